"""Keep the input of a block only, and run the block again when its backward is due.

The graph of the forward is dropped as soon as the block is through, so that no more than one block's graph is there at
a time, in the forward as in the backward. The forward makes a graph all the same: then both runs are one computation,
and their results the same bits. Only dropout's masks are not drawn again (``dropout_masks``).

Source: Chen et al., Training deep nets with sublinear memory cost (2016).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from edge.compute.saving.block_forward import BlockForward
from edge.compute.saving.dropout_masks import DropoutMasks
from edge.compute.saving.keep import Kept


class Recomputed:
    """One block of one micro-batch, to be run again.

    Args:
        forward: runs it.
        hidden: enters it.
        block: which one.
        masks: of its dropout; None without.
    """

    def __init__(self, forward: BlockForward, hidden: torch.Tensor, block: int, masks: DropoutMasks | None) -> None:
        self._forward, self._hidden, self._block, self._masks = forward, hidden, block, masks

    def backward(self, grad: torch.Tensor) -> torch.Tensor | None:
        """Run the block again, and back; see ``Saved.backward``."""
        x = self._forward.leaf(self._hidden, self._block)
        with contextlib.nullcontext() if self._masks is None else self._masks.given():
            y = self._forward.run_again(x, self._block)
        self._masks = None  # their room is free for the backward
        return Kept(x, y).backward(grad)

    def tensors(self) -> Iterator[torch.Tensor]:
        """See ``Saved.tensors``; VeLoRA's vectors that no layer holds any more are among them."""
        yield from (self._hidden, self._forward.mask, *self._forward.vectors.values())
        if self._masks is not None:
            yield from self._masks.packed


def recompute(forward: BlockForward, hidden: torch.Tensor, block: int) -> tuple[Recomputed, torch.Tensor]:
    """Run a block; return what runs it again, and what leaves it."""
    masks = DropoutMasks() if forward.has_dropout else None
    with contextlib.nullcontext() if masks is None else masks.drawn():
        y = forward.run(forward.leaf(hidden, block), block, block + 1)
    return Recomputed(forward, hidden, block, masks), y.detach()
