"""Interface of a technique to the executor of a node: its own actions, hooks around turns, and figures.

A technique is one module or folder here, and ``edge.techniques`` lists its constructor. A technique that the placement
does not use is not built, and has no handler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from edge.techniques.micro_batches import MicroBatches, OpenItem
from ringtune.schedule.actions import Action, Op
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StartPoint, Turn

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
