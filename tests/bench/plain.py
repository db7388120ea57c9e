"""The other side of the ring's benchmark: the same steps in one process, with plain transformers and adapters.

``python -m tests.bench.plain RUN`` reads job and plan of a run's folder, trains the whole model on the very same
batches, and prints one line of JSON. Run as a process of its own, so that threads and caches are not shared.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from edge.data.dataset import OwnerDataset
from edge.data.tokens import Batch
from ringtune.job.job import Job, load_job
from ringtune.schedule.course import Course
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Item, StepKind
from tests.support import reference
from tests.support.plans import changed


class TimedDataset:
    """An owner's data that notes when each training item was asked for; the loop asks once an item, at its start."""

    def __init__(self, inner: OwnerDataset, started: dict[int, tuple[float, float]]) -> None:
        self._inner = inner
        self._started = started

    def __getattr__(self, name: str) -> Any:
        """Everything else is the data's own."""
        return getattr(self._inner, name)

    def batch(self, course: Course, item: Item) -> Batch:
        """The batch of an item."""
        if item.kind is StepKind.TRAIN:
            self._started.setdefault(item.step, (time.perf_counter(), time.process_time()))
        return self._inner.batch(course, item)


def datasets_of(job: Job, plan: Plan) -> dict[str, OwnerDataset]:
    """Each owner's share, as local nodes would read it."""
    owners = sorted(owner.node for owner in plan.course.owners)
    return {
        owner: OwnerDataset.load(
            job,
            Path(job.data.train),
            Path(job.data.eval) if job.data.eval else None,
            share=share,
            num_owners=len(owners),
            tokenizer_folder=Path(job.model.path),
        )
        for share, owner in enumerate(owners)
    }


def train(job: Job, plan: Plan, *, first_step: int = 0) -> dict[str, Any]:
    """Train and evaluate.

    Args:
        job: of the run.
        plan: of the run.
        first_step: where the clock starts; it stops where the last step starts.

    Returns:
        ``wall_s`` and ``cpu_s`` of the steps ``[first_step, last)``, the ``losses`` of all steps, and after the last
        one ``eval_loss`` and ``accuracy``, if there is data for them.
    """
    started: dict[int, tuple[float, float]] = {}
    owned: Mapping[str, Any] = {
        owner: TimedDataset(dataset, started) for owner, dataset in datasets_of(job, plan).items()
    }
    trained = reference.train(job, plan, Path(job.model.path), owned)
    wall_s, cpu_s = (
        end - start for start, end in zip(started[first_step], started[plan.course.num_steps - 1], strict=True)
    )
    result: dict[str, Any] = {"wall_s": wall_s, "cpu_s": cpu_s, "losses": trained.losses}
    if trained.evaluations:
        loss_sum, count, correct = trained.evaluations[max(trained.evaluations)]
        if count:
            result |= {"eval_loss": loss_sum / count, "accuracy": correct / count}
    return result


def main() -> None:
    """Read the command line, print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a run: job.toml and plan.json are read")
    parser.add_argument("--first-step", type=int, default=0)
    parser.add_argument("--method", help="in place of the plan's")
    parser.add_argument("--seed", type=int, help="in place of the plan's")
    options = parser.parse_args()
    torch.set_num_threads(1)
    job = load_job(options.run / "job.toml")
    plan = Plan.from_json(json.loads((options.run / "plan.json").read_text(encoding="utf-8")))
    if options.method not in (None, job.train.method):
        job = dataclasses.replace(job, train=dataclasses.replace(job.train, method=options.method), unfreeze=None)
        plan = changed(plan, method=job.method)
    if options.seed is not None:
        job = dataclasses.replace(job, train=dataclasses.replace(job.train, seed=options.seed))
        plan = changed(plan, seed=options.seed)
    print(json.dumps(train(job, plan, first_step=options.first_step)))  # noqa: T201


if __name__ == "__main__":
    main()
