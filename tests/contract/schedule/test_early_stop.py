"""The rule that ends a run early: a fold over its evaluations."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from ringtune.schedule.turns import NONE_DONE, Evaluations
from tests.support.cases import cases

LOSSES = st.lists(st.floats(0.0, 3.0) | st.just(math.nan), max_size=12)


def after(losses: Sequence[float]) -> list[Evaluations]:
    """What is known after each evaluation, one every 10 steps."""
    found = [NONE_DONE]
    for index, loss in enumerate(losses, start=1):
        found.append(found[-1].after(10 * index, loss))
    return found[1:]


def test_early_stop_counts_evaluations_since_the_best() -> None:
    """The table of the module: an equal loss is no better one."""
    found = after([0.7, 0.5, 0.6, 0.5])
    assert [entry.waited for entry in found] == [0, 0, 1, 2]
    assert found[-1] == Evaluations(step=40, best=0.5, best_step=20, waited=2)
    assert [entry.stops_run(2) for entry in found] == [False, False, False, True]
    assert not any(entry.stops_run(0) for entry in found)


def test_early_stop_takes_a_loss_that_is_no_number_for_no_better_one() -> None:
    """Also at the very first; a later number is then the best."""
    found = after([math.nan, math.inf, 0.9])
    assert [(entry.best, entry.waited) for entry in found] == [(None, 1), (None, 2), (0.9, 0)]


def test_early_stop_counts_a_repeated_evaluation_once() -> None:
    """A run that goes on repeats the evaluation of the step at which it was stopped."""
    known = after([0.5, 0.6])[-1]
    assert known.after(20, 0.6) == known.after(10, 0.1) == known


@given(losses=LOSSES, patience=st.integers(1, 4))
def test_early_stop_ends_where_counting_by_hand_does(losses: list[float], patience: int) -> None:
    """The first evaluation of which so many, itself the last, are all no better than the best before them."""

    def is_over(count: int) -> bool:
        if count < patience:
            return False
        before, last = losses[: count - patience], losses[count - patience : count]
        best = min((loss for loss in before if math.isfinite(loss)), default=math.inf)
        return not any(loss < best for loss in last)

    by_hand = next((count for count in range(1, len(losses) + 1) if is_over(count)), None)
    found = next((count for count, entry in enumerate(after(losses), start=1) if entry.stops_run(patience)), None)
    assert found == by_hand


@cases("patience", [1, 3])
def test_early_stop_never_ends_a_run_that_gets_better(patience: int) -> None:
    """However little."""
    assert not any(entry.stops_run(patience) for entry in after([1 - 1e-9 * index for index in range(9)]))
