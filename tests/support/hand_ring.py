"""Drive node executors by hand through the lowering of a plan: a ring without engine, wire or clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from edge.data.dataset import OwnerDataset
from edge.profiler.benchmark import Bench
from edge.runtime.executor import NodeExecutor
from ringtune.costs.model_facts import model_facts
from ringtune.job.job import Job, parse_job
from ringtune.schedule.actions import Action, Leg, Op, TensorKey
from ringtune.schedule.course import Course, FrozenWeights
from ringtune.schedule.lowering import Way, item_updates, num_microbatches, way
from ringtune.schedule.placement import Placement, Slice
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import Owner
from ringtune.schedule.turns import Item, StepKind, Turn, items, turn_sequence
from tests.support import tiny


def make_job(model_folder: Path, **overrides: object) -> Job:
    """A float64 job on a tiny model; override dotted keys with ``__`` for the dot."""
    job = parse_job(f'[model]\npath = "{model_folder}"\ndtype = "float64"\n', source="test")
    base: dict[str, object] = {
        "train.batch_size": 6,
        "train.microbatches": 1,
        "train.max_length": 16,
        "train.local_iterations": 5,
        "train.max_steps": 12,
        "unfreeze.every_steps": 3,
        "train.learning_rate": 1e-2,
    }
    values = base | {name.replace("__", "."): value for name, value in overrides.items()}
    if values.get("train.method", "ringada") != "ringada":
        del values["unfreeze.every_steps"]
    return job.with_overrides(values)


def make_bench(
    model_folder: Path,
    job: Job,
    dataset: OwnerDataset | None = None,
    *,
    subnets: int = 1,
    frozen: FrozenWeights | None = None,
) -> Bench:
    """Build what times a node's works, with room for any of them."""
    model = model_facts(model_folder, job)
    return Bench(model_folder, job, dataset, model=model, memory_bytes=1 << 40, subnets=subnets, frozen=frozen)


def make_plan(
    job: Job,
    datasets: Mapping[str, OwnerDataset],
    slices: Mapping[str, tuple[int, int]],
    *,
    num_blocks: int = 4,
    hidden_size: int = 32,
    labels: tuple[str, ...] = tiny.LABELS,
    frozen: FrozenWeights | None = None,
) -> Plan:
    """A plan of the job with these slices; owners in the order of ``datasets``."""
    course = Course(
        method=job.method,
        num_blocks=num_blocks,
        owners=tuple(
            Owner(node=name, train_rows=dataset.train_rows, eval_rows=dataset.eval_rows)
            for name, dataset in datasets.items()
        ),
        num_steps=job.train.num_steps([dataset.train_rows for dataset in datasets.values()]),
        turns=job.train.turns,
        local_iterations=job.train.local_iterations,
        batch_size=job.train.batch_size,
        microbatches=job.train.microbatches,
        max_length=job.train.max_length,
        hidden_size=hidden_size,
        eval_every=job.train.eval_every,
        labels=labels,
        seed=job.train.seed,
        frozen_blocks=job.privacy.private_blocks,
        frozen=frozen,
    )
    pieces = tuple(Slice(node=name, start=start, stop=stop) for name, (start, stop) in slices.items())
    return Plan.of(course, Placement(slices=pieces, private_blocks=job.privacy.private_blocks))


def make_datasets(
    job: Job, model_folder: Path, folder: Path, owners: tuple[str, ...], *, num_rows: int = 40, eval_rows: int = 0
) -> dict[str, OwnerDataset]:
    """Rows on disk, shared among the owners."""
    path = tiny.write_rows(folder / "train.csv", num_rows, seed=1)
    eval_path = tiny.write_rows(folder / "eval.jsonl", eval_rows, seed=2) if eval_rows else None
    return {
        name: OwnerDataset.load(
            job, path, eval_path, share=share, num_owners=len(owners), tokenizer_folder=model_folder
        )
        for share, name in enumerate(owners)
    }


@dataclass(slots=True)
class HandRing:
    """Executors of every node of a plan in one process.

    Attributes:
        interleave: backward of each micro-batch as soon as its head is through, instead of after all heads.
        gradients_sent: (source, target, boundary) of every gradient that went from node to node.
        losses: mean loss of each train item.
        evaluations: (loss_sum, count, correct) by the step after which they were taken.
        values: everything that an evaluation counted, by the step after which it was taken.
        holder: the node that holds the newest head.
    """

    plan: Plan
    job: Job
    model_folder: Path
    datasets: Mapping[str, OwnerDataset]
    interleave: bool = False
    nodes: dict[str, NodeExecutor] = field(default_factory=dict)
    gradients_sent: list[tuple[str, str, int]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    evaluations: dict[int, tuple[float, float, float]] = field(default_factory=dict)
    values: dict[int, dict[str, float]] = field(default_factory=dict)
    holder: str = ""

    def __post_init__(self) -> None:
        """Build every node."""
        self.holder = self.plan.course.owners[0].node
        for node in self.plan.nodes:
            self.nodes[node] = NodeExecutor(self.plan, node, self.job, self.model_folder, self.datasets.get(node))

    def train(self) -> HandRing:
        """Do the whole run."""
        for turn in turn_sequence(self.plan.course):
            self.run_turn(turn)
            for node in self.nodes.values():
                node.forget_turn(turn.index)
        return self

    def run_turn(self, turn: Turn) -> None:
        """Do all items of a turn."""
        self.start_turn(turn)
        for item in items(self.plan.course, turn):
            self.run_item(item)

    def start_turn(self, turn: Turn) -> None:
        """Grant a turn to all, and hand the head over if the owner changes."""
        if turn.owner != self.holder:
            self.nodes[turn.owner].load_head_blob(self.nodes[self.holder].head_blob())
            self.holder = turn.owner
        for node in self.nodes.values():
            node.grant(turn)

    def run_item(self, item: Item) -> None:
        """One batch through the ring and back, then the updates."""
        ways = [way(self.plan, item, micro) for micro in range(num_microbatches(self.plan.course, item))]
        at = {(node, micro): 0 for node in self.nodes for micro in range(num_microbatches(self.plan.course, item))}
        values: dict[str, float] = {}
        for micro in range(num_microbatches(self.plan.course, item)):
            self._advance(item, micro, ways[micro], at, values, stop_at=None if self.interleave else Op.HEAD)
        for micro in range(num_microbatches(self.plan.course, item)):
            self._advance(item, micro, ways[micro], at, values, stop_at=None)
        for node, executor in self.nodes.items():
            for action in item_updates(self.plan, item, node):
                executor.run(action)
        if item.kind is StepKind.TRAIN:
            self.losses.append(values["loss_sum"] / values["count"])
        elif item.kind is StepKind.EVALUATE:
            sums = self.values.setdefault(item.step, {})
            for name, value in values.items():
                sums[name] = sums.get(name, 0.0) + value
            before = self.evaluations.get(item.step, (0.0, 0.0, 0.0))
            after = (values["loss_sum"], values["count"], values.get("correct", 0.0))
            self.evaluations[item.step] = tuple(map(sum, zip(before, after, strict=True)))  # type: ignore[assignment]

    def _advance(
        self,
        item: Item,
        micro: int,
        legs: Way,
        at: dict[tuple[str, int], int],
        values: dict[str, float],
        *,
        stop_at: Op | None,
    ) -> None:
        """Follow one micro-batch until it is through, or (inclusive) to its first ``stop_at``."""
        moved = True
        arrived: set[tuple[str, str]] = set()
        while moved:
            moved = False
            for node, parts in legs.items():
                while at[node, micro] < len(parts):
                    leg = parts[at[node, micro]]
                    if leg.op is Op.RECEIVE:
                        if (node, leg.payload) not in arrived:
                            break
                        arrived.discard((node, leg.payload))
                    elif leg.op is Op.SEND:
                        self._send(node, leg, item.seq, micro)
                        arrived.add((leg.peer, leg.payload))
                    else:
                        found = self.nodes[node].run(leg.bind(item.seq, micro))
                        for name, value in found:
                            values[name] = values.get(name, 0.0) + value
                    at[node, micro] += 1
                    moved = True
                    if leg.op is stop_at:
                        return

    def _send(self, node: str, leg: Leg, seq: int, micro: int) -> None:
        key = TensorKey(leg.payload, seq, micro, leg.start)
        tensor, mask = self.nodes[node].take_tensor(key)
        assert (mask is not None) == (leg.payload == "h" and leg.start < self.plan.course.num_blocks)
        if leg.payload == "g":
            self.gradients_sent.append((node, leg.peer, leg.start))
        narrow = None if mask is None else mask.to(torch.int8)
        self.nodes[leg.peer].put_tensor(key, tensor.clone(), narrow)

    def files(self) -> dict[str, dict[str, bytes]]:
        """What every node would hand to the coordinator at the end."""
        return {
            name: {
                file: bytes(content)
                for file, content in node.adapter_files(
                    with_head=name == self.holder, with_private=name == self.holder
                ).items()
            }
            for name, node in self.nodes.items()
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """Adapter and head of the whole ring, by name."""
        from safetensors.torch import load

        found: dict[str, torch.Tensor] = {}
        for files in self.files().values():
            for name, content in files.items():
                if name.endswith(".safetensors"):
                    found |= load(content)
        return found


def make_ring(
    model_folder: Path,
    folder: Path,
    slices: Mapping[str, tuple[int, int]],
    owners: tuple[str, ...] = ("a",),
    *,
    eval_rows: int = 0,
    **overrides: object,
) -> HandRing:
    """The ring of a job on a tiny model, with rows for these owners; see ``make_job`` for what can be overridden."""
    job = make_job(model_folder, **overrides)
    datasets = make_datasets(job, model_folder, folder, owners, eval_rows=eval_rows)
    return HandRing(make_plan(job, datasets, slices), job, model_folder, datasets)


def action(op: Op, seq: int, micro: int = 0, start: int = 0, stop: int = 0) -> Action:
    """A compute action."""
    return Action(op, seq, micro, start, stop)
