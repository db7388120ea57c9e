"""The model of one node for a plan: its blocks, at an owner the embedding and the head, and the gradients of updates.

Hosts of the same blocks send each other their gradients. Every replica sums those of all hosts in the same order and
does the same update, so all replicas stay equal in bits. A step with a gradient that is not finite is not applied.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from edge.data.dataset import OwnerDataset
from edge.model.frozen_weights import FrozenFiles
from edge.model.head_groups import subnets_of_config
from edge.model.heads import task_of
from edge.model.optimizers import UnitOptimizers
from edge.model.owner import OwnerParts
from edge.model.result import load_initial
from edge.model.skeleton import Skeleton, build_skeleton
from edge.model.slice import DTYPES, BlockRunner, materialise, module_bytes
from edge.model.tensor_files import require_finite_grads
from edge.model.unit_grads import grad_blob, read_grads
from edge.techniques.micro_batches import OpenItem
from edge.techniques.offload.runner import OffloadParts, offload_parts
from ringtune.engine.failure_texts import diverged, may_diverge
from ringtune.errors import DataError, DivergedError, JobError, ModelError, PlanError
from ringtune.job.job import Job, Kind
from ringtune.models.adapter_support import head_group_refusal, subnet_refusal
from ringtune.models.families import check_task, family_named
from ringtune.models.folder import model_dimensions, read_config
from ringtune.schedule.actions import Action, TensorKey
from ringtune.schedule.course import Course
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import users_text
from ringtune.schedule.stages import replicas
from ringtune.schedule.units import EMBEDDING, unit_name
from ringtune.storage.pieces import Pieces


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
    kinds: Mapping[Kind, BlockRunner]

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


Grads = dict[str, torch.Tensor | None]


class Replica:
    """Gradients of one host's blocks, with those of the other hosts of its stage.

    A single host of its blocks sums nothing.
    """

    def __init__(self, plan: Plan, node: str, hosted: HostedModel) -> None:
        self._course, self._piece, self._hosted = plan.course, plan.slice_of(node), hosted
        self._names = replicas(plan.placement, node)
        self._rank = self._names.index(node) if self._names else 0
        self._came: dict[TensorKey, Grads] = {}

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
        self._came[key] = read_grads(data, self._parameters(key, entry), where=where)

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
        keys = [key for key in self._came if (key.seq, key.boundary) == (update.seq, update.start)]
        ranks = {key.micro: self._came.pop(key) for key in keys}
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
