"""Take the digests of this owner's copies of embedding and head, once a sweep, at the update that the rule names.

The digest is taken right after that update, before anything else runs: the next turn's first update of the copy may
come before this turn is over here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from edge.run.reporter import CopyCompared
from ringtune.rounds.copy_digests import compared_copies
from ringtune.schedule.actions import Action, Op
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Turn


class CopyWatch:
    """The digests of one run at one node; a node that owns no data has none.

    Args:
        plan: of the run.
        node: this node.
        digest: of this node's copy of a unit, as it is now.
    """

    def __init__(self, plan: Plan, node: str, digest: Callable[[int], str]) -> None:
        self._course = plan.course
        self._is_owner = plan.owner(node) is not None
        self._digest = digest
        self._wanted: dict[tuple[int, int], int] = {}
        self._found: dict[int, list[CopyCompared]] = {}

    def expect(self, turn: Turn) -> None:
        """Learn the updates of a granted turn after which digests are wanted."""
        if self._is_owner:
            wanted = compared_copies(self._course, turn)
            self._wanted |= {(seq, unit): turn.index for unit, seq in wanted.items()}

    def after(self, action: Action) -> None:
        """Take the digest that is wanted after this action, if any."""
        turn = self._wanted.pop((action.seq, action.start), None) if action.op is Op.UPDATE else None
        if turn is not None:
            entry = CopyCompared(turn, action.start, self._digest(action.start))
            self._found.setdefault(turn, []).append(entry)

    def take(self, turn: int) -> Iterator[CopyCompared]:
        """Hand out the digests of a turn that is done."""
        yield from self._found.pop(turn, ())
