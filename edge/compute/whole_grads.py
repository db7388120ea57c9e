"""Make the gradients of an update whole, and refuse those that are not finite: nothing of a bad step is applied."""

from __future__ import annotations

from edge.compute.hosting import Hosted
from edge.compute.micro_batches import OpenItem
from edge.compute.replica import Replica
from edge.model.finite import require_finite_grads
from ringtune.engine.diverged import diverged, may_diverge
from ringtune.errors import DivergedError, PlanError
from ringtune.schedule.actions import Action
from ringtune.schedule.course import Course
from ringtune.schedule.units import EMBEDDING, unit_name


def make_whole(action: Action, entry: OpenItem, course: Course, hosted: Hosted, replica: Replica) -> None:
    """Bring the gradients of an update together, and look whether they are finite.

    Args:
        action: the update.
        entry: its item.
        course: of the run.
        hosted: what this node hosts.
        replica: has the gradients of other hosts of these blocks.

    Raises:
        DivergedError: they are not finite; names step, unit and rows.
        PlanError: the node has no embedding and head to update.
    """
    if action.start in (EMBEDDING, course.head):
        if hosted.owner is None:
            raise PlanError(f"{action} needs an owner, which this node is not")
        hosted.owner.complete(action.start)
        units = {action.start: hosted.owner.units[action.start]}
    else:
        replica.add_up(action)
        units = {unit: dict(hosted.optimizers.units.get(unit, {})) for unit in range(action.start, action.stop)}
    if not may_diverge(entry.item):
        return
    try:
        for unit, parameters in units.items():
            name = unit_name(unit, course.head)
            require_finite_grads(parameters, f"the {name}" if unit in (EMBEDDING, course.head) else name)
    except DivergedError as error:
        raise diverged(entry.item, str(error), course=course) from error
