"""Plans that move: random placements after the first one, and what each epoch of a run did."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence

from ringtune.rounds import rounds as rd
from ringtune.schedule.actions import Action, Payload
from ringtune.schedule.epochs import due
from ringtune.schedule.placement import Placement, Slice
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StartPoint, Turn
from sim.ring_result import RingResult

Triples = Sequence[tuple[str, int, int]]


def moving(plan: Plan, *later: tuple[int, Triples]) -> Plan:
    """The plan with further placements: each from a train turn on, with slices as triples."""
    placements = [plan.placement]
    for first_turn, triples in later:
        slices = tuple(Slice(node=node, start=start, stop=stop) for node, start, stop in triples)
        placements.append(
            dataclasses.replace(plan.placement, slices=slices, epoch=len(placements), first_turn=first_turn)
        )
    return Plan(plan.course, tuple(placements))


def random_placement(rng: random.Random, plan: Plan, epoch: int, first_turn: int) -> Placement:
    """Any slices on the nodes of a plan, and on one that comes new."""
    course, private = plan.course, plan.placement.private_blocks
    names = [*plan.nodes, f"new-{epoch}"]
    hosts = rng.sample(names, rng.randint(1, min(4, len(names))))
    cuts = sorted(rng.randint(private, course.num_blocks) for _ in hosts[1:])
    pieces = zip(hosts, [private, *cuts], [*cuts, course.num_blocks], strict=True)
    return dataclasses.replace(
        plan.placement,
        slices=tuple(Slice(node=node, start=start, stop=stop) for node, start, stop in pieces),
        credits=rng.choice([1, 2, 4, 8]),
        epoch=epoch,
        first_turn=first_turn,
    )


def moving_at_random(rng: random.Random, plan: Plan) -> Plan:
    """The plan with up to three further placements, each from any turn on."""
    num_turns = -(-plan.course.num_steps // plan.course.local_iterations)
    turns = sorted(rng.sample(range(1, num_turns), min(num_turns - 1, rng.randint(1, 3)))) if num_turns > 1 else []
    later = (random_placement(rng, plan, epoch, turn) for epoch, turn in enumerate(turns, start=1))
    return Plan(plan.course, (plan.placement, *later))


def granted(result: RingResult) -> list[Turn]:
    """The turns that were logged as done, in order."""
    return [entry.turn for entry in result.logged if isinstance(entry, rd.LogTurn)]


def by_epoch(
    plan: Plan, turns: Sequence[Turn], order: Mapping[str, Sequence[Action]], stays: frozenset[int] = frozenset()
) -> Iterator[tuple[Plan, list[Turn], dict[str, list[Action]], StartPoint]]:
    """Yield what each epoch was to do and did: its part of the plan, turns, actions by node, and where it began.

    Epochs of ``stays`` were never moved to.
    """
    start, left = StartPoint.of(plan.course), list(turns)
    while left:
        epoch = _held(plan, left[0], stays)
        count = next((at for at, turn in enumerate(left) if _held(plan, turn, stays) != epoch), len(left))
        own, left = left[:count], left[count:]
        part = plan.at(epoch)
        table = {node: [action for action in actions if _is_of(action, own)] for node, actions in order.items()}
        assert all(node in part.nodes or not actions for node, actions in table.items())
        yield part, own, {node: table.get(node, []) for node in part.nodes}, start
        last = own[-1]
        start = StartPoint(step=last.end_step, holder=last.owner, first_turn=last.index + 1, first_seq=last.end_seq)


def _held(plan: Plan, turn: Turn, stays: frozenset[int]) -> int:
    return max(epoch for epoch in range(due(plan.course, plan.placements, turn) + 1) if epoch not in stays)


def _is_of(action: Action, turns: Sequence[Turn]) -> bool:
    if action.payload == Payload.HEAD:
        return turns[0].index <= action.start <= turns[-1].index
    return turns[0].first_seq <= action.seq < turns[-1].end_seq
