"""Say when the optimizer state of a node's units is put away and when it is read ahead, by what the method trains.

::

    step       0          1          2          3       two groups; node a has units 0 and 1, each a group
    updates    unit 0     unit 1     unit 0     unit 1
    put away   after 0    after 1    ...                unless the next step trains the unit again
    read ahead      unit 1     unit 0     unit 1        while the step before computes
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from edge.model.optimizers.on_disk import OnDisk, require_room
from edge.model.optimizers.unit_optimizers import Dropped, UnitOptimizers
from ringtune.schedule.course import Course
from ringtune.schedule.turns.turns import Item
from ringtune.schedule.units import Units


class InactiveState:
    """Tells the optimizers of a node which units become inactive, and which are updated soon.

    Args:
        course: of the run.
        optimizers: of the node's blocks, and of an owner's embedding and head.
    """

    def __init__(self, course: Course, optimizers: Sequence[UnitOptimizers]) -> None:
        self._course = course
        self._optimizers = tuple(optimizers)
        self._is_moved = course.method.drops_state
        self._step = -1
        if course.method.drops_state:
            for each in self._optimizers:
                each.keep_in(Dropped())

    def keep_on_disk(self, folder: Path, of: Mapping[str, str]) -> None:
        """Keep the state of inactive units in files from now on; no unit may have state yet.

        The room is taken at once, so that two nodes on one disk can't both count on it.

        Args:
            folder: for the files.
            of: what they are of: run and node.

        Raises:
            StorageError: the folder can't be written, or its disk has less room than the state of all units takes.
        """
        require_room(folder, self._optimizers, of)
        self._is_moved = True
        for each in self._optimizers:
            keeper = OnDisk(folder, each.name, of)
            each.keep_in(keeper)
            keeper.reserve(each.units)

    def begin(self, item: Item) -> None:
        """Read ahead what the step of an item and the next one update; call it with each action."""
        if self._is_moved and item.kind.has_update and item.step != self._step:
            self._step = item.step
            for step in (item.step, item.step + 1):
                for each in self._optimizers:
                    each.prefetch(self._trained(step))

    def updated(self, step: int, units: Iterable[int]) -> None:
        """Put the state of units away that were updated at ``step`` and that the next step does not train."""
        if self._is_moved:
            goes_on = self._trained(step + 1)
            inactive = [unit for unit in units if unit not in goes_on]
            for each in self._optimizers:
                each.put_away(inactive)

    def close(self) -> None:
        """Remove what is on the disk."""
        if self._is_moved:
            for each in self._optimizers:
                each.close()

    def _trained(self, step: int) -> Units:
        return self._course.method.trained(self._course, step)
