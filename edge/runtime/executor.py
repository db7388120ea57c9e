"""Executor of a node: the modules that it hosts, a handler for each compute action, parcels, and the node's shard.

The engine decides the order; here each action is a few lines on the state of its micro-batch::

    E  ids -> hidden            F  hidden -> hidden, keeps (x, y)    H  hidden -> loss, gradient
    f  hidden -> hidden         B  y.backward(gradient) -> x.grad    U  optimizer step

The actions of helpers are in ``edge.techniques.offload``. An E of an item that trains the embedding keeps its y too,
for its B. A tensor is dropped once it is sent or used, so a frozen slice holds nothing between two micro-batches.

Hosts of the same blocks send each other their gradients. Every replica sums those of all hosts in the same order and
does the same update, so all replicas stay equal in bits. A step with a gradient that is not finite is not applied.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from edge.checkpoint.shard_file import MERGED, PAIRS, PREFIXES, SUMS, VECTORS, ExtraTensors, ShardContent, small_tensors
from edge.checkpoint.snapshots import block_of
from edge.data.dataset import OwnerDataset
from edge.machine.accelerator import capacity_errors, device_memory, device_name, settle_of
from edge.model.frozen_weights import FrozenFiles
from edge.model.head_groups import subnets_of_config
from edge.model.heads import task_of
from edge.model.optimizer_state import InactiveState
from edge.model.optimizers import UnitOptimizers
from edge.model.owner import OwnerParts
from edge.model.result import load_initial, load_saved, result_files, users_files
from edge.model.skeleton import Skeleton, build_skeleton
from edge.model.slice import DTYPES, BlockRunner, materialise, module_bytes
from edge.model.tensor_files import digest_of, require_finite_grads, require_finite_values
from edge.model.unit_grads import add_up_rows, grad_blob, load_grads, read_grads
from edge.runtime.generation import KeptKeys, TextWriter
from edge.techniques import build_techniques
from edge.techniques.activation_checkpointing import (
    BlockForward,
    SavedActivations,
    SavedGraph,
    run_saving,
    storage_bytes,
)
from edge.techniques.micro_batches import Handler, MicroBatch, MicroBatches, OpenItem, VersionStore
from edge.techniques.offload.helper import GradientSums
from edge.techniques.offload.runner import OffloadParts, OffloadRunner, offload_parts
from edge.techniques.operations import ScoreCollector
from edge.techniques.velora import Projections, Vectors
from edge.transport.tensors import check_finite
from ringtune.config.sections import learning_rate
from ringtune.engine.failure_texts import diverged, may_diverge
from ringtune.errors import DataError, DivergedError, FrameError, IntegrityError, JobError, ModelError, PlanError
from ringtune.job.job import AdapterKind, Job
from ringtune.models.adapter_support import head_group_refusal, subnet_refusal
from ringtune.models.families import check_task, family_named
from ringtune.models.folder import model_dimensions, read_config
from ringtune.schedule.actions import Action, Op, Payload, TensorKey
from ringtune.schedule.course import COLLABORATION, Course
from ringtune.schedule.operation_tables import BlockScores
from ringtune.schedule.placement import Slice
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import users_text
from ringtune.schedule.stages import collected_blocks, replicas
from ringtune.schedule.turns import Item, StepKind, Turn, items
from ringtune.schedule.units import EMBEDDING, Units, unit_name
from ringtune.schedule.versions import rate_at
from ringtune.storage.pieces import Pieces
from ringtune.storage.tensor_files import TensorFile, TensorPieces, write_tensors

Values = tuple[tuple[str, float], ...]


@dataclass(kw_only=True, slots=True)
class HostedModel:
    """The part of the model that one node hosts, ready to compute.

    Attributes:
        skeleton: the model; only hosted modules are real.
        optimizers: of the trained tensors of the slice, and of the other hosts' blocks fitted here; one per block.
        hosted_bytes: of weights, adapters and head.
        copied: which files have frozen weights that were copied; see ``SafetensorsFiles.copied_text``.
        parts: what helpers fit of the hosted blocks, and what is fitted here for other hosts.
        kinds: what runs the hosted blocks with each kind of adapters of ``parts``, the job's own first.
    """

    skeleton: Skeleton
    blocks: BlockRunner
    optimizers: UnitOptimizers
    owner: OwnerParts | None
    dtype: torch.dtype
    device: torch.device
    hosted_bytes: int
    copied: str
    parts: OffloadParts
    kinds: Mapping[AdapterKind, BlockRunner]

    def all_optimizers(self) -> tuple[UnitOptimizers, ...]:
        """Return all optimizers of this node: of the slice, and of an owner's embedding and head."""
        return (self.optimizers,) if self.owner is None else (self.optimizers, self.owner.optimizers)

    def weights(self) -> Iterator[torch.Tensor]:
        """Yield every parameter and buffer of the model, including the empty ones of blocks hosted elsewhere."""
        for runner in self.kinds.values():
            yield from runner.skeleton.model.parameters()
            yield from runner.skeleton.model.buffers()


def host(
    plan: Plan, node: str, job: Job, folder: Path, dataset: OwnerDataset | None, *, device: torch.device
) -> HostedModel:
    """Build the model that ``node`` hosts; see ``NodeExecutor`` for arguments and errors."""
    course, piece = plan.course, plan.slice_of(node)
    is_owner = course.owner(node) is not None
    private = range(plan.placement.private_blocks if is_owner else 0)
    hosted_blocks = [*private, *range(piece.start, piece.stop)]
    dtype, task = DTYPES[job.model.dtype], task_of(job.model.task)
    if is_owner:
        _check_data(course, node, dataset)
    head = None
    with torch.random.fork_rng(devices=[]):
        skeleton = build_skeleton(folder, job)
        _check_model(course, job, skeleton, folder)
        if is_owner:
            head = task.add(skeleton.model, course.labels)
    with FrozenFiles(folder, course.frozen) as weights:
        materialise(skeleton, weights, blocks=hosted_blocks, with_embedding=is_owner, dtype=dtype, device=device)
        if head is not None:
            task.connect(skeleton, head, weights)
            head.to(device=device, dtype=dtype).eval()
        copied = weights.copied_text() if device.type == "cpu" else ""  # an accelerator has a copy of each
    if course.initial:
        head_of = (job.model.task, course.labels) if head is not None else None
        load_initial(skeleton, Path(job.adapter.from_), head_of=head_of)
    _check_subnets(course, job, skeleton)
    parts = offload_parts(plan, node, job, folder, skeleton, hosted_blocks, dtype=dtype, device=device)
    runner = functools.partial(
        BlockRunner,
        dropout=job.train.dropout,
        seed=job.train.seed,
        top_tokens=course.top_tokens,
        compute=course.compute,
    )
    blocks = runner(skeleton)
    kinds = {kind: blocks if kin is skeleton else runner(kin) for kind, kin in parts.kinds.items()}
    owner = None if head is None else OwnerParts(skeleton, head, task, job.train)
    trained = {index: blocks.parameters(index, index + 1) for index in range(piece.start, piece.stop)}
    trained |= {index: models.parameters(index, index + 1) for models in parts.helped for index in models.units}
    return HostedModel(
        skeleton=skeleton,
        blocks=blocks,
        optimizers=UnitOptimizers(job.train, trained),
        owner=owner,
        dtype=dtype,
        device=device,
        hosted_bytes=module_bytes(*(kin.model for kin in parts.kinds.values())) + parts.other_bytes,
        copied=copied,
        parts=parts,
        kinds=kinds,
    )


def _check_data(course: Course, node: str, dataset: OwnerDataset | None) -> None:
    if dataset is None:
        raise DataError(f"node {node} owns data by the plan but has none; start it with --data")
    planned = course.owner(node)
    counted = (dataset.train_rows, dataset.eval_rows)
    if planned is not None and counted != (planned.train_rows, planned.eval_rows):
        raise DataError(
            f"node {node} has {counted[0]} training and {counted[1]} evaluation rows, the plan says "
            f"{planned.train_rows} and {planned.eval_rows}; plan anew"
        )
    if planned is not None and planned.users and dataset.users != planned.users:
        raise DataError(
            f"node {node} has rows of {users_text(dataset.users, but=planned.users)}, the plan says "
            f"{users_text(planned.users, but=dataset.users)}; plan anew"
        )
    dataset.set_labels(course.labels)


def _check_subnets(course: Course, job: Job, skeleton: Skeleton) -> None:
    """Refuse subnets that blocks with these adapters can't have."""
    if course.subnets > 1:
        subnets = subnets_of_config(skeleton.model.config, inner=course.hidden_size, count=course.subnets)
        if problem := (
            head_group_refusal(job.adapter.config, heads=subnets.heads_each)
            or subnet_refusal(skeleton.layout, dropout=job.train.dropout)
        ):
            raise JobError(problem)


def _check_model(course: Course, job: Job, skeleton: Skeleton, folder: Path) -> None:
    config = read_config(folder)
    check_task(family_named(config["model_type"]), job.model.task, where=str(folder))
    dimensions = model_dimensions(config)
    if course.max_length > dimensions.longest and not dimensions.fixed:
        raise ModelError(
            f"train.max_length is {course.max_length}, {folder} can take {dimensions.longest} tokens; lower it"
        )
    num_blocks, hidden_size = len(skeleton.blocks), int(skeleton.model.config.hidden_size)
    if (num_blocks, hidden_size) != (course.num_blocks, course.hidden_size):
        raise ModelError(
            f"{folder} has {num_blocks} blocks of width {hidden_size}, the plan says {course.num_blocks} of "
            f"{course.hidden_size}; every node needs the same model"
        )
    passed = skeleton.layout.passed(config)
    widths = ((), ()) if passed is None else (passed.entering, passed.returning)
    if widths != (course.entering, course.returning):
        raise ModelError(
            f"blocks of {folder} pass on {[*widths[0]] or hidden_size} values of a token, the plan says "
            f"{[*course.entering] or course.hidden_size}; every node needs the same model"
        )


class NodeExecutor:
    """Computes the actions of one node in one run, on the blocks and head that it hosts.

    Not thread-safe: all calls are from one thread (dropout uses torch's global generator).

    Args:
        dataset: the node's own rows; needed exactly if the plan names it as an owner.

    Raises:
        ModelError: the folder does not fit the plan.
        JobError: the adapter configuration can't be split.
        DataError: an owner without data, or a class that the plan does not have.
    """

    def __init__(
        self, plan: Plan, node: str, job: Job, model_folder: Path, dataset: OwnerDataset | None, *, device: str = "cpu"
    ) -> None:
        self._plan, self._course, self._ends = plan, plan.course, (EMBEDDING, plan.course.head)
        self._slice = plan.slice_of(node)
        self._job, self._folder = job, model_folder
        self._dataset = dataset if plan.owner(node) else None
        self._hosted: HostedModel = host(plan, node, job, model_folder, dataset, device=torch.device(device))
        blocks = [self._hosted.skeleton.blocks[index] for index in range(self._slice.start, self._slice.stop)]
        self._versions = VersionStore(blocks, self._hosted.optimizers)
        self._scoring = ScoreCollector(self._hosted.skeleton, self._course)
        self._flows = MicroBatches(plan.course, dtype=self._hosted.dtype, device=torch.device(device))
        self.offloading = OffloadRunner(plan, node, self._hosted.parts, self._hosted.kinds, self._flows)
        helped = {block for helper in plan.placement.helpers_of(node) for block in range(helper.start, helper.stop)}
        self._trained_here = {*range(self._slice.start, self._slice.stop)} - helped
        self._replica = Replica(plan, node, self._hosted)
        self._forwards = ForwardRunner(plan, node, self._hosted, self._versions, self._scoring, self.offloading)
        self.part = CheckpointPart(plan, self._slice, self._hosted, self.offloading, self._forwards.vectors)
        self.inactive_state = InactiveState(self._course, self._hosted.all_optimizers())
        self.dtype, self.device = self._hosted.dtype, torch.device(device)
        self._settle = settle_of(self.device)
        self._capacity_errors = functools.partial(capacity_errors, node, self.device.type)
        self._items: dict[int, OpenItem] = {}
        self.kept_keys = KeptKeys(self._hosted.skeleton.base.config, plan.course.generation)
        self.texts: TextWriter | None = None
        if self._dataset is not None and plan.course.generation is not None:
            prompts = self._dataset.prompts
            self.texts = TextWriter(plan.course, plan.course.generation, job, model_folder, prompts)
        self.techniques = build_techniques(plan, node, self._flows)
        self._handlers: dict[Op, Handler] = {
            Op.EMBED: self._embed,
            Op.FORWARD_FREE: self._forward_free,
            Op.FORWARD: self._forward,
            Op.SKIP: lambda action, entry: (),
            Op.HEAD: self._head,
            Op.BACKWARD: self._backward,
            Op.UPDATE: self._update,
            **self.offloading.handlers,
        }
        for technique in self.techniques.values():
            self._handlers |= technique.handlers

    # ---- what is held -----------------------------------------------------------------------------

    @property
    def hosted_bytes(self) -> int:
        """Bytes of weights, adapters and head that this node holds."""
        return self._hosted.hosted_bytes

    @property
    def run_figures(self) -> dict[str, Any]:
        """Device, peak number and bytes of stored weight versions, and totals of techniques.

        For an accelerator also its memory and this process's peak of it, in bytes.
        """
        memory = device_memory(self.device.type)
        return {
            "device": device_name(self.device.type),
            **({"peak_device_bytes": memory.peak, "device_bytes": memory.total} if memory else {}),
            **{name: value for technique in self.techniques.values() for name, value in technique.figures.items()},
            "peak_versions": self._versions.peak_versions,
            "peak_version_bytes": self._versions.peak_extra_bytes,
        }

    def live_bytes(self) -> int:
        """Bytes of the batches, hidden states, gradients and graphs in memory, without weights."""
        held = [tensor for entry in self._items.values() if entry.batch for tensor in entry.batch.tensors()]
        held += self._flows.tensors()
        weights = storage_bytes(self._hosted.weights())
        live = sum(size for address, size in storage_bytes(held).items() if address not in weights)
        return live + self.kept_keys.num_bytes

    # ---- turns ------------------------------------------------------------------------------------

    def grant(self, turn: Turn) -> None:
        """Open the items of a turn, before any of their actions."""
        course = turn.settled(self._course)
        self._items |= {item.seq: OpenItem.of(course, item) for item in items(course, turn)}
        for technique in self.techniques.values():
            technique.grant(turn)

    def forget_turn(self, index: int) -> str:
        """Drop the items and tensors of a finished turn; return the problems of ``end_turn``."""
        done = {seq for seq, entry in self._items.items() if entry.item.turn == index}
        for seq in done:
            del self._items[seq]
        self._flows.forget(done)
        return self.end_turn(index)

    def end_turn(self, index: int) -> str:
        """End a turn in all techniques; return, once, why a technique can't continue; else empty."""
        self.kept_keys.forget(index)
        if self.texts is not None:
            self.texts.forget(index)
        problems = [technique.end_turn(index) for technique in self.techniques.values()]
        return "; ".join(filter(None, problems))

    def take_scores(self, turn_index: int) -> tuple[BlockScores, ...]:
        """Return and drop the scores of the hosted subnets for each micro-batch of a finished score turn.

        In the order of items, micro-batches and blocks; empty for another turn.
        """
        return self._scoring.take(turn_index)

    def copy_digest(self, start: int, stop: int) -> str:
        """Return the digest of this owner's copy of embedding or head, or of the trained tensors of hosted blocks."""
        if start in self._ends:
            return self._owner(None)[0].digest(start)
        return digest_of(self._hosted.blocks.parameters(start, stop))

    # ---- actions ----------------------------------------------------------------------------------

    def run(self, action: Action) -> Values:
        """Run one compute action; return when the device has finished it; raises ``PlanError`` or ``CapacityError``.

        Returns:
            Numbers for the report, summed by name: an H gives ``loss_sum`` and ``count``, and by task ``correct``,
            ``tokens``, or at an evaluation ``questions``, ``exact_sum`` and ``f1_sum``; other actions none.
        """
        entry = self._items.get(action.seq)
        if entry is None:
            raise PlanError(f"{action} belongs to no granted turn")
        handler = self._handlers.get(action.op)
        if handler is None:
            raise PlanError(f"{action} is not a compute action that this node knows")
        self.inactive_state.begin(entry.item)
        with self._capacity_errors(action):
            values = handler(action, entry)
            self._settle()
        return values

    def _embed(self, action: Action, entry: OpenItem) -> Values:
        owner, dataset = self._owner(action)
        if entry.item.kind is StepKind.GENERATE:
            self._flows.begin(action, self._embedded_text(entry.item, action.micro, owner))
            return ()
        rows = entry.own_rows(action, self._course, dataset, owner, self.device)
        if entry.trained.has_embedding:
            y = owner.embed_to_train(rows, entry.dropout_at(action))
            graphs: dict[tuple[int, int], SavedActivations] = {(EMBEDDING, EMBEDDING + 1): SavedGraph(None, y)}
            self._flows.begin(action, MicroBatch(hidden=y.detach(), mask=rows.mask, graphs=graphs))
        else:
            self._flows.begin(action, MicroBatch(hidden=owner.embed(rows), mask=rows.mask))
        return ()

    def _embedded_text(self, item: Item, micro: int, owner: OwnerParts) -> MicroBatch:
        """Embed the newest tokens of a text; a text that has ended passes as a token under a mask of zeros."""
        batch = None if self.texts is None else self.texts.batch(item, micro)
        if batch is None:
            hidden = torch.zeros((1, 1, self._course.hidden_size), dtype=self._hosted.dtype, device=self.device)
            return MicroBatch(hidden=hidden, mask=torch.zeros((1, 1), dtype=torch.int64, device=self.device))
        rows = batch.to(self.device)
        return MicroBatch(hidden=owner.embed(rows), mask=rows.mask)

    def _choose_token(self, action: Action, entry: OpenItem) -> Values:
        hidden, owner = self._flows.enter_head(action), self._owner(action)[0]
        entry.heads_left -= 1
        self._flows.drop_if_empty(action)
        if self.texts is None:
            raise PlanError(f"{action} is of a text, and the plan has no [generation]; plan anew")
        return self.texts.chosen(entry.item, action.micro, functools.partial(owner.next_logits, hidden))

    def _forward_free(self, action: Action, entry: OpenItem) -> Values:
        """Run blocks without a graph; a text passes with its newest tokens, and the head gets the last one only."""
        flow, is_text = self._flows.of(action), entry.item.kind is StepKind.GENERATE
        if is_text and flow.mask is not None and not flow.mask.any():
            self.kept_keys.drop(entry.item, action)
            return ()
        cache = functools.partial(self.kept_keys.of, entry.item, action) if is_text else None
        inputs = flow.block_inputs(action, self._hosted.blocks, cache)
        hidden = self._forwards.run_free(action, entry, *inputs)
        flow.hidden = hidden[:, -1:] if is_text and action.stop == self._course.head else hidden
        return ()

    def _forward(self, action: Action, entry: OpenItem) -> Values:
        item, flow = entry.item, self._flows.of(action)
        hidden, mask, context = flow.block_inputs(action, self._hosted.blocks)
        if item.kind.has_update and self._trained_here & {*entry.trained}:
            self._versions.use(item.seq)
        with self.offloading.recording(action, entry):
            graph, flow.hidden = self._forwards.run(action, entry, hidden, mask, context)
        flow.graphs[action.start, action.stop] = graph
        return ()

    def _head(self, action: Action, entry: OpenItem) -> Values:
        if entry.item.kind is StepKind.GENERATE:
            return self._choose_token(action, entry)
        item, flow, (owner, dataset) = entry.item, self._flows.of(action), self._owner(action)
        hidden = self._flows.enter_head(action)
        rows = entry.own_rows(action, self._course, dataset, owner, self.device)
        if item.kind.has_backward:
            result = owner.train_step(
                hidden,
                rows,
                num_targets=max(1, entry.num_targets),
                at=entry.dropout_at(action),
                weights=entry.trained if item.kind.has_update else Units(self._course.num_blocks),
                goes_down=entry.lowest[action.micro] < self._course.head,
            )
            flow.grad = result.grad
        else:
            result = owner.evaluate(hidden, rows)
            if item.kind is StepKind.EVALUATE:
                more = dataset.score(self._course, item, rows, result.predictions)
                result = result._replace(values=result.values + more)
        if may_diverge(item) and not math.isfinite(loss := dict(result.values)["loss_sum"]):
            raise diverged(item, f"the loss is {loss}", course=self._course, micro=action.micro)
        entry.heads_left -= 1
        if entry.heads_left == 0:
            entry.batch = None
        self._flows.drop_if_empty(action)
        return result.values

    def _backward(self, action: Action, entry: OpenItem) -> Values:
        flow = self._flows.of(action)
        graph, flow.grad = flow.graphs.pop((action.start, action.stop), None), self._flows.whole_grad(action)
        if graph is None or flow.grad is None:
            raise PlanError(f"{action} has no {'graph' if graph is None else 'gradient'} here")
        with self.offloading.recording(action, entry):
            flow.grad = graph.backward(flow.grad)
        self._scoring.reduce(entry.item, action)
        if not entry.item.kind.has_update:
            for parameter in self._parameters_of(action).values():
                parameter.grad = None
        elif action.start == EMBEDDING:
            add_up_rows(self._owner(action)[0].units[EMBEDDING])
        self._flows.drop_if_empty(action)
        return ()

    def _parameters_of(self, action: Action) -> Mapping[str, torch.nn.Parameter]:
        if action.start == EMBEDDING:
            return self._owner(action)[0].units[EMBEDDING]
        return self._hosted.blocks.parameters(action.start, action.stop)

    def _update(self, action: Action, entry: OpenItem) -> Values:
        if self.offloading.install(action):
            return ()
        rate = learning_rate(self._job.train, *rate_at(self._course, action.start, entry.item.step))
        self._replica.complete(action, entry)
        if action.start in self._ends:
            self._owner(action)[0].optimizers.update([action.start], rate)
        else:
            if action.start < self._slice.stop and action.stop > self._slice.start:  # not of blocks that others host
                self._versions.release(action.seq)
            changing = self.offloading.changing(action)
            self._hosted.optimizers.update(range(action.start, action.stop), rate)
            self.offloading.updated(action, entry.item.step, changing)
        self.inactive_state.updated(entry.item.step, range(action.start, action.stop))
        return ()

    # ---- tensors in and out -----------------------------------------------------------------------

    def put_tensor(self, key: TensorKey, tensor: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Add a received hidden state (B, T, D) or gradient to its micro-batch; see ``MicroBatches.put``.

        Raises ``FrameError``: it has other tokens than this node has sent or its own rows have, or is of packed rows in
        place of a text, of which the newest tokens alone travel.
        """
        entry = self._items.get(key.seq)
        if entry is None or entry.item.kind is not StepKind.GENERATE:
            is_own = entry is not None and key.is_hidden and entry.item.owner == self._slice.node
            self._flows.check_tokens(key, tensor, self._own_tokens(key) if is_own else 0)
        elif mask is not None and bool((mask > 1).any()):
            raise FrameError(f"the {key} is of a text, and has the mask of packed rows; it is dropped")
        self.put_made(key, tensor, mask)

    def put_made(self, key: TensorKey, tensor: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Add a hidden state or gradient that this process has made, of any number of tokens, as ``put_tensor``."""
        with self._capacity_errors(key):
            self._flows.put(key, tensor, mask)

    def _own_tokens(self, key: TensorKey) -> int:
        """Number of tokens of each own row in a micro-batch; one from the activation cache was not sent from here."""
        owner, dataset = self._owner(key)
        return self._items[key.seq].own_rows(key, self._course, dataset, owner, self.device).mask.shape[1]

    def take_tensor(self, key: TensorKey) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a micro-batch's hidden state or gradient for sending, and drop it; see ``MicroBatches.take``.

        Raises:
            DivergedError: the tensor is not finite. The receiver would refuse it, and the faulty node would be unknown.
        """
        tensor, mask = self._flows.take(key)
        try:
            check_finite(tensor.detach(), tensor.shape)
        except DivergedError as error:
            raise diverged(
                self._items[key.seq].item, f"{error}: {key}", course=self._course, micro=key.micro
            ) from error
        return tensor, mask

    def copy_tensor(self, key: TensorKey) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a copy, on the CPU, of the tensor that ``take_tensor`` would return; the tensor is kept."""
        return self._flows.copy(key)

    # ---- head and files ---------------------------------------------------------------------------

    def head_blob(self) -> Pieces:
        """Return the head with its optimizer state; the head must not change before the pieces were iterated."""
        return self._owner(None)[0].to_blob()

    def drop_head_state(self) -> None:
        """Free the optimizer state of a head after its hand-over."""
        self._owner(None)[0].optimizers.drop_state()  # it returns with a newer head

    def load_head_blob(self, data: Pieces) -> None:
        """Replace the head and its optimizer state by ``head_blob`` of another owner; raises ``IntegrityError``."""
        self._owner(None)[0].load_blob(data)

    def take_parcel(self, key: TensorKey) -> Pieces:
        """Return a parcel for sending: a gradient of embedding, head or hosted blocks, pairs, or a helper's weights.

        Raises ``DivergedError``: it is not finite; see ``take_tensor``.
        """
        with self._of_item(key):
            if key.payload == Payload.UNIT_GRAD:
                owner = self._owner(key)[0]
                grad = owner.unit_grad(key.boundary)
                require_finite_grads(owner.units[key.boundary], f"the {unit_name(key.boundary, self._course.head)}")
                return grad
            if key.payload == Payload.REPLICA_GRAD:
                return self._replica.grads(key, self._items[key.seq])
            return self.offloading.take_parcel(key)

    def put_parcel(self, key: TensorKey, data: Pieces) -> None:
        """Take a parcel of another node; raises ``IntegrityError`` or ``DivergedError``."""
        entry = self._items[key.seq]
        with self._of_item(key):
            if key.payload == Payload.REPLICA_GRAD:
                self._replica.put(key, data, entry)
            elif key.payload == Payload.UNIT_GRAD:
                where = f"the gradient of the {unit_name(key.boundary, self._course.num_blocks)} for item {key.seq}"
                load_grads(data, self._owner(key)[0].units[key.boundary], where=where)
            else:
                self.offloading.put_parcel(key, data, entry.item.step)

    @contextmanager
    def _of_item(self, key: TensorKey) -> Iterator[None]:
        """Name the step in errors of values that are not finite."""
        try:
            yield
        except DivergedError as error:
            raise diverged(self._items[key.seq].item, str(error)) from error

    @property
    def copied(self) -> str:
        """Names of the files with frozen weights that could not be mapped; empty = none."""
        return self._hosted.copied

    def rows_digest(self, run_id: str) -> str:
        """Return the digest of this owner's rows, keyed with ``run_id``; empty if the node is no owner."""
        return "" if self._dataset is None else self._dataset.digest(run_id)

    def shard(self, metadata: Mapping[str, str], *, with_head: bool) -> Pieces:
        """Return this node's shard: trained tensors with optimizer state, read when the pieces are iterated.

        ``metadata`` names run, step and node; ``with_head`` is for the owner that holds the head.
        """
        head = self.head_blob() if with_head else None
        return self.part.write(head, metadata)

    def load_shard(self, data: Pieces, metadata: Mapping[str, str], *, with_head: bool) -> None:
        """Replace trained tensors and optimizer state by a shard; arguments as for ``shard``.

        Raises:
            IntegrityError: the shard is unreadable, of another run, or does not fit this node's slice.
            DivergedError: the head in it is not finite.
            OSError: the content can't be read.
        """
        head = self.part.load(data, metadata, with_head=with_head)
        if head is not None:
            self._owner(None)[0].load_blob(head, where="the head in the shard")

    def adapter_files(self, *, with_head: bool, with_private: bool = False) -> dict[str, Pieces]:
        """Return this node's part of the run's result; tensors are read when a file is iterated.

        Args:
            with_head: also the configs and, unless it is frozen, the head; for the node that holds the newest head.
            with_private: also the adapters of the private blocks (never trained); for one owner.

        Returns:
            Name to content: ``adapter.safetensors`` (unless the node hosts nothing), and with the head
            ``adapter_config.json`` and, of a head that trains, ``head_config.json`` and ``model_head.safetensors``. For
            users with adapters of their own see ``users_files``. Where the blocks' own weights train:
            ``blocks.safetensors`` instead of the first two. Where all parameters train: ``model.safetensors``, and with
            the head ``config.json`` and the tokenizer's files.

        Raises:
            DivergedError: a trained weight is not finite after the last update.
        """
        # separately: merged adapters of helpers may be in a file, the others on an accelerator
        require_finite_values(self.part.trained, "the part of this node")
        require_finite_values(self.offloading.installed, "the helpers of this node")
        require_finite_values(self._owner(None)[0].parameters if with_head else {}, "the head")
        private = range(0 if with_private else self._plan.placement.private_blocks)
        hosted = range(self._slice.start, self._slice.stop)
        without = (*private, *(hosted if not collected_blocks(self._plan.placement, self._slice.node) else ()))
        skeleton, task, kept = self._hosted.skeleton, self._job.model.task, self._hosted.parts.kept
        if sets := self.offloading.sets():
            kinds = self.offloading.other_kinds(self._job, self._folder)
            return users_files(skeleton, sets, without_blocks=without, with_head=with_head, others=kinds)
        return result_files(skeleton, task, self._folder, without_blocks=without, with_head=with_head, merged=kept)

    def load_saved(self, folder: Path) -> None:
        """Replace the initial values of trained tensors, and at an owner of the head, by those of a run's result.

        Raises ``IntegrityError``: the folder is damaged or belongs to another job.
        """
        load_saved(self._hosted.skeleton, self._job.model.task, folder, with_head=self._hosted.owner is not None)

    def _owner(self, work: Action | TensorKey | None) -> tuple[OwnerParts, OwnerDataset]:
        if self._hosted.owner is None or self._dataset is None:
            raise PlanError(f"{work or 'the head'} needs an owner, which this node is not")
        return self._hosted.owner, self._dataset


Grads = dict[str, torch.Tensor | None]


class Replica:
    """Gradients of one host's blocks, with those of the other hosts of its stage.

    A single host of its blocks sums nothing.
    """

    def __init__(self, plan: Plan, node: str, hosted: HostedModel) -> None:
        self._course, self._piece, self._hosted = plan.course, plan.slice_of(node), hosted
        self._names = replicas(plan.placement, node)
        self._rank = self._names.index(node) if self._names else 0
        self._received: dict[TensorKey, Grads] = {}

    def grads(self, key: TensorKey, entry: OpenItem) -> Pieces:
        """Return the gradients of this host's micro-batches of an item as one safetensors file; they stay unchanged.

        Raises ``DivergedError``: a gradient is not finite.
        """
        parameters = self._parameters(key, entry)
        require_finite_grads(parameters, unit_name(key.boundary, self._course.head))
        return grad_blob(parameters, ())

    def put(self, key: TensorKey, data: Pieces, entry: OpenItem) -> None:
        """Keep the gradients of another host; raises ``IntegrityError`` or ``DivergedError``."""
        where = f"the gradients of item {key.seq} from node {self._names[key.micro]}"
        self._received[key] = read_grads(data, self._parameters(key, entry), where=where)

    def complete(self, action: Action, entry: OpenItem) -> None:
        """Sum the gradients of an update over all copies or replicas, and refuse those that are not finite.

        Raises:
            DivergedError: a gradient is not finite; names step, unit and rows.
            PlanError: the node has no embedding and head to update.
        """
        if action.start in (EMBEDDING, self._course.head):
            if self._hosted.owner is None:
                raise PlanError(f"{action} needs an owner, which this node is not")
            self._hosted.owner.complete(action.start)
            units = {action.start: self._hosted.owner.units[action.start]}
        else:
            self._add_up(action)
            trained = self._hosted.optimizers.units
            units = {unit: dict(trained.get(unit, {})) for unit in range(action.start, action.stop)}
        if not may_diverge(entry.item):
            return
        try:
            for unit, parameters in units.items():
                name = unit_name(unit, self._course.head)
                require_finite_grads(parameters, f"the {name}" if unit in (EMBEDDING, self._course.head) else name)
        except DivergedError as error:
            raise diverged(entry.item, str(error), course=self._course) from error

    def _add_up(self, update: Action) -> None:
        """Sum the gradients of all hosts for an update, in ring order.

        No sent tensor is changed in place: the link may still read it.
        """
        if not self._names:
            return
        keys = [key for key in self._received if (key.seq, key.boundary) == (update.seq, update.start)]
        ranks = {key.micro: self._received.pop(key) for key in keys}
        for name, parameter in self._hosted.blocks.parameters(update.start, update.stop).items():
            total = None
            for rank in range(len(self._names)):
                grad = parameter.grad if rank == self._rank else ranks[rank][name]
                if grad is not None:
                    total = grad if total is None else total + grad
            parameter.grad = total

    def _parameters(self, key: TensorKey, entry: OpenItem) -> dict[str, nn.Parameter]:
        for start, stop in entry.trained.ranges_within(self._piece.start, self._piece.stop):
            if start == key.boundary:
                return dict(self._hosted.blocks.parameters(start, stop))
        raise PlanError(f"item {key.seq} trains no blocks from {key.boundary} on here, so it has no gradients of them")


class ForwardRunner:
    """Runs the forwards of one node, with and without a graph.

    VeLoRA is used in items that update weights. Scores are exact: score items keep whole inputs, and recompute the same
    blocks as training items.

    Raises:
        JobError: VeLoRA is for layers that do not train here.

    Attributes:
        vectors: VeLoRA's, for checkpoints; None without VeLoRA.
    """

    def __init__(
        self,
        plan: Plan,
        node: str,
        hosted: HostedModel,
        versions: VersionStore,
        scoring: ScoreCollector,
        offloading: OffloadRunner,
    ) -> None:
        self._placement, self._hosted, self._course = plan.placement, hosted, plan.course
        self._versions, self._scoring, self._offloading = versions, scoring, offloading
        piece, velora, seed = plan.slice_of(node), plan.course.velora, plan.course.seed
        self._projections: Projections | None = None
        self.vectors: Vectors | None = None
        if velora is not None:
            self._projections = Projections(velora, hosted.skeleton, start=piece.start, stop=piece.stop, seed=seed)
            self.vectors = self._projections.vectors

    def run(
        self, action: Action, entry: OpenItem, hidden: torch.Tensor, mask: torch.Tensor, context: Any
    ) -> tuple[SavedActivations, torch.Tensor]:
        """Run the blocks of an F action; return their saved activations and the output of the last block.

        hidden is (batch rows, tokens, model width), mask (batch rows, tokens), and context of
        ``FamilyForward.context``.
        """
        blocks = self._hosted.blocks
        for runner in self._hosted.kinds.values():
            runner.train_only(action.start, action.stop, entry.trained)
        forward = BlockForward(
            blocks=blocks,
            mask=mask,
            context=context,
            trained=entry.trained,
            lowest=entry.lowest[action.micro],
            train_at=entry.dropout_at(action),
            patterns=entry.patterns(action),
            watched=lambda start, stop: self._scoring.watched(
                entry.item, action._replace(start=start, stop=stop), entry.trained
            ),
            version=functools.partial(self._versions.at, entry.item.seq),
            projections=self._projections if entry.item.kind.has_update else None,
        )
        run = functools.partial(run_saving, start=action.start, stop=action.stop, placement=self._placement)
        return self._offloading.run_saving(entry.item, action.micro, run, forward, hidden)

    def run_free(
        self, action: Action, entry: OpenItem, hidden: torch.Tensor, mask: torch.Tensor, context: Any
    ) -> torch.Tensor:
        """Run the blocks of an f action, which saves nothing; arguments as for ``run``."""
        blocks, patterns = self._hosted.blocks, entry.patterns(action)

        def run(blocks: BlockRunner, hidden: torch.Tensor, mask: torch.Tensor, context: Any) -> torch.Tensor:
            return blocks.run(hidden, mask, context, action.start, action.stop, patterns=patterns)

        with torch.no_grad():
            return self._offloading.run_free(entry.item, action.micro, run, blocks, hidden, mask, context)


_WHERE: Final = "the blocks that were taken over"


class CheckpointPart:
    """Writes and reads the shard of one node.

    Args:
        hosted: the node's blocks, and the adapters that it fits for other hosts.
        offloading: knows the adapters that helpers train.
    """

    def __init__(
        self, plan: Plan, piece: Slice, hosted: HostedModel, offloading: OffloadRunner, vectors: Vectors | None
    ) -> None:
        self._course, self._piece, self._hosted = plan.course, piece, hosted
        self._offloading, self._vectors = offloading, vectors
        self._blocks = plan.placement.held_at(piece.node)

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """Trained tensors here: of the slice, and of other hosts' blocks fitted here."""
        slice_parameters = self._hosted.blocks.parameters(self._piece.start, self._piece.stop)
        return slice_parameters | self._hosted.parts.fitted()

    @property
    def vectors(self) -> dict[str, torch.Tensor]:
        """VeLoRA's vectors of the slice."""
        return {} if self._vectors is None else self._vectors.tensors()

    def load_vectors(self, tensors: Mapping[str, torch.Tensor], *, where: str) -> None:
        """Replace VeLoRA's vectors; raises ``IntegrityError`` where they are of other layers or sizes."""
        if self._vectors is not None:
            self._vectors.check(tensors, where=where)
            self._vectors.load(tensors)

    def write(self, head: Pieces | None, metadata: Mapping[str, str]) -> Pieces:
        """Return the shard, read when the pieces are iterated; see ``edge.checkpoint.shard_file.ShardContent``.

        Raises ``DivergedError``: a trained weight is not finite.
        """
        content = self._content()
        require_finite_values(content.parameters, "the part of this node")
        return content._replace(installed=self._offloading.installed).write(head, metadata, self._blocks)

    def load(self, data: Pieces, metadata: Mapping[str, str], *, with_head: bool) -> Pieces | None:
        """Load a shard; return the head in it; see ``edge.checkpoint.shard_file.ShardContent``."""
        content = self._content()._replace(installed=self._offloading.installed)
        head = content.load(data, metadata, with_head=with_head)
        self._offloading.loaded()
        return head

    def tensors(self) -> dict[str, TensorPieces]:
        """Return trained tensors with optimizer state, and what goes with them, by their names in a shard."""
        return self._content().tensors()

    def load_migrated(self, tensors: Mapping[str, TensorPieces], *, blocks: Collection[int]) -> None:
        """Load ``tensors()`` of other nodes for ``blocks``; all other blocks are untrained yet.

        Of blocks that a helper trains only values and vectors are loaded. Raises ``IntegrityError``.
        """
        trained = {name: value for name, value in self.trained.items() if block_of(name) in blocks}
        installed = {name: value for name, value in self._offloading.installed.items() if block_of(name) in blocks}
        is_sum = self._course.helper_settings.users == COLLABORATION
        file = TensorFile(write_tensors(_for_node(tensors, installed, is_sum=is_sum)), where=_WHERE)
        content = ShardContent(trained, self._hosted.optimizers, installed=installed, where=_WHERE, part="blocks")
        state, sums = content.state(), GradientSums(self._offloading.added_up(trained))
        given = {prefix: small_tensors(file, prefix) for prefix in (VECTORS, PAIRS, SUMS)}
        state.check(file, besides=tuple(f"{prefix}{name}" for prefix, vectors in given.items() for name in vectors))
        state.check_numbers(file)
        sums.check(given[SUMS], where=_WHERE)
        for prefix, vectors in ((VECTORS, self._vectors), (PAIRS, self._offloading.vectors)):
            if vectors is not None:
                vectors.load_blocks(given[prefix], blocks, where=_WHERE)
        sums.load(given[SUMS])
        state.load(file)
        self._offloading.loaded()

    def _content(self) -> ShardContent:
        """Return what this node has, without the adapters that helpers train."""
        trained = self.trained
        velora: dict[str, ExtraTensors] = {} if self._vectors is None else {"velora": self._vectors}
        return ShardContent(trained, self._hosted.optimizers, {**velora, **self._offloading.saved(trained)})


def _for_node(
    tensors: Mapping[str, TensorPieces], installed: Collection[str], *, is_sum: bool
) -> dict[str, TensorPieces]:
    """Select what a node loads of trained blocks, by the names in a shard.

    Of blocks that a helper trains it loads values and vectors alone; ``installed`` are their names here. With
    ``is_sum`` these values are sums of all users' adapters.
    """
    kept: dict[str, TensorPieces] = {}
    blocks = {block_of(name) for name in installed}
    for name, value in tensors.items():
        kind = f"{name.partition('/')[0]}/"
        inside = name.removeprefix(kind)
        if kind == MERGED:
            kept |= {f"{PREFIXES.value}{inside}": value} if inside in installed else {}
        elif block_of(name) not in blocks or kind == PAIRS or (kind == PREFIXES.value and not is_sum):
            kept[name] = value
    lacking = sorted({block_of(name) for name in installed if f"{PREFIXES.value}{name}" not in kept}) if is_sum else []
    if lacking:
        raise IntegrityError(
            f"{_WHERE} have no sum of users' adapters of block {lacking[0]}, which earlier versions did not save at a "
            "helper; resume the run on its own nodes"
        )
    return kept
