"""A change counts beyond the noise of a run and beside turns of the same work only: drawn runs of equal boards.

Boards have a quota that nobody sees: where their own blocks train they rest less, and the same work takes up to twice
as long; as more trains elsewhere they rest longer. The initiator of a turn has more to do in it. Paces drift from turn
to turn, and one turn in twenty is a burst of other work.

Links carry the messages that a virtual run of the plan sends in each turn. Their rates drift in the same way, by as
much as a radio link's; one turn in twenty has other traffic, and a busy processor makes one message in five up to three
times as long. Fewer runs of links than of boards are enough to show a rule that has become worse.
"""

from __future__ import annotations

import functools
import math
import random
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from ringtune.costs.calibration import (
    CHANGED,
    LASTING_TURNS,
    MAX_USUAL_TURNS,
    ChangeDetector,
    LinkMonitor,
    kinds_of_work,
)
from ringtune.costs.links import Pair
from ringtune.schedule.actions import Payload
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StepKind, Turn, turn_sequence
from tests.support.plans import changed, make_plan
from tests.support.profiles import all_pairs, profile_of
from tests.support.recorded_ring import RecordedRing

PLAN = make_plan(
    [("b0", 0, 2), ("b1", 2, 4), ("b2", 4, 5), ("b3", 5, 6)],
    ["b0", "b1", "b2", "b3"],
    num_blocks=6,
    num_steps=96,
    local_iterations=4,
    every_steps=8,
)
LONG = changed(PLAN, num_steps=384)
NEIGHBOURS: tuple[Pair, ...] = tuple(
    pair for left, right in zip(PLAN.nodes[:-1], PLAN.nodes[1:], strict=True) for pair in ((left, right), (right, left))
)
"""Links that nearly every turn uses, once blocks below train; the others are used where one of their ends initiates."""
RUNS, LINK_RUNS = 100, 25

DRIFT = 0.07
"""Standard deviation of what this machine takes for the same work, in windows of two seconds (measured)."""

RADIO_DRIFT = 0.25
"""The same of the rate of a radio link from turn to turn; chosen, not measured."""

MESSAGE_BYTES = 4 * 64 * 384 * 4
"""Hidden states of 4 rows of 64 tokens, of width 384."""
RATE_BYTES_PER_S, LATENCY_S = 12.5e6, 2e-3

Alarms = list[tuple[int, dict[str, float]]]
LinkAlarms = list[tuple[int, dict[Pair, float]]]


def never(name: object, turn: int) -> float:
    """Nothing becomes slower."""
    return 1.0


class TrainTurn(NamedTuple):
    """A train turn of a plan: what each node and all of them have to do in it, and the messages of each link."""

    turn: Turn
    depth: Hashable
    kinds: Mapping[str, Hashable]
    messages: Mapping[Pair, int]


@functools.cache
def train_turns(plan: Plan) -> Sequence[TrainTurn]:
    """The train turns of a plan; messages are counted in a virtual run of it."""
    turns = [turn for turn in turn_sequence(plan.course) if turn.kind is StepKind.TRAIN]
    index_of = {seq: index for index, turn in enumerate(turns) for seq in range(turn.first_seq, turn.end_seq)}
    messages: list[Counter[Pair]] = [Counter() for _ in turns]
    for message in RecordedRing(plan).run().messages:
        if message.payload in (Payload.HIDDEN, Payload.GRAD) and message.key.seq in index_of:
            messages[index_of[message.key.seq]][message.source, message.target] += 1
    return [TrainTurn(turn, *kinds_of_work(plan, turn), count) for turn, count in zip(turns, messages, strict=True)]


def board_alarms(seed: int, slows: Callable[[str, int], float] = never) -> Alarms:
    """The turns of a run after which boards count as changed, each with these boards."""
    rng, found = random.Random(seed), Alarms()
    slower, faster = ChangeDetector[str](CHANGED), ChangeDetector[str](CHANGED)
    drift = dict.fromkeys(PLAN.nodes, 0.0)
    for number, (turn, depth, kinds, _) in enumerate(train_turns(PLAN)):
        for piece in PLAN.placement.hosts:
            node, own = piece.node, kinds[piece.node]
            assert isinstance(own, tuple)
            drift[node] = 0.7 * drift[node] + DRIFT * rng.gauss(0, 0.7)
            crowded = 1 + own[2][0] / piece.num_blocks - 0.05 * turn.first_step / PLAN.course.num_steps
            pace = (
                crowded * (1.6 if turn.owner == node else 1.0) * _burst(rng) * (1 + drift[node]) * slows(node, number)
            )
            if number:
                slower.add(node, own, {"all": (pace, 1.0)})
                faster.add(node, (depth, own), {"all": (pace, 1.0)})
        now = {node: ratio for node, ratio in slower.changed().items() if ratio > 1}
        now |= {node: ratio for node, ratio in faster.changed().items() if ratio < 1}
        if now:
            found.append((number, now))
    return found


def link_alarms(
    seed: int, slows: Callable[[Pair, int], float] = never, *, plan: Plan = PLAN, drift: float = RADIO_DRIFT
) -> LinkAlarms:
    """The turns of a run after which links count as changed, each with these links."""
    rng, found = random.Random(seed), LinkAlarms()
    watch = LinkMonitor(profile_of(plan, links=all_pairs(plan.nodes, RATE_BYTES_PER_S, LATENCY_S)).links)
    drifts: dict[Pair, float] = {}
    for number, turn in enumerate(train_turns(plan)):
        for pair, count in sorted(turn.messages.items()):
            drifts[pair] = 0.7 * drifts.get(pair, 0.0) + drift * rng.gauss(0, 0.7)
            on_wire_s = MESSAGE_BYTES / RATE_BYTES_PER_S * math.exp(drifts[pair]) * _burst(rng) * slows(pair, number)
            for message in range(count):
                busy = rng.uniform(1.0, 3.0) if rng.random() < 0.2 else 1.0
                watch.add(*pair, MESSAGE_BYTES, LATENCY_S + on_wire_s * busy, at_s=1000.0 + 10 * number + message)
        watch.turn_done(turn.kinds)
        if now := watch.changed():
            found.append((number, now))
    return found


def _burst(rng: random.Random) -> float:
    return rng.uniform(1.2, 2.0) if rng.random() < 0.05 else 1.0


Name = TypeVar("Name")


def found_after(
    alarms: Callable[[int, Callable[[Name, int], float]], Sequence[tuple[int, Mapping[Name, float]]]],
    names: Sequence[Name],
    factor: float,
    *,
    since: tuple[int, int] = (12, 17),
    runs: int = RUNS,
) -> tuple[list[int], int]:
    """Runs in each of which one board or link becomes slower by a factor, in a turn between two.

    Returns:
        After how many turns it was named first, where it was; and in how many runs something else was named too.
    """
    turns, others = list[int](), 0
    for seed in range(runs):
        rng = random.Random(f"slow {seed}")
        slow, first = rng.choice(names), rng.randint(*since)

        def slows(name: Name, turn: int, slow: Name = slow, first: int = first) -> float:
            return factor if name == slow and turn >= first else 1.0

        raised = alarms(seed, slows)
        turns += [turn - first + 1 for turn, named in raised if slow in named and turn >= first][:1]
        others += any(named.keys() != {slow} for _, named in raised)
    return turns, others


def test_equal_boards_with_noise_and_more_that_trains_are_no_alarm() -> None:
    """Of a hundred runs with quotas, drift, and bursts at most two look for another placement."""
    assert sum(bool(board_alarms(seed)) for seed in range(RUNS)) <= 2


def test_equal_links_with_the_noise_of_radio_are_seldom_an_alarm() -> None:
    """At most one in twenty."""
    assert sum(bool(link_alarms(seed)) for seed in range(LINK_RUNS)) <= 1


def test_what_lasts_is_found_within_some_turns() -> None:
    """A board at half its speed: nearly always, after three to seven turns."""
    turns, others = found_after(board_alarms, PLAN.nodes, 2.0)
    assert sum(LASTING_TURNS - 1 <= after <= 7 for after in turns) >= 0.97 * RUNS
    assert others <= 3


def test_a_link_at_a_fifth_of_its_rate_is_found_within_some_turns() -> None:
    """Between neighbours always, after three to seven turns; no board and hardly any other link is named."""
    turns, others = found_after(link_alarms, NEIGHBOURS, 5.0, runs=LINK_RUNS)
    assert len(turns) == LINK_RUNS and min(turns) >= LASTING_TURNS and max(turns) <= 7
    assert others <= 1


def test_a_link_that_few_turns_use_is_found_after_three_of_them() -> None:
    """One of an initiator, which is that of every fourth turn: after 9 to 12 turns of a long run."""
    seldom = sorted(set().union(*(turn.messages for turn in train_turns(PLAN))) - set(NEIGHBOURS))
    turns, _ = found_after(functools.partial(link_alarms, plan=LONG), seldom, 5.0, since=(24, 40), runs=4)
    assert len(turns) == 4 and min(turns) > 4 * (LASTING_TURNS - 1)
    assert max(turns) <= 4 * LASTING_TURNS


def test_usual_are_the_first_turns_of_a_kind() -> None:
    """One that becomes slower by a hundredth each turn is found, as later turns do not become the usual ones."""
    watch = ChangeDetector[str](CHANGED)
    since = []
    for turn in range(60):
        watch.add("a", 0, {"w": (1.01**turn, 1.0), "new": (5.0, 0.0)})
        since += [turn] if watch.changed() else []
    first = since[0]
    assert (
        since == list(range(first, 60)) and CHANGED <= 1.01 ** (first - LASTING_TURNS + 1) / 1.01**4 <= 1.02 * CHANGED
    )
    assert MAX_USUAL_TURNS == 6
