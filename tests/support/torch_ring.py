"""The virtual ring with real tensors, one ``NodeExecutor`` per node, all in this process; also from a checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load

from coordinator.api.arguments import unpickled
from edge.agent.torch_backend import kept_file, load_migrated
from edge.checkpoint.snapshots import MigratedState, Snapshot, TurnSnapshots, metadata
from edge.data.dataset import OwnerDataset
from edge.runtime.executor import NodeExecutor
from ringtune.job.job import Job, parse_job
from ringtune.models.adapter_config import invertible_of
from ringtune.models.adapter_support import may_trim
from ringtune.models.families import FAMILIES, family_named
from ringtune.models.family import CHAT, LANGUAGE_TASKS
from ringtune.models.folder import read_config
from ringtune.run_control import events as rd
from ringtune.run_control.events import Move
from ringtune.schedule.actions import Action, Op, TensorKey
from ringtune.schedule.course import Course, FrozenWeights
from ringtune.schedule.migration import copies_of, head_holders, trained_blocks
from ringtune.schedule.operation_tables import Operations
from ringtune.schedule.placement import Placement, Slice
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import Owner
from ringtune.schedule.stages import saves_head
from ringtune.schedule.turns import StartPoint, StepKind, Turn
from ringtune.storage.pieces import Pieces
from ringtune.techniques.generation import generation_of
from ringtune.techniques.initial_adapter import initial_values
from tests.support import chat_models, reference, tiny
from tests.support.recorded_ring import Carrier, RecordedResult, RecordedRing
from tests.support.tiny_data import SUFFIXES, labels_of, write_task_rows
from tests.support.tiny_families import write_family


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run whose result must not depend on its slices.

    ``owners`` are node names in initiator order; the sizes are small on purpose.
    """

    folder: Path
    owners: tuple[str, ...] = ("a",)
    method: str = "ringada"
    every_steps: int = 7
    microbatches: int = 1
    optimizer: str = "adamw"
    dropout: float = 0.0
    lr_schedule: str = "linear"
    dtype: str = "float64"
    wire: str = ""  # empty = as ``dtype``
    num_steps: int = 50
    local_iterations: int = 4
    private_blocks: int = 0
    eval_every: int = 0
    checkpoint_every: int = 0
    num_blocks: int = 4
    weight_decay: float = 0.01
    task: str = "sequence-classification"
    adapter: str = "seq_bn"
    operations: Operations | None = None
    frozen: FrozenWeights | None = None
    split: str = "iid"
    turns: str = "equal"
    trims: bool = True  # where nothing speaks against it
    hift: str = ""  # the lines of [hift]
    offload: str = ""  # the lines of [offload]
    generation: str = ""  # the lines of [generation]
    max_length: int = 16
    packing: bool = False
    compute: str = "float32"
    initial: bool = False  # begins from ``adapter.from``, the adapter in ``folder / "from.adapter"``

    @functools.cached_property
    def job(self) -> Job:
        """The job of the case."""
        unfreeze = f"[unfreeze]\nevery_steps = {self.every_steps}" if self.method == "ringada" else ""
        hift = f"[hift]\n{self.hift}" if self.method == "hift" else ""
        offload = f"[offload]\n{self.offload}" if self.offload else ""
        generation = f"[generation]\n{self.generation}" if self.generation else ""
        return parse_job(
            f"""
            [model]
            path = "{self.folder / "model"}"
            task = "{self.task}"
            dtype = "{self.dtype}"
            [data]
            split = "{self.split}"
            [adapter]
            config = "{self.adapter}"
            from = "{self.folder / "from.adapter" if self.initial else ""}"
            [train]
            method = "{self.method}"
            optimizer = "{self.optimizer}"
            learning_rate = 1e-2
            weight_decay = {self.weight_decay}
            lr_schedule = "{self.lr_schedule}"
            warmup_steps = 3
            dropout = {self.dropout}
            batch_size = 8
            microbatches = {self.microbatches}
            max_length = {self.max_length}
            packing = {str(self.packing).lower()}
            compute = "{self.compute}"
            local_iterations = {self.local_iterations}
            max_steps = {self.num_steps}
            turns = "{self.turns}"
            eval_every = {self.eval_every}
            [wire]
            dtype = "{self.wire or self.dtype}"
            {unfreeze}
            {hift}
            {offload}
            {generation}
            """,
            source="test",
        )

    def plan(self, slices: tuple[tuple[str, int, int], ...]) -> Plan:
        """A plan of this case with these slices."""
        config = read_config(self.folder / "model")
        family = family_named(config["model_type"])
        passed = family.passed(config)
        head_tokens = family.head_tokens(self.task)
        course = Course(
            method=self.job.method,
            num_blocks=self.num_blocks,
            owners=tuple(
                Owner(node=name, train_rows=data.train_rows, eval_rows=data.eval_rows)
                for name, data in self.datasets().items()
            ),
            num_steps=self.num_steps,
            local_iterations=self.local_iterations,
            batch_size=8,
            microbatches=self.microbatches,
            max_length=self.max_length,
            hidden_size=32,
            eval_every=self.eval_every,
            checkpoint_every=self.checkpoint_every,
            wire_dtype=self.wire or self.dtype,
            labels=self.labels,
            frozen_blocks=self.private_blocks,
            operations=self.operations,
            frozen=self.frozen,
            turns=self.turns,
            initial=self.initial_values.sha256() if self.initial else "",
            invertible=invertible_of(self.job.adapter.config) is not None,
            head_tokens=head_tokens,
            trims=self.trims
            and bool(head_tokens)
            and may_trim(family, [self.job.adapter.config], dropout=self.job.train.dropout),
            packed=self.packing,
            generation=generation_of(self.job),
            compute=self.compute,
            entering=passed.entering if passed else (),
            returning=passed.returning if passed else (),
        )
        pieces = tuple(Slice(node=node, start=start, stop=stop) for node, start, stop in slices)
        return Plan.of(course, Placement(slices=pieces, private_blocks=self.private_blocks, credits=4))

    @functools.cached_property
    def initial_values(self) -> Pieces:
        """The file of initial values, as it goes to the nodes."""
        return initial_values(self.job, unpickled)

    @property
    def node_job(self) -> Job:
        """The job at a node, which has fetched that file."""
        if not self.initial:
            return self.job
        path = self.folder / f"{self.initial_values.sha256()}.safetensors"
        if not path.exists():
            path.write_bytes(bytes(self.initial_values))
        return self.job.with_overrides({"adapter.from": str(path)})

    @property
    def labels(self) -> tuple[str, ...]:
        """Class names, if the task has any."""
        return labels_of(self.task)

    def datasets(self) -> dict[str, OwnerDataset]:
        """Each owner's share of the rows."""
        return dict(_datasets_of(self))


def write_inputs(folder: Path, *, num_blocks: int = 4, num_rows: int = 61) -> Path:
    """Write the tiny model and its rows, so many of them for training."""
    tiny.write_model(folder / "model", num_blocks=num_blocks)
    tiny.write_rows(folder / "train.csv", num_rows, seed=1)
    tiny.write_rows(folder / "eval.csv", 21, seed=2)
    return folder


def write_family_inputs(
    folder: Path, model_type: str, task: str, *, padding_side: str = "right", **config: Any
) -> Path:
    """Write a tiny model of a family, with some values of its ``config.json``, and rows of a task."""
    decoder = task in LANGUAGE_TASKS
    write_family(folder / "model", model_type, padding_side=padding_side, with_decoder=decoder, **config)
    if task == CHAT:
        chat_models.write_tokenizer(folder / "model", chat_models.MISTRAL)
    write_task_rows(folder, task, "train", 21, seed=1)
    write_task_rows(folder, task, "eval", 11, seed=2)
    return folder


@functools.lru_cache(maxsize=16)
def _datasets_of(case: Case) -> dict[str, OwnerDataset]:
    """They are only read, so those of one case are read and tokenized once."""
    found = {}
    for share, owner in enumerate(case.owners):
        data = OwnerDataset.load(
            case.job,
            case.folder / f"train.{SUFFIXES[case.task]}",
            case.folder / f"eval.{SUFFIXES[case.task]}",
            share=share,
            num_owners=len(case.owners),
            tokenizer_folder=case.folder / "model",
        )
        data.set_labels(case.labels)
        found[owner] = data
    return found


def reference_of(case: Case) -> reference.Trained:
    """One process with plain transformers, adapters and autograd; one per case, whatever the slices.

    In float64 without dropout the number of micro-batches makes no difference beyond 1e-9 either, so that all numbers
    are compared with the same result.
    """
    is_exact = case.dtype == "float64" and not case.dropout
    return _reference_of(dataclasses.replace(case, microbatches=1) if is_exact else case)


@functools.lru_cache(maxsize=128)
def _reference_of(case: Case) -> reference.Trained:
    plan = case.plan((("a", case.private_blocks, case.num_blocks),))
    return reference.train(case.job, plan, case.folder / "model", case.datasets())


RUN = "run"


@dataclass
class TorchCarrier(Carrier):
    """Carries actions and messages out with executors; remembers the bytes that travelled."""

    executors: Mapping[str, NodeExecutor]
    keep_messages: bool = False
    messages: list[tuple[str, str, int, Any]] = field(default_factory=list)
    shards: dict[int, dict[str, bytes]] = field(default_factory=dict)
    case: Case | None = None
    plan: Plan | None = None
    snapshots: dict[str, Snapshot] = field(default_factory=dict)
    kept: dict[str, TurnSnapshots] = field(default_factory=dict)
    _part: Plan | None = None
    _saves: dict[int, Turn] = field(default_factory=dict)

    def granted(self, node: str, turn: Turn) -> None:
        """The executor learns the turn's items."""
        self.executors[node].grant(turn)
        if turn.kind is StepKind.CHECKPOINT:
            self._saves[turn.first_seq] = turn

    def run(self, node: str, action: Action) -> tuple[tuple[str, float], ...]:
        """With torch; a save keeps the node's shard."""
        if action.op is not Op.SAVE:
            return self.executors[node].run(action)
        turn = self._saves[action.seq]
        executor = self.executors[node]
        with_head = saves_head(executor._course, node, turn.owner)
        shard = executor.shard(shard_metadata(node, turn.first_step), with_head=with_head)
        self.shards.setdefault(turn.first_step, {})[node] = bytes(shard)
        return ()

    def ended(self, node: str, turn: int) -> str:
        """The executor looks after what it keeps."""
        return self.executors[node].end_turn(turn)

    def take(self, node: str, key: TensorKey) -> Any:
        """Tensor and mask."""
        content = self.executors[node].take_tensor(key)
        if self.keep_messages:
            self.messages.append((node, key.payload, key.boundary, content))
        return content

    def put(self, node: str, key: TensorKey, content: Any) -> None:
        """Tensor and mask."""
        self.executors[node].put_tensor(key, *content)

    def take_head(self, node: str) -> Any:
        """A safetensors blob."""
        return self.executors[node].head_blob()

    def put_head(self, node: str, content: Any) -> None:
        """A safetensors blob."""
        self.executors[node].load_head_blob(content)

    def rest(self, node: str) -> None:
        """The node's snapshot, which every other may take over; its executor is let go."""
        assert self.plan is not None
        part = self._part or self.plan.at(0)
        self.snapshots[node] = Snapshot(
            self.executors[node], part.placement.trained_at(node), {}, with_head=self._has_head(node)
        )

    def _has_head(self, node: str) -> bool:
        return self.plan is not None and self.plan.owner(node) is not None

    def move(self, command: Move) -> None:
        """A fresh executor with what others kept."""
        assert self.case is not None
        node, self._part = command.node, command.part
        self.executors = {name: executor for name, executor in self.executors.items() if name != node}
        if node not in command.part.nodes:
            return
        executor = make_executor(self.case, command.part, node)
        self.executors = {**self.executors, node: executor}
        if command.from_step is not None:
            self._recover(executor, command, command.from_step)
            return
        parts = [self.snapshots[source.node].part(source.start, source.stop) for source in command.sources]
        head = self.snapshots[node].head if node == command.start.holder else None
        assert head is not None or node != command.start.holder
        files = tuple(Pieces.of(bytes(part)) for part in parts)
        load_migrated(executor, MigratedState(files, {}, head, RUN))

    # ---- copies for recovery ----------------------------------------------------------------------

    def keep(self, node: str, part: Plan, turn: Turn) -> None:
        """What the node has trained, here and where copies are kept, and the head at the turn's owner."""
        step, placement = turn.end_step, part.placement
        blocks = trained_blocks(part.course, placement, node, turn)
        head = bytes(self.executors[node].head_blob()) if node == turn.owner else None
        for holder, wanted in {**copies_of(placement, node), node: blocks}.items():
            part_of = tuple(block for block in blocks if block in wanted)
            file = kept_file(self.executors[node], part_of, metadata(RUN, step))
            kept = self.kept.setdefault(holder, TurnSnapshots(holder))
            kept.begin(RUN)
            kept.keep(RUN, step, node, file, head if holder == node else None)
        for holder in head_holders(part.course, placement, node) if head is not None else ():
            assert head is not None
            kept = self.kept.setdefault(holder, TurnSnapshots(holder))
            kept.begin(RUN)
            kept.keep_head(RUN, step, head)

    def lose(self, node: str) -> None:
        """Its executor and all that it kept."""
        self.executors = {name: executor for name, executor in self.executors.items() if name != node}
        self.kept.pop(node, None)

    def _recover(self, executor: NodeExecutor, command: Move, step: int) -> None:
        node, files = command.node, list[Pieces]()
        own = self.kept.setdefault(node, TurnSnapshots(node))
        own.begin(RUN)
        for source in command.sources:
            part = bytes(self.kept[source.node].part(RUN, step, source.start, source.stop))
            files.append(Pieces.of(part))
            own.keep(RUN, step, f"{source.start}-{source.stop}", part)
        if command.head_from:
            own.keep_head(RUN, step, bytes(self.kept[command.head_from].head(RUN, step)))
        head = own.head(RUN, step) if node == command.start.holder and step else None
        load_migrated(executor, MigratedState(tuple(files), metadata(RUN, step), head, RUN))

    def take_parcel(self, node: str, key: TensorKey) -> Any:
        """A safetensors blob."""
        return self.executors[node].take_parcel(key)

    def put_parcel(self, node: str, key: TensorKey, content: Any) -> None:
        """A safetensors blob."""
        self.executors[node].put_parcel(key, content)

    def collected(self, plan: Plan, holder: str) -> dict[str, torch.Tensor]:
        """All adapter tensors and the head, by name."""
        tensors: dict[str, torch.Tensor] = {}
        for node in self.executors:
            is_holder = node == holder
            tensors |= self.sent(
                node, with_head=is_holder, with_private=is_holder and plan.placement.private_blocks > 0
            )
        return tensors

    def sent(self, node: str, *, with_head: bool, with_private: bool) -> dict[str, torch.Tensor]:
        """All tensors that a node sends at the end, by name."""
        files = self.executors[node].adapter_files(with_head=with_head, with_private=with_private)
        found = (load(bytes(content)) for name, content in files.items() if name.endswith(".safetensors"))
        return {name: tensor for tensors in found for name, tensor in tensors.items()}


def shard_metadata(node: str, step: int) -> dict[str, str]:
    """What a shard says it is of."""
    return {"node": node, "step": str(step)}


def make_carrier(case: Case, plan: Plan, *, keep_messages: bool = False) -> TorchCarrier:
    """Executors for every node of a plan."""
    part = plan.parts[0]
    executors = {node: make_executor(case, part, node) for node in part.nodes}
    return TorchCarrier(executors, keep_messages=keep_messages, case=case, plan=plan)


def make_executor(case: Case, plan: Plan, node: str) -> NodeExecutor:
    """The executor of one node of a plan."""
    return NodeExecutor(plan, node, case.node_job, case.folder / "model", case.datasets().get(node))


def distance(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float:
    """Relative distance of two sets of tensors, each taken as one vector."""
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    names = sorted(theirs)
    left = torch.cat([ours[name].double().flatten() for name in names])
    right = torch.cat([theirs[name].double().flatten() for name in names])
    return float((left - right).norm() / right.norm())


TASKS: Final[Mapping[str, str]] = {
    **{name: family.tasks[-1] for name, family in FAMILIES.items()},
    "bert": "sequence-classification",
}
"""``model_type`` -> a task that the family has, by which it is tested."""


def family_writer(folder: Path) -> Callable[[str], Path]:
    """Make a function that writes the inputs of a family once, and returns their folder."""

    @functools.cache
    def write(model_type: str) -> Path:
        return write_family_inputs(folder / model_type, model_type, TASKS[model_type])

    return write


def run(plan: Plan, carrier: TorchCarrier, seed: int, *, start: StartPoint | None = None) -> RecordedResult:
    """Run with random delays."""
    rng = random.Random(seed)
    return RecordedRing(
        plan,
        carrier=carrier,
        action_s=lambda node, action: rng.random(),
        message_s=lambda source, target, payload: rng.random(),
        control_s=lambda node: rng.random(),
        start=start,
    ).run()


def rebuilt(case: Case, plan: Plan, shards: dict[str, bytes], saved: rd.LogCheckpoint) -> TorchCarrier:
    """New executors that go on from the shards of a checkpoint."""
    carrier = make_carrier(case, plan)
    for node, executor in carrier.executors.items():
        with_head = saves_head(plan.course, node, saved.holder)
        executor.load_shard(Pieces.of(shards[node]), shard_metadata(node, saved.step), with_head=with_head)
    return carrier


def holder_of(plan: Plan, result: RecordedResult) -> str:
    """Who has the head at the end."""
    last = [entry for entry in result.logged if isinstance(entry, rd.LogTurn)][-1]
    return last.turn.owner


def same_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of tensors are equal in every bit."""
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
