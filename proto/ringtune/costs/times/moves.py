"""What a move of a run takes, by a formula that is meant to be too long rather than too short."""

from __future__ import annotations

from typing import Final

from ringtune.costs.profile import NodeFacts
from ringtune.schedule.placement import Placement

BASE_S: Final = 2.0
"""Seconds of a move whatever the slices: to rest, to build an empty model, to open links; assumed, not measured."""
READ_BYTES_PER_S: Final = 40e6
"""Base weights from the memory card of a board; assumed, not measured."""


def move_s(before: Placement, after: Placement, model: NodeFacts) -> float:
    """Seconds of a move: the fullest node that changes reads all blocks of its next slice; 0 if none changes.

    What was trained is thousand times less than that, and is left out.
    """
    changed = [piece for piece in after.hosts if _blocks(before, piece.node) != (piece.start, piece.stop)]
    if not changed and len(before.hosts) == len(after.hosts):
        return 0.0
    most = max((piece.num_blocks for piece in after.hosts), default=0)
    return BASE_S + most * model.model.block_bytes / READ_BYTES_PER_S


def _blocks(placement: Placement, node: str) -> tuple[int, int]:
    piece = placement.slice_of(node)
    return piece.start, piece.stop
