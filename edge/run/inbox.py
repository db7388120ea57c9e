"""What came for a node and was not taken yet: links put it in from their threads, the loop takes it out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ringtune.files.pieces import Pieces
from ringtune.schedule.actions import TensorKey
from ringtune.schedule.turns import Turn


@dataclass(slots=True)
class Inbox:
    """What came, by its name.

    Attributes:
        tensors: each with its mask.
        heads: by the turn that they are for.
        unit_grads: by item and unit.
    """

    tensors: dict[TensorKey, tuple[Any, Any]] = field(default_factory=dict)
    heads: dict[int, Pieces] = field(default_factory=dict)
    unit_grads: dict[tuple[int, int], Pieces] = field(default_factory=dict)

    def clear(self) -> None:
        """Drop everything."""
        self.tensors.clear()
        self.heads.clear()
        self.unit_grads.clear()

    def forget(self, turn: Turn) -> None:
        """Drop what came twice for a turn that is done."""
        for key in [key for key in list(self.tensors) if turn.first_seq <= key.seq < turn.end_seq]:
            del self.tensors[key]
        for name in [name for name in list(self.unit_grads) if turn.first_seq <= name[0] < turn.end_seq]:
            del self.unit_grads[name]
