"""A job that leaves the number of micro-batches to the planner."""

from __future__ import annotations

import pytest

from ringtune.errors import JobError
from ringtune.job.job import Job, parse_job

MODEL = '[model]\npath = "m"\n'


def job(train: str, more: str = "") -> Job:
    """A job with such lines in ``[train]``."""
    return parse_job(f"{MODEL}[train]\n{train}\n{more}", source="test")


def test_auto_microbatches_are_the_planners_choice() -> None:
    """The job has a number to begin with and says that another may be taken; written and read it is the same."""
    found = job('microbatches = "auto"')
    assert (found.train.microbatches, found.placement.microbatches) == (4, "auto")
    assert parse_job(found.to_toml(), source="test") == found
    assert job("microbatches = 4").placement.microbatches == "never"


def test_auto_microbatches_of_a_small_batch_begin_with_its_rows() -> None:
    """Two rows can't be cut into four."""
    assert job('microbatches = "auto"\nbatch_size = 2').train.microbatches == 2


def test_number_of_microbatches_set_later_is_the_jobs_own() -> None:
    """``--set train.microbatches=2`` beside a job that says auto, and the other way round."""
    free = job('microbatches = "auto"')
    fixed = free.with_overrides({"train.microbatches": 2})
    assert (fixed.train.microbatches, fixed.placement.microbatches) == (2, "never")
    again = fixed.with_overrides({"train.microbatches": "auto"})
    assert (again.train.microbatches, again.placement.microbatches) == (4, "auto")
    assert free.with_overrides({"train.seed": 1}).placement.microbatches == "auto"


def test_other_words_for_microbatches_are_refused() -> None:
    """Auto is the only one."""
    with pytest.raises(JobError, match=r"train\.microbatches has to be a whole number"):
        job('microbatches = "many"')
    with pytest.raises(JobError, match=r"placement\.microbatches"):
        job("seed = 1", '[placement]\nmicrobatches = "many"')
