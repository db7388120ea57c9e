"""The forwards of one node that keep something, by the policies of course and placement."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from edge.compute.hosting import Hosted
from edge.compute.micro_batches import OpenItem
from edge.compute.saving.block_forward import BlockForward, Saved
from edge.compute.saving.saved_blocks import run_saving
from edge.compute.saving.vectors import Vectors
from edge.compute.saving.velora import Projections
from edge.compute.scoring import Scoring
from edge.model.versions import VersionStore
from ringtune.schedule.actions import Action
from ringtune.schedule.plan import Plan


class Forwards:
    """Runs the forwards of one node that keep something for their backward.

    VeLoRA is for items that update weights. Scores are gathered with whole inputs, so that they are exact; blocks that
    are run again where weights are updated are run again there too.

    Args:
        plan: of the run.
        node: which node of it.
        hosted: what it hosts.
        versions: of its trained tensors.
        scoring: what watches its blocks for scores.

    Raises:
        JobError: VeLoRA is for layers that do not train here.
    """

    def __init__(self, plan: Plan, node: str, hosted: Hosted, versions: VersionStore, scoring: Scoring) -> None:
        self._placement, self._hosted = plan.placement, hosted
        self._versions, self._scoring = versions, scoring
        piece, velora, seed = plan.slice_of(node), plan.course.velora, plan.course.seed
        self._projections: Projections | None = None
        if velora is not None:
            self._projections = Projections(velora, hosted.skeleton, start=piece.start, stop=piece.stop, seed=seed)

    @property
    def vectors(self) -> Vectors | None:
        """VeLoRA's vectors, which a checkpoint needs; None without VeLoRA."""
        return None if self._projections is None else self._projections.vectors

    def run(
        self, action: Action, entry: OpenItem, hidden: torch.Tensor, mask: torch.Tensor, context: Any
    ) -> tuple[Saved, torch.Tensor]:
        """Run the blocks of an F action.

        Args:
            action: the forward.
            entry: its item.
            hidden: (batch rows, tokens, model width), enters its first block.
            mask: (batch rows, tokens).
            context: what the blocks need besides.

        Returns:
            What they keep, and what leaves the last of them.
        """
        item, blocks = entry.item, self._hosted.blocks
        blocks.train_only(action.start, action.stop, entry.trained)
        forward = BlockForward(
            blocks=blocks,
            mask=mask,
            context=context,
            trained=entry.trained,
            lowest=entry.lowest[action.micro],
            train_at=entry.dropout_at(action),
            patterns=entry.patterns(action),
            watched=functools.partial(self._watched, action, entry),
            version=functools.partial(self._versions.at, item.seq),
            projections=self._projections if item.kind.has_update else None,
        )
        return run_saving(forward, hidden, action.start, action.stop, self._placement)

    def _watched(
        self, action: Action, entry: OpenItem, start: int, stop: int
    ) -> contextlib.AbstractContextManager[None]:
        return self._scoring.watched(entry.item, action._replace(start=start, stop=stop), entry.trained)
