"""Consecutive blocks by themselves, forward and back under a policy: what they keep, for measurements.

The forward is that of a node, with the same policies. Nothing is updated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from edge.model.skeleton import Skeleton
from edge.model.slice import BlockRunner
from edge.techniques.activation_checkpointing import BlockForward, SavedActivations, run_saving, storage_bytes
from edge.techniques.velora import Projections
from ringtune.schedule.placement import Placement
from ringtune.schedule.saved_activations import Velora
from ringtune.schedule.units import Range, Units


class Stack:
    """All blocks of a skeleton, of which every one is real and trains."""

    def __init__(
        self, skeleton: Skeleton, *, dropout: float, velora: Velora | None = None, recompute: Sequence[Range] = ()
    ) -> None:
        self.num_blocks = len(skeleton.blocks)
        self._skeleton, self._runner = skeleton, BlockRunner(skeleton, dropout=dropout, seed=0)
        self._placement = Placement(slices=(), private_blocks=self.num_blocks, recompute=tuple(recompute))
        self._projections = None
        if velora is not None:
            self._projections = Projections(velora, skeleton, start=0, stop=self.num_blocks, seed=0)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> tuple[SavedActivations, torch.Tensor]:
        """Run all blocks for one micro-batch; a gradient of its input is asked for."""
        with torch.no_grad():
            context = self._runner.context(hidden, mask)
        forward = BlockForward(
            blocks=self._runner,
            mask=mask,
            context=context,
            trained=Units.of(self.num_blocks, range(self.num_blocks)),
            lowest=-1,
            train_at=(0, 0),
            patterns={},
            watched=lambda start, stop: contextlib.nullcontext(),
            version=contextlib.nullcontext,
            projections=self._projections,
        )
        return run_saving(forward, hidden, 0, self.num_blocks, self._placement)

    def saved_bytes(self, hidden: torch.Tensor, mask: torch.Tensor) -> float:
        """Bytes that a block keeps for its backward for each token, padding included; the mean over all blocks.

        What the blocks share, such as the attention mask, is divided among them.
        """
        saved, _ = self.forward(hidden, mask)
        weights = storage_bytes([*self._skeleton.model.parameters(), *self._skeleton.model.buffers()])
        found = storage_bytes(saved.tensors())
        kept = sum(size for address, size in found.items() if address not in weights)
        return kept / (mask.numel() * self.num_blocks)
