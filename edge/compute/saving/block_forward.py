"""How a forward that keeps something runs its blocks: as often as it has to, each time with the same numbers.

A forward is everything that its result depends on besides the hidden state: step, patterns of operations, the version
of the weights, and VeLoRA's vectors. Dropout is seeded by step, micro-batch and block. So a
block that is run again gives the bits that it gave the first time.

B batch rows, T tokens, D model width.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from edge.compute.saving.velora import Projections, Used
from edge.model.slice import BlockRunner
from ringtune.schedule.units import Units


class Saved(Protocol):
    """What blocks of one micro-batch keep from their forward to their backward."""

    def backward(self, grad: torch.Tensor) -> torch.Tensor | None:
        """Add to the gradients of the weights; return that of the input, None where nothing below needs it.

        It is called once; what is kept is free afterwards.

        Args:
            grad: of the output, (B, T, D).
        """

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every tensor that is kept."""


@dataclass(kw_only=True, slots=True)
class BlockForward:
    """A forward of one micro-batch through blocks of this node.

    Attributes:
        blocks: runs them.
        mask: (B, T), 1 = token.
        context: what the blocks need besides the hidden state.
        trained: the units whose weights get a gradient.
        lowest: the lowest unit that gets one.
        train_at: (step, micro-batch) that dropout is drawn at; None = without.
        patterns: block -> what its subnets do.
        watched: what is open around blocks ``[start, stop)`` while the graph is made that the backward uses.
        version: what is open around a second run, so that it finds the weights of the first one.
        projections: VeLoRA's layers; None where inputs are kept whole.
        vectors: VeLoRA's vectors of this micro-batch, once a run has used them.
    """

    blocks: BlockRunner
    mask: torch.Tensor
    context: Any
    trained: Units
    lowest: int
    train_at: tuple[int, int] | None
    patterns: Mapping[int, str]
    watched: Callable[[int, int], AbstractContextManager[None]]
    version: Callable[[], AbstractContextManager[None]]
    projections: Projections | None = None
    vectors: Used = field(default_factory=dict)
    _has_context: bool = True

    @property
    def has_dropout(self) -> bool:
        """Whether a run draws what it drops."""
        return self.train_at is not None and self.blocks.dropout > 0

    def leaf(self, hidden_BTD: torch.Tensor, block: int) -> torch.Tensor:
        """Cut what enters a block off from all before; it gets a gradient if something below needs one."""
        return hidden_BTD.detach().requires_grad_(block > self.lowest)

    def run(self, x_BTD: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Run blocks ``[start, stop)`` with a graph."""
        if not self._has_context:
            with torch.no_grad():
                self.context, self._has_context = self.blocks.context(x_BTD, self.mask), True
        with torch.enable_grad():
            return self.blocks.run(
                x_BTD,
                self.mask,
                self.context,
                start,
                stop,
                train_at=self.train_at,
                patterns=self.patterns,
                around=self._around,
            )

    def run_again(self, x_BTD: torch.Tensor, block: int) -> torch.Tensor:
        """Run one block as the first time, now for its backward."""
        with self.version():
            self.blocks.train_only(block, block + 1, self.trained)
            with self.watched(block, block + 1):
                return self.run(x_BTD, block, block + 1)

    def of_rows(self, rows_R: torch.Tensor, version: Callable[[], AbstractContextManager[None]]) -> BlockForward:
        """Return the forward of some rows of the micro-batch, with what is open around their second run."""
        mask = self.mask[rows_R]
        return dataclasses.replace(self, mask=mask, context=None, version=version, vectors={}, _has_context=False)

    def drop_context(self) -> None:
        """Forget the context until blocks are run again, which make it anew."""
        self.context, self._has_context = None, False

    def _around(self, block: int) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self.projections is None else self.projections.block(block, self.vectors)
