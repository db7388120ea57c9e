"""What actions and messages of the virtual ring do besides taking time: real tensors, in checks of correctness."""

from __future__ import annotations

from typing import Any, Protocol

from ringtune.rounds.events.move_events import Move
from ringtune.schedule.actions import Action, TensorKey
from ringtune.schedule.turns.turns import Turn


class Carrier(Protocol):
    """What actions and messages really do."""

    def granted(self, node: str, turn: Turn) -> None:
        """Note that a turn was granted to ``node``."""

    def run(self, node: str, action: Action) -> tuple[tuple[str, float], ...]:
        """Carry a compute action out; returns the numbers it yields."""

    def ended(self, node: str, turn: int) -> str:
        """Note that ``node`` has done a turn; returns why it keeps no hidden states any more, once."""

    def take(self, node: str, key: TensorKey) -> Any:
        """Take a tensor out of ``node`` to send it."""

    def put(self, node: str, key: TensorKey, content: Any) -> None:
        """Give a tensor that arrived to its micro-batch at ``node``."""

    def take_head(self, node: str) -> Any:
        """Copy the head with its optimizer state."""

    def put_head(self, node: str, content: Any) -> None:
        """Load a head."""

    def take_parcel(self, node: str, key: TensorKey) -> Any:
        """Make a parcel of ``node``."""

    def rest(self, node: str) -> None:
        """Keep what ``node`` has trained, for a move."""

    def move(self, command: Move) -> None:
        """Build what a node has in another placement, with what others kept of it."""

    def put_parcel(self, node: str, key: TensorKey, content: Any) -> None:
        """Give a parcel that arrived to ``node``."""
