"""``train.patience_evals``: needs evaluations to wait for, and changes no older digest."""

from __future__ import annotations

import pytest

from ringtune.errors import JobError
from ringtune.jobs.job import Job, Model, Train
from ringtune.rounds.job_changes import changed_keys, job_digest

JOB = Job(model=Model(path="m"))


def test_patience_needs_evaluations_in_between() -> None:
    """Both keys and the remedy are in the message."""
    with pytest.raises(
        JobError, match=r"patience_evals = 2 waits for evaluations, and train\.eval_every = 0 .* set eval"
    ):
        Train(patience_evals=2)
    with pytest.raises(JobError, match=r"train\.patience_evals is -1, it has to be at least 0"):
        Train(patience_evals=-1, eval_every=5)
    assert Train(patience_evals=2, eval_every=5).patience_evals == 2


def test_patience_counts_as_a_change_of_the_result() -> None:
    """A run is resumed with the patience that it was begun with."""
    other = JOB.with_overrides({"train.eval_every": 5, "train.patience_evals": 2})
    assert changed_keys(JOB, other) == ("train.eval_every", "train.patience_evals")
    assert job_digest(other) != job_digest(JOB.with_overrides({"train.eval_every": 5}))
