"""The forwards of one node: what they keep, by the policies of course and placement, and whose adapters they see."""

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
from edge.compute.users.by_user import ByUser
from edge.model.slice import BlockRunner
from edge.model.versions import VersionStore
from ringtune.schedule.actions import Action
from ringtune.schedule.plan import Plan
from ringtune.schedule.whose_rows.users import rows_of_users


class Forwards:
    """Runs the forwards of one node, those that keep something for their backward, and those that do not.

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
        self._placement, self._hosted, self._course = plan.placement, hosted, plan.course
        self._versions, self._scoring = versions, scoring
        self._by_user: ByUser | None = None
        if hosted.sets is not None and hosted.captures is not None:
            runners = {user: one.blocks for one in hosted.kinds for user in one.kind.users}
            self._by_user = ByUser(hosted.sets, hosted.captures, runners)
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
        blocks = self._hosted.blocks
        for kind in self._hosted.kinds:
            kind.blocks.train_only(action.start, action.stop, entry.trained)
        forward = BlockForward(
            blocks=blocks,
            mask=mask,
            context=context,
            trained=entry.trained,
            lowest=entry.lowest[action.micro],
            train_at=entry.dropout_at(action),
            patterns=entry.patterns(action),
            watched=functools.partial(self._watched, action, entry),
            version=functools.partial(self._versions.at, entry.item.seq),
            projections=self._projections if entry.item.kind.has_update else None,
        )
        run = functools.partial(self._run_saving, action)
        if self._by_user is None:
            return run(forward, hidden)
        rows = rows_of_users(self._course, entry.item, action.micro)
        return self._by_user.saving(rows, run, forward, hidden)

    def run_free(
        self, action: Action, entry: OpenItem, hidden: torch.Tensor, mask: torch.Tensor, context: Any
    ) -> torch.Tensor:
        """Run the blocks of an f action, which keeps nothing; see ``run`` for arguments."""
        blocks, patterns = self._hosted.blocks, entry.patterns(action)

        def run(blocks: BlockRunner, hidden: torch.Tensor, mask: torch.Tensor, context: Any) -> torch.Tensor:
            return blocks.run(hidden, mask, context, action.start, action.stop, patterns=patterns)

        with torch.no_grad():
            if self._by_user is None:
                return run(blocks, hidden, mask, context)
            rows = rows_of_users(self._course, entry.item, action.micro)
            return self._by_user.free(rows, run, blocks.context, hidden, mask, context)

    def _run_saving(self, action: Action, forward: BlockForward, hidden: torch.Tensor) -> tuple[Saved, torch.Tensor]:
        return run_saving(forward, hidden, action.start, action.stop, self._placement)

    def _watched(
        self, action: Action, entry: OpenItem, start: int, stop: int
    ) -> contextlib.AbstractContextManager[None]:
        return self._scoring.watched(entry.item, action._replace(start=start, stop=stop), entry.trained)
