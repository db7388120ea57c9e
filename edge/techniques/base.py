"""Interface of a technique to the executor of a node: its own actions, hooks around turns, and figures.

A technique is one module or folder here, and ``edge.techniques`` lists its constructor. A technique that the placement
does not use is not built, and has no handler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

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

    @property
    def pairs(self) -> dict[int, Any]:
        """Block -> pairs recorded for its helper."""


class MicroBatches(Protocol):
    """The open micro-batches of a node."""

    def of(self, action: Action) -> MicroBatch:
        """The micro-batch of an action."""

    def drop_if_empty(self, action: Action) -> None:
        """Drop the micro-batch of an action if nothing of it is held any more."""

    def put(self, key: TensorKey, tensor: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Set a tensor of a micro-batch as if it had arrived."""


class OpenItem(Protocol):
    """An item of a granted turn."""

    @property
    def item(self) -> Item:
        """The item."""


Handler = Callable[[Action, OpenItem], tuple[tuple[str, float], ...]]
"""Runs an action; returns numbers for the report, summed by name."""


class NodeTechnique(Protocol):
    """A technique at one node in one placement of a run."""

    @property
    def handlers(self) -> Mapping[Op, Handler]:
        """Handlers of its own actions."""

    @property
    def figures(self) -> Mapping[str, int]:
        """Totals, by the names of ``ringtune.techniques.base.Technique.totals``."""

    def open(self, folder: Path | None, start: StartPoint | None = None, *, problem: str = "") -> None:
        """Start before the first turn.

        Args:
            folder: for files that are deleted at the run's end; None = there is none.
            start: the item from which the run continues; None = the first.
            problem: reason for a missing folder.
        """

    def grant(self, turn: Turn) -> None:
        """Note a granted turn."""

    def end_turn(self, index: int) -> str:
        """End a turn; return, once, the reason for which the technique can't continue."""


Build = Callable[[Plan, str, MicroBatches], NodeTechnique | None]
"""(plan in one placement, node, micro-batches) -> the technique; None where the placement does not use it."""
