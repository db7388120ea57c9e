"""Who keeps what was trained at the end of the last committed turn, so that a run can go back to it.

A run on a [0,3), b [3,6) after a turn in which the blocks 2 to 5 have trained::

    blocks 2        kept by a, a copy by b
    blocks 3 to 5   kept by b, a copy by a, the next host in the ring
    head            kept by the owner of the turn, a copy by the next owner

Where a stage has several hosts each of them is a copy of the others already. A host that fetched blocks in a recovery
keeps them too.
"""

from __future__ import annotations

from collections.abc import Iterable

from ringtune.schedule.changing_hands.copy_holders import copy_holder
from ringtune.schedule.changing_hands.placements import Source, joined
from ringtune.schedule.course import Course
from ringtune.schedule.placement import Placement
from ringtune.schedule.turns.turns import Turn
from ringtune.schedule.turns.versions import weight_version
from ringtune.schedule.whose_rows.leaving_out import head_holder


def trained_blocks(course: Course, placement: Placement, node: str, turn: Turn) -> tuple[int, ...]:
    """The blocks of a host that were trained until the end of a turn: they are what it keeps."""
    settled, piece = course.decided(turn.unfreeze_at, turn.operations), placement.slice_of(node)
    return tuple(block for block in range(piece.start, piece.stop) if weight_version(settled, block, turn.end_step))


class KeptCopies:
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
