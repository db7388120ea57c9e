"""Drawn runs of equal boards, and the alarms that the watches of boards and of links raise in them.

``python -m tests.bench.alarms`` prints in how many of a hundred runs a change is found, after how many turns, and in
how many there is an alarm though nothing has changed.

Boards have a quota that nobody sees: where their own blocks train they rest less, and the same work takes up to twice
as long; as more trains elsewhere they rest longer. The initiator of a turn has more to do in it. Paces drift from turn
to turn, and one turn in twenty is a burst of other work.

Links carry the messages that a virtual run of the plan sends in each turn. Their rates drift in the same way, by as
much as a radio link's; one turn in twenty has other traffic, and a busy processor makes one message in five up to three
times as long.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ringtune.costs.calibration import CHANGED, ChangeDetector, LinkMonitor, kinds_of_work
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
TURN_STEPS = PLAN.course.local_iterations
NEIGHBOURS: tuple[Pair, ...] = tuple(
    pair for left, right in zip(PLAN.nodes[:-1], PLAN.nodes[1:], strict=True) for pair in ((left, right), (right, left))
)
"""Links that nearly every turn uses, once blocks below train; the others are used where one of their ends initiates."""
RUNS = 100

DRIFT = 0.07
"""Standard deviation of what this machine takes for the same work, in windows of two seconds (``machine_drift``)."""

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


class Found(NamedTuple):
    """Runs in each of which one board or link becomes slower."""

    runs: int
    turns: Sequence[int]
    others: int


def slow_boards() -> Found:
    """One board falls to half its speed."""
    turns, others = list[int](), 0
    for seed in range(RUNS):
        rng = random.Random(f"slow {seed}")
        slow, since = rng.choice(PLAN.nodes), rng.randint(12, 17)

        def slows(node: str, turn: int, slow: str = slow, since: int = since) -> float:
            return 2.0 if node == slow and turn >= since else 1.0

        found = board_alarms(seed, slows)
        turns += [number - since + 1 for number, names in found if slow in names][:1]
        others += any(names.keys() != {slow} for _, names in found)
    return Found(RUNS, turns, others)


def slow_links(
    pairs: Sequence[Pair], *, plan: Plan = PLAN, since: tuple[int, int] = (12, 17), runs: int = RUNS
) -> Found:
    """One link falls to a fifth of its rate."""
    turns, others = list[int](), 0
    for seed in range(runs):
        rng = random.Random(f"slow {seed}")
        slow, first = rng.choice(pairs), rng.randint(*since)

        def slows(pair: Pair, turn: int, slow: Pair = slow, first: int = first) -> float:
            return 5.0 if pair == slow and turn >= first else 1.0

        found = link_alarms(seed, slows, plan=plan)
        turns += [number - first + 1 for number, pairs in found if slow in pairs and number >= first][:1]
        others += any(pairs.keys() != {slow} for _, pairs in found)
    return Found(runs, turns, others)


def other_links() -> tuple[Pair, ...]:
    """The links that the plan uses besides those of neighbours."""
    return tuple(sorted(set().union(*(turn.messages for turn in train_turns(PLAN))) - set(NEIGHBOURS)))


def lines() -> Iterator[str]:
    """The figures, a line each."""
    rows = {
        "a board at half its speed": (PLAN, slow_boards()),
        "a link of neighbours at a fifth of its rate": (PLAN, slow_links(NEIGHBOURS)),
        "another link at a fifth of its rate": (PLAN, slow_links(other_links())),
        "the same in longer runs": (LONG, slow_links(other_links(), plan=LONG, since=(24, 40))),
    }
    for name, (plan, found) in rows.items():
        steps = [TURN_STEPS * turns for turns in found.turns]
        within = f", {min(steps)} to {max(steps)} steps after it" if steps else ""
        yield (
            f"{name}, runs of {plan.course.num_steps} steps: found in {len(steps)} of {found.runs}{within}; "
            f"something else named too in {found.others}"
        )
    boards = sum(bool(board_alarms(seed)) for seed in range(RUNS))
    yield f"alarms though no board has changed, runs of {PLAN.course.num_steps} steps: {boards} of {RUNS}"
    for plan in (PLAN, LONG):
        for drift in (DRIFT, RADIO_DRIFT):
            count = sum(bool(link_alarms(seed, plan=plan, drift=drift)) for seed in range(RUNS))
            yield f"the same of links, rates that drift by {drift}, {plan.course.num_steps} steps: {count} of {RUNS}"


def main() -> int:
    """Print them."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for line in lines():
        print(line)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
