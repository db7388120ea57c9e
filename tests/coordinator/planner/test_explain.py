"""Why counts of operations came out so, and what they save: counted by hand."""

from __future__ import annotations

import pytest

from coordinator.planner.explain import explain, explanation_text
from coordinator.planner.judge import plan_job_s
from coordinator.planner.make_plan import make_plan
from coordinator.planner.operations import explain_operations, operations_reason_lines
from ringtune.costs.action_costs import all_full
from ringtune.schedule.operation_tables import BatchOperations, Operations
from ringtune.schedule.plan import Plan
from tests.support import plans
from tests.support.fake_agents import facts, job
from tests.support.profiles import profile_of

FACTS = {name: facts(name) for name in "ab"}
CHOSEN = job().with_overrides(
    {"train.method": "all", "operations.policy": "two-stage", "operations.full": 1, "operations.forward_only": 1}
)


def test_chosen_operations_are_explained_by_counts() -> None:
    """One of two micro-batches is full and one forward-only; the paper counts 1.4 and 1.5 of 2."""
    planned = make_plan(CHOSEN, FACTS)
    assert planned.choice is not None
    found = explain(planned.choice, relative=False, plan=planned.plan, profile=planned.profile)
    reason = found.operations
    assert reason is not None
    assert (reason.policy, reason.is_assumed, reason.microbatches) == ("two-stage", True, 2)
    assert [each.node for each in reason.counts] == [piece.node for piece in planned.plan.placement.slices]
    for each in reason.counts:
        assert [each.full, each.forward_only] == pytest.approx([1, 1])
        assert 0 < each.forward_share < 1
    assert [reason.paper_compute, reason.paper_sent] == pytest.approx([0.7, 0.75])
    assert 0.5 < reason.compute < 1
    text = "\n".join(explanation_text(found))
    assert "(70% and 75% by the paper's count)" in text
    assert "assumed until the run has chosen" in text
    assert "a: each subnet is full for 1 and forward-only for 1 of 2 micro-batches" in text


def test_scores_are_explained_by_their_seconds_and_when_they_have_paid() -> None:
    """Half of the compute is saved at each step; a policy that needs no scores has no such line."""
    planned = make_plan(CHOSEN, FACTS)
    assert planned.profile is not None
    reason = explain_operations(planned.plan, planned.profile)
    assert reason is not None and reason.paid_after is not None
    assert (reason.score_passes, reason.score_s > 0) == (1, True)
    plan, steps = planned.plan, planned.plan.course.num_steps
    all_s, some_s = (plan_job_s(one, planned.profile, optimizer="adamw") for one in (all_full(plan), plan))
    saved_s = (all_s - some_s) / steps
    assert saved_s * (reason.paid_after - 1) < reason.score_s <= saved_s * reason.paid_after * (1 + 1e-9)
    line = operations_reason_lines(reason)[-1]
    assert line.startswith("    scores come on top of all steps: one pass takes ")
    assert f"paid after {reason.paid_after} steps" in line
    drawn = make_plan(CHOSEN.with_overrides({"operations.policy": "random"}), FACTS)
    assert drawn.profile is not None
    without = explain_operations(drawn.plan, drawn.profile)
    assert without is not None and "scores" not in operations_reason_lines(without)[-1]


def test_pruning_is_explained_by_the_subnets_that_stay() -> None:
    """It has no counts by micro-batch."""
    planned = make_plan(CHOSEN.with_overrides({"operations.policy": "magnitude", "operations.compute": 0.5}), FACTS)
    assert planned.profile is not None
    reason = explain_operations(planned.plan, planned.profile)
    assert reason is not None
    assert operations_reason_lines(reason)[1] == "    magnitude: 50% of all subnets stay, for all micro-batches"


def test_given_operations_are_explained_by_what_they_save() -> None:
    """Half of the slices are passed by; nothing is assumed."""
    batches = tuple(BatchOperations(owner="a", batch_id=at, rows=("1111", "1133")) for at in range(3))
    even = plans.make_plan(
        [("a", 0, 2), ("b", 2, 4)], ["a"], method="all", train_rows=12, operations=Operations(batches=batches)
    )
    plan = Plan(even.course, even.placements)
    reason = explain_operations(plan, profile_of(plan))
    assert reason is not None
    assert (reason.is_assumed, reason.counts) == (False, ())
    assert [reason.sent, reason.paper_compute, reason.compute] == pytest.approx([0.5, 0.75, 0.75], rel=0.05)
    (line,) = operations_reason_lines(reason)
    assert line.endswith("50% of the bytes of all full (75% and 75% by the paper's count)")


def test_full_runs_have_nothing_to_explain() -> None:
    """No line and no figure of operations."""
    planned = make_plan(job(), FACTS)
    assert planned.choice is not None
    assert explain(planned.choice, relative=False, plan=planned.plan, profile=planned.profile).operations is None
