"""What came for a node and was not taken yet: links put it in from their threads, the loop takes it out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ringtune.files.pieces import Pieces
from ringtune.schedule.actions import TensorKey
from ringtune.schedule.turns.turns import Turn


@dataclass(slots=True)
class Inbox:
    """What came, by its name.

    Attributes:
        tensors: each with its mask.
        heads: by the turn that they are for.
        parcels: by their names.
    """

    tensors: dict[TensorKey, tuple[Any, Any]] = field(default_factory=dict)
    heads: dict[int, Pieces] = field(default_factory=dict)
    parcels: dict[TensorKey, Pieces] = field(default_factory=dict)

    def clear(self) -> None:
        """Drop everything."""
        self.tensors.clear()
        self.heads.clear()
        self.parcels.clear()

    def forget(self, turn: Turn) -> None:
        """Drop what came twice for a turn that is done."""
        for held in (self.tensors, self.parcels):
            for key in [key for key in list(held) if turn.first_seq <= key.seq < turn.end_seq]:
                del held[key]
