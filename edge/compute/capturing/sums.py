"""The sum of the changes that several users' adapters make to one matrix, as adapters of one.

========= ============================================================== =====================================
site      the sum                                                        size
========= ============================================================== =====================================
linear    the matrices added up                                          that of one set
low rank  the factors of all users side by side, a product of rank K r   K sets
low rank  where that is larger: the products added up, as one matrix     that of the matrix beside it
of kinds  where users have several at a matrix: all added up             that of the matrix beside it
========= ============================================================== =====================================

So what a host gets for the users of a block is never larger than the matrices that it is merged into.

Source: ColA, Proposition 2 (parameter merging), for K users.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from edge.compute.capturing.sites import AuxiliarySite, FusedLoraSite, LoraSite, Site, sites_of
from edge.model.auxiliary.modules import FUSED_PARTS, FusedDelta, LinearDelta
from edge.model.skeleton import Skeleton
from ringtune.errors import JobError

CHANGE: Final = "change"
"""The name, behind that of its site or of several kinds' matrix, of changes that were added up."""

_A, _B = "lora_A", "lora_B"

Tensors = Mapping[str, torch.Tensor]


class Change(NamedTuple):
    """What changes some outputs of a matrix: a matrix, or the product of two.

    Attributes:
        first: the lowest of these outputs.
        up: name of the matrix with a row for each output.
        rows: of it.
        down: name of the matrix that is multiplied from the right; empty without one.
        ranks: rows of that one.
    """

    first: int
    up: str
    rows: slice
    down: str = ""
    ranks: slice = slice(None)

    def of(self, tensors: Tensors, outputs: slice, inputs: slice) -> torch.Tensor:
        """Return some rows and columns of the change."""
        up = tensors[self.up][self.rows][outputs]
        return up @ tensors[self.down][self.ranks, inputs] if self.down else up[:, inputs]


def changes_of(site: Site, users: int) -> list[Change]:
    """List what an adapter changes, or the sum of those of so many users.

    Raises:
        JobError: it is no linear change of a matrix.
    """
    name, adapter = site.name, site.adapter
    if isinstance(site, FusedLoraSite):
        return _fused_changes(name, site.adapter, users, is_one=is_change(site, users))
    if is_change(site, users):
        return [Change(0, f"{name}.{CHANGE}", slice(0, site.outputs))]
    if isinstance(site, LoraSite) and not site.adapter.use_gating and not site.reads.is_output:
        return [Change(0, f"{name}.lora_B", slice(0, site.outputs), f"{name}.lora_A")]
    if isinstance(site, AuxiliarySite) and isinstance(adapter, LinearDelta):
        return [Change(0, f"{name}.weight", slice(0, site.outputs))]
    if isinstance(adapter, FusedDelta) and all(isinstance(part, LinearDelta) for part in adapter.values()):
        own = slice(0, adapter.width)
        return [
            Change(at * adapter.width, f"{name}.{part}.weight", own)
            for at, part in enumerate(FUSED_PARTS)
            if part in adapter
        ]
    raise JobError(f"{name} is no linear change of a matrix and can't be merged; set offload.merged = false")


def _fused_changes(name: str, lora: Any, users: int, *, is_one: bool) -> list[Change]:
    """Query, key and value have rows of their own in both matrices, or in one, one after the other."""
    enabled = [at for at, is_there in enumerate(lora.enable_lora) if is_there]
    rank = users * lora.lora_B.shape[1]
    width = lora.lora_B.shape[0] // len(enabled)
    if is_one:
        return [
            Change(at * width, f"{name}.{CHANGE}", slice(own * width, (own + 1) * width))
            for own, at in enumerate(enabled)
        ]
    return [
        Change(
            at * width,
            f"{name}.lora_B",
            slice(own * width, (own + 1) * width),
            f"{name}.lora_A",
            slice(own * rank, (own + 1) * rank),
        )
        for own, at in enumerate(enabled)
    ]


class AtMatrix(NamedTuple):
    """The adapters at one matrix of a block: mostly one, several where users have several kinds.

    Attributes:
        block: that it is in.
        path: of the matrix in the block.
        sites: of its adapters, each with the position of its kind.
    """

    block: int
    path: str
    sites: tuple[tuple[int, Site], ...]

    @property
    def alpha(self) -> float:
        """Factor of the sum; the sum of several adapters has their factors inside."""
        return self.sites[0][1].alpha if len(self.sites) == 1 else 1.0

    @property
    def outputs(self) -> int:
        """Outputs of the matrix, all of them."""
        site = self.sites[0][1]
        return site.outputs if site.columns is None else len(site.columns)

    def sum_of(self, sets: Sequence[Sequence[Tensors]]) -> dict[str, torch.Tensor]:
        """Return the sum of all sets.

        Args:
            sets: of each kind those of its users, by block and name.

        Returns:
            As ``sum_of``; where there are several adapters one matrix.
        """
        if len(self.sites) == 1:
            kind, site = self.sites[0]
            return sum_of(site, [_at(site, own) for own in sets[kind]])
        kind, site = self.sites[0]
        found = next(iter(_at(site, sets[kind][0]).values())).new_zeros(self.outputs, site.inputs)
        for kind, site in self.sites:
            changes = changes_of(site, 1)
            for own in sets[kind]:
                for change in changes:
                    rows = slice(change.first, change.first + change.rows.stop - change.rows.start)
                    found[rows].add_(change.of(own, slice(None), slice(None)), alpha=site.alpha)
        return {self._name: found}

    def changes(self, users: Sequence[int]) -> list[Change]:
        """List what the sum changes, with so many users of each kind.

        Raises:
            JobError: an adapter is no linear change of a matrix.
        """
        found = [change for kind, site in self.sites for change in changes_of(site, users[kind])]
        return found if len(self.sites) == 1 else [Change(0, self._name, slice(0, self.outputs))]

    @property
    def _name(self) -> str:
        return f"{self.block}.{self.path}.{CHANGE}"


def matrices_of(skeletons: Mapping[int, Skeleton], block: int) -> list[AtMatrix]:
    """List the matrices of a block that have adapters, each once.

    Args:
        skeletons: of each kind of adapters, by its position.
        block: which one.
    """
    found: dict[str, list[tuple[int, Site]]] = {}
    for kind, skeleton in skeletons.items():
        for site in sites_of(skeleton, block):
            found.setdefault(site.path(skeleton.blocks[block]), []).append((kind, site))
    return [AtMatrix(block, path, tuple(sites)) for path, sites in found.items()]


def _at(site: Site, own: Tensors) -> dict[str, torch.Tensor]:
    """Return what a set has for a site, by name in it."""
    inside = f"{site.name}."
    return {name.removeprefix(inside): value.detach() for name, value in own.items() if name.startswith(inside)}


def is_change(site: Site, users: int) -> bool:
    """Whether the sum of so many users' low-rank adapters is one matrix, as it is smaller than their factors."""
    if not isinstance(site, LoraSite):
        return False
    values = sum(getattr(site.adapter, name).numel() for name in (_A, _B))
    return users > 1 and users * values > site.inputs * site.outputs


def sum_of(site: Site, sets: Sequence[Tensors]) -> dict[str, torch.Tensor]:
    """Return the sum of several sets.

    Args:
        site: with whose adapter all sets go.
        sets: the tensors of this adapter by name in it, such as ``lora_A``; at least one.

    Returns:
        The tensors of the sum by block and name, on memory of their own where there are several sets.
    """
    if len(sets) == 1:
        return {f"{site.name}.{name}": value for name, value in sets[0].items()}
    if not isinstance(site, LoraSite):
        return {f"{site.name}.{name}": _added([own[name] for own in sets]) for name in sets[0]}
    parts = len(sets[0][_A]) // sets[0][_B].shape[1]
    if is_change(site, len(sets)):
        return {f"{site.name}.{CHANGE}": _added([_product(own, parts) for own in sets])}
    low = torch.cat([own[_A].view(parts, -1, own[_A].shape[1]) for own in sets], dim=1)
    return {
        f"{site.name}.{_A}": low.flatten(0, 1),
        f"{site.name}.{_B}": torch.cat([own[_B] for own in sets], dim=1),
    }


def _added(values: Sequence[torch.Tensor]) -> torch.Tensor:
    found = values[0].clone()
    for value in values[1:]:
        found += value
    return found


def _product(own: Tensors, parts: int) -> torch.Tensor:
    """Multiply both factors; query, key and value have rows of their own in each."""
    pairs = zip(own[_A].chunk(parts), own[_B].chunk(parts), strict=True)
    return torch.cat([up @ low for low, up in pairs])
