"""What another optimizer leaves behind."""

from __future__ import annotations

import pytest

from ringtune.errors import JobError
from ringtune.job.job import Job, Model

JOB = Job(model=Model(path="models/tiny"))


def test_job_with_overrides_leaves_the_momentum_behind() -> None:
    """Another optimizer has none; the same one keeps its own."""
    job = JOB.with_overrides({"train.optimizer": "momentum", "train.momentum": 0.5})
    assert JOB.with_overrides({"train.optimizer": "momentum"}).train.momentum == 0.9
    assert job.with_overrides({"train.optimizer": "momentum"}).train.momentum == 0.5
    assert job.with_overrides({"train.optimizer": "adafactor"}).train.momentum is None
    with pytest.raises(JobError, match=r"train\.momentum = 0\.5 has no meaning"):
        job.with_overrides({"train.optimizer": "sgd", "train.momentum": 0.5})
