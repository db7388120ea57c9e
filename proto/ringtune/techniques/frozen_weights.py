"""Frozen weights held small: refusals for ``runtime.frozen`` of a job, and the forms that a planner may choose."""

from __future__ import annotations

from typing import Protocol

from ringtune.config.sections import AUTO, Adapter, Model, Runtime, Train
from ringtune.errors import JobError
from ringtune.models.adapter_config import trains_own_weights
from ringtune.schedule.course import AS_COMPUTED, FROZEN_DTYPES, FrozenWeights
from ringtune.schedule.methods import method_class
from ringtune.schedule.operation_tables import Policy, Score
from ringtune.techniques.operations import OperationsSettings


class JobSections(Protocol):
    """The sections of a job that have to do with frozen weights."""

    @property
    def model(self) -> Model:
        """``[model]``."""

    @property
    def adapter(self) -> Adapter:
        """``[adapter]``."""

    @property
    def train(self) -> Train:
        """``[train]``."""

    @property
    def operations(self) -> OperationsSettings:
        """``[operations]``."""

    @property
    def runtime(self) -> Runtime:
        """``[runtime]``."""


def check_frozen(job: JobSections) -> None:
    """Refuse small frozen weights where the rest of a job can't go with them.

    Raises:
        JobError: names both keys, and the remedy.
    """
    problem = why_not_small(job)
    if problem and job.runtime.frozen in FROZEN_DTYPES:
        raise JobError(f"runtime.frozen = {job.runtime.frozen!r} {problem}")


def why_not_small(job: JobSections) -> str:
    """Say why the frozen weights of a job can't be held small, and the remedy; empty if they can."""
    if job.model.dtype != AS_COMPUTED:
        return f"rounds weights that model.dtype = {job.model.dtype!r} wants exact; remove one of them"
    if method_class(job.train.method).full_parameters:
        return f"has no meaning with train.method = {job.train.method!r}, where no weight is frozen; remove it"
    score = _score_by_gradient(job.operations)
    if score and not trains_own_weights(job.adapter.config):
        return (
            f"holds frozen weights without gradients, which operations need for the score {score!r}; remove it, or "
            f"choose operations by {Score.WEIGHT_MAGNITUDE.value!r} alone"
        )
    return ""


def frozen_choices(job: JobSections, *, is_native: bool) -> tuple[FrozenWeights | None, ...]:
    """The ways of holding frozen weights that a planner may take: the first for which a plan fits.

    Args:
        job: with its wish.
        is_native: whether every node multiplies bfloat16 fast.

    Returns:
        None for float32. Example: ``auto`` gives None, bfloat16, and int8 last.
    """
    wish = job.runtime.frozen
    if wish == AS_COMPUTED:
        return (None,)
    if wish != AUTO:
        return (FrozenWeights(dtype=wish, native=is_native),)
    if why_not_small(job):
        return (None,)
    return (None, *(FrozenWeights(dtype=dtype, native=is_native) for dtype in FROZEN_DTYPES))


def _score_by_gradient(operations: OperationsSettings) -> str:
    """The first score of frozen weights' gradients that operations may be chosen by; empty if there is none."""
    match operations.policy:
        case Policy.MAGNITUDE_GRADIENT:
            return Score.GRADIENT_MAGNITUDE.value
        case Policy.TWO_STAGE | Policy.JOINT:
            counts = operations.policy == Policy.JOINT or operations.full is None or operations.forward_only
            scores = (operations.backward_score, *([operations.forward_score] if counts else []))
            return next((score for score in scores if Score(score).needs_gradient), "")
    return ""
