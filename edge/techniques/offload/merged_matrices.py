"""Linear adapters, of one user or of several added up, merged into the matrices beside them at a host.

At each update every matrix is computed anew, piece by piece, from the base weight in the model folder and the received
adapter: ``base + alpha * g``, rounded once. So rounding does not accumulate over updates. The matrix takes the memory
of the base weight, whatever the rank.

For several users a helper sends the sum of their changes as one adapter:

========= ============================================================== =====================================
site      the sum                                                        size
========= ============================================================== =====================================
linear    the matrices added up                                          that of one set
low rank  the factors of all users side by side, a product of rank K r   K sets
low rank  where that is larger: the products added up, as one matrix     that of the matrix beside it
of kinds  where users have several at a matrix: all added up             that of the matrix beside it
========= ============================================================== =====================================

So a host never receives more for a block than the size of the merged matrices.

Source: ColA, section 3, Proposition 2 (parameter merging), for K users.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from edge.model.adapters.lora import detach
from edge.model.auxiliary import FUSED_PARTS, FusedDelta, LinearDelta, detach_delta
from edge.model.frozen_weights import FrozenMatrix, RowScaled
from edge.model.skeleton import ADAPTER, Skeleton
from edge.model.tensor_files import SafetensorsFiles
from edge.techniques.offload.sites import (
    AuxiliarySite,
    FusedLoraSite,
    LoraSite,
    Site,
    adapter_weights,
    check_config,
    check_like,
    copy_of,
    sites_of,
)
from ringtune.errors import JobError, ModelError
from ringtune.job.job import Job
from ringtune.models.adapter_support import merged_refusal
from ringtune.models.families import LAYOUTS

Tensors = Mapping[str, torch.Tensor]


class _Matrix(NamedTuple):
    """One matrix with a merged adapter.

    Attributes:
        target: memory of the matrix, in the folder's layout.
        stored: name of the base weight in the folder.
        inputs_first: whether it has a row for each input.
        alpha: factor of the change.
        changes: of its outputs.
        like: the adapter's tensors by name, on ``meta``.
    """

    block: int
    target: torch.Tensor
    stored: str
    inputs_first: bool
    alpha: float
    changes: tuple[Change, ...]
    like: dict[str, torch.Tensor]


class MergedMatrices:
    """Matrices of a host with the adapters of some blocks merged into them.

    Make it after ``Capture``, which needs the adapters, and before ``BlockRunner``: the adapter modules are dropped
    here. Pairs are those of unmerged adapters: the input of a matrix, and alpha times the gradient of its output.

    Args:
        folder: of the model; read at every ``install``.
        users: number of users of the job's kind; their sets begin equal and are summed (see ``sum_of``). None = all
            users have one set.
        others: for each other kind of adapters its model, which may lack other weights, and its number of users.

    Attributes:
        initial: merged initial adapters, as arguments of ``install``.

    Raises:
        JobError: an adapter that is no linear change of a matrix, or frozen weights in int8 or nf4.
        ModelError: the folder lacks a tensor.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        blocks: Iterable[int],
        folder: Path,
        job: Job,
        *,
        users: int | None = None,
        others: Sequence[tuple[Skeleton, int]] = (),
    ) -> None:
        if problem := merged_refusal(job.adapter.config, dropout=job.train.dropout):
            raise JobError(problem)
        check_config(job.adapter.config, skeleton, dropout=job.train.dropout)
        indices = tuple(blocks)
        all_kinds = ((skeleton, 1 if users is None else users), *others)
        counts = [count for _, count in all_kinds]
        kinds = {at: kind for at, (kind, count) in enumerate(all_kinds) if count}
        places = [place for index in indices for place in matrices_of(kinds, index)]
        if users is None:
            places = [place._replace(sites=(site,)) for place in places for site in place.sites]
        self._folder = folder
        self.initial: dict[str, torch.Tensor] = {}
        self._matrices = []
        with SafetensorsFiles(folder) as files:
            for place in places:
                weights = {kind: adapter_weights(there, [place.block]) for kind, there in kinds.items()}
                sums = place.sum_of([[weights.get(kind, {})] * count for kind, count in enumerate(counts)])
                self.initial |= {name: copy_of(value) for name, value in sums.items()}
                self._matrices.append(_matrix(place, skeleton, files, counts, sums))
        for index in indices:
            for site in sites_of(skeleton, index):
                _drop(site)
        self.install(self.initial, set(indices), where="the initial adapters")

    def install(self, tensors: Tensors, blocks: Iterable[int], *, where: str) -> None:
        """Compute the matrices of some blocks anew with these adapters, of ``AuxiliaryModels.weights`` or ``sums``.

        Graphs of the old matrices must have had their backward. ``where`` names the tensors in errors.

        Raises:
            IntegrityError: other names, shapes or types than those of the adapters; nothing was changed then.
            DivergedError: numbers that are not finite; nothing was changed then.
            ModelError, IntegrityError: the folder can't be read.
        """
        indices = set(blocks)
        matrices = [matrix for matrix in self._matrices if matrix.block in indices]
        check_like(tensors, {name: like for matrix in matrices for name, like in matrix.like.items()}, where=where)
        with SafetensorsFiles(self._folder) as files, torch.no_grad():
            for stored in dict.fromkeys(matrix.stored for matrix in matrices):
                _rewrite([matrix for matrix in matrices if matrix.stored == stored], tensors, files)


def _rewrite(matrices: Sequence[_Matrix], tensors: Tensors, files: SafetensorsFiles) -> None:
    """Compute one matrix from base and changes, piece by piece, in float32 or float64.

    ``matrices`` are the same matrix for each merged adapter, such as LoRA on queries and a ``linear`` on values where
    both are one matrix.
    """
    target = matrices[0].target
    dtype = torch.float64 if target.dtype is torch.float64 else torch.float32
    weights = {name: tensors[name].to(target.device, dtype) for matrix in matrices for name in matrix.like}
    for start, base in files.row_pieces(matrices[0].stored):
        rows = slice(start, start + len(base))
        whole = base.to(target.device, dtype)
        for matrix in matrices:
            whole.add_(_change_of(matrix, weights, rows, base.shape[1]), alpha=matrix.alpha)
        target[rows].copy_(whole)


def _change_of(matrix: _Matrix, weights: Tensors, rows: slice, width: int) -> torch.Tensor:
    """Return these rows of the change to the stored matrix, without alpha."""
    any_tensor = weights[next(iter(matrix.like))]
    change_of_rows = any_tensor.new_zeros(rows.stop - rows.start, width)
    for change in matrix.changes:
        first, last = change.first, change.first + change.rows.stop - change.rows.start
        if matrix.inputs_first:
            change_of_rows[:, first:last] = change.of(weights, slice(None), rows).t()
            continue
        low, high = max(first, rows.start), min(last, rows.stop)
        if low < high:
            some = change.of(weights, slice(low - first, high - first), slice(None))
            change_of_rows[low - rows.start : high - rows.start] = some
    return change_of_rows


def _matrix(
    place: MatrixAdapters, skeleton: Skeleton, files: SafetensorsFiles, users: Sequence[int], initial: Tensors
) -> _Matrix:
    layer: Any = skeleton.blocks[place.block].get_submodule(place.path)
    full = f"{skeleton.layout.blocks_path}.{place.block}.{place.path}.weight"
    stored = files.find(full, skeleton.layout)
    if stored is None:
        raise ModelError(f"{files.folder}: tensor {full} is missing; fetch the model again")
    return _Matrix(
        block=place.block,
        target=_numbers(layer.weight, place.sites[0][1].name),
        stored=stored,
        inputs_first=LAYOUTS[skeleton.layout.model_type].inputs_first,
        alpha=place.alpha,
        changes=tuple(place.changes(users)),
        like={name: torch.empty_like(value, device="meta") for name, value in initial.items()},
    )


def _numbers(weight: torch.Tensor, site: str) -> torch.Tensor:
    """Return the memory of a matrix."""
    if not isinstance(weight, FrozenMatrix):
        return weight.detach()
    numbers = weight.held.numbers
    if not isinstance(numbers, RowScaled) or numbers.scales is not None:
        held = "int8" if isinstance(numbers, RowScaled) else numbers.kind
        raise JobError(
            f"{site} can't be merged into a matrix that is held in {held}; set offload.merged = false, or "
            "runtime.frozen to 'bfloat16'"
        )
    return numbers.numbers


def _drop(site: Site) -> None:
    """Remove the adapter from the module of a matrix."""
    layer: Any = site.taps.module
    if isinstance(site, AuxiliarySite):
        detach_delta(layer, name=ADAPTER)
        return
    detach(layer, name=ADAPTER)


CHANGE: Final = "change"
"""Last part of the name of summed changes, after the name of their site or matrix."""

_A, _B = "lora_A", "lora_B"


class Change(NamedTuple):
    """Change of some outputs of a matrix: a matrix, or the product of two.

    Attributes:
        first: the lowest of these outputs.
        up: name of the matrix with a row for each output.
        rows: of ``up``.
        down: name of the right factor; empty without one.
        ranks: rows of ``down``.
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
    """List the changes of an adapter, or of the sum of ``users`` adapters; raises ``JobError``."""
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
        columns = slice(0, adapter.width)
        return [
            Change(at * adapter.width, f"{name}.{part}.weight", columns)
            for at, part in enumerate(FUSED_PARTS)
            if part in adapter
        ]
    raise JobError(f"{name} is no linear change of a matrix and can't be merged; set offload.merged = false")


def _fused_changes(name: str, lora: Any, users: int, *, is_one: bool) -> list[Change]:
    """List the changes of query, key and value, each with its own rows in both factors, or in one matrix."""
    enabled = [at for at, is_there in enumerate(lora.enable_lora) if is_there]
    rank = users * lora.lora_B.shape[1]
    width = lora.lora_B.shape[0] // len(enabled)
    if is_one:
        return [
            Change(at * width, f"{name}.{CHANGE}", slice(place * width, (place + 1) * width))
            for place, at in enumerate(enabled)
        ]
    return [
        Change(
            at * width,
            f"{name}.lora_B",
            slice(place * width, (place + 1) * width),
            f"{name}.lora_A",
            slice(place * rank, (place + 1) * rank),
        )
        for place, at in enumerate(enabled)
    ]


class MatrixAdapters(NamedTuple):
    """The adapters at one matrix of a block: one, or several where users have several kinds.

    Attributes:
        sites: of its adapters, each with the index of its kind.
    """

    block: int
    path: str
    sites: tuple[tuple[int, Site], ...]

    @property
    def alpha(self) -> float:
        """Factor of the sum; 1 for several adapters, because their sum contains their factors."""
        return self.sites[0][1].alpha if len(self.sites) == 1 else 1.0

    @property
    def outputs(self) -> int:
        """Number of all outputs of the matrix."""
        site = self.sites[0][1]
        return site.outputs if site.columns is None else len(site.columns)

    def sum_of(self, sets: Sequence[Sequence[Tensors]]) -> dict[str, torch.Tensor]:
        """Return the sum of all sets: as ``sum_of``, or one matrix for several adapters.

        ``sets`` has for each kind the sets of its users, by block and name.
        """
        if len(self.sites) == 1:
            kind, site = self.sites[0]
            return sum_of(site, [_at(site, weights) for weights in sets[kind]])
        kind, site = self.sites[0]
        total = next(iter(_at(site, sets[kind][0]).values())).new_zeros(self.outputs, site.inputs)
        for kind, site in self.sites:
            changes = changes_of(site, 1)
            for weights in sets[kind]:
                for change in changes:
                    rows = slice(change.first, change.first + change.rows.stop - change.rows.start)
                    total[rows].add_(change.of(weights, slice(None), slice(None)), alpha=site.alpha)
        return {self._name: total}

    def changes(self, users: Sequence[int]) -> list[Change]:
        """List the changes of the sum for so many users of each kind; raises ``JobError``."""
        listed = [change for kind, site in self.sites for change in changes_of(site, users[kind])]
        return listed if len(self.sites) == 1 else [Change(0, self._name, slice(0, self.outputs))]

    @property
    def _name(self) -> str:
        return f"{self.block}.{self.path}.{CHANGE}"


def matrices_of(skeletons: Mapping[int, Skeleton], block: int) -> list[MatrixAdapters]:
    """List the matrices of a block that have adapters, each once; ``skeletons`` is by index of the kind."""
    sites_by_path: dict[str, list[tuple[int, Site]]] = {}
    for kind, skeleton in skeletons.items():
        for site in sites_of(skeleton, block):
            sites_by_path.setdefault(site.path(skeleton.blocks[block]), []).append((kind, site))
    return [MatrixAdapters(block, path, tuple(sites)) for path, sites in sites_by_path.items()]


def _at(site: Site, weights: Tensors) -> dict[str, torch.Tensor]:
    """Return the tensors of a set for a site, by name in it."""
    inside = f"{site.name}."
    return {name.removeprefix(inside): value.detach() for name, value in weights.items() if name.startswith(inside)}


def is_change(site: Site, users: int) -> bool:
    """Whether the sum of ``users`` low-rank adapters is sent as one matrix, which is then smaller than the factors."""
    if not isinstance(site, LoraSite):
        return False
    values = sum(getattr(site.adapter, name).numel() for name in (_A, _B))
    return users > 1 and users * values > site.inputs * site.outputs


def sum_of(site: Site, sets: Sequence[Tensors]) -> dict[str, torch.Tensor]:
    """Return the sum of several users' sets for one site, by block and name; a copy if there are several sets.

    Each set, at least one, has the tensors of the adapter by name in it, such as ``lora_A``.
    """
    if len(sets) == 1:
        return {f"{site.name}.{name}": value for name, value in sets[0].items()}
    if not isinstance(site, LoraSite):
        return {f"{site.name}.{name}": _added([weights[name] for weights in sets]) for name in sets[0]}
    parts = len(sets[0][_A]) // sets[0][_B].shape[1]
    if is_change(site, len(sets)):
        return {f"{site.name}.{CHANGE}": _added([_product(weights, parts) for weights in sets])}
    low = torch.cat([weights[_A].view(parts, -1, weights[_A].shape[1]) for weights in sets], dim=1)
    return {
        f"{site.name}.{_A}": low.flatten(0, 1),
        f"{site.name}.{_B}": torch.cat([weights[_B] for weights in sets], dim=1),
    }


def _added(values: Sequence[torch.Tensor]) -> torch.Tensor:
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total


def _product(weights: Tensors, parts: int) -> torch.Tensor:
    """Multiply both factors; query, key and value have separate rows in each."""
    pairs = zip(weights[_A].chunk(parts), weights[_B].chunk(parts), strict=True)
    return torch.cat([up @ low for low, up in pairs])
