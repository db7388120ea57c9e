"""The job file of a benchmark: what all of them want, and what one of them wants otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ringtune.job.job import METHOD_SECTIONS, Job, Model
from ringtune.schedule.methods import method_class
from ringtune.storage.durable import write_durably

LEARNING_RATE = 1e-3
BATCH_SIZE = 16


def write_job(
    path: Path,
    *,
    model: Path,
    train: Path,
    steps: int,
    method: str = "ringada",
    microbatches: int = 4,
    tokens: int = 64,
    more: Mapping[str, object] | None = None,
) -> Path:
    """Write a job with one compute thread a node, no checkpoints and no copies.

    Args:
        path: of the file.
        model: folder.
        train: rows.
        steps: how many.
        method: ``train.method``.
        microbatches: of each batch.
        tokens: of the longest row.
        more: further keys with a dot, e.g. ``{"train.seed": 1}``; settings of another method are left out, so that
            methods can be compared.

    Returns:
        The whole path of the file.

    Raises:
        JobError: a key is unknown, or its value can't be.
    """
    values: dict[str, object] = {
        "data.train": str(train.resolve()),
        "train.method": method,
        "train.learning_rate": LEARNING_RATE,
        "train.batch_size": BATCH_SIZE,
        "train.microbatches": microbatches,
        "train.max_length": tokens,
        "train.max_steps": steps,
        "train.checkpoint_every": 0,
        "runtime.threads": 1,
        "recovery.copies": "none",
    }
    foreign = METHOD_SECTIONS.keys() - {method_class(method).section}
    values |= {key: value for key, value in (more or {}).items() if key.partition(".")[0] not in foreign}
    job = Job(model=Model(path=str(model.resolve()))).with_overrides(values)
    write_durably(path, job.to_toml().encode())
    return path.resolve()
