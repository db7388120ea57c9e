"""Offload of adapters (ColA) at a node: hosts send pairs; helpers fit adapters with them and return weights.

Users with adapters of another kind (``ringtune.job.job``) need a second model with modules of this kind, which shares
the frozen weights of the first one, also those in 16 or 8 bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from edge.checkpoint.snapshots import block_of
from edge.model.auxiliary import start_auxiliary
from edge.model.optimizer_state import StateFile
from edge.model.skeleton import ADAPTER, Skeleton, build_skeleton
from edge.model.slice import BlockRunner, Empty
from edge.model.tensor_files import DTYPE_NAMES, first_not_finite
from edge.techniques.activation_checkpointing import BlockForward, SavedActivations
from edge.techniques.micro_batches import Handler, MicroBatches, OpenItem
from edge.techniques.offload.helper import AdapterModules, AuxiliaryModels, GradientSums, MergedSums
from edge.techniques.offload.merged_matrices import MergedMatrices
from edge.techniques.offload.pairs import Capture, Captures, PairsByKind, PairVectors, PairWire, from_file, to_file
from edge.techniques.offload.sites import adapter_weights, install
from edge.techniques.offload.users import RunBlocks, RunSaving, UserBlockRunner, UserSets
from ringtune.errors import DivergedError, IntegrityError, PlanError, sent_by
from ringtune.job.job import AdapterKind, Job, job_of, kinds_of
from ringtune.schedule.actions import Action, Op, Payload, TensorKey
from ringtune.schedule.course import COLLABORATION
from ringtune.schedule.lowering import weights_key
from ringtune.schedule.placement import Helper
from ringtune.schedule.plan import Plan
from ringtune.schedule.saved_activations import merged as joined
from ringtune.schedule.turns import Item, microbatch_rows
from ringtune.schedule.units import Range
from ringtune.schedule.versions import weight_version
from ringtune.storage.pieces import Pieces
from ringtune.techniques.offload import LOSSY, RowsOfUser, rows_of_users

_MAX_TIMES: Final = 4
"""Numbers of pairs that a helper decodes, compared with what full rows of all its blocks have."""


@dataclass(kw_only=True, slots=True)
class OffloadParts:
    """Modules of one node that helpers fit, or that it fits for other hosts.

    Attributes:
        kinds: kind of the rows' adapters -> the model with them, the job's own kind first; one if users have one kind,
            or adapters are merged. All share their frozen weights; only hosted modules are real.
        captures: record the pairs of hosted blocks that helpers fit; None without helpers.
        helped: adapters of other hosts' blocks that are fitted here, one for each run of neighbouring blocks,
            ascending.
        merged: matrices with merged adapters that helpers fit; None where adapters are unmerged.
        kept: merged adapters, or the sums of several users', by name, for checkpoints and the result.
        sets: adapters of each user, of blocks that helpers fit; None with one set for all users, or merged ones.
    """

    kinds: Mapping[AdapterKind, Skeleton]
    dtype: torch.dtype
    device: torch.device
    captures: Captures | None = None
    helped: tuple[AuxiliaryModels, ...] = ()
    merged: MergedMatrices | None = None
    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    sets: UserSets | None = None

    @property
    def skeleton(self) -> Skeleton:
        """The model with the job's own kind of adapters."""
        return next(iter(self.kinds.values()))

    @property
    def other_bytes(self) -> int:
        """Bytes of weights beside those of the models."""
        return (self.sets.other_bytes if self.sets is not None else 0) + sum(each.held_bytes for each in self.helped)

    def fitted(self) -> dict[str, nn.Parameter]:
        """Return the adapters of other hosts' blocks that train here, by name."""
        parameters: dict[str, nn.Parameter] = {}
        for models in self.helped:
            parameters |= models.parameters(models.units.start, models.units.stop)
        return parameters


def offload_parts(
    plan: Plan,
    node: str,
    job: Job,
    folder: Path,
    skeleton: Skeleton,
    hosted_blocks: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> OffloadParts:
    """Build what a node needs for its helpers and as a helper; before its optimizers, as captures change what trains.

    ``skeleton`` has the job's own adapters and real ``hosted_blocks``. Of the folder only the configuration is read.
    """
    settings, users = plan.course.helper_settings, plan.course.user_sets
    first, *more = kinds_of(job, users)
    fitted = joined(Range(helper.start, helper.stop) for helper in plan.placement.helped_by(node))
    parts = OffloadParts(kinds={first: skeleton}, dtype=dtype, device=device)
    helped_blocks = _blocks_of(plan.placement.helpers_of(node))

    def other_model(own_job: Job) -> Skeleton:
        if settings.merged:
            return AdapterModules(folder, own_job, helped_blocks, dtype, device).skeleton
        return sharing(skeleton, folder, own_job, blocks=hosted_blocks, dtype=dtype, device=device)

    if helped_blocks:
        with_signs = settings.pairs in LOSSY
        capture = Capture(skeleton, helped_blocks, with_signs=with_signs)
        others = [(kind, other_model(job_of(job, kind.config))) for kind in more]
        at = skeleton if settings.merged else None
        also = [(kind, Capture(kin, helped_blocks, with_signs=with_signs, at=at)) for kind, kin in others]
        parts.captures = Captures([(first, capture), *also], by_kind=not settings.merged)
        if settings.merged:
            counts = [(kin, len(kind.users)) for kind, kin in others]
            own_count = len(first.users) if users else None
            parts.merged = MergedMatrices(skeleton, helped_blocks, folder, job, users=own_count, others=counts)
            parts.kept, parts.merged.initial = parts.merged.initial, {}
        else:
            parts.kinds = {first: skeleton, **dict(others)}
            if users:
                parts.sets = UserSets([(kin, kind.users) for kind, kin in parts.kinds.items()], helped_blocks)
    parts.helped = tuple(AuxiliaryModels(folder, job, range(*units), dtype, device, users) for units in fitted)
    return parts


def _blocks_of(helpers: Iterable[Helper]) -> list[int]:
    return [block for helper in helpers for block in range(helper.start, helper.stop)]


def sharing(
    first: Skeleton, folder: Path, job: Job, *, blocks: Iterable[int], dtype: torch.dtype, device: torch.device
) -> Skeleton:
    """Build a model with the adapters of ``job`` on the frozen weights of ``first``, which is materialised.

    Embedding and head are shared too; of the folder only the configuration is read; ``blocks`` are real in ``first``.

    Raises ``JobError``: see ``build_skeleton``.
    """
    with torch.random.fork_rng(devices=[]):
        skeleton = build_skeleton(folder, job)
    indices = set(blocks)
    for index in range(len(skeleton.blocks)):
        if index not in indices:
            skeleton.blocks[index] = Empty()
            continue
        if skeleton.auxiliary:
            start_auxiliary(skeleton.blocks[index], seed=skeleton.seed, index=index)
        _share(skeleton.blocks[index], first.blocks[index])
        for path, module in skeleton.blocks[index].named_modules():
            if path.split(".")[-1] == ADAPTER:
                module.to(device=device, dtype=dtype)
    root = skeleton.layout.blocks_path.split(".")[0]
    for name, module in first.base.named_children():
        if name != root:
            setattr(skeleton.base, name, module)
    return skeleton


def _share(block: nn.Module, first: nn.Module) -> None:
    """Point all tensors of a block, except adapters, at those of the same block of the first model."""
    theirs = dict(first.named_modules())
    for path, module in block.named_modules():
        if path in theirs and ADAPTER not in path.split("."):
            for tensors, others in (
                (module._parameters, theirs[path]._parameters),
                (module._buffers, theirs[path]._buffers),
            ):
                tensors.update({name: value for name, value in others.items() if name in tensors})


class OffloadRunner:
    """Pairs and weights of one node in one run; ``kinds`` run the hosted blocks with each kind of adapters."""

    def __init__(
        self, plan: Plan, node: str, parts: OffloadParts, kinds: Mapping[AdapterKind, BlockRunner], flows: MicroBatches
    ) -> None:
        self._course, self._placement, self._parts, self._flows = plan.course, plan.placement, parts, flows
        self._helpers = plan.placement.helpers_of(node)
        settings, seed = plan.course.helper_settings, plan.course.seed
        wire, projected = settings.pairs, settings.projected
        self._wire = PairWire(wire, parts.captures.inputs(projected) if parts.captures else {}, seed=seed)
        self._fitted = [(models, PairWire(wire, models.inputs(projected), seed=seed)) for models in parts.helped]
        self._shipped: dict[TensorKey, tuple[Mapping[str, torch.Tensor], Mapping[str, str]]] = {}
        self._file: StateFile | None = None
        self._received: dict[TensorKey, Mapping[str, torch.Tensor]] = {}
        self._by_user: UserBlockRunner | None = None
        if parts.sets is not None and parts.captures is not None:
            runners = {user: runner for kind, runner in kinds.items() for user in kind.users}
            self._by_user = UserBlockRunner(parts.sets, parts.captures, runners)

    @property
    def handlers(self) -> dict[Op, Handler]:
        """Handlers of SHIP and FIT actions."""
        return {Op.SHIP: self.ship, Op.FIT: self.fit}

    # ---- at a host --------------------------------------------------------------------------------

    @property
    def vectors(self) -> PairVectors | None:
        """Vectors of projected pairs here; None where pairs are sent exact or rounded."""
        if self._wire.vectors is None:
            return None
        projected = self._wire.vectors if self._parts.captures is not None else None
        return PairVectors(projected, [wire for _, wire in self._fitted])

    def shown(self, block: int) -> dict[str, torch.Tensor]:
        """Return the vectors on which a host has projected the pairs of a block, by site; none before the first."""
        vectors = {} if self._wire.vectors is None else self._wire.vectors.tensors()
        return {site: vector for site, vector in vectors.items() if block_of(site) == block and vector.numel()}

    def load_shown(self, block: int, tensors: Mapping[str, torch.Tensor], *, where: str) -> None:
        """Replace the vectors of a block by those of ``shown``; raises ``IntegrityError``."""
        if self._wire.vectors is not None:
            sites = (site for site in self._wire.vectors.tensors() if block_of(site) == block)
            whole = dict.fromkeys(sites, torch.zeros(0)) | dict(tensors)
            self._wire.vectors.load_blocks(whole, (block,), where=where)

    def saved(self, trained: Mapping[str, nn.Parameter]) -> dict[str, PairVectors | MergedSums | GradientSums]:
        """Return what a shard has beside trained tensors: vectors, sums of users' adapters, and of gradients."""
        stores: dict[str, PairVectors | MergedSums | GradientSums] = {}
        if (vectors := self.vectors) is not None:
            stores["pairs"] = vectors
        if self._is_collaboration and self._parts.helped:
            stores["merged"] = MergedSums(self._parts.helped)
        if added_up := self.added_up(trained):
            stores["sums"] = GradientSums(added_up)
        return stores

    def added_up(self, trained: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Select the tensors with gradients that are added up over several steps, here or at a helper."""
        offload, fitted = self._course.offload, self._parts.fitted()
        return {
            name: value
            for name, value in trained.items()
            if name in fitted or (offload is not None and offload.has_block(block_of(name)))
        }

    @property
    def installed(self) -> dict[str, torch.Tensor]:
        """Adapters of hosted blocks that helpers update, by name; a checkpoint is loaded into them in place."""
        if self._parts.merged is not None:
            return dict(self._parts.kept)
        if self._parts.sets is not None:
            return dict(self._parts.sets.parameters(range(self._course.num_blocks)))
        return dict(adapter_weights(self._parts.skeleton, _blocks_of(self._helpers)))

    def held(self, block: int) -> dict[str, torch.Tensor]:
        """Return the adapters of a block that its host holds of its helper, by name, at either of both."""
        if not any(block in models.units for models, _ in self._fitted):
            return {name: value for name, value in self.installed.items() if block_of(name) == block}
        models, _ = self._models_of(block)
        if self._is_collaboration:
            return models.sums(block, block + 1)
        return {name: value.detach() for name, value in models.parameters(block, block + 1).items()}

    def load_held(self, tensors: Mapping[str, torch.Tensor], blocks: Collection[int], *, where: str) -> None:
        """Replace what a host holds of the helpers of some blocks.

        Raises:
            IntegrityError: other names, shapes or types; nothing was replaced then.
            DivergedError: numbers that are not finite; nothing was replaced then.
        """
        parameters = {name: value for name, value in self.installed.items() if block_of(name) in blocks}
        install(parameters, tensors, where=where)
        self.loaded()

    def sets(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return this node's part of each user's adapters in the result, by block and name; empty without users.

        Users alone: at the host. Users in collaboration: at the helper, because the host has only the sum.
        """
        by_user: dict[str, dict[str, torch.Tensor]] = {user: {} for user in self._course.user_sets}
        for user, tensors in by_user.items():
            if self._parts.sets is not None:
                tensors |= self._parts.sets.of(user)
            elif self._is_collaboration:
                for models in self._parts.helped:
                    tensors |= models.of_user(user)
        return by_user

    def other_kinds(self, job: Job, folder: Path) -> dict[str, Skeleton]:
        """Return the hosted blocks with the adapters of each user of another kind than the job's own.

        Adapters that are merged or train nowhere are built anew with their initial values, except of blocks of which
        helpers return the sets. Of the folder only the configuration is read.
        """
        skeletons, fitted, parts = dict[str, Skeleton](), _blocks_of(self._helpers), self._parts
        there = {kind.number: skeleton for kind, skeleton in parts.kinds.items()}
        indices = [index for index, block in enumerate(parts.skeleton.blocks) if not isinstance(block, Empty)]
        for kind in kinds_of(job, self._course.user_sets)[1:]:
            skeleton = there.get(kind.number)
            if skeleton is None:
                units = [index for index in indices if index not in fitted]
                skeleton = AdapterModules(folder, job_of(job, kind.config), units, parts.dtype, parts.device).skeleton
            skeletons |= dict.fromkeys(kind.users, skeleton)
        return skeletons

    @property
    def _is_collaboration(self) -> bool:
        return self._course.helper_settings.users == COLLABORATION

    @contextlib.contextmanager
    def recording(self, action: Action, entry: OpenItem) -> Iterator[None]:
        """Record pairs of a micro-batch inside the context, which is a forward with a graph, or a backward.

        A backward records the pairs of recomputed blocks.
        """
        captures = self._parts.captures
        blocks = [block for block in range(action.start, action.stop) if self._helper_of(block) is not None]
        if captures is None or not blocks or not entry.item.kind.has_update:
            yield
            return
        flow = self._flows.of(action)
        with captures.recording(flow.pairs.get(blocks[0]), self._rows(action, entry)) as pairs:
            yield
        flow.pairs.update(dict.fromkeys(blocks, pairs))

    def run_saving(
        self, item: Item, micro: int, run: RunSaving, forward: BlockForward, hidden: torch.Tensor
    ) -> tuple[SavedActivations, torch.Tensor]:
        """Run blocks with a graph, the rows of each user apart where users have adapters of their own."""
        if self._by_user is None:
            return run(forward, hidden)
        return self._by_user.saving(rows_of_users(self._course, item, micro), run, forward, hidden)

    def run_free(self, item: Item, micro: int, run: RunBlocks, blocks: BlockRunner, *inputs: Any) -> torch.Tensor:
        """Run blocks without a graph in the same way; ``inputs`` are hidden state, mask and context."""
        if self._by_user is None:
            return run(blocks, *inputs)
        return self._by_user.free(rows_of_users(self._course, item, micro), run, blocks, *inputs)

    def ship(self, action: Action, entry: OpenItem) -> tuple[()]:
        """Pack the pairs of some blocks for their helper, and drop the recorded ones; raises ``PlanError``."""
        pairs: dict[str, torch.Tensor] = {}
        flow = self._flows.of(action)
        for block in range(action.start, action.stop):
            recorded: PairsByKind | None = flow.pairs.pop(block, None)
            if recorded is None:
                raise PlanError(f"{action} has no pairs of block {block} here")
            pairs |= recorded.take(block, block + 1)
        key = TensorKey(Payload.PAIRS, action.seq, action.micro, action.start)
        self._shipped[key] = self._wire.encode(pairs), _metadata(key)
        self._flows.drop_if_empty(action)
        return ()

    def install(self, action: Action) -> bool:
        """Install a helper's weights in place of an update; return False for an update of this node's own blocks.

        Raises ``IntegrityError``: the weights do not fit the blocks; nothing was changed then.
        """
        helper = self._helper_of(action.start)
        if helper is None:
            return False
        with sent_by(helper.node):
            self._install(action, self._received.pop(weights_key(action)), helper.node)
        return True

    def _install(self, action: Action, weights: Mapping[str, torch.Tensor], helper: str) -> None:
        where = f"the adapters that helper {helper} sent for the blocks [{action.start}, {action.stop})"
        blocks, parts = range(action.start, action.stop), self._parts
        if parts.sets is not None:
            parts.sets.install(weights, blocks, where=where)
        elif parts.merged is None:
            install(adapter_weights(parts.skeleton, blocks), weights, where=where)
        else:
            parts.merged.install(weights, blocks, where=where)
            for name, value in weights.items():
                parts.kept[name].copy_(value)
            self._let_go()

    def loaded(self) -> None:
        """Merge the adapters of a loaded checkpoint, where adapters are merged."""
        if self._parts.merged is not None:
            blocks = _blocks_of(self._helpers)
            self._parts.merged.install(self._parts.kept, blocks, where="the adapters of the checkpoint")
            self._let_go()

    def keep_on_disk(self, folder: Path, of: Mapping[str, str]) -> None:
        """Keep merged adapters in a file in ``folder``; only checkpoints and the result read them.

        ``of`` is run and node, for the file's header. Raises ``StorageError``.
        """
        kept = self._parts.kept
        if not kept:
            return
        shapes = {name: (DTYPE_NAMES[value.dtype], tuple(value.shape)) for name, value in kept.items()}
        self._file = StateFile(folder / "merged.safetensors", {**of, "part": "merged adapters"}, shapes)
        self._file.make()
        for name, tensor in self._file.map().items():
            tensor.copy_(kept[name])
            kept[name] = tensor
        self._let_go()

    def _let_go(self) -> None:
        """Release the resident pages of adapters in the file."""
        if self._file is not None:
            for name in {name.rpartition("/")[0] for name in self._parts.kept}:
                self._file.release_pages(name)

    # ---- at a helper ------------------------------------------------------------------------------

    def fit(self, action: Action, entry: OpenItem) -> tuple[()]:
        """Accumulate the gradients of some blocks from their pairs, and drop the pairs.

        Raises ``IntegrityError``, or ``DivergedError``: pairs are not finite in the type of the run.
        """
        models, wire = self._models_of(action.start)
        key = TensorKey(Payload.PAIRS, action.seq, action.micro, action.start)
        with sent_by(self._placement.host_of(action.start)):
            sent = self._received.pop(key)
            rows = microbatch_rows(self._course, entry.item)[action.micro]
            most = _MAX_TIMES * rows * self._course.max_length * models.values_per_token
            if (came := wire.num_values(sent)) > most:
                raise IntegrityError(
                    f"the pairs of {rows} rows have {came:,} numbers, at most {most:,} are taken; remove the host with "
                    "'ringtune nodes remove NAME', or install one version of ringtune on all machines"
                )
            pairs = wire.decode(sent, self._parts.dtype)
            _require_finite({name: value for name, value in pairs.items() if value is not sent.get(name)}, key)
            models.fit(pairs, self._rows(action, entry), range(action.start, action.stop))
        return ()

    def _rows(self, action: Action, entry: OpenItem) -> Sequence[RowsOfUser]:
        """The rows of each user in a micro-batch; empty with one set for all users."""
        return rows_of_users(self._course, entry.item, action.micro) if self._course.user_sets else ()

    def changing(self, action: Action) -> tuple[str, ...]:
        """Users with adapters that the next update at this helper changes; empty without users."""
        return self._models_of(action.start)[0].changing(action.start, action.stop) if self._fits(action) else ()

    def updated(self, action: Action, step: int, users: Collection[str]) -> None:
        """Prepare the weights of an update at this helper for their host; ignore updates of hosted blocks.

        ``users`` is the result of ``changing`` before the update. With overlap the next update may run before the
        sending, so the weights are copied.
        """
        if self._fits(action):
            key, (models, _) = weights_key(action), self._models_of(action.start)
            if self._is_collaboration:
                weights = models.sums(action.start, action.stop)
            else:
                weights = models.weights(action.start, action.stop, users)
            if self._course.helper_settings.overlap:
                weights = {name: value.clone() for name, value in weights.items()}
            self._shipped[key] = weights, self._metadata(key, step)

    # ---- parcels ----------------------------------------------------------------------------------

    def take_parcel(self, key: TensorKey) -> Pieces:
        """Return pairs or weights for sending; the weights must not change before the pieces were iterated.

        Raises ``DivergedError``: they are not finite.
        """
        tensors, metadata = self._shipped.pop(key)
        _require_finite(tensors, key)
        return to_file(tensors, metadata)

    def put_parcel(self, key: TensorKey, data: Pieces, step: int) -> None:
        """Keep received pairs or weights until their action; raises ``IntegrityError`` or ``DivergedError``."""
        tensors = from_file(data, self._metadata(key, step), where=_what(key), device=self._parts.device)
        _require_finite(tensors, key)
        self._received[key] = tensors

    def _metadata(self, key: TensorKey, step: int) -> dict[str, str]:
        metadata = _metadata(key)
        if key.payload == Payload.WEIGHTS:
            metadata["version"] = str(weight_version(self._course, key.boundary, step + 1))
        return metadata

    def _helper_of(self, block: int) -> Helper | None:
        return next((helper for helper in self._helpers if helper.has_block(block)), None)

    def _fits(self, action: Action) -> bool:
        return any(action.start in models.units for models, _ in self._fitted)

    def _models_of(self, block: int) -> tuple[AuxiliaryModels, PairWire]:
        return next(fitted for fitted in self._fitted if block in fitted[0].units)


def _what(key: TensorKey) -> str:
    return "the pairs" if key.payload == Payload.PAIRS else "the adapters of a helper"


def _require_finite(tensors: Mapping[str, torch.Tensor], key: TensorKey) -> None:
    if name := first_not_finite(tensors):
        raise DivergedError(f"{_what(key)} have {name} with numbers that are not finite")


def _metadata(key: TensorKey) -> dict[str, str]:
    return {"item": str(key.seq), "micro-batch": str(key.micro), "block": str(key.boundary)}
