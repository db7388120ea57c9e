"""Comparing what a ring trained with what one process trains."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load, load_file

from edge.data.dataset import OwnerDataset
from ringtune.job.job import Job
from ringtune.schedule.migration import course_before
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Turn
from tests.support import reference
from tests.support.cluster import Cluster, Outcome

_FILES = ("adapter/adapter.safetensors", "adapter/model_head.safetensors")


def trained(outcome: Outcome) -> dict[str, torch.Tensor]:
    """Adapter and head of a run, by name."""
    return {name: tensor for file in _FILES for name, tensor in load(bytes(outcome.files[file])).items()}


def trained_in(out: Path) -> dict[str, torch.Tensor]:
    """The same of a run's folder."""
    return {name: tensor for file in _FILES for name, tensor in load_file(out / file).items()}


def datasets_of(cluster: Cluster, job: Job) -> dict[str, OwnerDataset]:
    """Each owner's share of the rows, as its agent has it."""
    return {
        name: OwnerDataset.load(
            job,
            Path(cluster.train),
            Path(cluster.eval),
            share=index,
            num_owners=len(cluster.owners),
            tokenizer_folder=cluster.model,
        )
        for index, name in enumerate(cluster.owners)
    }


def reference_of(
    cluster: Cluster, job: Job, outcome: Outcome, turns: Iterable[tuple[Plan, Turn]] | None = None
) -> reference.Trained:
    """Train the same items in this process on the whole model; those of the plan, or of other turns."""
    assert outcome.plan is not None
    return reference.train(job, outcome.plan, cluster.model, datasets_of(cluster, job), turns=turns)


def turns_of(outcome: Outcome, num_steps: int) -> list[tuple[Plan, Turn]]:
    """The turns that a run has to have trained that has lost owners and taken some back; ``num_steps`` with all."""
    assert outcome.plan is not None
    plan, changes = outcome.plan, list[tuple[int, Plan]]()
    for line in reversed(outcome.of_kind("recovery")):
        changes.insert(0, (line["step"], plan))
        for _ in (*line.get("left_out", ()), *line.get("returned", ())):
            plan = Plan(course_before(plan.course, num_steps), plan.placements)
    return reference.turns_as_written(plan, changes)


def largest_difference(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest absolute difference; both have to have the same names."""
    assert found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())
    return max(float((found[name].double() - wanted[name].double()).abs().max()) for name in found)
