"""A technique on a node, as its executor sees it: actions of its own, what it does around turns, and figures.

A technique is one module or folder here. ``edge.techniques`` lists how each is built; what a placement does not use is
not built, and has no handler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch

from ringtune.schedule.actions import Action, Op, TensorKey
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Item, StartPoint, Turn


class MicroBatch(Protocol):
    """The tensors of a micro-batch that enter a block (B rows, T tokens, D model width)."""

    @property
    def hidden(self) -> torch.Tensor | None:
        """(B, T, D), not part of a graph."""

    @property
    def mask(self) -> torch.Tensor | None:
        """(B, T)."""


class MicroBatches(Protocol):
    """The micro-batches that are under way at a node."""

    def of(self, action: Action) -> MicroBatch:
        """The micro-batch of an action."""

    def put(self, key: TensorKey, tensor: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Give a micro-batch a tensor as if it had arrived."""


class OpenItem(Protocol):
    """An item of a granted turn."""

    @property
    def item(self) -> Item:
        """The item."""


Handler = Callable[[Action, OpenItem], tuple[tuple[str, float], ...]]
"""Carries an action out; returns numbers for the report, to be summed by name."""


class NodeTechnique(Protocol):
    """What a technique does at one node in one placement of a run."""

    @property
    def handlers(self) -> Mapping[Op, Handler]:
        """For its own actions."""

    @property
    def figures(self) -> Mapping[str, int]:
        """Its totals, by the names of ``ringtune.techniques.base.Technique.totals``."""

    def open(self, folder: Path | None, start: StartPoint | None = None, *, problem: str = "") -> None:
        """Begin, before the first turn.

        Args:
            folder: for files that are deleted when the run ends; None = there is none.
            start: where the run continues; None = it begins.
            problem: why there is no folder.
        """

    def grant(self, turn: Turn) -> None:
        """Note a granted turn."""

    def end_turn(self, index: int) -> str:
        """Note that a turn is done here; return why the technique can't do its part any more, once."""


Build = Callable[[Plan, str, MicroBatches], NodeTechnique | None]
"""(plan in one placement, node, micro-batches) -> the technique; None where the placement does not use it."""
