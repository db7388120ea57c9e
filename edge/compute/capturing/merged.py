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

from edge.compute.capturing.install import check_like, copy_of
from edge.compute.capturing.sites import AuxiliarySite, FusedLoraSite, LoraSite, Site, check_config, sites_of
from edge.compute.capturing.sums import CHANGE, is_change, sum_of
from edge.model.auxiliary.modules import FUSED_PARTS, FusedDelta, LinearDelta, take_away
from edge.model.frozen.matrix import FrozenMatrix
from edge.model.safetensors_files import SafetensorsFiles
from edge.model.skeleton import ADAPTER, Skeleton
from edge.model.slice import stored_names
from ringtune.errors import JobError, ModelError
from ringtune.jobs.job import Job
from ringtune.models.offload_support import merged_refusal

Tensors = Mapping[str, torch.Tensor]


class _Change(NamedTuple):
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


class _Matrix(NamedTuple):
    """One matrix into which an adapter is merged.

    Attributes:
        block: that it is in.
        site: name of the adapter.
        target: the numbers of the matrix, as the folder has them.
        stored: name of the base weight in the folder.
        inputs_first: whether it has a row for each input.
        alpha: factor of the change.
        changes: of its outputs.
        like: the adapter's tensors by name, without numbers.
    """

    block: int
    site: str
    target: torch.Tensor
    stored: str
    inputs_first: bool
    alpha: float
    changes: tuple[_Change, ...]
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
        users: how many users' adapters are added up (see ``sum_of``); they all begin with the same values.

    Attributes:
        initial: what is merged at the beginning, as ``install`` takes it.

    Raises:
        JobError: an adapter that is no linear change of a matrix, or frozen weights in int8.
        ModelError: the folder has not such a tensor.
    """

    def __init__(self, skeleton: Skeleton, blocks: Iterable[int], folder: Path, job: Job, *, users: int = 1) -> None:
        if problem := merged_refusal(job.adapter.config, dropout=job.train.dropout):
            raise JobError(problem)
        check_config(job.adapter.config, skeleton, dropout=job.train.dropout)
        sites = [(index, site) for index in blocks for site in sites_of(skeleton, index)]
        self._folder = folder
        with SafetensorsFiles(folder) as files:
            self._matrices = [_matrix(index, site, skeleton, files, users) for index, site in sites]
        self.initial: dict[str, torch.Tensor] = {}
        for _, site in sites:
            own = {name: value.detach() for name, value in site.adapter.named_parameters()}
            self.initial |= {name: copy_of(value) for name, value in sum_of(site, [own] * users).items()}
            _drop(site)
        self.install(self.initial, {index for index, _ in sites}, where="the initial adapters")

    def install(self, tensors: Tensors, blocks: Iterable[int], *, where: str) -> None:
        """Make the matrices of some blocks anew, with these adapters.

        Graphs that need the matrices of before must have had their backward.

        Args:
            tensors: what ``AuxiliaryModels.weights`` gave for these blocks.
            blocks: which ones.
            where: names the tensors in errors.

        Raises:
            IntegrityError: other names, shapes or types than those of the adapters; nothing was changed then.
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


def _matrix(index: int, site: Site, skeleton: Skeleton, files: SafetensorsFiles, users: int) -> _Matrix:
    layer: Any = site.taps.module
    path = next(path for path, module in skeleton.blocks[index].named_modules() if module is layer)
    full = f"{skeleton.layout.blocks_path}.{index}.{path}.weight"
    stored = files.find(*stored_names(skeleton.model.base_model_prefix, full))
    if stored is None:
        raise ModelError(f"{files.folder}: tensor {full} is missing; fetch the model again")
    parameters = {name: torch.empty_like(p, device="meta") for name, p in site.adapter.named_parameters()}
    return _Matrix(
        block=index,
        site=site.name,
        target=_numbers(layer.weight, site.name),
        stored=stored,
        inputs_first=bool(layer.fan_in_fan_out),
        alpha=site.alpha,
        changes=tuple(_changes(site, users)),
        like=sum_of(site, [parameters] * users),
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


def _changes(site: Site, users: int) -> list[_Change]:
    """List what an adapter changes, or the sum of those of so many users.

    Raises:
        JobError: it is no linear change of a matrix.
    """
    name, adapter = site.name, site.adapter
    if isinstance(site, FusedLoraSite):
        return _fused_changes(name, site.adapter, users, is_one=is_change(site, users))
    if is_change(site, users):
        return [_Change(0, f"{name}.{CHANGE}", slice(0, site.outputs))]
    if isinstance(site, LoraSite) and not site.adapter.use_gating and not site.reads.is_output:
        return [_Change(0, f"{name}.lora_B", slice(0, site.outputs), f"{name}.lora_A")]
    if isinstance(site, AuxiliarySite) and isinstance(adapter, LinearDelta):
        return [_Change(0, f"{name}.weight", slice(0, site.outputs))]
    if isinstance(adapter, FusedDelta) and all(isinstance(part, LinearDelta) for part in adapter.values()):
        own = slice(0, adapter.width)
        return [
            _Change(at * adapter.width, f"{name}.{part}.weight", own)
            for at, part in enumerate(FUSED_PARTS)
            if part in adapter
        ]
    raise JobError(f"{name} is no linear change of a matrix and can't be merged; set offload.merged = false")


def _fused_changes(name: str, lora: Any, users: int, *, is_one: bool) -> list[_Change]:
    """Query, key and value have rows of their own in both matrices, or in one, one after the other."""
    enabled = [at for at, is_there in enumerate(lora.enable_lora) if is_there]
    rank = users * lora.lora_B.shape[1]
    width = lora.lora_B.shape[0] // len(enabled)
    if is_one:
        return [
            _Change(at * width, f"{name}.{CHANGE}", slice(own * width, (own + 1) * width))
            for own, at in enumerate(enabled)
        ]
    return [
        _Change(
            at * width,
            f"{name}.lora_B",
            slice(own * width, (own + 1) * width),
            f"{name}.lora_A",
            slice(own * rank, (own + 1) * rank),
        )
        for own, at in enumerate(enabled)
    ]


def _drop(site: Site) -> None:
    """Let the module of a matrix compute without its adapter, and drop this."""
    layer: Any = site.taps.module
    if isinstance(site, AuxiliarySite):
        take_away(layer, name=ADAPTER)
        return
    layer.merged = ADAPTER  # the library multiplies by the matrix alone then
    loras: nn.ModuleDict = layer.loras
    del loras[ADAPTER]
