"""Refuses replicas for courses whose result they would change, or for which nobody has built them."""

from __future__ import annotations

from ringtune.errors import PlanError
from ringtune.schedule.course import Course
from ringtune.schedule.placement import Placement
from ringtune.schedule.stages.dealing import check_shares
from ringtune.schedule.turns.versions import may_be_stale


def check_replicas(course: Course, placement: Placement) -> None:
    """Refuse several hosts for the same blocks where a course can't have them; see ``no_replicas``.

    Raises:
        PlanError: names the hosts, the reason, and what can be done; or shares that are too large.
    """
    if not placement.has_replicas:
        return
    check_shares(placement)
    reason = no_replicas(course) or ("helpers fit adapters of one host" if placement.helpers else "")
    if reason:
        stage = next(stage for stage in placement.stages if len(stage) > 1)
        names = ", ".join(piece.node for piece in stage)
        raise PlanError(f"nodes {names} host the same blocks {stage[0].text}, but {reason}; give each other blocks")


def no_replicas(course: Course) -> str:
    """Why no stage may have several hosts in such a run; empty if it may."""
    name = course.method.name
    if course.method.full_parameters:
        return f"{name} trains all parameters, whose gradients are as large as the model"
    if may_be_stale(course):
        return f"{name} keeps several versions of weights, which replicas would not have alike"
    if course.offload is not None:
        return "helpers fit adapters of one host"
    if course.choice is not None:
        return "the run chooses operations by scores, which each host would have of its micro-batches only"
    if course.velora is not None:
        return "velora projects on vectors of the first micro-batch, which replicas would not have alike"
    return ""
