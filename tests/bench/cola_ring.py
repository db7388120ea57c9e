"""A run of ``make bench-cola`` in one process: an owner hosts all blocks of the demo's model, a helper fits adapters.

Two executors compute with torch on the virtual ring, so no process and no socket is in the way. What is trained depends
on the course alone, so that a run of two machines gives the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from edge.data.dataset import OwnerDataset
from edge.runtime.executor import NodeExecutor
from edge.techniques.offload.sites import adapter_weights
from ringtune.job.job import Job, OffloadSettings, parse_job
from ringtune.models.folder import model_dimensions, read_config
from ringtune.run_control import events as rd
from ringtune.schedule.course import COLLABORATION, EXACT, JOINT, Course, Offload
from ringtune.schedule.methods import Everything
from ringtune.schedule.placement import Helper, Placement, Slice
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import Owner, UserRows
from ringtune.schedule.units import Range
from sim.ring import VirtualRing
from tests.support.torch_ring import TorchCarrier

HOST, HELPER = "host", "helper"
LORA, LINEAR, MLP = "lora[r=8,alpha=16]", "linear", "mlp[hidden=128]"
BATCH, TOKENS = 8, 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """Folder of the model, rows to train on, and rows to judge by; None = the run is not judged."""

    model: Path
    train: Path
    judged: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What is trained, and how.

    Attributes:
        adapter: configuration.
        rate: learning rate of AdamW at the beginning; it falls to zero.
        seed: of the run.
        steps: of 8 sentences.
        is_helped: whether a helper fits the adapters; else they train at their host.
        interval: steps for one update of the adapters.
        pairs: how they travel.
        users: whose adapters a row goes through; with sets of their own there is a helper.
        num_users: how many share the rows evenly.
        other: configuration that the upper half of the users has; empty = as all.
    """

    adapter: str
    rate: float
    seed: int = 0
    steps: int
    is_helped: bool = True
    interval: int = 1
    pairs: str = EXACT
    users: str = JOINT
    num_users: int = 1
    other: str = ""


class Ring:
    """The executors of a run.

    Args:
        training: what is wanted.
        inputs: files.
        carrier: what carries actions and messages out; takes the executors by node.

    Attributes:
        plan: of the run.
        job: of the run.
        carrier: as made.
        host: executor of all blocks, embedding and head.
    """

    def __init__(
        self,
        training: Training,
        inputs: Inputs,
        carrier: Callable[[Mapping[str, NodeExecutor]], TorchCarrier] = TorchCarrier,
    ) -> None:
        job, (blocks, width) = _job_of(training, inputs), _size_of(inputs.model)
        self.job = job
        data = OwnerDataset.load(job, inputs.train, inputs.judged, tokenizer_folder=inputs.model)
        data.set_labels(data.labels)
        self.plan = _plan_of(training, data, blocks, width)
        data.users = self.plan.course.owners[0].users
        executors = {
            node: NodeExecutor(self.plan, node, job, inputs.model, data if node == HOST else None)
            for node in self.plan.nodes
        }
        self.host, self.carrier = executors[HOST], carrier(executors)

    def adapters(self) -> dict[str, torch.Tensor]:
        """Return the adapters as the host has them, on memory of their own."""
        found = adapter_weights(self.host._hosted.skeleton, range(self.plan.course.num_blocks))
        return {name: value.detach().clone() for name, value in found.items()}

    def run(self) -> dict[str, float]:
        """Train to the end.

        Returns:
            What the evaluation counted: ``count``, ``correct``, ``loss_sum``; nothing where there was none.

        Raises:
            RuntimeError: the run failed.
        """
        result = VirtualRing(self.plan, carrier=self.carrier).run()
        if result.finish != rd.Finish("", ""):
            raise RuntimeError(f"the run ended with {result.finish}")
        return next((dict(entry.values) for entry in result.logged if isinstance(entry, rd.LogEvaluation)), {})


def distance_of_changes(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], start: dict[str, torch.Tensor]
) -> float:
    """How far two runs went apart since their start: ``|ours - theirs| / |theirs - start|``, all as one vector."""
    apart, gone = 0.0, 0.0
    for name, value in theirs.items():
        apart += float((ours[name].double() - value.double()).square().sum())
        gone += float((value.double() - start[name].double()).square().sum())
    return float((apart / gone) ** 0.5)


def shares(train_rows: int, eval_rows: int, num_users: int) -> tuple[UserRows, ...]:
    """Share rows out evenly; none where there is one user."""
    if num_users == 1:
        return ()
    return tuple(
        UserRows(
            name=f"user-{index}",
            train_rows=train_rows * (index + 1) // num_users - train_rows * index // num_users,
            eval_rows=eval_rows * (index + 1) // num_users - eval_rows * index // num_users,
        )
        for index in range(num_users)
    )


def _job_of(training: Training, inputs: Inputs) -> Job:
    job = parse_job(
        f"""
        [model]
        path = "{inputs.model}"
        [adapter]
        config = "{training.adapter}"
        [train]
        method = "all"
        learning_rate = {training.rate}
        lr_schedule = "linear"
        batch_size = {BATCH}
        microbatches = 1
        max_length = {TOKENS}
        max_steps = {training.steps}
        seed = {training.seed}
        """,
        source="bench",
    )
    if not training.other:
        return job
    names = [user.name for user in shares(0, 0, training.num_users)]
    settings = OffloadSettings(
        mode="auto",
        users=training.users,
        merged=training.users == COLLABORATION,
        adapters=dict.fromkeys(names[len(names) // 2 :], training.other),
    )
    return dataclasses.replace(job, offload=settings)


def _size_of(model: Path) -> tuple[int, int]:
    dimensions = model_dimensions(read_config(model))
    return dimensions.num_blocks, dimensions.hidden


def _plan_of(training: Training, data: OwnerDataset, blocks: int, width: int) -> Plan:
    offload = Offload(
        blocks=(Range(0, blocks),),
        interval=training.interval,
        pairs=training.pairs,
        users=training.users,
        merged=training.users == COLLABORATION,
    )
    users = shares(data.train_rows, data.eval_rows, training.num_users)
    course = Course(
        method=Everything(),
        num_blocks=blocks,
        owners=(Owner(node=HOST, train_rows=data.train_rows, eval_rows=data.eval_rows, users=users),),
        num_steps=training.steps,
        local_iterations=min(10, training.steps),
        batch_size=BATCH,
        microbatches=1,
        max_length=TOKENS,
        hidden_size=width,
        labels=data.labels,
        seed=training.seed,
        offload=offload if training.is_helped else None,
    )
    helpers = (Helper(node=HELPER, start=0, stop=blocks),) if training.is_helped else ()
    return Plan.of(course, Placement(slices=(Slice(node=HOST, start=0, stop=blocks),), helpers=helpers))
