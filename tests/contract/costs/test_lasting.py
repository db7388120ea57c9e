"""A change counts beyond the noise of a run and beside turns of the same work only: a hundred runs of equal boards."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from ringtune.costs.calibration import (
    BEYOND_NOISE,
    CHANGED,
    LASTING_TURNS,
    MOST_USUAL_TURNS,
    USUAL_TURNS,
    LastingChanges,
    kinds_of_work,
)
from ringtune.schedule.turns import StepKind, turn_sequence
from tests.support.plans import make_plan

PLAN = make_plan(
    [("b0", 0, 2), ("b1", 2, 4), ("b2", 4, 5), ("b3", 5, 6)],
    ["b0", "b1", "b2", "b3"],
    num_blocks=6,
    num_steps=96,
    local_iterations=4,
    every_steps=8,
)
TURNS = [turn for turn in turn_sequence(PLAN.course) if turn.kind is StepKind.TRAIN]
KINDS = [kinds_of_work(PLAN, turn) for turn in TURNS]
RUNS = 100

DRIFT = 0.07
"""Standard deviation of what this machine takes for the same work, in windows of two seconds (``machine_drift``)."""


Alarms = list[tuple[int, dict[str, float]]]


def never(node: str, turn: int) -> float:
    """No board becomes slower."""
    return 1.0


def alarms(seed: int, slows: Callable[[str, int], float] = never) -> Alarms:
    """The turns of a run after which boards count as changed, each with these boards.

    Boards have a quota that nobody sees: where their own blocks train they rest less, and the same work takes up to
    twice as long; as more trains elsewhere they rest longer. The initiator of a turn has more to do in it. Paces drift
    from turn to turn, and one turn in twenty is a burst of other work.
    """
    rng, found = random.Random(seed), Alarms()
    slower, faster = LastingChanges[str](CHANGED), LastingChanges[str](CHANGED)
    drift = dict.fromkeys(PLAN.nodes, 0.0)
    for number, (turn, (depth, kinds)) in enumerate(zip(TURNS, KINDS, strict=True)):
        for piece in PLAN.placement.hosts:
            node, own = piece.node, kinds[piece.node]
            assert isinstance(own, tuple)
            drift[node] = 0.7 * drift[node] + DRIFT * rng.gauss(0, 0.7)
            crowded = 1 + own[2][0] / piece.num_blocks - 0.05 * turn.first_step / PLAN.course.num_steps
            burst = rng.uniform(1.2, 2.0) if rng.random() < 0.05 else 1.0
            pace = crowded * (1.6 if turn.owner == node else 1.0) * burst * (1 + drift[node]) * slows(node, number)
            if number:
                slower.add(node, own, {"all": (pace, 1.0)})
                faster.add(node, (depth, own), {"all": (pace, 1.0)})
        now = {node: ratio for node, ratio in slower.changed().items() if ratio > 1}
        now |= {node: ratio for node, ratio in faster.changed().items() if ratio < 1}
        if now:
            found.append((number, now))
    return found


def test_equal_boards_with_noise_and_more_that_trains_are_no_alarm() -> None:
    """Of a hundred runs with quotas, drift, and bursts at most two look for another placement."""
    assert sum(bool(alarms(seed)) for seed in range(RUNS)) <= 2


def test_what_lasts_is_found_within_some_turns() -> None:
    """A board at half its speed: nearly always, after three to seven turns."""
    turns, others = list[int](), 0
    for seed in range(RUNS):
        rng = random.Random(f"slow {seed}")
        slow, since = rng.choice(PLAN.nodes), rng.randint(12, 17)

        def slows(node: str, turn: int, slow: str = slow, since: int = since) -> float:
            return 2.0 if node == slow and turn >= since else 1.0

        found = alarms(seed, slows)
        turns += [number - since + 1 for number, names in found if slow in names][:1]
        others += any(names.keys() != {slow} for _, names in found)
    assert sum(LASTING_TURNS - 1 <= after <= 7 for after in turns) >= 0.97 * RUNS
    assert others <= 3


def test_noise_alone_is_what_turns_of_a_kind_differ_by() -> None:
    """Turns of another kind say nothing; one burst among usual turns does not hide a change, nor make one."""

    def watched(paces: list[float]) -> dict[str, float]:
        watch = LastingChanges[str](CHANGED)
        for pace in paces:
            watch.add("a", "other work", {"w": (9.0, 1.0)})
            watch.add("a", "work", {"w": (pace, 1.0)})
        return watch.changed()

    assert watched([1.0, 1.0, 1.5, 1.5, 1.5]) == pytest.approx({"a": 1.5})
    assert watched([1.0, 1.0, 1.5, 1.5]) == watched([1.0, 1.5, 1.5, 1.5]) == {}
    assert watched([1.0, 1.0, 1.2, 1.2, 1.2]) == watched([1.0, 2.0, 1.0, 1.0, 1.0]) == {}
    assert watched([1.0, 1.0, 1.5, 1.0, 1.0, 2.0, 2.0, 2.0]) == pytest.approx({"a": 2.0})
    assert watched([0.6, 1.4] * 3 + [1.77, 1.78, 1.77]) == {}
    assert BEYOND_NOISE > 2 and USUAL_TURNS == 2


def test_usual_are_the_first_turns_of_a_kind() -> None:
    """One that becomes slower by a hundredth each turn is found, as later turns do not become the usual ones."""
    watch = LastingChanges[str](CHANGED)
    since = []
    for turn in range(60):
        watch.add("a", 0, {"w": (1.01**turn, 1.0), "new": (5.0, 0.0)})
        since += [turn] if watch.changed() else []
    first = since[0]
    assert (
        since == list(range(first, 60)) and CHANGED <= 1.01 ** (first - LASTING_TURNS + 1) / 1.01**4 <= 1.02 * CHANGED
    )
    assert MOST_USUAL_TURNS == 6
