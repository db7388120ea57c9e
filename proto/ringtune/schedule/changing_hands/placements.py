"""From one placement of a run to the next, at a turn boundary: when, and who hands which blocks to whom.

A run of turns of 5 steps whose second placement holds from turn 3 on, with nodes a and b::

    placement 0   a [0,3)  b [3,6)    steps 0 to 14
    placement 1   a [0,1)  b [1,6)    steps 15 on: b gets the blocks 1 and 2 of a, as far as they were trained

What moves is what was trained: weights, moments and step counts of blocks. The head stays at the owner that has it, and
base weights come from the node's own folder, or by digest from any node that has them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ringtune.errors import PlanError
from ringtune.schedule.course import Course
from ringtune.schedule.placement import Placement
from ringtune.schedule.turns.turns import StepKind, Turn
from ringtune.schedule.turns.versions import may_be_stale, weight_version

_ONE = "give the plan one placement"


class Source(NamedTuple):
    """The blocks ``[start, stop)`` that a node takes over from the node that hosted them until now, perhaps itself."""

    node: str
    start: int
    stop: int


def check_placements(course: Course, placements: Sequence[Placement]) -> None:
    """Refuse placements that a run of the course can't carry out one after another.

    Raises:
        PlanError: there is none, they are not in order, or the course stays on one placement; says why.
    """
    if not placements:
        raise PlanError("a plan has at least one placement, this one has none; make it anew with 'ringtune plan'")
    first = placements[0]
    if first.first_turn and not first.placement_number:
        raise PlanError(
            f"placement {first.placement_number} holds from turn {first.first_turn} on; placement 0 has to hold "
            "from turn 0"
        )
    for before, after in itertools.pairwise(placements):
        if after.placement_number <= before.placement_number or after.first_turn <= before.first_turn:
            raise PlanError(
                f"placement {after.placement_number} from turn {after.first_turn} on comes after placement "
                f"{before.placement_number} from turn {before.first_turn} on; numbers count up, and "
                "each begins at a later turn"
            )
        if after.private_blocks != before.private_blocks:
            raise PlanError(
                f"placement {after.placement_number} has {after.private_blocks} private blocks, the one before "
                f"{before.private_blocks}; give all placements the same number"
            )
        if (after.recompute, after.state_on_disk) != (before.recompute, before.state_on_disk):
            raise PlanError(
                f"placement {after.placement_number} runs other blocks again than the one before; give both the "
                "same ranges"
            )
    if len(placements) > 1 and (problem := why_it_stays(course, placements)):
        raise PlanError(f"a run can't move to another placement: {problem}; {_ONE}")


def why_it_stays(course: Course, placements: Sequence[Placement]) -> str:
    """Why a course stays on one placement; empty if it may move."""
    if course.method.full_parameters:
        return f"{course.method.name} trains all parameters, which do not fit beside those of the next slice"
    if may_be_stale(course):
        return f"the result of {course.method.name} depends on the ring"
    if course.offload is not None or any(one.helpers for one in placements):
        return "helpers have fitted adapters that no other node knows"
    if course.choice is not None:
        return "it chooses operations by what its hosts have room for"
    if course.velora is not None:
        return "velora keeps vectors that do not move"
    return ""


def first_step(course: Course, placement: Placement) -> int:
    """The step with which a placement begins to hold."""
    return placement.first_turn * course.local_iterations


def due(course: Course, placements: Sequence[Placement], turn: Turn) -> int:
    """The number of the placement in which a turn is to be worked on.

    A checkpoint and the evaluations after the last turn of a placement are of that placement still; scores are of the
    train turn that they come before.
    """
    comes_before = turn.kind in (StepKind.TRAIN, StepKind.SCORE)
    holding = [
        one.placement_number
        for one in placements
        if not one.first_turn
        or (step := first_step(course, one)) < turn.first_step
        or (step == turn.first_step and comes_before)
    ]
    return max(holding, default=placements[0].placement_number)


def sources(course: Course, before: Placement, after: Placement, node: str, step: int) -> tuple[Source, ...]:
    """Which blocks a node takes over when a run moves after ``step`` steps, and from whom, in ascending order.

    Blocks that were not trained yet are as every node makes them, so nobody hands them over.

    Args:
        course: in which the run's decisions are settled.
        before: the placement that held until now.
        after: the placement that holds from now on.
        node: that takes over.
        step: optimizer steps done.
    """
    return tuple(joined(_single(course, before, after, node, step)))


def _single(course: Course, before: Placement, after: Placement, node: str, step: int) -> Iterator[Source]:
    piece = after.slice_of(node)
    had = before.slice_of(node)
    for block in range(piece.start, piece.stop):
        if weight_version(course, block, step):
            own = had.start <= block < had.stop
            yield Source(node if own else before.host_of(block), block, block + 1)


def joined(parts: Iterator[Source]) -> Iterator[Source]:
    """Yield neighbouring blocks of one node as one range."""
    last: Source | None = None
    for part in parts:
        if last is not None and (last.node, last.stop) == (part.node, part.start):
            last = Source(last.node, last.start, part.stop)
            continue
        if last is not None:
            yield last
        last = part
    if last is not None:
        yield last
