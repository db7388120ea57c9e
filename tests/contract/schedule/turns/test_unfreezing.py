"""The rule of automatic unfreezing: a fold over the losses of finished turns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtune.errors import PlanError
from ringtune.schedule.course import Course
from ringtune.schedule.owner_turns import latest_owners, owner_indices, weights
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.turns import StartPoint
from ringtune.schedule.turns.unfreezing import NOTHING_KNOWN, Unfreezing
from ringtune.schedule.turns.versions import depth
from tests.support.plans import changed, make_plan
from tests.support.unfreezing import unfreezing_after

LOSSES = st.lists(st.floats(0, 10), max_size=40)


def auto_plan(
    num_owners: int = 1, *, num_blocks: int = 6, local_iterations: int = 10, patience_steps: int = 20, **changes: object
) -> Plan:
    """A long run with one host."""
    values: dict[str, object] = {"num_steps": 400, "unfreeze": "auto"} | changes
    return make_plan(
        [("a", 0, num_blocks)],
        [f"owner-{index}" for index in range(num_owners)],
        num_blocks=num_blocks,
        local_iterations=local_iterations,
        patience_steps=patience_steps,
        **values,  # type: ignore[arg-type]
    )


ROWS = st.lists(st.integers(1, 40), min_size=4, max_size=4)


def with_turns_by_rows(plan: Plan, rows: Sequence[int]) -> Plan:
    """The plan whose owners have so many rows, and as many turns."""
    owners = zip(plan.course.owners, rows, strict=False)
    return changed(plan, owners=tuple(dataclasses.replace(one, train_rows=own) for one, own in owners), turns="rows")


PLANS = st.builds(
    auto_plan,
    st.integers(1, 4),
    num_blocks=st.integers(2, 8),
    local_iterations=st.integers(1, 7),
    patience_steps=st.integers(1, 25),
    num_steps=st.integers(0, 200),
    min_improvement=st.sampled_from([0.0, 0.01, 0.5]),
).flatmap(lambda plan: st.one_of(st.just(plan), st.builds(with_turns_by_rows, st.just(plan), ROWS)))


def test_unfreezing_table_of_the_docstring() -> None:
    """Three owners, turns of 10 steps, a patience of 20, a loss that never improves."""
    plan = auto_plan(3)
    known = [unfreezing_after(plan.course, [1.0] * count) for count in range(1, 9)]
    assert [entry.waited_steps for entry in known] == [0, 0, 0, 10, 0, 0, 10, 0]
    assert known[-1].unfreeze_at == (60, 90)
    view = plan.decided(known[-1].unfreeze_at)
    assert [depth(view.course, turn * 10) for turn in range(10)] == [1, 1, 1, 1, 1, 1, 2, 2, 2, 3]


def test_unfreezing_of_a_loss_that_improves_never_comes() -> None:
    """Two percent a turn is more than one percent."""
    plan = auto_plan()
    assert unfreezing_after(plan.course, [0.98**turn for turn in range(40)]).unfreeze_at == ()


def test_unfreezing_of_a_loss_that_improves_too_little_comes() -> None:
    """Half a percent a turn beats the best loss by one percent only every third turn; a patience of 20 steps is two."""
    plan = auto_plan()
    found = unfreezing_after(plan.course, [0.995**turn for turn in range(40)])
    assert found.unfreeze_at[0] == 40 and len(found.unfreeze_at) == 5


def test_unfreezing_comes_two_turns_after_the_patience_is_over() -> None:
    """The loss of turn 5 is the second one without improvement; turn 6 is granted already, so turn 7 is deeper."""
    plan = auto_plan()
    losses = [1.0, 0.9, 0.8, 0.7, 0.7, 0.7]
    assert unfreezing_after(plan.course, losses[:-1]).unfreeze_at == ()
    assert unfreezing_after(plan.course, losses).unfreeze_at == (70,)


def test_unfreezing_counts_patience_anew_after_each_block() -> None:
    """Turns that still trained the old depth do not count; then 20 steps more have to pass."""
    plan = auto_plan()
    assert unfreezing_after(plan.course, [1.0] * 9).unfreeze_at == (40, 70, 100)
    better = [1.0, 1.0, 1.0, 1.0, 0.5, 0.4, 0.4, 0.4]
    assert unfreezing_after(plan.course, better).unfreeze_at == (40, 90)


def test_unfreezing_judges_whole_rounds() -> None:
    """An owner with harder rows is no plateau: the mean over the last turn of every owner falls all the time."""
    hard_and_easy = [(2.0 if turn % 3 else 0.5) * 0.97**turn for turn in range(40)]
    assert unfreezing_after(auto_plan(3).course, hard_and_easy).unfreeze_at == ()
    assert unfreezing_after(auto_plan(1).course, hard_and_easy).unfreeze_at != ()


def by_rows(*rows: int, **changes: object) -> Course:
    """The course of owners with so many rows, whose turns go by rows."""
    return with_turns_by_rows(auto_plan(len(rows), **changes), rows).course  # type: ignore[arg-type]


def losses_of(course: Course, first: Sequence[float], fall: Callable[[int, int], float]) -> list[float]:
    """The losses of all turns: an owner's first loss times what ``fall`` says of the turn and of its own turn."""
    order = owner_indices(weights(course.owners, course.turns), 0)
    counts, found = [0] * len(first), []
    for turn in range(course.num_steps // course.local_iterations):
        owner = next(order)
        found.append(first[owner] * fall(turn, counts[owner]))
        counts[owner] += 1
    return found


@pytest.mark.parametrize("first", [(1.0, 0.5, 0.5), (0.5, 1.0, 1.0)])
@pytest.mark.parametrize("fall", [lambda turn, _: 0.97**turn, lambda _, own: 0.97**own], ids=["of_all", "of_its_own"])
def test_unfreezing_by_rows_is_not_fooled_by_who_had_the_last_turns(
    first: tuple[float, ...], fall: Callable[[int, int], float]
) -> None:
    """The owner of most rows has four turns before the others have one; every loss falls by 3 percent a turn."""
    course = by_rows(800, 100, 100, num_steps=600)
    assert unfreezing_after(course, losses_of(course, first, fall)).unfreeze_at == ()
    plateau = unfreezing_after(course, losses_of(course, first, lambda turn, own: 1.0))
    assert len(plateau.unfreeze_at) == 5


def test_unfreezing_by_rows_begins_anew_with_the_first_turn_of_an_owner() -> None:
    """An owner with few rows and a high loss joins the mean at its first turn: the loss has not got worse by that."""
    course = by_rows(90, 10)
    known = [
        unfreezing_after(course, losses_of(course, (1.0, 9.0), lambda turn, own: 0.97**turn)[:count])
        for count in (5, 6)
    ]
    assert [len(entry.recent) for entry in known] == [1, 2]
    assert known[1].best is not None and known[0].best is not None and known[1].best > known[0].best
    assert known[1].waited_steps == 0


def test_unfreezing_of_a_diverged_run_goes_on() -> None:
    """A loss that is no number is no improvement, and what is known stays a number that JSON has."""
    found = unfreezing_after(auto_plan().course, [1.0, math.nan, math.inf, math.nan])
    assert found.unfreeze_at == (40,)
    assert all(math.isfinite(value) for value in (*found.recent, found.best or 0.0))


def test_unfreezing_stops_at_private_blocks_and_at_the_end() -> None:
    """What can't train any more, or would only begin after the run, is not decided."""
    private = changed(auto_plan(), slices=[("a", 4, 6)], private_blocks=4)
    assert unfreezing_after(private.course, [1.0] * 40).unfreeze_at == (40,)
    short = auto_plan(num_steps=40)
    assert unfreezing_after(short.course, [1.0] * 4).unfreeze_at == ()
    assert unfreezing_after(auto_plan(num_steps=41).course, [1.0] * 5).unfreeze_at == (40,)


@given(PLANS, LOSSES, LOSSES)
def test_unfreezing_decisions_are_only_ever_added(plan: Plan, losses: list[float], more: list[float]) -> None:
    """Later losses change no earlier decision, and each one holds two turns after the last loss that it rests on."""
    losses = losses[: -(-plan.course.num_steps // plan.course.local_iterations)]
    before, after = unfreezing_after(plan.course, losses), unfreezing_after(plan.course, losses + more)
    assert after.unfreeze_at[: len(before.unfreeze_at)] == before.unfreeze_at
    assert all(
        step >= (len(losses) + 2) * plan.course.local_iterations
        for step in after.unfreeze_at[len(before.unfreeze_at) :]
    )
    assert all(step <= (len(losses) + 1) * plan.course.local_iterations for step in before.unfreeze_at)
    plan.decided(after.unfreeze_at)


@given(PLANS, LOSSES)
def test_unfreezing_is_never_sooner_than_without_any_improvement(plan: Plan, losses: list[float]) -> None:
    """The plan that memory is checked for is the deepest at every step, and a constant loss gives it exactly.

    Exactly where turns are equal; by rows it may come later.
    """
    num_turns = -(-plan.course.num_steps // plan.course.local_iterations)
    soonest = plan.soonest()
    constant = plan.decided(unfreezing_after(plan.course, [1.0] * num_turns).unfreeze_at)
    assert constant == soonest or plan.course.turns == "rows"
    found = plan.decided(unfreezing_after(plan.course, losses[:num_turns]).unfreeze_at)
    assert all(depth(found.course, step) <= depth(soonest.course, step) for step in range(plan.course.num_steps))


def test_unfrozen_soonest_of_a_settled_plan_is_itself() -> None:
    """Where the plan says when, that is when."""
    plan = make_plan([("a", 0, 4)], ["a"], unfreeze="at", unfreeze_at=(3,))
    assert plan.soonest() is plan
    ignored = make_plan([("a", 0, 4)], ["a"], unfreeze="auto", method="all")
    assert ignored.soonest() is ignored


@given(PLANS, LOSSES)
def test_unfreezing_fits_the_step_that_it_knows_of(plan: Plan, losses: list[float]) -> None:
    """What a checkpoint keeps is accepted at its own step alone."""
    losses = losses[: plan.course.num_steps // plan.course.local_iterations]
    step = len(losses) * plan.course.local_iterations
    known = unfreezing_after(plan.course, losses)
    known.check(plan.course, step)
    if step < plan.course.num_steps:
        with pytest.raises(PlanError, match="the checkpoint is of another run"):
            known.check(plan.course, min(plan.course.num_steps, step + plan.course.local_iterations))


@pytest.mark.parametrize(
    "known",
    [
        NOTHING_KNOWN,
        Unfreezing(num_turns=2, recent=()),
        Unfreezing(num_turns=2, recent=(1.0,), best=1.0, unfreeze_at=(15,)),
        Unfreezing(num_turns=2, recent=(1.0,), best=1.0, unfreeze_at=(40, 30)),
    ],
)
def test_unfreezing_that_can_not_be_is_refused(known: Unfreezing) -> None:
    """A manifest of another run, or a damaged one."""
    with pytest.raises(PlanError):
        known.check(auto_plan().course, 20)


def test_unfreezing_is_not_asked_for_where_the_plan_settles_it() -> None:
    """A run of the first form has nothing to remember, and a checkpoint that does is of another one."""
    plan = make_plan([("a", 0, 4)], ["a"])
    NOTHING_KNOWN.check(plan.course, 4)
    assert StartPoint.of(plan.course, step=4).unfreezing is NOTHING_KNOWN
    with pytest.raises(PlanError, match="of another run"):
        Unfreezing(num_turns=2, recent=(1.0,)).check(plan.course, 4)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(0, 60))
def test_latest_owners_are_those_of_the_order(rows: list[int], num_turns: int) -> None:
    """Without walking through the turns, in the order of the last one of each."""
    order = [owner for owner, _ in zip(owner_indices(rows, 0), range(num_turns), strict=False)]
    latest = dict.fromkeys(reversed(order))
    assert latest_owners(rows, num_turns) == tuple(reversed(latest))
