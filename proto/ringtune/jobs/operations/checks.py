"""What `[operations]` of a job has to agree with: its own policy, micro-batches, private blocks, adapter, dropout."""

from __future__ import annotations

from typing import Final

from ringtune.errors import JobError
from ringtune.jobs.operations.settings import OperationsSettings
from ringtune.jobs.sections import Adapter, Privacy, Train
from ringtune.models.adapters.head_group_support import refusal

_OF_A_CHOICE: Final = ("compute", "full", "by_slice", "balance", "refresh_rounds")


def check_operations(operations: OperationsSettings, *, adapter: Adapter, train: Train, privacy: Privacy) -> None:
    """Refuse operations that the rest of a job does not go with.

    Raises:
        JobError: names both keys, and the remedy.
    """
    if operations.table:
        _check_table_alone(operations)
    elif operations.is_chosen:
        _check_budget(operations, train.microbatches)
    elif wanting := [name for name in operations.changed() if name in _OF_A_CHOICE]:
        value = getattr(operations, wanting[0])
        raise JobError(
            f"operations.{wanting[0]} = {str(value).lower()} has no meaning with operations.policy = "
            f"'{operations.policy}', where everything is full; set operations.policy = 'two-stage', or remove it"
        )
    if operations.is_any and privacy.private_blocks:
        raise JobError(
            f"privacy.private_blocks = {privacy.private_blocks} and [operations] can't go together: an owner that runs "
            "blocks itself would have no part in the tables; remove one of them"
        )
    heads = 0 if operations.by_slice or not operations.is_chosen else operations.heads
    if problem := refusal(adapter.config, dropout=train.dropout, heads=heads):
        raise JobError(problem)


def _check_table_alone(operations: OperationsSettings) -> None:
    others = [name for name in operations.changed() if name != "table"]
    if others:
        raise JobError(
            f"operations.table has the operations of an earlier run, operations.{others[0]} would choose others; "
            "remove one of them"
        )


def _check_budget(operations: OperationsSettings, microbatches: int) -> None:
    if operations.compute is None and operations.full is None:
        raise JobError(
            f"operations.policy = '{operations.policy}' needs operations.compute or operations.full, which say how "
            "much is done; add compute = 0.6"
        )
    both = "operations.full" if not operations.forward_only else "operations.full + operations.forward_only"
    done = (operations.full or 0) + (operations.forward_only or 0)
    if done > microbatches:
        raise JobError(
            f"{both} is {done}, a batch has train.microbatches = {microbatches}; lower it or raise train.microbatches"
        )
