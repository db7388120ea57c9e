"""Gradient of embedding or head where all parameters train: completed, and sent to the other owners.

Every owner has a copy of both units. The gradient of an item's whole batch is at its initiator. Every other owner gets
it as a safetensors file, and does the same update::

    grad/<name>                 the whole gradient of a tensor
    rows/<name>, values/<name>  of a table with a sparse gradient: row indices, ascending, and gradients

Tables collect sparse gradients, of the size of a batch's tokens, but at most of the table and a micro-batch. They
become dense right before an update, because optimizers move every row. Rows of equal tokens are summed first
(``coalesce``): an accelerator adds an uncoalesced gradient with atomics, in any order, so that two runs would differ in
their last bits. The gradients reveal to the other owners the tokens of a batch, with learned positions also their
places, and approximately the number of rows of each class.

Source: HiFT, algorithm 1 (gradients of the active group only); the copies are ours. PyTorch, Reproducibility:
``index_add_`` on CUDA is not deterministic, on which ``to_dense`` of an uncoalesced tensor rests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import torch
from torch import nn

from edge.model.tensor_files import DTYPE_NAMES, is_finite, pieces_of, read_tensor, require_kind
from ringtune.config.optimizers import TABLE_GIVEN_BACK_BYTES
from ringtune.errors import DivergedError, IntegrityError
from ringtune.machine.resources import trim_heap
from ringtune.storage.pieces import Pieces
from ringtune.storage.tensor_files import TensorFile, TensorInfo, TensorPieces, write_tensors

_WHOLE: Final = "grad/"
_ROWS: Final = "rows/"
_VALUES: Final = "values/"


class TensorSpec(NamedTuple):
    """Required dtype, shape and device of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device


Parameters = Mapping[str, nn.Parameter]
Tied = Iterable[tuple[nn.Parameter, nn.Parameter]]


def collect_sparse(modules: Iterable[nn.Module]) -> None:
    """Let every token table in these modules collect sparse gradients."""
    for module in modules:
        for part in module.modules():
            if isinstance(part, nn.Embedding):
                part.sparse = True


def add_up_rows(parameters: Parameters) -> None:
    """Sum the rows of equal tokens where a sparse gradient has more rows than its table; called after a backward.

    Autograd appends the rows of each micro-batch: the gradient of a table of two token types would have a row for every
    token of the batch.
    """
    for parameter in parameters.values():
        grad = parameter.grad
        if grad is not None and grad.is_sparse and grad._nnz() > parameter.shape[0]:
            parameter.grad = grad.coalesce()


def complete(parameters: Parameters, tied: Tied) -> None:
    """Make the gradients of a unit dense and complete for an optimizer.

    ``tied`` are tensors of the unit, each with its stand-in at the head; their gradients are summed.
    """
    _add_tied(tied)
    for parameter in parameters.values():
        if parameter.grad is not None and parameter.grad.is_sparse:
            if parameter.nbytes >= TABLE_GIVEN_BACK_BYTES:
                trim_heap()  # memory of the step's graphs
            parameter.grad = parameter.grad.coalesce()  # sums equal tokens in their order; frees the uncoalesced copy
            parameter.grad = parameter.grad.to_dense()


def grad_blob(parameters: Parameters, tied: Tied) -> Pieces:
    """Return the gradients of a unit as a file; arguments as for ``complete``.

    The bytes are read when iterated; nothing changes them afterwards.
    """
    _add_tied(tied)
    tensors: dict[str, TensorPieces] = {}
    for name, parameter in parameters.items():
        grad = parameter.grad
        if grad is None:
            continue
        if grad.is_sparse:
            parameter.grad = grad = grad.coalesce()
            tensors[f"{_ROWS}{name}"] = pieces_of(grad.indices()[0])
            tensors[f"{_VALUES}{name}"] = pieces_of(grad.values())
        else:
            tensors[f"{_WHOLE}{name}"] = pieces_of(grad)
    return write_tensors(tensors)


def load_grads(data: Pieces, parameters: Parameters, *, where: str) -> None:
    """Set the gradients of a unit from a file of ``grad_blob``; on an error they are unchanged.

    Memory of ``data`` is freed while it is read. Errors as ``read_grads``.
    """
    grads = read_grads(data, parameters, where=where, with_rows=True)
    for name, parameter in parameters.items():
        parameter.grad = grads[name]


def read_grads(
    data: Pieces, parameters: Parameters, *, where: str, with_rows: bool = False
) -> dict[str, torch.Tensor | None]:
    """Return the gradients in a file of ``grad_blob`` by name; None for a parameter without one.

    Those of matrices may be sparse ``with_rows``, as an owner's tables have; those of blocks are whole.

    Raises ``IntegrityError`` for other tensors, shapes or types than those of the parameters, ``DivergedError`` for
    numbers that are not finite.
    """
    file = TensorFile(data, where=where)
    expected = _expected(file.infos, parameters, where, with_rows=with_rows)
    tensors: dict[str, torch.Tensor] = {}
    for name in file.infos:  # in the order of the data, so that the memory of each can be freed
        tensors[name] = _read(file, name, expected[name], where)
        file.release_pages(name)
    return {name: _grad(tensors, name, parameter, where) for name, parameter in parameters.items()}


def _add_tied(tied: Tied) -> None:
    """Move the gradient of each stand-in to its tensor, and add the tensor's own."""
    for value, stand_in in tied:
        if stand_in.grad is None:
            continue
        gradient, value.grad, stand_in.grad = value.grad, stand_in.grad, None
        if gradient is not None:
            value.grad.add_(gradient.coalesce() if gradient.is_sparse else gradient)


def _expected(
    infos: Mapping[str, TensorInfo], parameters: Parameters, where: str, *, with_rows: bool
) -> dict[str, TensorSpec]:
    """Return the required dtype and shape of each tensor of a file."""
    specs: dict[str, TensorSpec] = {}
    for name, parameter in parameters.items():
        whole, rows, values = names = [f"{prefix}{name}" for prefix in (_WHOLE, _ROWS, _VALUES)]
        given = {full for full in names if full in infos}
        if given not in (set(), {whole}, {rows, values}):
            raise IntegrityError(f"{where} has the gradient of {name} twice, or rows without values")
        specs[whole] = TensorSpec(parameter.dtype, tuple(parameter.shape), parameter.device)
        if rows in given and with_rows and parameter.dim() == 2:
            count = infos[rows].shape[:1] or (0,)
            specs[rows] = TensorSpec(torch.int64, count, parameter.device)
            specs[values] = TensorSpec(parameter.dtype, (*count, *parameter.shape[1:]), parameter.device)
    if unknown := sorted(infos.keys() - specs.keys()):
        raise IntegrityError(f"{where} has the tensors {unknown[:3]}..., not those of its unit")
    return specs


def _read(file: TensorFile, name: str, like: TensorSpec, where: str) -> torch.Tensor:
    require_kind(name, file.infos[name][:2], (DTYPE_NAMES[like.dtype], like.shape), where=where)
    if not is_finite(file.tensor(name)):
        raise DivergedError(f"{where} has {name} with numbers that are not finite")
    return read_tensor(file.tensor(name), like.device)


def _grad(tensors: Mapping[str, torch.Tensor], name: str, parameter: nn.Parameter, where: str) -> torch.Tensor | None:
    """Return the gradient of one parameter; None if there is none."""
    rows = tensors.get(f"{_ROWS}{name}")
    if rows is None:
        return tensors.get(f"{_WHOLE}{name}")
    # all rows, as differences of forged ones may overflow
    is_inside = not len(rows) or (int(rows.min()) >= 0 and int(rows.max()) < parameter.shape[0])
    if not is_inside or bool((rows.diff() <= 0).any()):
        raise IntegrityError(f"{where} has rows of {name} that are not ascending within {parameter.shape[0]}")
    return torch.sparse_coo_tensor(
        rows.unsqueeze(0), tensors[f"{_VALUES}{name}"], size=parameter.shape, is_coalesced=True, check_invariants=False
    )
