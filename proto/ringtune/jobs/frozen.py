"""What ``runtime.frozen`` of a job has to agree with, and which ways of holding frozen weights a planner may choose."""

from __future__ import annotations

from ringtune.errors import JobError
from ringtune.jobs.operations import OperationsSettings
from ringtune.jobs.sections import AUTO, Adapter, Model, Runtime
from ringtune.models.adapter_config import trains_own_weights
from ringtune.schedule.frozen_weights import AS_COMPUTED, FROZEN_DTYPES, FrozenWeights
from ringtune.schedule.operations.choice import Policy, Score


def check_frozen(runtime: Runtime, *, model: Model, adapter: Adapter, operations: OperationsSettings) -> None:
    """Refuse small frozen weights where the rest of a job can't go with them.

    Raises:
        JobError: names both keys, and the remedy.
    """
    problem = why_not_small(model=model, adapter=adapter, operations=operations)
    if problem and runtime.frozen in FROZEN_DTYPES:
        raise JobError(f"runtime.frozen = {runtime.frozen!r} {problem}")


def why_not_small(*, model: Model, adapter: Adapter, operations: OperationsSettings) -> str:
    """Say why the frozen weights of a job can't be held small, and the remedy; empty if they can."""
    if model.dtype != AS_COMPUTED:
        return f"rounds weights that model.dtype = {model.dtype!r} wants exact; remove one of them"
    score = _score_by_gradient(operations)
    if score and not trains_own_weights(adapter.config):
        return (
            f"holds frozen weights without gradients, which operations need for the score {score!r}; remove it, or "
            f"choose operations by {Score.WEIGHT_MAGNITUDE.value!r} alone"
        )
    return ""


def frozen_choices(
    runtime: Runtime, *, model: Model, adapter: Adapter, operations: OperationsSettings, is_native: bool
) -> tuple[FrozenWeights | None, ...]:
    """The ways of holding frozen weights that a planner may take: the first for which a plan fits.

    Args:
        runtime: of the job, with its wish.
        model: of the job.
        adapter: of the job.
        operations: of the job.
        is_native: whether every node multiplies bfloat16 fast.

    Returns:
        None for float32. Example: ``auto`` gives None, bfloat16, and int8 last.
    """
    if runtime.frozen == AS_COMPUTED:
        return (None,)
    if runtime.frozen != AUTO:
        return (FrozenWeights(dtype=runtime.frozen, native=is_native),)
    if why_not_small(model=model, adapter=adapter, operations=operations):
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
