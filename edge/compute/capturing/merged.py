"""Hold adapters that are linear inside the matrices beside them, so that a host computes and holds nothing for them.

With each update every matrix is made anew, a piece at a time, from the base weight in the model folder and the adapter
that came: ``base + alpha * g``, rounded once. Nothing is added to what was there before, so that no rounding adds up,
however many updates there are. The matrix takes the memory of the base weight, whatever the rank.

Source: ColA, section 3, Proposition 2 (parameter merging).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from edge.compute.capturing.install import adapter_weights, check_like, copy_of
from edge.compute.capturing.sites import AuxiliarySite, Site, check_config, sites_of
from edge.compute.capturing.sums import AtMatrix, Change, matrices_of
from edge.model.auxiliary.modules import take_away
from edge.model.frozen.matrix import FrozenMatrix
from edge.model.layouts import LAYOUTS
from edge.model.safetensors_files import SafetensorsFiles
from edge.model.skeleton import ADAPTER, Skeleton
from edge.model.slice import stored_names
from ringtune.errors import JobError, ModelError
from ringtune.jobs.job import Job
from ringtune.models.adapters.offload_support import merged_refusal

Tensors = Mapping[str, torch.Tensor]


class _Matrix(NamedTuple):
    """One matrix into which an adapter is merged.

    Attributes:
        block: that it is in.
        target: the numbers of the matrix, as the folder has them.
        stored: name of the base weight in the folder.
        inputs_first: whether it has a row for each input.
        alpha: factor of the change.
        changes: of its outputs.
        like: the adapter's tensors by name, without numbers.
    """

    block: int
    target: torch.Tensor
    stored: str
    inputs_first: bool
    alpha: float
    changes: tuple[Change, ...]
    like: dict[str, torch.Tensor]


class MergedMatrices:
    """The matrices of a host into which the adapters of some blocks are merged.

    Make it after ``Capture``, which looks for the adapters, and before ``BlockRunner``: the adapters are dropped here.
    Pairs are recorded as ever: what enters a matrix, and alpha times the gradient of what leaves it.

    Args:
        skeleton: whose blocks these are, real ones.
        blocks: with merged adapters.
        folder: of the model; it is read at every ``install``.
        job: of the run.
        users: how many users' adapters of the job's kind are added up (see ``sum_of``), which begin with equal values;
            None = all users have one set.
        others: of each other kind of adapters the model that has it, which may be without other weights, and how many
            users have it.

    Attributes:
        initial: what is merged at the beginning, as ``install`` takes it.

    Raises:
        JobError: an adapter that is no linear change of a matrix, or frozen weights in int8.
        ModelError: the folder has not such a tensor.
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
        wanted = tuple(blocks)
        all_kinds = ((skeleton, 1 if users is None else users), *others)
        counts = [count for _, count in all_kinds]
        kinds = {at: kind for at, (kind, count) in enumerate(all_kinds) if count}
        places = [place for index in wanted for place in matrices_of(kinds, index)]
        if users is None:
            places = [place._replace(sites=(site,)) for place in places for site in place.sites]
        self._folder = folder
        self.initial: dict[str, torch.Tensor] = {}
        self._matrices = []
        with SafetensorsFiles(folder) as files:
            for place in places:
                own = {kind: adapter_weights(there, [place.block]) for kind, there in kinds.items()}
                found = place.sum_of([[own.get(kind, {})] * count for kind, count in enumerate(counts)])
                self.initial |= {name: copy_of(value) for name, value in found.items()}
                self._matrices.append(_matrix(place, skeleton, files, counts, found))
        for index in wanted:
            for site in sites_of(skeleton, index):
                _drop(site)
        self.install(self.initial, set(wanted), where="the initial adapters")

    def install(self, tensors: Tensors, blocks: Iterable[int], *, where: str) -> None:
        """Make the matrices of some blocks anew, with these adapters.

        Graphs that need the matrices of before must have had their backward.

        Args:
            tensors: what ``AuxiliaryModels.weights`` gave for these blocks.
            blocks: which ones.
            where: names the tensors in errors.

        Raises:
            IntegrityError: other names, shapes or types than those of the adapters; nothing was changed then.
            DivergedError: numbers that are not finite; nothing was changed then.
            ModelError, IntegrityError: the folder can't be read.
        """
        wanted = set(blocks)
        found = [matrix for matrix in self._matrices if matrix.block in wanted]
        check_like(tensors, {name: like for matrix in found for name, like in matrix.like.items()}, where=where)
        with SafetensorsFiles(self._folder) as files, torch.no_grad():
            for stored in dict.fromkeys(matrix.stored for matrix in found):
                _rewrite([matrix for matrix in found if matrix.stored == stored], tensors, files)


def _rewrite(matrices: Sequence[_Matrix], tensors: Tensors, files: SafetensorsFiles) -> None:
    """Make one matrix from base and changes, some rows at a time, in float32 at least.

    Args:
        matrices: the same one for each adapter that is merged into it, such as LoRA on queries and a ``linear`` on
            values where both are one matrix.
        tensors: of the adapters.
        files: of the model.
    """
    target = matrices[0].target
    dtype = torch.float64 if target.dtype is torch.float64 else torch.float32
    own = {name: tensors[name].to(target.device, dtype) for matrix in matrices for name in matrix.like}
    for start, base in files.row_pieces(matrices[0].stored):
        rows = slice(start, start + len(base))
        whole = base.to(target.device, dtype)
        for matrix in matrices:
            whole.add_(_change_of(matrix, own, rows, base.shape[1]), alpha=matrix.alpha)
        target[rows].copy_(whole)


def _change_of(matrix: _Matrix, own: Tensors, rows: slice, width: int) -> torch.Tensor:
    """Return these rows of what is added to the stored matrix, still without alpha."""
    any_tensor = own[next(iter(matrix.like))]
    found = any_tensor.new_zeros(rows.stop - rows.start, width)
    for change in matrix.changes:
        first, last = change.first, change.first + change.rows.stop - change.rows.start
        if matrix.inputs_first:
            found[:, first:last] = change.of(own, slice(None), rows).t()
            continue
        low, high = max(first, rows.start), min(last, rows.stop)
        if low < high:
            some = change.of(own, slice(low - first, high - first), slice(None))
            found[low - rows.start : high - rows.start] = some
    return found


def _matrix(
    place: AtMatrix, skeleton: Skeleton, files: SafetensorsFiles, users: Sequence[int], initial: Tensors
) -> _Matrix:
    layer: Any = skeleton.blocks[place.block].get_submodule(place.path)
    full = f"{skeleton.layout.blocks_path}.{place.block}.{place.path}.weight"
    stored = files.find(*stored_names(skeleton.model.base_model_prefix, full))
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
    """Return the memory that a matrix is multiplied from.

    Raises:
        JobError: it is held in int8, whose scales an update would change.
    """
    if not isinstance(weight, FrozenMatrix):
        return weight.detach()
    if weight.held.scales is not None:
        raise JobError(
            f"{site} can't be merged into a matrix that is held in int8; set offload.merged = false, or runtime.frozen "
            "to 'bfloat16'"
        )
    return weight.held.numbers


def _drop(site: Site) -> None:
    """Let the module of a matrix compute without its adapter, and drop this."""
    layer: Any = site.taps.module
    if isinstance(site, AuxiliarySite):
        take_away(layer, name=ADAPTER)
        return
    layer.merged = ADAPTER  # the library multiplies by the matrix alone then
    loras: nn.ModuleDict = layer.loras
    del loras[ADAPTER]
