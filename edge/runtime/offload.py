"""Offload of adapters (ColA) at a node: hosts send pairs; helpers fit adapters with them and return weights."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from edge.model.optimizer_state import StateFile
from edge.model.skeleton import Skeleton
from edge.model.slice import Empty
from edge.model.tensor_files import DTYPE_NAMES
from edge.runtime.micro_batches import MicroBatches, OpenItem
from edge.runtime.node_model import HostedModel
from edge.techniques.offload.helper import AdapterModules, AuxiliaryModels, MergedSums
from edge.techniques.offload.pairs import PairsByKind, PairVectors, PairWire, from_file, to_file
from edge.techniques.offload.sites import adapter_weights, check_like, install
from edge.techniques.offload.users import block_of
from edge.techniques.velora import block_of as vector_block
from ringtune.engine.failure_texts import diverged
from ringtune.errors import DivergedError, PlanError
from ringtune.job.job import Job, job_of, kinds_of
from ringtune.schedule.actions import Action, Payload, TensorKey
from ringtune.schedule.course import COLLABORATION
from ringtune.schedule.lowering import weights_key
from ringtune.schedule.placement import Helper
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Item
from ringtune.schedule.versions import weight_version
from ringtune.storage.pieces import Pieces
from ringtune.techniques.offload import RowsOfUser, rows_of_users


class OffloadRunner:
    """Pairs and weights of one node in one run."""

    def __init__(self, plan: Plan, node: str, hosted: HostedModel, flows: MicroBatches) -> None:
        self._course, self._hosted, self._flows = plan.course, hosted, flows
        self._helpers = plan.placement.helpers_of(node)
        settings, seed = plan.course.helper_settings, plan.course.seed
        wire, projected = settings.pairs, settings.projected
        self._wire = PairWire(wire, hosted.captures.inputs(projected) if hosted.captures else {}, seed=seed)
        self._fitted = [(models, PairWire(wire, models.inputs(projected), seed=seed)) for models in hosted.helped]
        self._shipped: dict[TensorKey, Pieces] = {}
        self._file: StateFile | None = None
        self._came: dict[TensorKey, Mapping[str, torch.Tensor]] = {}

    # ---- at a host --------------------------------------------------------------------------------

    @property
    def vectors(self) -> PairVectors | None:
        """Vectors of projected pairs here; None where pairs are sent exact or rounded."""
        if self._wire.vectors is None:
            return None
        own = self._wire.vectors if self._hosted.captures is not None else None
        return PairVectors(own, [wire for _, wire in self._fitted])

    def shown(self, block: int) -> dict[str, torch.Tensor]:
        """Return the vectors on which a host has projected the pairs of a block, by site; none before the first."""
        found = {} if self._wire.vectors is None else self._wire.vectors.tensors()
        return {site: vector for site, vector in found.items() if vector_block(site) == block and vector.numel()}

    def load_shown(self, block: int, tensors: Mapping[str, torch.Tensor], *, where: str) -> None:
        """Replace the vectors of a block by those of ``shown``; raises ``IntegrityError``."""
        if self._wire.vectors is not None:
            sites = (site for site in self._wire.vectors.tensors() if vector_block(site) == block)
            whole = dict.fromkeys(sites, torch.zeros(0)) | dict(tensors)
            self._wire.vectors.load_blocks(whole, (block,), where=where)

    @property
    def merged_sums(self) -> MergedSums | None:
        """The sums of users' adapters that are fitted here; None if users do not collaborate or have no helper here."""
        return MergedSums(self._hosted.helped) if self._is_collaboration and self._hosted.helped else None

    @property
    def installed(self) -> dict[str, torch.Tensor]:
        """Adapters of hosted blocks that helpers update, by name; a checkpoint is loaded into them in place."""
        if self._hosted.merged is not None:
            return dict(self._hosted.kept)
        if self._hosted.sets is not None:
            return dict(self._hosted.sets.parameters(range(self._course.num_blocks)))
        blocks = (block for helper in self._helpers for block in range(helper.start, helper.stop))
        return dict(adapter_weights(self._hosted.skeleton, blocks))

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
        wanted = {name: value for name, value in self.installed.items() if block_of(name) in blocks}
        check_like(tensors, wanted, where=where)
        with torch.no_grad():
            for name, value in wanted.items():
                value.copy_(tensors[name])
        self.loaded()

    def sets(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return this node's part of each user's adapters in the result, by block and name; empty without users.

        Users alone: at the host. Users in collaboration: at the helper, because the host has only the sum.
        """
        found: dict[str, dict[str, torch.Tensor]] = {user: {} for user in self._course.user_sets}
        for user, own in found.items():
            if self._hosted.sets is not None:
                own |= self._hosted.sets.of(user)
            elif self._is_collaboration:
                for models in self._hosted.helped:
                    own |= models.of_user(user)
        return found

    def other_kinds(self, job: Job, folder: Path) -> dict[str, Skeleton]:
        """Return the hosted blocks with the adapters of each user of another kind than the job's own.

        Adapters that are merged or train nowhere are built anew with their initial values, except of blocks of which
        helpers return the sets. Of the folder only the configuration is read.
        """
        fitted = {block for helper in self._helpers for block in range(helper.start, helper.stop)}
        found, hosted = dict[str, Skeleton](), self._hosted
        there = {kind.number: runner.skeleton for kind, runner in hosted.kinds.items()}
        own = [index for index, block in enumerate(hosted.skeleton.blocks) if not isinstance(block, Empty)]
        for kind in kinds_of(job, self._course.user_sets)[1:]:
            skeleton = there.get(kind.number)
            if skeleton is None:
                units = [index for index in own if index not in fitted]
                skeleton = AdapterModules(folder, job_of(job, kind.config), units, hosted.dtype, hosted.device).skeleton
            found |= dict.fromkeys(kind.users, skeleton)
        return found

    @property
    def _is_collaboration(self) -> bool:
        return self._course.helper_settings.users == COLLABORATION

    @contextlib.contextmanager
    def recording(self, action: Action, entry: OpenItem) -> Iterator[None]:
        """Record pairs of a micro-batch inside the context, which is a forward with a graph, or a backward.

        A backward records the pairs of recomputed blocks.
        """
        captures = self._hosted.captures
        blocks = [block for block in range(action.start, action.stop) if self._helper_of(block) is not None]
        if captures is None or not blocks or not entry.item.kind.has_update:
            yield
            return
        flow = self._flows.of(action)
        with captures.recording(flow.pairs.get(blocks[0]), self._rows(action, entry)) as pairs:
            yield
        flow.pairs.update(dict.fromkeys(blocks, pairs))

    def ship(self, action: Action, entry: OpenItem) -> tuple[()]:
        """Pack the pairs of some blocks for their helper, and drop the recorded ones; raises ``PlanError``."""
        found: dict[str, torch.Tensor] = {}
        flow = self._flows.of(action)
        for block in range(action.start, action.stop):
            recorded: PairsByKind | None = flow.pairs.pop(block, None)
            if recorded is None:
                raise PlanError(f"{action} has no pairs of block {block} here")
            found |= recorded.take(block, block + 1)
        key = TensorKey(Payload.PAIRS, action.seq, action.micro, action.start)
        self._shipped[key] = to_file(self._wire.encode(found), _metadata(key))
        self._flows.drop_if_empty(action)
        return ()

    def install(self, action: Action, item: Item) -> bool:
        """Install a helper's weights in place of an update; return False for an update of this node's own blocks.

        Raises:
            IntegrityError: the weights do not fit the blocks; nothing was changed then.
            DivergedError: they are not finite; nothing was changed then.
        """
        helper = self._helper_of(action.start)
        if helper is None:
            return False
        try:
            self._install(action, self._came.pop(weights_key(action)), helper.node)
        except DivergedError as error:
            raise diverged(item, str(error)) from error
        return True

    def _install(self, action: Action, weights: Mapping[str, torch.Tensor], helper: str) -> None:
        where = f"the adapters that helper {helper} sent for the blocks [{action.start}, {action.stop})"
        blocks, hosted = range(action.start, action.stop), self._hosted
        if hosted.sets is not None:
            hosted.sets.install(weights, blocks, where=where)
        elif hosted.merged is None:
            install(hosted.skeleton, weights, blocks, where=where)
        else:
            hosted.merged.install(weights, blocks, where=where)
            for name, value in weights.items():
                hosted.kept[name].copy_(value)
            self._let_go()

    def loaded(self) -> None:
        """Merge the adapters of a loaded checkpoint, where adapters are merged."""
        if self._hosted.merged is not None:
            blocks = (block for helper in self._helpers for block in range(helper.start, helper.stop))
            self._hosted.merged.install(self._hosted.kept, blocks, where="the adapters of the checkpoint")
            self._let_go()

    def keep_on_disk(self, folder: Path, of: Mapping[str, str]) -> None:
        """Keep merged adapters in a file in ``folder``; only checkpoints and the result read them.

        ``of`` is run and node, for the file's header. Raises ``StorageError``.
        """
        kept = self._hosted.kept
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
            for name in {name.rpartition("/")[0] for name in self._hosted.kept}:
                self._file.release_pages(name)

    # ---- at a helper ------------------------------------------------------------------------------

    def fit(self, action: Action, entry: OpenItem) -> tuple[()]:
        """Accumulate the gradients of some blocks from their pairs, and drop the pairs; raises ``IntegrityError``."""
        models, wire = self._models_of(action.start)
        key = TensorKey(Payload.PAIRS, action.seq, action.micro, action.start)
        pairs = wire.decode(self._came.pop(key), self._hosted.dtype)
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
            self._shipped[key] = to_file(weights, self._metadata(key, step))

    # ---- parcels ----------------------------------------------------------------------------------

    def take_parcel(self, key: TensorKey) -> Pieces:
        """Return pairs or weights for sending; the weights must not change before the pieces were iterated."""
        return self._shipped.pop(key)

    def put_parcel(self, key: TensorKey, data: Pieces, step: int) -> None:
        """Keep received pairs or weights until their action; raises ``IntegrityError``."""
        where = "the pairs" if key.payload == Payload.PAIRS else "the adapters of a helper"
        self._came[key] = from_file(data, self._metadata(key, step), where=where, device=self._hosted.device)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the received tensors that no action has used yet; for tests."""
        for held in self._came.values():
            yield from held.values()

    def _metadata(self, key: TensorKey, step: int) -> dict[str, str]:
        found = _metadata(key)
        if key.payload == Payload.WEIGHTS:
            found["version"] = str(weight_version(self._course, key.boundary, step + 1))
        return found

    def _helper_of(self, block: int) -> Helper | None:
        return next((helper for helper in self._helpers if helper.has_block(block)), None)

    def _fits(self, action: Action) -> bool:
        return any(action.start in models.units for models, _ in self._fitted)

    def _models_of(self, block: int) -> tuple[AuxiliaryModels, PairWire]:
        return next(found for found in self._fitted if block in found[0].units)


def _metadata(key: TensorKey) -> dict[str, str]:
    return {"item": str(key.seq), "micro-batch": str(key.micro), "block": str(key.boundary)}
