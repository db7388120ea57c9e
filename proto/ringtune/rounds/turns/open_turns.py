"""The turns of a run that are granted and not done by every node."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from ringtune.errors import IntegrityError
from ringtune.rounds.events.round_events import StepReported
from ringtune.schedule.turns.turns import StepKind, Turn


class OpenTurn(NamedTuple):
    """The oldest open turn, and the nodes that it waits for."""

    turn: Turn
    waits_for: tuple[str, ...]


class OpenTurns:
    """The open turns of one run.

    Args:
        items_ahead: grant turns until at least so many items are granted beyond the finished ones.
    """

    def __init__(self, items_ahead: int) -> None:
        self._items_ahead = items_ahead
        self._turns: dict[int, Turn] = {}
        self._waits: dict[int, set[str]] = {}
        self._reported_items: dict[int, set[int]] = {}

    def __bool__(self) -> bool:
        """Whether a turn is open."""
        return bool(self._turns)

    @property
    def needs_more(self) -> bool:
        """Whether to grant more turns: fewer than two are open, or too few items are ahead."""
        ahead = sum(turn.num_items - len(self._reported_items[turn.index]) for turn in self._turns.values())
        return len(self._turns) < 2 or ahead < self._items_ahead

    @property
    def change_anything(self) -> bool:
        """Whether an open turn trains or saves; scores and evaluations leave nothing behind."""
        return any(turn.kind.has_update or turn.kind is StepKind.CHECKPOINT for turn in self._turns.values())

    @property
    def oldest(self) -> OpenTurn | None:
        """The oldest open turn; None if none is open."""
        if not self._turns:
            return None
        first = min(self._turns)
        return OpenTurn(self._turns[first], tuple(sorted(self._waits[first])))

    def add(self, turn: Turn, nodes: Collection[str]) -> None:
        """Open a turn that was granted to these nodes."""
        self._turns[turn.index] = turn
        self._waits[turn.index] = set(nodes)
        self._reported_items[turn.index] = set()

    def get(self, index: int) -> Turn | None:
        """Find an open turn by its index."""
        return self._turns.get(index)

    def of_item(self, seq: int) -> Turn | None:
        """Find the open turn that has an item."""
        return next((turn for turn in self._turns.values() if turn.first_seq <= seq < turn.end_seq), None)

    def item_done(self, turn: Turn, told: StepReported) -> bool:
        """Note that an item of an open turn is finished; False if that was known.

        Raises:
            IntegrityError: somebody else than its owner says so, or with the step of another turn.
        """
        if told.node != turn.owner or not turn.first_step <= told.step <= turn.end_step:
            raise IntegrityError(
                f"node {told.node} reports item {told.seq} of step {told.step}; it is of node {turn.owner} and of a "
                f"turn that begins at step {turn.first_step}; use one version on all machines"
            )
        known = self._reported_items[turn.index]
        is_new = told.seq not in known
        known.add(told.seq)
        return is_new

    def node_done(self, node: str, turn: Turn) -> None:
        """Note that a node has done an open turn."""
        self._waits[turn.index].discard(node)

    def close(self, turn: Turn) -> None:
        """Forget a turn that is done everywhere."""
        del self._turns[turn.index], self._waits[turn.index], self._reported_items[turn.index]

    def cleared(self) -> OpenTurns:
        """The same with no turn open."""
        return OpenTurns(self._items_ahead)
