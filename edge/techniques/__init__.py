"""Techniques of training on a node, a module or folder each, and their interface to the executor.

A technique that the placement does not use is not built, and has no handler.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Protocol

from edge.techniques.activation_cache import ActivationCache
from edge.techniques.micro_batches import Handler, MicroBatches
from ringtune.schedule.actions import Op
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StartPoint, Turn


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

TECHNIQUES: Final[dict[str, Build]] = {"activation_cache": ActivationCache.of}
"""Constructor of each technique, by its name in ``ringtune.techniques``."""


def build_techniques(plan: Plan, node: str, flows: MicroBatches) -> dict[str, NodeTechnique]:
    """Build the techniques of a placement, by name."""
    built = {name: build(plan, node, flows) for name, build in TECHNIQUES.items()}
    return {name: technique for name, technique in built.items() if technique is not None}
