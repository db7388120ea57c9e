"""What a micro-batch keeps whose rows go through adapters of several users: a part for the rows of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from edge.compute.saving.block_forward import Saved


class OfUser(NamedTuple):
    """What the rows of one user keep.

    Attributes:
        rows: positions in the micro-batch.
        saved: of their forward.
    """

    rows: torch.Tensor
    saved: Saved


class SplitRows:
    """What blocks of one micro-batch keep for their backward, by user.

    Args:
        parts: of all users; every row is in one of them.
    """

    def __init__(self, parts: Sequence[OfUser]) -> None:
        self._parts = list(parts)

    def backward(self, grad: torch.Tensor) -> torch.Tensor | None:
        """Go back through the parts, one after the other; see ``Saved.backward``."""
        found: torch.Tensor | None = None
        while self._parts:
            rows, saved = self._parts.pop(0)
            below = saved.backward(grad[rows])
            if below is not None:
                found = below.new_empty((len(grad), *below.shape[1:])) if found is None else found
                found[rows] = below
        return found

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every tensor that is kept."""
        for part in self._parts:
            yield from part.saved.tensors()
