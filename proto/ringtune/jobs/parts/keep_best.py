"""``train.keep_best``: what can't go together with it."""

from __future__ import annotations

from ringtune.errors import JobError
from ringtune.jobs.parts.offload import OFF, OffloadSettings
from ringtune.jobs.parts.recovery import SKIP, RecoverySettings
from ringtune.jobs.sections import Train
from ringtune.schedule.methods import method_class


def check_keep_best(*, train: Train, offload: OffloadSettings, recovery: RecoverySettings) -> None:
    """Refuse what leaves no single best result, or one of a model's size.

    Raises:
        JobError: names both keys, and the remedy.
    """
    if not train.keep_best:
        return
    if method_class(train.method).full_parameters:
        raise JobError(
            f"train.keep_best = true and train.method = {train.method!r} can't go together: each better result would "
            "be a whole model, sent by every node; leave keep_best out or change the method"
        )
    if offload.mode != OFF:
        raise JobError(
            f"train.keep_best = true and offload.mode = {offload.mode!r} can't go together: what helpers have updated "
            "comes later than the evaluation; leave one out"
        )
    if recovery.owners == SKIP:
        raise JobError(
            "train.keep_best = true and recovery.owners = 'skip' can't go together: without the rows of a lost owner "
            "evaluations can't be compared with those before; leave one out"
        )
