"""How many updates the units at a node have had: an item runs only with the weights of its step."""

from __future__ import annotations

from collections.abc import Mapping

from ringtune.engine.flows import Place
from ringtune.schedule.actions import Action
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.versions import weight_version
from ringtune.schedule.units import EMBEDDING


class UnitVersions:
    """Updates that the blocks of one node and its copy of the embedding have had.

    Args:
        plan: of the run.
        node: which node.

    Attributes:
        embedding: those of the embedding.
    """

    __slots__ = ("_blocks", "_head", "_piece", "embedding")

    def __init__(self, plan: Plan, node: str) -> None:
        self._piece, self._head = plan.slice_of(node), plan.course.head
        self._blocks: dict[int, int] = {}
        self.embedding = 0

    def begin(self, plan: Plan, step: int) -> None:
        """Take the versions that a run has at ``step``."""
        units = range(self._piece.start, self._piece.stop)
        self._blocks = {unit: weight_version(plan.course, unit, step) for unit in units}
        self.embedding = weight_version(plan.course, EMBEDDING, step)

    def updated(self, update: Action) -> None:
        """Count an update; nobody waits for versions of the head."""
        if update.start == EMBEDDING:
            self.embedding += 1
        elif update.start != self._head:
            for unit in range(update.start, update.stop):
                self._blocks[unit] += 1

    def are(self, wanted: Mapping[int, int], place: Place) -> bool:
        """Whether each unit of the action has had the wanted updates."""
        blocks = self._blocks
        if blocks == wanted:  # all that is hosted here, which is the usual case
            return True
        return all(wanted.get(unit) == blocks.get(unit) for unit in range(place.start, place.stop))
