"""The job of runs on real processes whose hosts keep copies of the last turns."""

from __future__ import annotations

from typing import Any

from ringtune.job.job import Job
from tests.support.cluster import Cluster


def job_of(ring: Cluster, **changes: object) -> Job:
    """24 steps in turns of 4, with checkpoints and copies."""
    wanted: dict[str, Any] = {
        "train__max_steps": 24,
        "train__local_iterations": 4,
        "train__checkpoint_every": 8,
        "train__eval_every": 8,
        "train__dropout": 0.0,
        "recovery__copies": "next",
    }
    return ring.job(**{**wanted, **changes})
