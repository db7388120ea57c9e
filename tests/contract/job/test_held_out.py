"""``data.held_out``: rows to evaluate on where there is no file of them."""

from __future__ import annotations

import pytest

from ringtune.errors import JobError
from ringtune.job.job import Data, Job, Model
from ringtune.run_control.continuation import changed_keys, job_digest

JOB = Job(model=Model(path="m"))


def test_held_out_and_a_file_can_not_go_together() -> None:
    """Both keys are in the message."""
    with pytest.raises(JobError, match=r"data\.eval = 'e\.csv' and data\.held_out = 0\.1 both say what is eval"):
        Data(eval="e.csv", held_out=0.1)


def test_held_out_and_a_file_clear_each_other() -> None:
    """Setting one of the two on the command line leaves the other behind."""
    held_out = JOB.with_overrides({"data.held_out": 0.2})
    assert (held_out.data.held_out, held_out.data.eval) == (0.2, "")
    assert held_out.with_overrides({"data.eval": "e.csv"}).data.held_out == 0.0


def test_held_out_changes_the_result_and_its_absence_no_digest() -> None:
    """Other rows train, so a run can't be resumed with another share; older jobs keep their digest."""
    other = JOB.with_overrides({"data.held_out": 0.2})
    assert changed_keys(JOB, other) == ("data.held_out",)
    assert job_digest(JOB) != job_digest(other)
