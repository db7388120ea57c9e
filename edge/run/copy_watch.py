"""Take the digests of what several nodes have alike, at the update that the rule names.

They are of an owner's copies of embedding and head, once a sweep, and of the blocks of a replica, once a turn.

The digest is taken right after that update, before anything else runs: the next turn's first update of the copy may
come before this turn is over here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from edge.run.reporter import CopyCompared
from ringtune.rounds.copy_digests import compared_at
from ringtune.schedule.actions import Action, Op
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.turns import Turn


class CopyWatch:
    """The digests of one run at one node; a node that has nothing like another one takes none.

    Args:
        plan: of the run.
        node: this node.
        digest: of this node's copy of a unit, or of the blocks of a range, as they are now.
    """

    def __init__(self, plan: Plan, node: str, digest: Callable[[int, int], str]) -> None:
        self._plan, self._node = plan, node
        self._digest = digest
        self._wanted: dict[tuple[int, int], int] = {}
        self._found: dict[int, list[CopyCompared]] = {}

    def expect(self, turn: Turn) -> None:
        """Learn the updates of a granted turn after which digests are wanted."""
        wanted = compared_at(self._plan, turn, self._node)
        self._wanted |= {(seq, unit): turn.index for unit, seq in wanted.items()}

    def after(self, action: Action) -> None:
        """Take the digest that is wanted after this action, if any."""
        turn = self._wanted.pop((action.seq, action.start), None) if action.op is Op.UPDATE else None
        if turn is not None:
            entry = CopyCompared(turn, action.start, self._digest(action.start, action.stop))
            self._found.setdefault(turn, []).append(entry)

    def take(self, turn: int) -> Iterator[CopyCompared]:
        """Hand out the digests of a turn that is done."""
        yield from self._found.pop(turn, ())
