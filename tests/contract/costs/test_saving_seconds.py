"""How long forwards and backwards take under each policy for activations."""

from __future__ import annotations

import dataclasses

import pytest

from ringtune.costs.saving_seconds import VELORA_EXTRA
from ringtune.costs.seconds import CourseCosts
from ringtune.costs.work_times import Work
from ringtune.schedule.actions import Action, Op
from ringtune.schedule.saving import Velora
from ringtune.schedule.turns import StepKind
from ringtune.schedule.units import Range
from tests.support.plans import make_plan
from tests.support.profiles import TIMES, profile_of

PLAN = make_plan([("a", 0, 4)], ["a"], microbatches=1, method="all")
GRAPH, LOW = (TIMES[work] for work in (Work.GRAPH, Work.GRAPH_LOWEST))
BACK, BACK_LOW = TIMES[Work.BACKWARD], TIMES[Work.BACKWARD_LOWEST]
LONGER = 1 + VELORA_EXTRA


def seconds(
    op: Op,
    start: int,
    stop: int,
    *,
    recompute: tuple[int, int] | None = None,
    projected: tuple[int, int] | None = None,
    kind: StepKind = StepKind.TRAIN,
) -> float:
    """Seconds of an action where block 0 is the lowest that trains."""
    velora = Velora(blocks=(Range(*projected),), layers=("down",)) if projected else None
    course = dataclasses.replace(PLAN.course, velora=velora)
    again = (Range(*recompute),) if recompute else ()
    costs = CourseCosts(course, profile_of(PLAN), recompute=again)
    return costs.action_s("a", Action(op, 0, 0, start, stop), size=0.0, lowest=0, kind=kind)


@pytest.mark.parametrize(
    ("recompute", "projected", "forward_s", "backward_s"),
    [
        (None, None, LOW + 3 * GRAPH, BACK_LOW + 3 * BACK),
        ((0, 4), None, LOW + 3 * GRAPH, LOW + 3 * GRAPH + BACK_LOW + 3 * BACK),
        ((0, 1), None, LOW + 3 * GRAPH, LOW + BACK_LOW + 3 * BACK),
        ((2, 3), None, LOW + 3 * GRAPH, GRAPH + BACK_LOW + 3 * BACK),
        (None, (0, 4), LONGER * (LOW + 3 * GRAPH), LONGER * (BACK_LOW + 3 * BACK)),
        (None, (1, 2), LOW + (2 + LONGER) * GRAPH, BACK_LOW + (2 + LONGER) * BACK),
        ((0, 4), (0, 4), LONGER * (LOW + 3 * GRAPH), LONGER * (LOW + 3 * GRAPH + BACK_LOW + 3 * BACK)),
        ((0, 2), (1, 3), LOW + (1 + 2 * LONGER) * GRAPH, LOW + LONGER * GRAPH + BACK_LOW + (1 + 2 * LONGER) * BACK),
    ],
)
def test_seconds_of_each_policy(
    recompute: tuple[int, int] | None, projected: tuple[int, int] | None, forward_s: float, backward_s: float
) -> None:
    """A block that runs again goes forward with a graph before its backward too."""
    assert seconds(Op.FORWARD, 0, 4, recompute=recompute, projected=projected) == pytest.approx(forward_s)
    assert seconds(Op.BACKWARD, 0, 4, recompute=recompute, projected=projected) == pytest.approx(backward_s)


def test_seconds_of_what_keeps_nothing_stay() -> None:
    """Forwards without a graph and updates take what they took."""
    for op in (Op.FORWARD_FREE, Op.UPDATE):
        assert seconds(op, 0, 4, recompute=(0, 4), projected=(0, 4)) == seconds(op, 0, 4)


def test_seconds_of_scores_are_without_projections() -> None:
    """A pass that gathers scores keeps whole inputs."""
    whole = seconds(Op.FORWARD, 0, 4, kind=StepKind.SCORE)
    assert seconds(Op.FORWARD, 0, 4, projected=(0, 4), kind=StepKind.SCORE) == whole
