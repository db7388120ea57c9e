"""Plans that move: random placements after the first one, and what was done in each placement of a run."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence

from ringtune.run_control import events as rd
from ringtune.schedule.actions import Action, Payload
from ringtune.schedule.migration import due
from ringtune.schedule.placement import Helper, Placement, Slice
from ringtune.schedule.plan import Plan
from ringtune.schedule.stages import no_replicas
from ringtune.schedule.turns import StartPoint, Turn
from tests.support.recorded_ring import RecordedResult

Slices = Sequence[tuple[str, int, int] | tuple[str, int, int, int]]
"""Node, first block, one past the last, and the share where a stage has several hosts."""


def slices_of(pieces: Slices) -> tuple[Slice, ...]:
    """The slices of a placement."""
    return tuple(
        Slice(node=piece[0], start=piece[1], stop=piece[2], share=piece[3] if len(piece) == 4 else 1)
        for piece in pieces
    )


def with_slices(rng: random.Random, plan: Plan, pieces: Slices, names: Sequence[str]) -> Placement:
    """The placement of a plan with other slices; if it has helpers, nodes of these names fit any blocks."""
    placement, offload = dataclasses.replace(plan.placement, slices=slices_of(pieces), helpers=()), plan.course.offload
    velora = plan.course.velora
    helpers = list[Helper]()
    for block in plan.course.trainable.blocks if plan.placement.helpers else ():
        others = [name for name in names if name != placement.host_of(block)]
        may_be = bool(others) and (offload is None or offload.has_block(block))
        may_be = may_be and (velora is None or not velora.has_block(block))
        if may_be and (plan.course.helper_settings.needs_helpers or rng.random() < 0.7):
            helpers.append(Helper(node=rng.choice(others), start=block, stop=block + 1))
    return dataclasses.replace(placement, helpers=tuple(helpers))


def moving(plan: Plan, *later: tuple[int, Slices]) -> Plan:
    """The plan with further placements, each from a train turn on."""
    placements = [plan.placement]
    for first_turn, pieces in later:
        placement = with_slices(random.Random(str(pieces)), plan, pieces, plan.nodes)
        placements.append(dataclasses.replace(placement, placement_number=len(placements), first_turn=first_turn))
    return Plan(plan.course, tuple(placements))


def random_slices(
    rng: random.Random, names: Sequence[str], first: int, stop: int, *, with_replicas: bool = True
) -> Slices:
    """Any stages of these nodes, some of several hosts if that is asked for; one of several hosts has blocks."""
    hosts = rng.sample(names, rng.randint(1, min(4, len(names))))
    at, found = first, list[tuple[str, int, int, int]]()
    while hosts:
        size = min(len(hosts), rng.choice([1, 1, 2, 3])) if with_replicas else 1
        end = stop if size == len(hosts) else rng.randint(at, stop)
        if size > 1 and end == at:
            size = 1
            end = stop if len(hosts) == 1 else at
        found += [(hosts.pop(), at, end, rng.choice([1, 1, 2]) if size > 1 else 1) for _ in range(size)]
        at = end
    return found


def random_placement(rng: random.Random, plan: Plan, placement_number: int, first_turn: int) -> Placement:
    """Any slices on the nodes of a plan, and on one that comes new."""
    course, private = plan.course, plan.placement.private_blocks
    names = [*plan.nodes, f"new-{placement_number}"]
    may_repeat = not (no_replicas(course) or plan.placement.helpers)
    return dataclasses.replace(
        with_slices(rng, plan, random_slices(rng, names, private, course.num_blocks, with_replicas=may_repeat), names),
        credits=rng.choice([1, 2, 4, 8]),
        placement_number=placement_number,
        first_turn=first_turn,
    )


def moving_at_random(rng: random.Random, plan: Plan) -> Plan:
    """The plan with up to three further placements, each from any turn on."""
    num_turns = -(-plan.course.num_steps // plan.course.local_iterations)
    turns = sorted(rng.sample(range(1, num_turns), min(num_turns - 1, rng.randint(1, 3)))) if num_turns > 1 else []
    later = (
        random_placement(rng, plan, placement_number, turn) for placement_number, turn in enumerate(turns, start=1)
    )
    return Plan(plan.course, (plan.placement, *later))


def granted(result: RecordedResult) -> list[Turn]:
    """The turns that were logged as done, in order."""
    return [entry.turn for entry in result.logged if isinstance(entry, rd.LogTurn)]


def by_placement(
    plan: Plan, turns: Sequence[Turn], order: Mapping[str, Sequence[Action]], stays: frozenset[int] = frozenset()
) -> Iterator[tuple[Plan, list[Turn], dict[str, list[Action]], StartPoint]]:
    """Yield what each placement was for and did: its part of the plan, turns, actions by node, and where it began.

    Placements of ``stays`` were never moved to.
    """
    start, left = StartPoint.of(plan.course), list(turns)
    while left:
        placement_number = _held(plan, left[0], stays)
        count = next((at for at, turn in enumerate(left) if _held(plan, turn, stays) != placement_number), len(left))
        own, left = left[:count], left[count:]
        part = plan.at(placement_number)
        table = {node: [action for action in actions if _is_of(action, own)] for node, actions in order.items()}
        assert all(node in part.nodes or not actions for node, actions in table.items())
        yield part, own, {node: table.get(node, []) for node in part.nodes}, start
        last = own[-1]
        start = StartPoint(step=last.end_step, holder=last.owner, first_turn=last.index + 1, first_seq=last.end_seq)


def _held(plan: Plan, turn: Turn, stays: frozenset[int]) -> int:
    return max(
        placement_number
        for placement_number in range(due(plan.course, plan.placements, turn) + 1)
        if placement_number not in stays
    )


def _is_of(action: Action, turns: Sequence[Turn]) -> bool:
    if action.payload == Payload.HEAD:
        return turns[0].index <= action.start <= turns[-1].index
    return turns[0].first_seq <= action.seq < turns[-1].end_seq
