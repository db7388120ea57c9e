"""Run the blocks of one action, each range with its own policy, and hold what they keep for the way back."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from edge.compute.saving.block_forward import BlockForward, Saved
from edge.compute.saving.keep import keep
from edge.compute.saving.recompute import recompute
from ringtune.schedule.placement import Placement


@dataclass(slots=True)
class SavedBlocks:
    """What consecutive blocks of one micro-batch keep, in parts from the bottom up.

    Attributes:
        parts: a graph of some blocks, or one block that is run again.
        forward: that made them.
    """

    parts: list[Saved]
    forward: BlockForward

    def backward(self, grad: torch.Tensor) -> torch.Tensor | None:
        """Go back through all parts, from the top down; each is free before the next one is begun."""
        below: torch.Tensor | None = grad
        while self.parts and below is not None:
            below = self.parts.pop().backward(below)
        self.forward.drop_context()
        return below

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every tensor that is kept."""
        for part in self.parts:
            yield from part.tensors()


def run_saving(
    forward: BlockForward, hidden: torch.Tensor, start: int, stop: int, placement: Placement
) -> tuple[Saved, torch.Tensor]:
    """Run blocks ``[start, stop)``.

    Args:
        forward: runs them.
        hidden: enters block ``start``.
        start: first block.
        stop: first block that is not run.
        placement: says which blocks are run again in backward.

    Returns:
        What they keep, and what leaves the last of them.
    """
    parts: list[Saved] = []
    for first, last, is_recomputed in _ranges(start, stop, placement):
        part: Saved
        if is_recomputed:
            part, hidden = recompute(forward, hidden, first)
        else:
            part, hidden = keep(forward, hidden, first, last)
        parts.append(part)
    forward.drop_context()
    return (parts[0] if len(parts) == 1 else SavedBlocks(parts, forward)), hidden


def _ranges(start: int, stop: int, placement: Placement) -> Sequence[tuple[int, int, bool]]:
    """Cut a range of blocks where the policy changes; blocks that are run again stand alone."""
    found: list[tuple[int, int, bool]] = []
    for is_recomputed, group in itertools.groupby(range(start, stop), placement.is_recomputed):
        blocks = list(group)
        if is_recomputed:
            found += [(block, block + 1, True) for block in blocks]
        else:
            found.append((blocks[0], blocks[-1] + 1, False))
    return found
