"""What the user asks for: ``job.toml`` as a value, and the functions that read and write it.

The values live in ``job_values``, the strict reading in ``job_file``; import both from here.
"""

from __future__ import annotations

from ringtune.job_file import load_job, parse_job
from ringtune.job_values import Adapter, Data, Job, Model, Privacy, Runtime, Train, Unfreeze, Wire

__all__ = [
    "Adapter",
    "Data",
    "Job",
    "Model",
    "Privacy",
    "Runtime",
    "Train",
    "Unfreeze",
    "Wire",
    "load_job",
    "parse_job",
]
