"""Slices that follow the unfreezing schedule: when a run moves, where to, and what is said of it."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from coordinator.planner import phases
from coordinator.planner.explain import explain, explanation_text
from coordinator.planner.planned import Planned, measured_time
from ringtune.costs import action_costs
from ringtune.schedule.plan import Plan
from tests.coordinator.planner.test_replicas import boards, job_of
from tests.coordinator.planner.test_replicas import planned as planned_of
from tests.support.plans import make_plan

UNEVEN = (1.0, 0.5, 0.3)
LONG: dict[str, Any] = {
    "train__max_steps": 600,
    "unfreeze__every_steps": 150,
    "train__microbatches": 8,
    "placement__replicas": "never",
}


def planned(speeds: tuple[float, ...] = UNEVEN, **changes: Any) -> Planned:
    """Plan 600 steps that may follow the schedule."""
    return planned_of(job_of(**{**LONG, "placement__follow": "auto", **changes}), speeds)


def test_slices_follow_the_schedule_where_boards_differ() -> None:
    """A slow board hosts frozen blocks at first; all placements fit, and the time is that of steps and moves."""
    found = planned()
    reason, plan = found.phases, found.plan
    assert reason is not None and reason.is_taken and plan.moves and found.profile is not None
    assert [phase.first_step for phase in reason.phases] == [
        one.first_turn * plan.course.local_iterations for one in plan.placements
    ]
    assert reason.moving_s <= 0.98 * reason.fixed_s
    assert reason.fixed_s - reason.moving_s == pytest.approx(
        sum(phase.gain_s - phase.move_s for phase in reason.phases)
    )
    facts, _ = boards(UNEVEN)
    assert all(found.memory[node].total_bytes <= facts[node].memory_bytes for node in plan.nodes)
    time = measured_time(found, found.profile, "adamw")
    assert time is not None and time.steps_s == reason.moving_s
    stays = planned_of(job_of(**LONG), UNEVEN)
    assert stays.phases is None and not stays.plan.moves, "by default a plan has one placement"


def test_slices_stay_where_moves_take_longer_than_they_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a minute for each move all steps are done on one placement."""
    monkeypatch.setattr(action_costs, "BASE_S", 60.0)
    found = planned_of.__wrapped__(job_of(**LONG, placement__follow="auto"), UNEVEN)
    assert found.phases is not None and not found.phases.is_taken and not found.plan.moves
    assert found.phases.moving_s == found.phases.fixed_s


@pytest.mark.parametrize(
    ("changes", "why_not"),
    [
        ({"train__max_steps": 30}, "the same blocks train at every step"),
        ({"memory__activations": "recompute"}, "memory.activations is decided for slices of their own"),
    ],
)
def test_why_nothing_is_looked_at(changes: dict[str, Any], why_not: str) -> None:
    """Explanations say it."""
    found = planned(**changes)
    assert found.phases is not None and found.phases.why_not == why_not
    assert found.choice is not None
    told = explanation_text(explain(found.choice, relative=False, plan=found.plan, phases=found.phases))
    assert f"  the run stays on one placement: {why_not}" in told
    auto = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], unfreeze="auto")
    assert phases._refusal_reason(auto, "none") == "the losses decide what trains when"


def test_explanation_says_what_each_move_gains() -> None:
    """With its first step, depth, slices and both times."""
    found = planned()
    assert found.choice is not None and found.phases is not None
    told = explanation_text(explain(found.choice, relative=False, plan=found.plan, phases=found.phases))
    (at,) = [index for index, line in enumerate(told) if line.startswith("  slices follow the schedule: ")]
    for phase, line in zip(found.phases.phases, told[at + 1 :], strict=False):
        assert line.startswith(f"    from step {phase.first_step}, depth {phase.depth}") and phase.slices in line
    after = told[at + 1 + len(found.phases.phases)]
    assert after == "  what follows is of the plan with one placement for all steps, from which this was made"


def best_way(seed: int) -> None:
    """Compare the best way with every way through the stretches."""
    rng = random.Random(seed)
    starts = [phases._Stretch(depth, depth, 10 * depth, rng.randint(1, 20)) for depth in range(4)]
    plans = [object() for _ in range(3)]
    found: list[Any] = [phases._Candidate(plan, {depth: rng.random() for depth in range(4)}) for plan in plans]  # type: ignore[arg-type]
    costs = {(one, other): rng.choice([0.5, 3.0]) if one is not other else 0.0 for one in plans for other in plans}

    class Moves:
        """Drawn seconds."""

        def seconds(self, before: Plan, after: Plan) -> float:
            return costs[before, after]

    def total(way: tuple[Any, ...]) -> float:
        steps = sum(stretch.steps * one.step_s[stretch.depth] for one, stretch in zip(way, starts, strict=True))
        return float(steps + sum(costs[one.plan, other.plan] for one, other in itertools.pairwise(way)))

    seconds, way = phases._best_way(found, starts, Moves())  # type: ignore[arg-type]
    assert seconds == pytest.approx(total(tuple(way)))
    assert seconds == pytest.approx(min(map(total, itertools.product(found, repeat=len(starts)))))


def test_best_way_is_the_best_of_all_ways() -> None:
    """Whatever stretches, steps and moves take."""
    for seed in range(20):
        best_way(seed)
