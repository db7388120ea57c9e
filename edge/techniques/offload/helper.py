"""Adapters that a helper fits for its hosts, of each user and kind, without the base model.

Their initial values are drawn with the whole skeleton from the run's seed, so they equal the host's in every bit and
are not sent. The base weights stay zeros of stride 0.

By Proposition 1 the gradient of ``0.5 * |g(x) - (g(x) - grad)|^2``, summed over tokens, is the ordinary one. So it is a
backward through g from ``grad`` itself; no target is made.

A checkpoint has ``GradientSums``, the accumulated gradients: with an update interval of several steps
(``ringtune.schedule.course``) it may fall between two updates.

Source: ColA, section 3 (auxiliary models, equations 5 and 6, Proposition 1), and section 4.3 (several users).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from edge.model.auxiliary import start_auxiliary
from edge.model.result import load_initial
from edge.model.skeleton import Skeleton, build_skeleton
from edge.model.slice import Empty, module_bytes, products
from edge.techniques.offload.merged_matrices import MatrixAdapters, matrices_of
from edge.techniques.offload.pairs import projected_inputs
from edge.techniques.offload.sites import Site, adapter_weights, check_config, check_like, sites_of, unpack
from edge.techniques.offload.users import UserSets, set_name
from ringtune.errors import IntegrityError
from ringtune.job.job import AdapterKind, Job, job_of, kinds_of
from ringtune.techniques.compute import is_rounded
from ringtune.techniques.offload import RowsOfUser


class AuxiliaryModels:
    """The adapters of the blocks ``units``, with a set for each user.

    Args:
        folder: of the model; only its configuration is read.
        units: blocks with the adapters that are fitted here.
        users: with adapters of their own; empty = one set for all.

    Raises:
        ModelError: no such folder, or a family that is not supported.
        JobError: adapters that can't be fitted from pairs.
    """

    def __init__(
        self,
        folder: Path,
        job: Job,
        units: range,
        dtype: torch.dtype,
        device: torch.device,
        users: Collection[str] = (),
    ) -> None:
        self.units = units
        kinds_of_users = [kind for kind in kinds_of(job, tuple(users)) if kind.users or not users]
        self._kinds: list[tuple[AdapterKind, AdapterModules]] = [
            (kind, AdapterModules(folder, job_of(job, kind.config), units, dtype, device)) for kind in kinds_of_users
        ]
        sets = [(modules.skeleton, kind.users) for kind, modules in self._kinds]
        self._sets = UserSets(sets, units) if users else None
        self._places: dict[int, list[MatrixAdapters]] = {}

    @property
    def skeleton(self) -> Skeleton:
        """The model of the first kind; only the adapters of ``units`` are real."""
        return self._kinds[0][1].skeleton

    @property
    def held_bytes(self) -> int:
        """Bytes of all weights, with the sets of all users."""
        held = sum(modules.held_bytes for _, modules in self._kinds)
        return held + (self._sets.other_bytes if self._sets is not None else 0)

    @property
    def values_per_token(self) -> int:
        """Numbers in the pairs of a token, of all blocks and kinds."""
        return sum(site.inputs + site.outputs for _, modules in self._kinds for site in modules.sites.values())

    def inputs(self, projected: str) -> dict[str, int]:
        """See ``projected_inputs``."""
        return projected_inputs([(kind, modules.sites.values()) for kind, modules in self._kinds], projected)

    def parameters(self, start: int, stop: int) -> dict[str, nn.Parameter]:
        """Return the weights of blocks ``[start, stop)`` by the names of ``BlockRunner``.

        With users the name begins with the user; see ``set_name``.
        """
        if self._sets is not None:
            return self._sets.parameters(range(start, stop))
        return self._kinds[0][1].parameters(range(start, stop))

    def weights(self, start: int, stop: int, users: Collection[str] = ()) -> dict[str, torch.Tensor]:
        """Return the weights of blocks ``[start, stop)`` without a copy; with several sets, only those of ``users``."""
        parameters = self.parameters(start, stop)
        if self._sets is not None:
            names = {set_name(user, name) for user in users for name in self._sets.of(user)}
            parameters = {name: value for name, value in parameters.items() if name in names}
        return {name: parameter.detach() for name, parameter in parameters.items()}

    def of_user(self, user: str) -> dict[str, torch.Tensor]:
        """Return the weights of a user by block and name; empty with one set for all."""
        return {} if self._sets is None else dict(self._sets.of(user))

    def sums(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Return the sums of all users' changes in blocks ``[start, stop)``, as input of ``MergedMatrices``."""
        sets = self._sets
        if sets is None:
            return {}
        sets_of = [[sets.of(user) for user in kind.users] for kind, _ in self._kinds]
        skeletons = {at: modules.skeleton for at, (_, modules) in enumerate(self._kinds)}
        joined: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for block in range(start, stop):
                if block not in self._places:
                    self._places[block] = matrices_of(skeletons, block)
                for place in self._places[block]:
                    joined |= place.sum_of(sets_of)
        return joined

    def changing(self, start: int, stop: int) -> tuple[str, ...]:
        """Users with gradients in blocks ``[start, stop)``, so that the next update changes their weights."""
        if self._sets is None:
            return ()
        names = {name for name, value in self.parameters(start, stop).items() if value.grad is not None}
        return tuple(user for user in self._sets.users if any(name.startswith(f"{user}/") for name in names))

    def fit(
        self,
        tensors: Mapping[str, torch.Tensor],
        rows: Sequence[RowsOfUser] = (),
        blocks: Collection[int] | None = None,
    ) -> None:
        """Accumulate the gradients of some pairs; the pairs are not kept.

        Args:
            tensors: ``Pairs.take`` for some of the blocks here, of one micro-batch.
            rows: rows of each user, where users have adapters of their own; each set gets the gradient of its rows.
            blocks: blocks that the pairs must cover; None = the blocks that they name.

        Raises:
            IntegrityError: other names, or inconsistent shapes; nothing was added then.
        """
        if self._sets is None:
            modules = self._kinds[0][1]
            modules.check(tensors, blocks=blocks)
            modules.fit(tensors)
            return
        parts = [self._part(kind, modules, tensors, rows, blocks) for kind, modules in self._kinds]
        if odd := sorted(tensors.keys() - {f"{kind.prefix}{name}" for kind, _, part, _ in parts for name in part}):
            raise IntegrityError(f"pairs have {odd[0]} too much; host and helper need the same plan and job")
        for _, modules, part, users in parts:
            for user, positions in users:
                self._sets.use(user)
                modules.fit(part, None if len(users) == 1 else positions)

    def _part(
        self,
        kind: AdapterKind,
        modules: AdapterModules,
        tensors: Mapping[str, torch.Tensor],
        rows: Sequence[RowsOfUser],
        blocks: Collection[int] | None,
    ) -> tuple[AdapterKind, AdapterModules, dict[str, torch.Tensor], list[tuple[str, list[int]]]]:
        """Check the pairs of one kind; return them by name, with the positions of each user's rows in them."""
        users = [(user, positions) for user, positions in rows if user in kind.users]
        places = {row: at for at, row in enumerate(sorted(row for _, positions in users for row in positions))}
        of_kind = {
            name.removeprefix(kind.prefix): value
            for name, value in tensors.items()
            if name.rpartition("/")[0] == kind.prefix.rstrip("/")
        }
        if of_kind and not users:
            raise IntegrityError(f"pairs of {kind.config} are too much; host and helper need the same plan and job")
        modules.check(of_kind, len(places), blocks if users else None)
        return kind, modules, of_kind if users else {}, [(user, [places[row] for row in part]) for user, part in users]


class AdapterModules:
    """The adapter modules of the blocks ``units``, of one kind.

    Args:
        folder: of the model; only its configuration is read.
        job: of the run, with the kind of adapter.

    Raises:
        ModelError: no such folder, or a family that is not supported.
        JobError: adapters that can't be fitted from pairs.

    Attributes:
        skeleton: the model; only the adapters of ``units`` are real.
        sites: of these blocks, by name.
    """

    def __init__(self, folder: Path, job: Job, units: Iterable[int], dtype: torch.dtype, device: torch.device) -> None:
        with torch.random.fork_rng(devices=[]):
            self.skeleton: Skeleton = build_skeleton(folder, job)
        check_config(job.adapter.config, self.skeleton, dropout=job.train.dropout)
        indices = tuple(units)
        _drop_all_but(self.skeleton, indices)
        if self.skeleton.auxiliary:
            for index in indices:
                start_auxiliary(self.skeleton.blocks[index], seed=self.skeleton.seed, index=index)
        self._dtype, self._device, self._is_rounded = dtype, device, is_rounded(job)
        self.sites: dict[str, Site] = {site.name: site for index in indices for site in sites_of(self.skeleton, index)}
        for site in self.sites.values():
            site.adapter.to(device=device, dtype=dtype)
        if job.adapter.from_:
            load_initial(self.skeleton, Path(job.adapter.from_))

    @property
    def held_bytes(self) -> int:
        """Bytes of all weights."""
        return module_bytes(self.skeleton.model)

    def parameters(self, blocks: Iterable[int]) -> dict[str, nn.Parameter]:
        """Return the weights of some blocks by the names of ``BlockRunner``."""
        return adapter_weights(self.skeleton, blocks)

    def check(
        self, tensors: Mapping[str, torch.Tensor], num_rows: int | None = None, blocks: Collection[int] | None = None
    ) -> None:
        """Refuse pairs that do not cover whole blocks here.

        ``num_rows`` None = any number; ``blocks`` None = the blocks that the pairs name.

        Raises ``IntegrityError``: other names, or inconsistent shapes.
        """
        named = _blocks_of(tensors) if blocks is None else {str(block) for block in blocks}
        sites = self._sites_in(named)
        expected = {f"{site.name}.grad" for site in sites} | {f"{site.source}.x" for site in sites}
        optional = {f"{site.name}.signs" for site in sites if site.units}
        if expected != tensors.keys() - optional:
            odd = sorted(expected ^ (tensors.keys() - optional))[0]
            raise IntegrityError(f"pairs of blocks {sorted(named)} have {odd} too much or too little")
        for site in sites:
            x, grad = tensors[f"{site.source}.x"], tensors[f"{site.name}.grad"]
            signs = tensors.get(f"{site.name}.signs")
            if signs is not None and (signs.shape, signs.dtype) != ((*x.shape[:2], -(-site.units // 8)), torch.uint8):
                raise IntegrityError(
                    f"the signs of {site.name} are {list(signs.shape)}, not bits of {site.units} units"
                )
            if (x.dim(), grad.dim()) != (3, 3) or (x.shape[2], grad.shape[2]) != (site.inputs, site.outputs):
                raise IntegrityError(
                    f"the pair of {site.name} is {list(x.shape)} and {list(grad.shape)}, expected rows and tokens of "
                    f"{site.inputs} and {site.outputs} values"
                )
            if len(x) != len(grad) or not 0 < grad.shape[1] <= x.shape[1]:
                raise IntegrityError(
                    f"the pair of {site.name} is of {list(x.shape[:2])} and {list(grad.shape[:2])} rows and tokens"
                )
            if num_rows is not None and len(x) != num_rows:
                raise IntegrityError(
                    f"the pair of {site.name} has {len(x)} rows, its users have {num_rows} of the batch"
                )

    def fit(self, tensors: Mapping[str, torch.Tensor], rows: Sequence[int] | None = None) -> None:
        """Accumulate the gradients of checked pairs in the current weights; ``rows`` selects some rows, None = all."""
        at = slice(None) if rows is None else list(rows)
        for site in self._sites_in(_blocks_of(tensors)):
            pair = (tensors[f"{site.source}.x"][at], tensors[f"{site.name}.grad"][at])
            x, grad = (tensor.to(self._device, self._dtype) for tensor in pair)
            x = x[:, : grad.shape[1]]  # the last block may compute only its first tokens, which attend to all
            signs = tensors.get(f"{site.name}.signs")
            is_on = None if signs is None else unpack(signs[at].to(self._device), site.units)
            with products(self._device, is_rounded=self._is_rounded):
                site.add_gradients(x, grad, is_on)

    def _sites_in(self, blocks: Collection[str]) -> list[Site]:
        return [site for name, site in self.sites.items() if name.split(".", 1)[0] in blocks]


def _blocks_of(names: Iterable[str]) -> set[str]:
    return {name.split(".", 1)[0] for name in names}


def _drop_all_but(skeleton: Skeleton, units: tuple[int, ...]) -> None:
    """Replace everything but these blocks by empty modules."""
    base, path = skeleton.base, skeleton.layout.blocks_path
    for index in range(len(skeleton.blocks)):
        if index not in units:
            skeleton.blocks[index] = Empty()
    for name, _ in list(base.named_children()):
        if name != path.split(".")[0]:
            setattr(base, name, Empty())


class MergedSums:
    """The sums of all users' adapters at a helper, which are made of their sets: nothing is loaded."""

    def __init__(self, models: Sequence[AuxiliaryModels]) -> None:
        self._models = models

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the sums by name."""
        sums: dict[str, torch.Tensor] = {}
        for models in self._models:
            sums |= models.sums(models.units.start, models.units.stop)
        return sums

    def check(self, tensors: Mapping[str, torch.Tensor], *, where: str) -> None:
        """Take any tensors: earlier versions saved none."""

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Do nothing."""


class GradientSums:
    """The gradients of some weights that have one."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return these gradients by name."""
        return {name: value.grad for name, value in self._parameters.items() if value.grad is not None}

    def check(self, tensors: Mapping[str, torch.Tensor], *, where: str) -> None:
        """Refuse tensors that are no gradients of these weights.

        Raises:
            IntegrityError: other names, shapes or types.
            DivergedError: numbers that are not finite.
        """
        check_like(tensors, {name: self._parameters.get(name, torch.empty(0)) for name in tensors}, where=where)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace all gradients."""
        for name, parameter in self._parameters.items():
            parameter.grad = tensors.get(name)
