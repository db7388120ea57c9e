"""Keep the whole graph of consecutive blocks until its backward: what autograd does by itself."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from edge.compute.saving.block_forward import BlockForward
from edge.model.activations import saved_tensors


class Kept:
    """The graph of some blocks, or of the embedding, of one micro-batch.

    Args:
        x: leaf that enters the lowest of them; None of the embedding.
        y: leaves the highest.
    """

    def __init__(self, x: torch.Tensor | None, y: torch.Tensor) -> None:
        self._x, self._y = x, y

    def backward(self, grad: torch.Tensor) -> torch.Tensor | None:
        """See ``Saved.backward``."""
        if self._y.requires_grad:
            torch.autograd.backward([self._y], [grad])
        return None if self._x is None else self._x.grad

    def tensors(self) -> Iterator[torch.Tensor]:
        """See ``Saved.tensors``."""
        if self._x is not None:
            yield self._x
        yield from (self._y, *saved_tensors(self._y))


def keep(forward: BlockForward, hidden: torch.Tensor, start: int, stop: int) -> tuple[Kept, torch.Tensor]:
    """Run blocks ``[start, stop)``; return their graph, and what leaves them, cut off from it."""
    x = forward.leaf(hidden, start)
    with forward.watched(start, stop):
        y = forward.run(x, start, stop)
    return Kept(x, y), y.detach()
