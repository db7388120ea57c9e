"""What actions and messages of the virtual ring really do: nothing, or real tensors."""

from __future__ import annotations

from typing import Any, Protocol

from ringtune.schedule.lowering import Action, Op
from ringtune.schedule.turns import Turn

_HEAD_VALUES = (("count", 1.0), ("loss_sum", 0.0))


class Carrier(Protocol):
    """What actions and messages really do."""

    def granted(self, node: str, turn: Turn) -> None:
        """A turn was granted to ``node``."""

    def run(self, node: str, action: Action) -> tuple[tuple[str, float], ...]:
        """Carry a compute action out; returns the numbers it yields."""

    def take(self, node: str, payload: str, seq: int, micro: int, boundary: int) -> Any:
        """Take a tensor out of ``node`` to send it."""

    def put(self, node: str, payload: str, seq: int, micro: int, content: Any) -> None:
        """Give a tensor that arrived to its micro-batch at ``node``."""

    def take_head(self, node: str) -> Any:
        """Copy the head with its optimizer state."""

    def put_head(self, node: str, content: Any) -> None:
        """Load a head."""


class NullCarrier:
    """Carries nothing: instant, empty actions."""

    def granted(self, node: str, turn: Turn) -> None:
        """Nothing to prepare."""

    def run(self, node: str, action: Action) -> tuple[tuple[str, float], ...]:
        """A head yields a count, so that reports are complete."""
        return _HEAD_VALUES if action.op is Op.HEAD else ()

    def take(self, node: str, payload: str, seq: int, micro: int, boundary: int) -> Any:
        """Nothing."""
        return None

    def put(self, node: str, payload: str, seq: int, micro: int, content: Any) -> None:
        """Nothing."""

    def take_head(self, node: str) -> Any:
        """Nothing."""
        return None

    def put_head(self, node: str, content: Any) -> None:
        """Nothing."""
