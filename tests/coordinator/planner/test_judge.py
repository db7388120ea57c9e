"""The seconds of a pass of scores, beside those of the whole run on the virtual clock."""

from __future__ import annotations

import dataclasses

import pytest

from coordinator.planner.judge import paid_after, score_pass_s, score_passes
from ringtune.costs.action_costs import CourseCosts
from ringtune.run_control import events as rd
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StepKind, Turn
from sim.ledger import Items
from sim.links import MeasuredLinks
from sim.meter import ProfileTimes
from sim.ring import VirtualRing
from tests.support.choosing import DrawnTables, make_choice
from tests.support.plans import changed, make_plan
from tests.support.profiles import all_pairs, profile_of


def choosing(slices: list[tuple[str, int, int]], *, refresh_steps: int = 0) -> Plan:
    """A run that gathers scores of thirty batches of each of two owners."""
    plan = make_plan(slices, ["a", "b"], method="all", train_rows=120, num_steps=8)
    return changed(plan, choice=make_choice(refresh_steps=refresh_steps))


class _Scored:
    """An observer that notes when the last score turn was closed."""

    def __init__(self, granted: Items) -> None:
        self.scored_s = 0.0
        self._items = granted

    def granted(self, turn: Turn) -> None:
        self._items.granted(turn)

    def logged(self, command: rd.Command, now_s: float) -> None:
        if isinstance(command, rd.LogTurn) and command.turn.kind is StepKind.SCORE:
            self.scored_s = now_s

    def __getattr__(self, _name: str) -> object:
        return lambda *_args: None


@pytest.mark.parametrize("slices", [[("a", 0, 4)], [("a", 0, 2), ("b", 2, 4)], [("b", 0, 1), ("a", 1, 4)]], ids=str)
def test_seconds_of_a_pass_of_scores_are_those_of_the_virtual_clock(slices: list[tuple[str, int, int]]) -> None:
    """Within 5 %, on one node and on two, though most batches are added by the formula; links hardly count."""
    plan = choosing(slices)
    profile = profile_of(plan, links=all_pairs("ab", 1e9, 1e-4))
    costs = CourseCosts.of(plan, profile)
    granted = Items(costs)
    observer = _Scored(granted)
    VirtualRing(
        plan,
        action_s=ProfileTimes(costs, granted),
        transport=MeasuredLinks(costs, profile, granted=granted),
        observer=observer,  # type: ignore[arg-type]
        chooser=DrawnTables(plan),
        wait_s=float("inf"),
    ).run()
    assert observer.scored_s > 0
    assert score_pass_s(plan, profile, optimizer="adamw") == pytest.approx(observer.scored_s, rel=0.05)


def test_scores_are_gathered_once_or_with_each_refresh() -> None:
    """Eight steps, a table every four of them."""
    assert score_passes(choosing([("a", 0, 4)]).course) == 1
    assert score_passes(choosing([("a", 0, 4)], refresh_steps=4).course) == 2
    assert score_passes(make_plan([("a", 0, 4)], ["a"]).course) == 0


def test_scores_never_pay_where_nothing_is_saved() -> None:
    """Everything is full, whatever the scores are."""
    plan = choosing([("a", 0, 4)])
    profile = profile_of(plan)
    assert plan.course.choice is not None
    (capacity,) = plan.course.choice.capacities
    most = dataclasses.replace(capacity, full=100 * (capacity.forward + capacity.backward))
    choice = dataclasses.replace(plan.course.choice, capacities=(most,))
    full = Plan(dataclasses.replace(plan.course, choice=choice), plan.placements)
    assert paid_after(full, profile, 1.0, optimizer="adamw") is None
    assert paid_after(plan, profile, 1.0, optimizer="adamw") is not None
