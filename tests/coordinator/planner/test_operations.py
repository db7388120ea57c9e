"""Operations at planning: given tables, how a run chooses its own, and plans that were made with other ones."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import pytest

from coordinator.planner.explain import explain, explanation_text
from coordinator.planner.given_plan import GivenPlan, accept_plan
from coordinator.planner.judge import plan_job_s, score_pass_s
from coordinator.planner.make_plan import make_plan
from coordinator.planner.operations import block_costs, explain_operations
from coordinator.planner.planned import Planned, guessed_time, measured_time
from ringtune.costs.action_costs import all_full
from ringtune.costs.profile import LinkFacts, NodeFacts, Profile
from ringtune.errors import JobError, PlanError
from ringtune.job.job import Job
from ringtune.quantities import format_seconds
from ringtune.schedule.operation_tables import (
    BatchOperations,
    Choice,
    Operations,
    ScheduledTable,
    tables_to_json,
)
from ringtune.schedule.plan import Plan
from ringtune.techniques.operations import choosers_of, expected_table
from tests.support import plans
from tests.support.fake_agents import MODEL, facts, job
from tests.support.profiles import profile_of

FACTS = {name: facts(name) for name in "ab"}
COURSE = make_plan(job(), FACTS).plan.course


def table(subnets: int = 1, *, owner: str = "a", microbatches: int = 0, blocks: int = 0) -> Operations:
    """The operations of one batch, of which the lowest block skips."""
    row = "3" * subnets + "1" * subnets * ((blocks or COURSE.num_blocks) - 1)
    rows = (row,) * (microbatches or COURSE.microbatches)
    return Operations(batches=(BatchOperations(owner=owner, batch_id=0, rows=rows),), subnets=subnets)


def with_table(operations: Operations, wanted: Job | None = None) -> Job:
    """A job that is given a table."""
    return (wanted or job()).with_overrides({"operations.table": json.dumps(operations.to_json())})


def test_given_table_is_the_courses() -> None:
    """It stands in the plan, and an evaluation runs every block."""
    wanted = with_table(table())
    assert make_plan(wanted, FACTS).plan.course.operations == table()
    assert make_plan(wanted, FACTS, evaluation_only=True).plan.course.operations is None
    assert make_plan(job(), FACTS).plan.course.operations is None
    # Those of a run that chose anew; the plan says when each begins to hold
    tables = tuple(ScheduledTable(step=step, operations=table()) for step in (0, COURSE.local_iterations))
    wanted = job().with_overrides({"operations.table": json.dumps(tables_to_json(tables))})
    course = make_plan(wanted, FACTS).plan.course
    assert course.choice == Choice.given(tables)
    assert course.operations is None


def test_given_table_of_another_plan_is_refused() -> None:
    """Another owner, number of micro-batches or number of blocks."""
    rows: list[tuple[Operations, str]] = [
        (table(owner="c"), "operations.table does not fit this run: operations of batch 0 of owner c are of no batch"),
        (table(microbatches=9), "operations.table does not fit this run: operations of batch 0 of owner a are for 9"),
        (table(blocks=9), "operations.table does not fit this run: operations of batch 0 of owner a have a row"),
    ]
    for operations, message in rows:
        with pytest.raises(PlanError) as caught:
            make_plan(with_table(operations), FACTS)
        assert message in str(caught.value)


def test_given_table_of_another_seed_or_model_is_refused() -> None:
    """The only table of a run fits by its shape, but its batches have other rows."""
    given = ScheduledTable(step=0, operations=table(), origin=COURSE.table_origin)
    wanted = job().with_overrides({"operations.table": json.dumps(tables_to_json([given]))})
    assert make_plan(wanted, FACTS).plan.course.operations == table()
    other = wanted.with_overrides({"train.seed": COURSE.seed + 1})
    with pytest.raises(PlanError, match=rf"operations.table does not fit this run: .* seed {COURSE.seed}, not"):
        make_plan(other, FACTS)
    # The message has the model's name
    with pytest.raises(JobError, match=rf"operations.table is of another model: 5 subnets .*{MODEL.model_type}"):
        make_plan(with_table(table(subnets=5)), FACTS)


# ---- choices ---------------------------------------------------------------------------------------


def chosen(wanted: Job | None = None, **values: object) -> Job:
    """A job whose run chooses its operations."""
    all_values = {"policy": "two-stage", "compute": 0.5, **values}
    if "full" in values:
        del all_values["compute"]
    return (wanted or job()).with_overrides({f"operations.{name}": value for name, value in all_values.items()})


def choice_of(wanted: Job, nodes: Mapping[str, NodeFacts] | None = None) -> Choice:
    """The choice in the plan of a job."""
    found = make_plan(wanted, nodes or FACTS).plan.course.choice
    assert found is not None
    return found


def test_choice_has_what_the_job_says() -> None:
    """Subnets by the model's heads; scores, scale and how often as given."""
    found = choice_of(
        chosen(
            policy="joint",
            full=1,
            forward_only=1,
            backward_score="taylor",
            scores="adapter",
            score_scale=0.5,
            heads=2,
            refresh_rounds=3,
        )
    )
    assert found.subnets == MODEL.num_heads // 2
    assert (found.policy, found.backward_score, found.forward_score) == ("joint", "taylor", "fisher")
    assert (found.scored_weights, choice_of(chosen()).scored_weights) == ("adapter", "base")
    assert (found.score_scale, found.refresh_steps) == (0.5, 3 * job().train.local_iterations * len(FACTS))
    # Frozen weights in int8 have no gradients to score, which is told; the plan is one of its job
    small = chosen().with_overrides({"runtime.frozen": "int8"})
    planned = make_plan(small, FACTS)
    assert planned.plan.course.choice == choice_of(chosen(scores="adapter"))
    assert [note for note in planned.left_out if "scores of adapters" in note and "int8" in note]
    assert accept_plan(GivenPlan(plan=planned.plan), small, FACTS).plan == planned.plan
    assert not make_plan(chosen(), FACTS).left_out
    # A plan without operations is the plan of before, digest and all
    assert make_plan(job().with_overrides({"operations.heads": 2}), FACTS).plan == make_plan(job(), FACTS).plan
    assert make_plan(chosen(), FACTS, evaluation_only=True).plan.course.choice is None
    # Its groups are the slices of the plan
    plan = make_plan(chosen(by_slice=True), FACTS).plan
    assert plan.course.choice is not None
    assert plan.course.choice.groups == tuple((piece.start, piece.stop) for piece in plan.placement.slices)
    assert len(plan.placement.slices) == 2


def test_choice_does_not_depend_on_the_placement() -> None:
    """Neither on who hosts what nor on how many nodes there are, as long as nothing is to be balanced."""
    slow = dataclasses.replace(FACTS["b"], block_forward_s=9.0, block_graph_s=9.0, block_backward_s=9.0, hardware="x")
    alone = choice_of(chosen(), {"a": FACTS["a"], "b": facts("b", rows=0)})
    unequal = make_plan(chosen(), {"a": FACTS["a"], "b": slow}).plan
    assert unequal.course.choice is not None
    capacity, other = alone.capacities[0], unequal.course.choice.capacities[0]
    each = capacity.forward + capacity.backward
    assert len(unequal.course.choice.capacities) == 1
    assert capacity.full / each == pytest.approx(other.full / (other.forward + other.backward))


def test_choices_that_can_not_be_are_refused_at_planning() -> None:
    """A share that is smaller than the smallest slice leaves nothing, which no pass over the data needs to show."""
    alone = {"a": FACTS["a"]}
    for policy in ("magnitude", "magnitude-gradient"):
        with pytest.raises(JobError, match=r"may keep .* and the smallest slice has .* leave operations.by_slice out"):
            make_plan(chosen(policy=policy, compute=0.6, by_slice=True), alone)
        assert choice_of(chosen(policy=policy, compute=0.6), alone).prunes
    # Before anything is planned
    with pytest.raises(JobError, match=rf"operations.heads = 3 does not divide .*{MODEL.model_type}"):
        make_plan(chosen(heads=3), FACTS)


def unequal(times: float) -> dict[str, NodeFacts]:
    """Two nodes, of which b takes so many times as long."""
    slow = {
        name: times * getattr(FACTS["b"], name) for name in ("block_forward_s", "block_graph_s", "block_backward_s")
    }
    return {"a": FACTS["a"], "b": dataclasses.replace(FACTS["b"], hardware="slow", **slow)}


def test_balanced_choice_is_settled_with_the_slices_and_their_hosts() -> None:
    """Each block has the costs of its host; a plan of it is accepted as it is."""
    wanted = chosen(balance=True, heads=0).with_overrides({"train.microbatches": 4})
    nodes = unequal(1.5)
    plan = make_plan(wanted, nodes).plan
    assert plan.course.choice is not None
    capacities = plan.course.choice.capacities
    assert len(capacities) == plan.course.num_blocks
    for piece in plan.placement.slices:
        forward_s = block_costs(dataclasses.replace(plan.course, choice=None), Profile(nodes=tuple(nodes.values())))
        for block in range(piece.start, piece.stop):
            assert capacities[block].forward == pytest.approx(forward_s[piece.node][0])
    assert accept_plan(GivenPlan(plan=plan), wanted, nodes).plan == plan


def test_micro_batches_that_do_not_fit_the_counts_are_refused_or_left_out() -> None:
    """``--microbatches`` can offer fewer than the job counts on."""
    wanted = chosen(full=2)
    assert make_plan(wanted, FACTS, microbatches=(2,)).plan.course.microbatches == 2
    with pytest.raises(JobError, match=r"operations.full = 2 .* more than the 1 micro-batches of a batch"):
        make_plan(wanted, FACTS, microbatches=(1,))
    # The others are still to choose from; the plan's note says which were not tried, and why
    planned = make_plan(chosen(full=2), FACTS, microbatches=(1, 2, 4), wire_dtypes=("float32", "bfloat16"))
    assert planned.plan.course.microbatches in (2, 4)
    assert planned.note.startswith("1 micro-batches were not tried: operations.full = 2 ")
    assert planned.note.count("not tried") == 1
    assert not make_plan(chosen(full=2), FACTS, microbatches=(2, 4)).note
    assert make_plan(with_table(table(microbatches=4)), FACTS, microbatches=(1, 4)).plan.course.microbatches == 4


def test_tables_that_fit_no_message_are_refused_before_anything_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all batches together; whole subnets that are pruned are the same for all batches."""
    assert make_plan(chosen(), FACTS).plan.course.choice is not None
    monkeypatch.setattr("coordinator.planner.operations.MAX_MESSAGE_BYTES", 600)
    with pytest.raises(
        JobError, match=r"operations of 6 batches with 32 operations .* of text, .* raise operations.heads"
    ):
        make_plan(chosen(), FACTS)
    assert make_plan(chosen(policy="magnitude"), FACTS).plan.course.choice is not None


# ---- plans that are given --------------------------------------------------------------------------


def accepted(plan_job: Job, run_job: Job) -> Operations | None:
    """The operations of a plan made for one job, accepted for another."""
    plan = make_plan(plan_job, FACTS).plan
    return accept_plan(GivenPlan(plan=plan), run_job, FACTS).plan.course.operations


def test_given_plan_may_have_a_table_that_the_job_does_not_name() -> None:
    """A static table in a plan file trains as well."""
    assert accepted(with_table(table()), job()) == table()
    assert accepted(with_table(table()), with_table(table())) == table()
    # What the job says goes before
    with pytest.raises(PlanError, match=r"the plan has other operations than the job's operations.table"):
        accepted(job(), with_table(table()))


def test_given_plan_with_other_operations_is_refused() -> None:
    """Whichever of the two chooses."""
    rows: list[tuple[Job, Job, str]] = [
        (chosen(), job(), "the plan has operations.policy = two-stage, the job says standard"),
        (job(), chosen(), "the plan has no operations to choose, the job says two-stage"),
        (chosen(policy="random"), chosen(), "the plan has operations.policy = random, the job says two-stage"),
        (chosen(heads=2), chosen(heads=1), "the plan has subnets = 1, the job says 2 (operations.heads)"),
        (
            chosen(by_slice=True),
            chosen(heads=0),
            "the plan has groups = ((0, 2), (2, 4)), the job says () (operations.by_slice)",
        ),
        (
            chosen(),
            chosen(forward_score="taylor"),
            "the plan has forward_score = fisher, the job says taylor (operations.forward_score)",
        ),
        (
            chosen(),
            chosen(scores="adapter"),
            "the plan has scored_weights = base, the job says adapter (operations.scores)",
        ),
        (
            chosen(),
            chosen(refresh_rounds=2),
            "the plan has refresh_steps = 0, the job says 8 (operations.refresh_rounds)",
        ),
    ]
    for planned, run, message in rows:
        with pytest.raises(PlanError) as caught:
            accepted(planned, run)
        assert message in str(caught.value)


@pytest.mark.parametrize("private_blocks", [0, 1])
@pytest.mark.parametrize(
    "keys", [{"by_slice": True}, {"balance": True, "compute": 0.8}, {"policy": "magnitude"}, {"policy": "joint"}]
)
def test_plan_is_accepted_for_its_own_job(keys: dict[str, Any], private_blocks: int) -> None:
    """Choosers are of the blocks above the private ones, which are full in every row."""
    wanted = chosen(**keys).with_overrides({"privacy.private_blocks": private_blocks})
    plan = make_plan(wanted, FACTS).plan
    assert accept_plan(GivenPlan(plan=plan), wanted, FACTS).plan == plan
    choice, choosers = plan.course.choice, choosers_of(plan.course)
    assert choice is not None
    assert (choosers[0].start, choosers[-1].stop) == (private_blocks, plan.course.num_blocks)
    rows = [row for batch in expected_table(plan.course).batches for row in batch.rows]
    assert {row[: private_blocks * choice.subnets] for row in rows} == {"1" * private_blocks * choice.subnets}


def test_given_plan_keeps_what_it_settled_for_its_own_slices() -> None:
    """A node is passed by as a whole, so groups are slices."""
    wanted = chosen(by_slice=True)
    plan = make_plan(wanted, FACTS).plan
    assert plan.course.choice is not None
    choice = dataclasses.replace(plan.course.choice, groups=((0, plan.course.num_blocks),))
    other = Plan(dataclasses.replace(plan.course, choice=choice), plan.placements)
    with pytest.raises(PlanError, match=r"the plan has groups = .*, the job says .* \(operations.by_slice\)"):
        accept_plan(GivenPlan(plan=other), wanted, FACTS)
    # Nodes that have become faster since do not change how much is done
    plan = make_plan(chosen(), FACTS).plan
    faster = {name: dataclasses.replace(node, block_forward_s=node.block_forward_s / 3) for name, node in FACTS.items()}
    assert make_plan(chosen(), faster).plan.course.choice != plan.course.choice
    assert accept_plan(GivenPlan(plan=plan), chosen(), faster).plan == plan


SLOW = {name: 2 * getattr(facts("b"), name) for name in ("block_forward_s", "block_graph_s", "block_backward_s")}
UNEQUAL = {"a": facts("a"), "b": dataclasses.replace(facts("b"), hardware="slow", **SLOW)}
LINKS = [
    LinkFacts(source=source, target=target, rate_bytes_per_s=1e9, latency_s=1e-4) for source, target in ("ab", "ba")
]
PROFILE = Profile(nodes=tuple(UNEQUAL.values()), links=tuple(LINKS))


def halved(**operations: object) -> Job:
    """A job of four micro-batches whose run chooses half of the compute."""
    values = {"policy": "two-stage", "compute": 0.5, "heads": 0, **operations}
    return job().with_overrides(
        {
            "train.method": "all",
            "train.batch_size": 8,
            "train.microbatches": 4,
            **{f"operations.{name}": value for name, value in values.items()},
        }
    )


def plan_of_half(one: Job, *, is_simulated: bool = False) -> Planned:
    """A plan for two unequal nodes."""
    return make_plan(one, UNEQUAL, links=LINKS if is_simulated else ())


def test_announced_time_is_that_of_the_settled_operations() -> None:
    """What the search assumed, equal counts or blocks of their own, is not what runs."""
    rows: list[dict[str, bool]] = [{"balance": True}, {"by_slice": True}]
    for operations in rows:
        made = plan_of_half(halved(**operations))
        assert made.choice is not None
        found = measured_time(made, Profile(nodes=PROFILE.nodes), "adamw")
        assert found is not None
        assert found.steps_s == pytest.approx(plan_job_s(made.plan, Profile(nodes=PROFILE.nodes), optimizer="adamw"))
        assert (found.steps_s != pytest.approx(made.choice.best.job_s)) == ("balance" in operations)
        assert made.choice.runs.draft.course.choice == made.plan.course.choice != made.choice.best.draft.course.choice


def test_announced_time_says_that_scores_come_on_top() -> None:
    """Where the search asked the simulator, so is the time of settled operations."""
    made = plan_of_half(halved(balance=True), is_simulated=True)
    assert made.choice is not None and made.choice.settled is not None
    found = measured_time(made, PROFILE, "adamw")
    assert found is not None
    assert (found.by, found.steps_s) == ("simulator", made.choice.settled.best.simulated_s)
    # With their seconds; where no scores are gathered nothing is said of them
    made = plan_of_half(halved())
    found = measured_time(made, PROFILE, "adamw")
    assert found is not None
    scores_s = score_pass_s(made.plan, PROFILE, optimizer="adamw")
    assert found.scores_s == pytest.approx(scores_s)
    assert found.line().endswith(f"; scores come on top, {format_seconds(scores_s)} by the simulator")
    guessed = guessed_time(made, halved(), PROFILE.nodes[0].model)
    assert guessed is not None and "scores come on top" in guessed.line()
    drawn = measured_time(plan_of_half(halved(policy="random")), PROFILE, "adamw")
    assert drawn is not None and "scores" not in drawn.line()


def test_explanation_says_what_balance_gains() -> None:
    """Predicted seconds with the nodes' own counts beside those with equal ones; slices are unequal already."""
    for compute, says in [(0.5, "gains 5.3%"), (0.6, "takes 8.5% longer")]:
        made = plan_of_half(halved(balance=True, compute=compute))
        assert made.choice is not None and made.choice.settled is not None and made.choice.settled.equal is not None
        why = explain(made, relative=False)
        assert why.equal == (made.choice.settled.best.job_s, made.choice.settled.equal.job_s)
        (line,) = [line for line in explanation_text(why) if "operations.balance" in line]
        assert line.startswith(f"    operations.balance {says}: ")
        assert f"{format_seconds(why.equal[1])} with equal counts" in line
        assert why.job_s == why.equal[0]
        assert sum(each.steps * each.step_s for each in why.depths) == pytest.approx(why.job_s)


CHOSEN = job().with_overrides(
    {"train.method": "all", "operations.policy": "two-stage", "operations.full": 1, "operations.forward_only": 1}
)


def test_chosen_operations_are_explained_by_counts() -> None:
    """One of two micro-batches is full and one forward-only; the paper counts 1.4 and 1.5 of 2."""
    planned = make_plan(CHOSEN, FACTS)
    found = explain(planned, relative=False)
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
    line = reason.lines()[-1]
    assert line.startswith("    scores come on top of all steps: one pass takes ")
    assert f"paid after {reason.paid_after} steps" in line
    drawn = make_plan(CHOSEN.with_overrides({"operations.policy": "random"}), FACTS)
    assert drawn.profile is not None
    without = explain_operations(drawn.plan, drawn.profile)
    assert without is not None and "scores" not in without.lines()[-1]


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
    (line,) = reason.lines()
    assert line.endswith("50% of the bytes of all full (75% and 75% by the paper's count)")
