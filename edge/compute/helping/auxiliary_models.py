"""Adapter modules without the model that they belong to: a helper fits them from the pairs of their host.

They are drawn as at every node: with the adapters of the whole skeleton, from the seed of the run. So they begin with
the values of their host, bit by bit, and none has to be sent. The base weights stay zeros of stride 0.

By Proposition 1 the gradient of ``0.5 * |g(x) - (g(x) - grad)|^2``, summed over tokens, is the ordinary one. It is that
of a backward through g from the gradient itself, which is what is done here; no target is ever made.

Source: ColA, section 3, equations 5 and 6, Proposition 1.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from edge.compute.capturing.signs import unpack
from edge.compute.capturing.sites import Site, check_config, sites_of
from edge.compute.capturing.sums import sum_of
from edge.compute.users.sets import UserSets, block_of, set_name
from edge.model.auxiliary.build import start_auxiliary
from edge.model.skeleton import ADAPTER, Skeleton, build_skeleton
from edge.model.slice import Empty, module_bytes
from ringtune.errors import IntegrityError
from ringtune.jobs.job import Job
from ringtune.schedule.users import RowsOfUser


class AuxiliaryModels:
    """The adapter modules of some blocks.

    Args:
        folder: of the model; only its configuration is read.
        job: of the run.
        units: blocks whose adapters are fitted here.
        dtype: of the computation.
        device: of the computation.
        users: that have adapters of their own; none = there is one set for all.

    Raises:
        ModelError: no such folder, or a family that is not supported.
        JobError: adapters that can't be fitted from pairs.

    Attributes:
        skeleton: the model; of its blocks the adapters in ``units`` are real.
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
        with torch.random.fork_rng(devices=[]):
            self.skeleton: Skeleton = build_skeleton(folder, job)
        check_config(job.adapter.config, self.skeleton, dropout=job.train.dropout)
        _drop_all_but(self.skeleton, units)
        if self.skeleton.auxiliary:
            for index in units:
                start_auxiliary(self.skeleton.blocks[index], seed=self.skeleton.seed, index=index)
        self.units = units
        self._dtype, self._device = dtype, device
        self._sites: dict[str, Site] = {site.name: site for index in units for site in sites_of(self.skeleton, index)}
        for site in self._sites.values():
            site.adapter.to(device=device, dtype=dtype)
        self._trained = {
            index: [
                name for name, parameter in self.skeleton.blocks[index].named_parameters() if f".{ADAPTER}." in name
            ]
            for index in units
        }
        self._sets = UserSets(self.skeleton, units, users) if users else None

    @property
    def held_bytes(self) -> int:
        """Bytes of everything that the modules hold, with the sets of all users."""
        return module_bytes(self.skeleton.model) + (self._sets.other_bytes if self._sets is not None else 0)

    @property
    def inputs(self) -> dict[str, int]:
        """Values of a token of x, by the names of the sites that have one of their own."""
        return {name: site.inputs for name, site in self._sites.items() if site.source == name}

    def parameters(self, start: int, stop: int) -> dict[str, nn.Parameter]:
        """Return the weights of blocks ``[start, stop)`` by the names that ``BlockRunner`` has for them.

        Those of users have the user before that name; see ``set_name``.
        """
        if self._sets is not None:
            return self._sets.parameters(range(start, stop))
        return {
            f"{index}.{name}": self.skeleton.blocks[index].get_parameter(name)
            for index in range(start, stop)
            for name in self._trained[index]
        }

    def weights(self, start: int, stop: int, users: Collection[str] = ()) -> dict[str, torch.Tensor]:
        """Return the values of these weights, on the memory of the weights.

        Args:
            start: first block.
            stop: one past the last block.
            users: whose; all of them if there is one set for all.
        """
        wanted = self.parameters(start, stop)
        if self._sets is not None:
            own = {set_name(user, name) for user in users for name in self._sets.of(user)}
            wanted = {name: value for name, value in wanted.items() if name in own}
        return {name: parameter.detach() for name, parameter in wanted.items()}

    def of_user(self, user: str) -> dict[str, torch.Tensor]:
        """Return the weights of a user, by block and name in it."""
        return {} if self._sets is None else dict(self._sets.of(user))

    def sums(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Return the sums of all users' changes in blocks ``[start, stop)``, as ``MergedMatrices`` takes them."""
        found: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for name, site in self._sites.items():
                if self._sets is not None and start <= block_of(name) < stop:
                    found |= sum_of(site, [self._sets.of_site(user, name) for user in self._sets.users])
        return found

    def changing(self, start: int, stop: int) -> tuple[str, ...]:
        """The users whose weights in blocks ``[start, stop)`` have gradients, so that the next update changes them."""
        if self._sets is None:
            return ()
        found = {name for name, value in self.parameters(start, stop).items() if value.grad is not None}
        return tuple(user for user in self._sets.users if any(name.startswith(f"{user}/") for name in found))

    def fit(self, tensors: Mapping[str, torch.Tensor], rows: Sequence[RowsOfUser] = ()) -> None:
        """Add the gradient that some pairs give to the gradients of the weights; the pairs are not kept.

        Args:
            tensors: what ``Pairs.take`` gave for some of the blocks here, of one micro-batch.
            rows: whose rows they are, where users have adapters of their own; each set gets the gradient of its rows.

        Raises:
            IntegrityError: other names, or shapes that don't belong together; nothing was added then.
        """
        names = self._check(tensors)
        if self._sets is None:
            self._fit(names, tensors, slice(None))
            return
        for user, positions in rows:
            self._sets.use(user)
            self._fit(names, tensors, slice(None) if len(rows) == 1 else list(positions))

    def _fit(self, names: Sequence[str], tensors: Mapping[str, torch.Tensor], rows: slice | list[int]) -> None:
        for name in names:
            site = self._sites[name]
            pair = (tensors[f"{site.source}.x"][rows], tensors[f"{name}.grad"][rows])
            x, grad = (tensor.to(self._device, self._dtype) for tensor in pair)
            signs = tensors.get(f"{name}.signs")
            is_on = None if signs is None else unpack(signs[rows].to(self._device), site.units)
            site.add_gradients(x, grad, is_on)

    def _check(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        blocks = {key.split(".", 1)[0] for key in tensors}
        wanted = [site for name, site in self._sites.items() if name.split(".", 1)[0] in blocks]
        expected = {f"{site.name}.grad" for site in wanted} | {f"{site.source}.x" for site in wanted}
        optional = {f"{site.name}.signs" for site in wanted if site.units}
        if expected != tensors.keys() - optional:
            odd = sorted(expected ^ (tensors.keys() - optional))[0]
            raise IntegrityError(f"pairs of blocks {sorted(blocks)} have {odd} too much or too little")
        for site in wanted:
            x, grad = tensors[f"{site.source}.x"], tensors[f"{site.name}.grad"]
            signs = tensors.get(f"{site.name}.signs")
            if signs is not None and (signs.shape, signs.dtype) != ((*x.shape[:2], -(-site.units // 8)), torch.uint8):
                raise IntegrityError(
                    f"the signs of {site.name} are {list(signs.shape)}, not bits of {site.units} units"
                )
            if x.dim() != 3 or grad.shape != (*x.shape[:2], site.outputs) or x.shape[2] != site.inputs:
                raise IntegrityError(
                    f"the pair of {site.name} is {list(x.shape)} and {list(grad.shape)}, expected rows and tokens of "
                    f"{site.inputs} and {site.outputs} values"
                )
        return [site.name for site in wanted]


def _drop_all_but(skeleton: Skeleton, units: range) -> None:
    """Put empty modules in the places of all but these blocks, so that only their adapters are held."""
    base, path = skeleton.base, skeleton.layout.blocks_path
    for index in range(len(skeleton.blocks)):
        if index not in units:
            skeleton.blocks[index] = Empty()
    for name, _ in list(base.named_children()):
        if name != path.split(".")[0]:
            setattr(base, name, Empty())
