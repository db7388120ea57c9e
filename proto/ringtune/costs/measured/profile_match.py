"""Whether a profile was measured for a course: its model, its width, and the shape of its timings."""

from __future__ import annotations

from ringtune.costs.profile import Profile, TimedShape
from ringtune.errors import PlanError
from ringtune.schedule.course import Course
from ringtune.schedule.frozen_weights import name_of


def check_profile(profile: Profile, course: Course, *, model_digest: str = "", shape: TimedShape | None = None) -> None:
    """Refuse a profile that was measured for something else.

    Args:
        profile: measured.
        course: to be timed with it; it says how frozen weights are held.
        model_digest: of the job's model; empty = whatever the profile has, as long as it is one.
        shape: of the job; the rows of a micro-batch may differ, times are scaled.

    Raises:
        PlanError: another model, another number of blocks or width, or another shape; names node and values.
    """
    digest = model_digest or (profile.nodes[0].model.digest if profile.nodes else "")
    for node in profile.nodes:
        model = node.model
        if model.digest != digest:
            raise PlanError(
                f"node {node.node} was profiled with another model ({model.digest[:12]}, not {digest[:12]})"
            )
        if (model.num_blocks, model.hidden_size) != (course.num_blocks, course.hidden_size):
            raise PlanError(
                f"the profile is of a model with {model.num_blocks} blocks of width {model.hidden_size}, the run has "
                f"{course.num_blocks} of {course.hidden_size}"
            )
        if shape is not None and node.shape.is_measured:
            if node.shape.frozen != name_of(course.frozen):
                raise PlanError(
                    f"node {node.node} was profiled with frozen weights in {node.shape.frozen}, the run has them in "
                    f"{name_of(course.frozen)} (runtime.frozen); measure anew with 'ringtune measure'"
                )
            for name in ("tokens", "task", "adapter", "dtype", "wire_dtype", "optimizer", "dropout"):
                found, wanted = getattr(node.shape, name), getattr(shape, name)
                if found != wanted:
                    raise PlanError(
                        f"node {node.node} was profiled with {name} {found}, the job has {wanted}; "
                        "measure anew with 'ringtune measure'"
                    )
