"""The clock of planning: what was found is taken when it ends, and whoever sees the plan is told."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from coordinator.planner.explain import explain, explanation_text
from coordinator.planner.limits import Effort, PlanningClock
from coordinator.planner.make_plan import make_plan
from coordinator.planner.planned import Planned
from ringtune.errors import DeadlineError, InterruptedRunError
from tests.coordinator.planner.test_choose import ring, wanted
from tests.support.planner_rings import MIB, QUICK


def ticking(step_s: float) -> Effort:
    """An effort of 60 s whose clock goes on by ``step_s`` each time it is read."""
    ticks = itertools.count()
    return dataclasses.replace(QUICK, now_s=lambda: step_s * next(ticks))


def planned(effort: Effort, **options: tuple[int, ...]) -> Planned:
    """The plan of the job for four devices."""
    profile = ring()
    return make_plan(wanted(), profile.by_name, links=profile.links, effort=effort, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("step_s", "microbatches"), [(61.0, ()), (20.0, (1, 2, 4)), (5.0, ())])
def test_plan_that_is_cut_is_the_best_found_and_says_so(step_s: float, microbatches: tuple[int, ...]) -> None:
    """Whenever the clock ends: the plan is whole, fits, and is marked, in words and in the explanation."""
    made = planned(ticking(step_s), microbatches=microbatches)
    assert made.choice is not None and made.choice.cut_after_s == 60.0
    assert "planning was cut after 60 s (runtime.plan_s)" in made.note
    why = explain(made.choice, relative=False)
    assert why.cut_after_s == 60.0
    assert any("cut after 60 s" in line for line in explanation_text(why))


def test_cut_that_found_nothing_is_no_lack_of_memory() -> None:
    """Without a ring when the time is over nothing is known about memory: the error names the clock."""
    profile = ring()
    tight = {
        name: dataclasses.replace(node, memory_bytes=90 * MIB, train_rows=0) for name, node in profile.by_name.items()
    }
    tight |= {name: dataclasses.replace(tight[name], memory_bytes=200 * MIB, train_rows=9) for name in ["n01-pi"]}
    with pytest.raises(DeadlineError, match=r"within 60 s; raise runtime\.plan_s"):
        make_plan(wanted(), tight, links=profile.links, effort=ticking(61.0))


def test_clock_of_a_part_cuts_the_whole() -> None:
    """A part has its share of the time that is left; nobody waits for a cancelled one."""
    now = [0.0]
    whole = PlanningClock(10.0, now_s=lambda: now[0])
    part = whole.part(0.5)
    now[0] = 4.0
    assert not part.is_over() and not whole.was_cut
    now[0] = 5.0
    assert part.is_over() and whole.was_cut and not whole.is_over()
    with pytest.raises(InterruptedRunError):
        PlanningClock(10.0, is_cancelled=lambda: True).is_over()
