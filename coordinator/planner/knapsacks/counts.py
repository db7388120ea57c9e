"""How many micro-batches of a batch a subnet is full for, and for how many it does the forward only."""

from __future__ import annotations

from typing import NamedTuple

from ringtune.errors import JobError
from ringtune.jobs.operations.settings import OperationsSettings
from ringtune.schedule.operations.choice import Policy
from ringtune.schedule.spreading.choosers import whole


class Counts(NamedTuple):
    """Operations of one subnet for the micro-batches of one batch; the others pass it by."""

    full: int
    forward_only: int


def counts_of(settings: OperationsSettings, microbatches: int, each: tuple[float, float]) -> Counts:
    """The counts of a job: its own, or as many whole full operations as fit ``compute``, and forward-only ones.

    Args:
        settings: ``[operations]`` of the job.
        microbatches: of a batch.
        each: cost of a forward and of a backward.

    Raises:
        JobError: the job says nothing of how much is done.
    """
    if settings.policy == "standard":
        return Counts(microbatches, 0)
    if settings.full is not None:
        return Counts(settings.full, settings.forward_only or 0)
    if settings.compute is None:
        raise JobError(
            f"operations.policy = {settings.policy!r} needs to know how much is done; add operations.compute, such as "
            "0.6, or operations.full"
        )
    forward, both = each[0], each[0] + each[1]
    budget = settings.compute * microbatches * both
    full = min(microbatches, whole(budget, both))
    return Counts(full, min(microbatches - full, whole(budget - full * both, forward)))


def check_counts(settings: OperationsSettings, counts: Counts, microbatches: int) -> None:
    """Refuse counts that do not fit the micro-batches, and such under which nothing is ever full.

    Raises:
        JobError: with both numbers and the key to change.
    """
    if sum(counts) > microbatches:
        raise JobError(
            f"operations.full = {counts.full} and operations.forward_only = {counts.forward_only} are more than the "
            f"{microbatches} micro-batches of a batch; lower them, or raise train.microbatches"
        )
    if counts.full or Policy(settings.policy).is_pruning:  # a share of all subnets need not be a whole micro-batch
        return
    if settings.compute is not None:
        raise JobError(
            f"operations.compute = {settings.compute} of {microbatches} micro-batches leaves nothing full, so nothing "
            f"would train; raise it to {1 / microbatches:.2g} at least, or raise train.microbatches"
        )
    raise JobError("operations.full is 0, so nothing would train; set it to 1 at least")
