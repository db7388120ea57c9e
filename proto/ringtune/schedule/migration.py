"""Changes of a run under way: the next placement, copies of ends of turns, and turns without a lost owner.

A run of turns of 5 steps whose second placement holds from turn 3 on, with nodes a and b::

    placement 0   a [0,3)  b [3,6)    steps 0 to 14
    placement 1   a [0,1)  b [1,6)    steps 15 on: b gets the blocks 1 and 2 of a, as far as they were trained

Weights, moments and step counts of trained blocks move. The head stays at the owner that has it, and base weights are
in the node's own folder, or fetched by digest from any node that has them.

``CopyHolders``: each host keeps a copy for the host before it in the ring, so that a run can go back to the end of the
last committed turn. A run on a [0,3), b [3,6) after a turn in which the blocks 2 to 5 have trained::

    blocks 2        kept by a, a copy by b
    blocks 3 to 5   kept by b, a copy by a, the next host in the ring
    head            kept by the owner of the turn, a copy by the next owner

With a [0,3), b [3,5), c [5,6) b keeps a copy for a, c for b, and a for c. Hosts of one stage are copies of one another
already. A host that fetched blocks in a recovery keeps them too.

``without_owner``: the turns of a lost owner are left out. Owners a, b and c, turns of 10 steps, 90 steps; owner b is
lost when 40 steps are committed::

    before    a b c a | b c a b c       the run ends with step 90
    after     a b c a | c a c           the run ends with step 70

All others have the turns, and the batches, that they would have had, one after another; steps are numbered without
gaps. What depends on the number of steps, as a learning rate that falls to the last one, uses the new number.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from ringtune.errors import PlanError
from ringtune.schedule.course import Course
from ringtune.schedule.placement import Placement
from ringtune.schedule.run_shape import DroppedOwner, Owner, next_owner, turn_counts, weights
from ringtune.schedule.turns import StepKind, Turn
from ringtune.schedule.versions import may_be_stale, weight_version

TURNS_KEPT: Final = 3
"""Train turns of which a node keeps what it has trained: the committed one, and two that may be granted since."""


def copy_holder(placement: Placement, node: str) -> str:
    """The node that keeps a copy of what a host has trained; empty if none does, or a replica has it anyway.

    Example: on a [0,3), b [3,6) b keeps a copy for a, and a for b. A host of all blocks has no such host.
    """
    hosts = placement.hosts
    own = placement.slice_of(node)
    if not own.num_blocks or sum((piece.start, piece.stop) == (own.start, own.stop) for piece in hosts) > 1:
        return ""
    at = hosts.index(own)
    return next((piece.node for piece in (*hosts[at + 1 :], *hosts[:at]) if piece.node != node), "")


def copied_from(placement: Placement, node: str) -> tuple[str, ...]:
    """The hosts of which a node keeps copies, in ring order; see ``copy_holder``."""
    return tuple(piece.node for piece in placement.hosts if copy_holder(placement, piece.node) == node)


def wait_reason(course: Course, owner: str) -> str:
    """The reason why a run can't continue without an owner's rows; empty if it can."""
    if len(course.owners) == 1:
        return f"no other node than {owner} owns rows"
    if course.operations is not None:
        return "its table of operations is for the batches of all owners"
    return ""


def without_owner(course: Course, node: str, num_turns: int) -> Course:
    """The course of a run that leaves an owner's turns out once so many train turns are done.

    Raises:
        PlanError: the node is no owner, or the course can't continue without it.
    """
    at = next((index for index, owner in enumerate(course.owners) if owner.node == node), -1)
    problem = f"{node} owns no rows" if at < 0 else wait_reason(course, node)
    if problem:
        raise PlanError(f"the turns of node {node} can't be left out: {problem}")
    own, length = weights(course.owners, course.turns), course.local_iterations
    total = course.turns_of_owners(course.turns_of(course.num_steps))
    had = turn_counts(own, min(course.turns_of_owners(num_turns), total))[at]
    left = turn_counts(own, total)[at] - had
    steps = left * length
    if left and next_owner(own, turn_counts(own, total - 1)) == at:
        steps -= -course.num_steps % length  # the last turn may be short
    return dataclasses.replace(
        course,
        owners=tuple(owner for owner in course.owners if owner.node != node),
        left_out=(*course.left_out, DroppedOwner(owner=course.owners[at], at=at, turns=had)),
        num_steps=course.num_steps - steps,
    )


def all_owners(course: Course) -> tuple[Owner, ...]:
    """The owners with which a run began, in initiator order: those that it has left out too."""
    owners = list(course.owners)
    for one in reversed(course.left_out):
        owners.insert(one.at, one.owner)
    return tuple(owners)


def reduced_num_steps(course: Course, num_steps: int) -> int:
    """Steps of a run that leaves owners out, and that would have so many with all of them."""
    length, owners = course.local_iterations, all_owners(course)
    out = {one.owner.node: one.turns for one in course.left_out}
    own, total = weights(owners, course.turns), course.turns_of(num_steps)
    counts = turn_counts(own, total)
    turns = [out.get(owner.node, count) for owner, count in zip(owners, counts, strict=True)]
    last = next_owner(own, turn_counts(own, total - 1)) if total else 0  # its last turn may be short
    return sum(turns) * length - (-num_steps % length if turns[last] == counts[last] else 0)


def with_owner_back(course: Course, num_steps: int) -> Course:
    """The course before it left out the last owner that it has left out.

    Args:
        course: that leaves owners out.
        num_steps: that a run with all owners would have.
    """
    last = course.left_out[-1]
    owners = [*course.owners]
    owners.insert(last.at, last.owner)
    found = dataclasses.replace(course, owners=tuple(owners), left_out=course.left_out[:-1])
    return dataclasses.replace(found, num_steps=reduced_num_steps(found, num_steps))


def head_holder(course: Course, owner: str) -> str:
    """The owner that keeps a copy of the head as another one had it at the end of its turn: the next in their order.

    Empty if there is none: then the head is nowhere else.
    """
    names = [one.node for one in course.owners]
    if len(names) < 2 or owner not in names:
        return ""
    return names[(names.index(owner) + 1) % len(names)]


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
    if len(placements) > 1 and (problem := stay_reason(course, placements)):
        raise PlanError(f"a run can't move to another placement: {problem}; {_ONE}")


def stay_reason(course: Course, placements: Sequence[Placement]) -> str:
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
    """The blocks that a node takes over when a run moves after ``step`` steps, with their sources, ascending.

    Blocks that were not trained yet are as every node makes them, so no node hands them over.

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


def trained_blocks(course: Course, placement: Placement, node: str, turn: Turn) -> tuple[int, ...]:
    """The blocks of a host that were trained until the end of a turn: they are what it keeps."""
    settled, piece = turn.settled(course), placement.slice_of(node)
    return tuple(block for block in range(piece.start, piece.stop) if weight_version(settled, block, turn.end_step))


class CopyHolders:
    """The holders of every trained block at the end of one turn.

    Attributes:
        step: optimizer steps done then; None = there is no turn to which the run could go back.
        owner: that had the head.
        holder: this owner, or if it is lost the one that has the copy of the head.
        decided: the run's unfreezing decisions until then.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.owner = ""
        self._heads: tuple[str, ...] = ()
        self.decided: tuple[int, ...] = ()
        self._nodes: dict[int, tuple[str, ...]] = {}

    def begin(self, holder: str) -> None:
        """A run that begins can begin again: nothing was trained yet."""
        self.step, self.owner, self._heads = 0, holder, (holder,)

    @property
    def holder(self) -> str:  # noqa: D102 - an attribute of the class
        return self._heads[0] if self._heads else ""

    def commit(self, course: Course, placement: Placement, turn: Turn) -> None:
        """Note the end of a train turn that every node has done and kept."""
        self.step, self.decided = turn.end_step, turn.unfreeze_at
        self.owner = turn.owner
        self._heads = tuple(filter(None, (turn.owner, head_holder(course, turn.owner))))
        self._nodes = {}
        for piece in placement.hosts:
            copy = copy_holder(placement, piece.node)
            for block in trained_blocks(course, placement, piece.node, turn):
                before = self._nodes.get(block, ())
                self._nodes[block] = (*before, piece.node, *([copy] if copy else []))

    def fetched(self, node: str, sources: Iterable[Source]) -> None:
        """Note that a node has fetched blocks as they were kept, and keeps them."""
        for source in sources:
            for block in range(source.start, source.stop):
                self._nodes[block] = tuple(dict.fromkeys((*self._nodes[block], node)))

    def head_source(self, node: str) -> str:
        """From whom a node fetches the head as it was then; empty if it has it, or all make it by themselves."""
        return "" if not self.step or node in self._heads else self.holder

    def fetched_head(self, node: str) -> None:
        """Note that a node has fetched the head, and keeps it."""
        self._heads = (node, *(each for each in self._heads if each != node))

    def lose(self, node: str) -> None:
        """Note that a node is lost."""
        self._nodes = {block: tuple(each for each in nodes if each != node) for block, nodes in self._nodes.items()}
        self._heads = tuple(each for each in self._heads if each != node)

    @property
    def missing(self) -> tuple[int, ...]:
        """Blocks that were trained and that no living node keeps."""
        return tuple(sorted(block for block, nodes in self._nodes.items() if not nodes))

    def sources(self, placement: Placement, node: str) -> tuple[Source, ...]:
        """From whom a node takes its blocks of a placement over: itself where it keeps them."""
        piece = placement.slice_of(node)
        found = [
            Source(node if node in self._nodes[block] else self._nodes[block][0], block, block + 1)
            for block in range(piece.start, piece.stop)
            if block in self._nodes
        ]
        return tuple(joined(iter(found)))
