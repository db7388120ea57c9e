"""The model of one node for a plan: its blocks, and at an owner the embedding and the head.

Users with adapters of another kind (``ringtune.job.job``) need a second model with modules of this kind, which shares
the frozen weights of the first one, also those in 16 or 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from edge.data.dataset import OwnerDataset
from edge.model.auxiliary import start_auxiliary
from edge.model.frozen_weights import FrozenFiles
from edge.model.head_groups import subnets_of_config
from edge.model.heads import task_of
from edge.model.optimizers import UnitOptimizers
from edge.model.owner import OwnerParts
from edge.model.result import load_initial
from edge.model.skeleton import ADAPTER, Skeleton, build_skeleton
from edge.model.slice import DTYPES, BlockRunner, Empty, materialise, module_bytes
from edge.techniques.offload.helper import AdapterModules, AuxiliaryModels
from edge.techniques.offload.merged_matrices import MergedMatrices
from edge.techniques.offload.pairs import Capture, Captures
from edge.techniques.offload.users import UserSets
from ringtune.errors import DataError, JobError, ModelError
from ringtune.job.job import Job, Kind, job_of, kinds_of
from ringtune.models.adapter_support import head_group_refusal
from ringtune.models.families import check_task, family_named
from ringtune.models.folder import model_dimensions, read_config
from ringtune.schedule.course import Course
from ringtune.schedule.placement import Helper
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import users_text
from ringtune.schedule.saved_activations import merged as joined
from ringtune.schedule.units import Range
from ringtune.techniques.offload import LOSSY


@dataclass(kw_only=True, slots=True)
class HostedModel:
    """The part of the model that one node hosts, ready to compute.

    Attributes:
        skeleton: the model; only hosted modules are real.
        optimizers: of the trained tensors of the slice, and of the other hosts' blocks fitted here; one per block.
        hosted_bytes: of weights, adapters and head.
        captures: record the pairs of hosted blocks that helpers fit; None without helpers.
        helped: adapters of other hosts' blocks that are fitted here, one for each run of neighbouring blocks,
            ascending.
        merged: matrices with merged adapters that helpers fit; None where adapters are unmerged.
        kept: merged adapters, or the sums of several users', by name, for checkpoints and the result.
        sets: adapters of each user, of blocks that helpers fit; None with one set for all users, or merged ones.
        kinds: kind of the rows' adapters -> what runs the hosted blocks with them, the job's own kind first; one if
            users have one kind, or adapters are merged. All share their frozen weights.
    """

    skeleton: Skeleton
    blocks: BlockRunner
    optimizers: UnitOptimizers
    owner: OwnerParts | None
    dtype: torch.dtype
    device: torch.device
    hosted_bytes: int
    captures: Captures | None = None
    helped: tuple[AuxiliaryModels, ...] = ()
    merged: MergedMatrices | None = None
    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    sets: UserSets | None = None
    kinds: Mapping[Kind, BlockRunner] = field(default_factory=dict)

    def fitted(self) -> dict[str, nn.Parameter]:
        """Return the adapters of other hosts' blocks that train here, by name."""
        found: dict[str, nn.Parameter] = {}
        for models in self.helped:
            found |= models.parameters(models.units.start, models.units.stop)
        return found

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
        materialise(
            skeleton,
            weights,
            blocks=[*private, *range(piece.start, piece.stop)],
            with_embedding=is_owner,
            dtype=dtype,
            device=device,
        )
        if head is not None:
            task.connect(skeleton, head, weights)
            head.to(device=device, dtype=dtype).eval()
    if course.initial:
        head_of = (job.model.task, course.labels) if head is not None else None
        load_initial(skeleton, Path(job.adapter.from_), head_of=head_of)
    _check_subnets(course, job, skeleton)
    helpers, users = plan.placement.helpers_of(node), course.user_sets
    helped_blocks, hosted_blocks = _blocks_of(helpers), [*private, *range(piece.start, piece.stop)]
    first, *more = kinds_of(job, users)
    captures, merged, sets, others = None, None, None, list[tuple[Kind, Skeleton]]()
    kept: dict[str, torch.Tensor] = {}
    if helpers:  # captures first: they change which tensors train
        is_merged = course.helper_settings.merged
        with_signs = course.helper_settings.pairs in LOSSY
        own = Capture(skeleton, helped_blocks, with_signs=with_signs)
        for kind in more:
            other = job_of(job, kind.config)
            if is_merged:
                others.append((kind, AdapterModules(folder, other, helped_blocks, dtype, device).skeleton))
            else:
                kin = sharing(skeleton, folder, other, blocks=hosted_blocks, dtype=dtype, device=device)
                others.append((kind, kin))
        at = skeleton if is_merged else None
        also = [(kind, Capture(kin, helped_blocks, with_signs=with_signs, at=at)) for kind, kin in others]
        captures = Captures([(first, own), *also], by_kind=not is_merged)
        if is_merged:
            counts = [(kin, len(kind.users)) for kind, kin in others]
            own_count = len(first.users) if users else None
            merged = MergedMatrices(skeleton, helped_blocks, folder, job, users=own_count, others=counts)
            kept, merged.initial, others = merged.initial, {}, []
        elif users:
            every = [(skeleton, first.users), *((kin, kind.users) for kind, kin in others)]
            sets = UserSets(every, helped_blocks)
    blocks = BlockRunner(
        skeleton,
        dropout=job.train.dropout,
        seed=job.train.seed,
        top_tokens=plan.course.top_tokens,
        compute=course.compute,
    )
    kinds = {first: blocks}
    for kind, kin in others:
        kinds[kind] = BlockRunner(
            kin, dropout=job.train.dropout, seed=job.train.seed, top_tokens=plan.course.top_tokens
        )
    owner = None
    if head is not None:
        owner = OwnerParts(skeleton, head, task, job.train)
    fitted = joined(Range(one.start, one.stop) for one in plan.placement.helped_by(node))
    helped = tuple(AuxiliaryModels(folder, job, range(*units), dtype, device, users) for units in fitted)
    trained = {index: blocks.parameters(index, index + 1) for index in range(piece.start, piece.stop)}
    trained |= {index: models.parameters(index, index + 1) for models in helped for index in models.units}
    return HostedModel(
        skeleton=skeleton,
        blocks=blocks,
        optimizers=UnitOptimizers(job.train, trained),
        owner=owner,
        dtype=dtype,
        device=device,
        hosted_bytes=module_bytes(*(runner.skeleton.model for runner in kinds.values()))
        + (sets.other_bytes if sets is not None else 0)
        + sum(models.held_bytes for models in helped),
        captures=captures,
        helped=helped,
        merged=merged,
        kept=kept,
        sets=sets,
        kinds=kinds,
    )


def _blocks_of(helpers: Iterable[Helper]) -> list[int]:
    return [block for helper in helpers for block in range(helper.start, helper.stop)]


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
        if problem := head_group_refusal(job.adapter.config, heads=subnets.heads_each):
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


def sharing(
    first: Skeleton, folder: Path, job: Job, *, blocks: Iterable[int], dtype: torch.dtype, device: torch.device
) -> Skeleton:
    """Build a model with the adapters of ``job`` on the frozen weights of ``first``, which is materialised.

    Embedding and head are shared too; of the folder only the configuration is read; ``blocks`` are real in ``first``.

    Raises:
        JobError: see ``build_skeleton``.
    """
    with torch.random.fork_rng(devices=[]):
        found = build_skeleton(folder, job)
    wanted = set(blocks)
    for index in range(len(found.blocks)):
        if index not in wanted:
            found.blocks[index] = Empty()
            continue
        if found.auxiliary:
            start_auxiliary(found.blocks[index], seed=found.seed, index=index)
        _share(found.blocks[index], first.blocks[index])
        for path, module in found.blocks[index].named_modules():
            if path.split(".")[-1] == ADAPTER:
                module.to(device=device, dtype=dtype)
    root = found.layout.blocks_path.split(".")[0]
    for name, module in first.base.named_children():
        if name != root:
            setattr(found.base, name, module)
    return found


def _share(block: nn.Module, first: nn.Module) -> None:
    """Point all tensors of a block, except adapters, at those of the same block of the first model."""
    theirs = dict(first.named_modules())
    for path, module in block.named_modules():
        if path in theirs and ADAPTER not in path.split("."):
            for own, others in (
                (module._parameters, theirs[path]._parameters),
                (module._buffers, theirs[path]._buffers),
            ):
                own.update({name: value for name, value in others.items() if name in own})
