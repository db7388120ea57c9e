"""What is announced of a run's time: that of the operations that it carries out, with its scores on top."""

from __future__ import annotations

import dataclasses

import pytest

from coordinator.planner.explain import explain, explanation_text
from coordinator.planner.judge import plan_job_s, score_pass_s
from coordinator.planner.make_plan import make_plan
from coordinator.planner.planned import Planned, guessed_time, measured_time
from ringtune.costs.profile import LinkFacts, Profile
from ringtune.job.job import Job
from ringtune.quantities import format_seconds
from tests.support.fake_agents import facts, job

SLOW = {name: 2 * getattr(facts("b"), name) for name in ("block_forward_s", "block_graph_s", "block_backward_s")}
FACTS = {"a": facts("a"), "b": dataclasses.replace(facts("b"), hardware="slow", **SLOW)}
LINKS = [
    LinkFacts(source=source, target=target, rate_bytes_per_s=1e9, latency_s=1e-4) for source, target in ("ab", "ba")
]
PROFILE = Profile(nodes=tuple(FACTS.values()), links=tuple(LINKS))


def wanted(**operations: object) -> Job:
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


def planned(one: Job, *, is_simulated: bool = False) -> Planned:
    """A plan for two unequal nodes."""
    return make_plan(one, FACTS, links=LINKS if is_simulated else ())


@pytest.mark.parametrize("operations", [{"balance": True}, {"by_slice": True}], ids=str)
def test_announced_time_is_that_of_the_settled_operations(operations: dict[str, bool]) -> None:
    """What the search assumed, equal counts or blocks of their own, is not what runs."""
    made = planned(wanted(**operations))
    assert made.choice is not None
    found = measured_time(made, Profile(nodes=PROFILE.nodes), "adamw")
    assert found is not None
    assert found.steps_s == pytest.approx(plan_job_s(made.plan, Profile(nodes=PROFILE.nodes), optimizer="adamw"))
    assert (found.steps_s != pytest.approx(made.choice.best.job_s)) == ("balance" in operations)
    assert made.choice.runs.draft.course.choice == made.plan.course.choice != made.choice.best.draft.course.choice


def test_announced_time_of_settled_operations_is_simulated_too() -> None:
    """Where the search asked the simulator."""
    made = planned(wanted(balance=True), is_simulated=True)
    assert made.choice is not None and made.choice.settled is not None
    found = measured_time(made, PROFILE, "adamw")
    assert found is not None
    assert (found.by, found.steps_s) == ("simulator", made.choice.settled.best.simulated_s)


@pytest.mark.parametrize(("compute", "says"), [(0.5, "gains 5.3%"), (0.6, "takes 8.5% longer")])
def test_explanation_says_what_balance_gains(compute: float, says: str) -> None:
    """Predicted seconds with the nodes' own counts beside those with equal ones; slices are unequal already."""
    made = planned(wanted(balance=True, compute=compute))
    assert made.choice is not None and made.choice.settled is not None and made.choice.settled.equal is not None
    why = explain(made.choice, relative=False, plan=made.plan, profile=made.profile)
    assert why.equal == (made.choice.settled.best.job_s, made.choice.settled.equal.job_s)
    (line,) = [line for line in explanation_text(why) if "operations.balance" in line]
    assert line.startswith(f"    operations.balance {says}: ")
    assert f"{format_seconds(why.equal[1])} with equal counts" in line
    assert why.job_s == why.equal[0]
    assert sum(each.steps * each.step_s for each in why.depths) == pytest.approx(why.job_s)


def test_explanation_compares_the_second_best_with_the_chosen_one_as_it_was_judged() -> None:
    """Both with operations of alike blocks: those that were settled with the chosen slices fit no other ring."""
    made = planned(wanted(balance=True))
    assert made.choice is not None
    why = explain(made.choice, relative=False, plan=made.plan, profile=PROFILE)
    assert why.second is not None and why.unsettled is not None
    assert why.unsettled.job_s == made.choice.best.job_s <= why.second.job_s
    text = explanation_text(why)
    at = next(at for at, line in enumerate(text) if line.startswith("  second best:"))
    assert format_seconds(why.second.job_s) in text[at]
    assert text[at + 1].startswith("    both were compared before their operations were settled")
    assert f"the chosen one takes {format_seconds(why.unsettled.job_s)} by the formula" in text[at + 1]


def test_announced_time_says_that_scores_come_on_top() -> None:
    """With their seconds; where no scores are gathered nothing is said of them."""
    made = planned(wanted())
    found = measured_time(made, PROFILE, "adamw")
    assert found is not None
    scores_s = score_pass_s(made.plan, PROFILE, optimizer="adamw")
    assert found.scores_s == pytest.approx(scores_s)
    assert found.line().endswith(f"; scores come on top, {format_seconds(scores_s)} by the simulator")
    guessed = guessed_time(made, wanted(), PROFILE.nodes[0].model)
    assert guessed is not None and "scores come on top" in guessed.line()
    drawn = measured_time(planned(wanted(policy="random")), PROFILE, "adamw")
    assert drawn is not None and "scores" not in drawn.line()
