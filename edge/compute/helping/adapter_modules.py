"""The adapter modules of one kind without the model that they belong to, and the gradients that pairs give them.

They are drawn as at every node: with the adapters of the whole skeleton, from the seed of the run. So they begin with
the values of their host, bit by bit, and none has to be sent. The base weights stay zeros of stride 0.

By Proposition 1 the gradient of ``0.5 * |g(x) - (g(x) - grad)|^2``, summed over tokens, is the ordinary one. It is that
of a backward through g from the gradient itself, which is what is done here; no target is ever made.

Source: ColA, section 3, equations 5 and 6, Proposition 1.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from edge.compute.capturing.install import adapter_weights
from edge.compute.capturing.signs import unpack
from edge.compute.capturing.sites import Site, check_config, sites_of
from edge.model.auxiliary.build import start_auxiliary
from edge.model.skeleton import Skeleton, build_skeleton
from edge.model.slice import Empty, module_bytes
from ringtune.errors import IntegrityError
from ringtune.jobs.job import Job


class AdapterModules:
    """The adapter modules of some blocks.

    Args:
        folder: of the model; only its configuration is read.
        job: of the run, with the kind of adapter.
        units: blocks that have them here.
        dtype: of the computation.
        device: of the computation.

    Raises:
        ModelError: no such folder, or a family that is not supported.
        JobError: adapters that can't be fitted from pairs.

    Attributes:
        skeleton: the model; of its blocks the adapters in ``units`` are real.
    """

    def __init__(self, folder: Path, job: Job, units: Iterable[int], dtype: torch.dtype, device: torch.device) -> None:
        with torch.random.fork_rng(devices=[]):
            self.skeleton: Skeleton = build_skeleton(folder, job)
        check_config(job.adapter.config, self.skeleton, dropout=job.train.dropout)
        wanted = tuple(units)
        _drop_all_but(self.skeleton, wanted)
        if self.skeleton.auxiliary:
            for index in wanted:
                start_auxiliary(self.skeleton.blocks[index], seed=self.skeleton.seed, index=index)
        self._dtype, self._device = dtype, device
        self._sites: dict[str, Site] = {site.name: site for index in wanted for site in sites_of(self.skeleton, index)}
        for site in self._sites.values():
            site.adapter.to(device=device, dtype=dtype)

    @property
    def held_bytes(self) -> int:
        """Bytes of everything that the modules hold."""
        return module_bytes(self.skeleton.model)

    @property
    def inputs(self) -> dict[str, int]:
        """Values of a token of x, by the names of the sites that have one of their own."""
        return {name: site.inputs for name, site in self._sites.items() if site.source == name}

    def parameters(self, blocks: Iterable[int]) -> dict[str, nn.Parameter]:
        """Return the weights of some blocks by the names that ``BlockRunner`` has for them."""
        return adapter_weights(self.skeleton, blocks)

    def check(
        self,
        tensors: Mapping[str, torch.Tensor],
        num_rows: int | None = None,
        blocks: Collection[int] | None = None,
    ) -> None:
        """Refuse pairs that are not those of whole blocks here.

        Args:
            tensors: what ``Pairs.take`` gave.
            num_rows: that they have to have; None = any.
            blocks: that they have to be of; None = those that they name.

        Raises:
            IntegrityError: other names, or shapes that don't belong together.
        """
        named = _blocks_of(tensors) if blocks is None else {str(block) for block in blocks}
        wanted = self._sites_in(named)
        expected = {f"{site.name}.grad" for site in wanted} | {f"{site.source}.x" for site in wanted}
        optional = {f"{site.name}.signs" for site in wanted if site.units}
        if expected != tensors.keys() - optional:
            odd = sorted(expected ^ (tensors.keys() - optional))[0]
            raise IntegrityError(f"pairs of blocks {sorted(named)} have {odd} too much or too little")
        for site in wanted:
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
        """Add the gradient that some pairs give to the gradients of the weights that the modules have.

        Args:
            tensors: that ``check`` took.
            rows: which of their rows; None = all.
        """
        at = slice(None) if rows is None else list(rows)
        for site in self._sites_in(_blocks_of(tensors)):
            pair = (tensors[f"{site.source}.x"][at], tensors[f"{site.name}.grad"][at])
            x, grad = (tensor.to(self._device, self._dtype) for tensor in pair)
            x = x[:, : grad.shape[1]]  # the last block may compute its first tokens only, and attends to all
            signs = tensors.get(f"{site.name}.signs")
            is_on = None if signs is None else unpack(signs[at].to(self._device), site.units)
            site.add_gradients(x, grad, is_on)

    def _sites_in(self, blocks: Collection[str]) -> list[Site]:
        return [site for name, site in self._sites.items() if name.split(".", 1)[0] in blocks]


def _blocks_of(names: Iterable[str]) -> set[str]:
    return {name.split(".", 1)[0] for name in names}


def _drop_all_but(skeleton: Skeleton, units: tuple[int, ...]) -> None:
    """Put empty modules in the places of all but these blocks, so that only their adapters are held."""
    base, path = skeleton.base, skeleton.layout.blocks_path
    for index in range(len(skeleton.blocks)):
        if index not in units:
            skeleton.blocks[index] = Empty()
    for name, _ in list(base.named_children()):
        if name != path.split(".")[0]:
            setattr(base, name, Empty())
