"""Bring the gradient of a unit together, and carry it from the initiator to the other owners.

Embedding and head of a model whose parameters all train are on every owner. One item gives such a unit one gradient,
of the whole batch, at its initiator. Every other owner gets it as a safetensors file, and does the same update::

    grad/<name>                 the whole gradient of a tensor
    rows/<name>, values/<name>  of a table some of whose rows have one: the rows' numbers, ascending, and gradients

Token tables collect sparse gradients, which cost as much memory as the tokens of a batch. Right before an update they
become dense, because optimizers move every row. The rows tell the other owners which tokens a batch had.

Source: HiFT, algorithm 1 (gradients of the active group only); the copies are ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import torch
from torch import nn

from edge.model.tensor_bytes import DTYPE_NAMES, fill, is_finite, pieces_of
from ringtune.engine.diverged import LOWER_THE_RATE
from ringtune.errors import DivergedError, IntegrityError
from ringtune.files.pieces import Pieces
from ringtune.files.safetensors_header import TensorInfo
from ringtune.files.safetensors_stream import TensorFile, TensorPieces, write_tensors

_WHOLE: Final = "grad/"
_ROWS: Final = "rows/"
_VALUES: Final = "values/"

Parameters = Mapping[str, nn.Parameter]
Tied = tuple[nn.Parameter, nn.Parameter] | None


def collect_sparse(modules: Iterable[nn.Module]) -> None:
    """Let every token table in these modules collect gradients of the rows that a batch uses, and of no others."""
    for module in modules:
        for part in module.modules():
            if isinstance(part, nn.Embedding):
                part.sparse = True


def complete(parameters: Parameters, tied: Tied) -> None:
    """Make the gradients of a unit dense and whole, as an optimizer wants them.

    Args:
        parameters: of the unit.
        tied: a table of the unit, and the stand-in that the head has for it; their gradients are summed.
    """
    _add_tied(tied)
    for parameter in parameters.values():
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()


def grad_blob(parameters: Parameters, tied: Tied) -> Pieces:
    """Return the gradients of a unit as a file, of those tensors that have one; see ``complete`` for the arguments.

    The bytes are read when the file is gone through; nothing changes them, whatever comes after.
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
    """Give the parameters of a unit the gradients of a file that ``grad_blob`` made; nothing changes on an error.

    Raises:
        IntegrityError: unreadable, or gradients of other tensors, shapes or types than those of the unit.
        DivergedError: numbers that are not finite.
    """
    file = TensorFile(data, where=where)
    found = {name: _grad(file, name, parameter, where) for name, parameter in parameters.items()}
    count = sum(0 if grad is None else 1 + grad.is_sparse for grad in found.values())
    if count != len(file.infos):
        raise IntegrityError(f"{where} has the tensors {sorted(file.infos)[:3]}..., not those of its unit")
    for name, parameter in parameters.items():
        parameter.grad = found[name]


def _add_tied(tied: Tied) -> None:
    """Move what a stand-in has collected to its table, and add it up there."""
    if tied is None or tied[1].grad is None:
        return
    table, stand_in = tied
    own, table.grad, stand_in.grad = table.grad, stand_in.grad, None
    if own is not None:
        table.grad.add_(own)  # type: ignore[union-attr]


def _grad(file: TensorFile, name: str, parameter: nn.Parameter, where: str) -> torch.Tensor | None:
    """Read the gradient of one parameter; None if the file has none."""
    whole, rows, values = (file.infos.get(f"{prefix}{name}") for prefix in (_WHOLE, _ROWS, _VALUES))
    if whole is not None and rows is None and values is None:
        return _read(file, f"{_WHOLE}{name}", tuple(parameter.shape), parameter, where)
    if whole is not None or (rows is None) is not (values is None):
        raise IntegrityError(f"{where} has the gradient of {name} twice, or rows without values")
    if rows is None:
        return None
    numbers = _read_rows(file, name, rows, parameter, where)
    found = _read(file, f"{_VALUES}{name}", (len(numbers), *parameter.shape[1:]), parameter, where)
    return torch.sparse_coo_tensor(
        numbers.unsqueeze(0), found, size=parameter.shape, is_coalesced=True, check_invariants=False
    ).to(parameter.device)


def _read(file: TensorFile, name: str, shape: tuple[int, ...], parameter: nn.Parameter, where: str) -> torch.Tensor:
    info = file.infos[name]
    if info.shape != shape or info.dtype != DTYPE_NAMES[parameter.dtype]:
        raise IntegrityError(
            f"{where} has {name} as {info.dtype} {list(info.shape)}, expected {parameter.dtype} {list(shape)}"
        )
    if not is_finite(file.tensor(name)):
        raise DivergedError(
            f"the training diverged: {where} has {name} with numbers that are not finite; {LOWER_THE_RATE}"
        )
    target = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
    fill(target, file.tensor(name))
    file.let_go_of(name)
    return target


def _read_rows(file: TensorFile, name: str, info: TensorInfo, parameter: nn.Parameter, where: str) -> torch.Tensor:
    """Read row numbers, which have to be ascending and within the table."""
    if parameter.dim() < 1 or len(info.shape) != 1 or info.dtype != DTYPE_NAMES[torch.int64]:
        raise IntegrityError(f"{where} has the rows of {name} as {info.dtype} {list(info.shape)}, expected I64 [rows]")
    rows = torch.empty(info.shape, dtype=torch.int64)
    fill(rows, file.tensor(f"{_ROWS}{name}"))
    if len(rows) and (int(rows[0]) < 0 or int(rows[-1]) >= parameter.shape[0] or bool((rows.diff() <= 0).any())):
        raise IntegrityError(f"{where} has rows of {name} that are not ascending within {parameter.shape[0]}")
    return rows
