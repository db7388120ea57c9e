"""Keep the input of a block only, and run the block again when its backward is due.

The graph of the forward is dropped as soon as the block is through, so that no more than one block's graph is there at
a time, in the forward as in the backward. The forward makes a graph all the same: then both runs are one computation,
and their results the same bits.

Source: Chen et al., Training deep nets with sublinear memory cost (2016).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from edge.compute.saving.block_forward import BlockForward
from edge.compute.saving.keep import Kept


class Recomputed:
    """One block of one micro-batch, to be run again.

    Args:
        forward: runs it.
        hidden: enters it.
        block: which one.
    """

    def __init__(self, forward: BlockForward, hidden: torch.Tensor, block: int) -> None:
        self._forward, self._hidden, self._block = forward, hidden, block

    def backward(self, grad: torch.Tensor) -> torch.Tensor | None:
        """Run the block again, and back; see ``Saved.backward``."""
        x = self._forward.leaf(self._hidden, self._block)
        return Kept(x, self._forward.run_again(x, self._block)).backward(grad)

    def tensors(self) -> Iterator[torch.Tensor]:
        """See ``Saved.tensors``; VeLoRA's vectors that no layer holds any more are among them."""
        yield from (self._hidden, self._forward.mask, *self._forward.vectors.values())


def recompute(forward: BlockForward, hidden: torch.Tensor, block: int) -> tuple[Recomputed, torch.Tensor]:
    """Run a block; return what runs it again, and what leaves it."""
    y = forward.run(forward.leaf(hidden, block), block, block + 1)
    return Recomputed(forward, hidden, block), y.detach()
