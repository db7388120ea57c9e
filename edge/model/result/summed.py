"""Add up the adapters of several users to one adapter, whose folder loads like that of any run.

See ``ringtune.models.adapters.summed_adapters`` for what it is. Tensors are read and added one at a time, as the file
is gone through.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from edge.model.tensor_bytes import fill, pieces_of, torch_dtype
from ringtune.errors import IntegrityError
from ringtune.files.pieces import FilePieces, Piece, Pieces
from ringtune.files.safetensors_stream import TensorFile, TensorPieces, write_tensors
from ringtune.files.strict import parse_json
from ringtune.models.adapters.summed_adapters import GROWING
from ringtune.models.result_files import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    AUXILIARY_CONFIG_FILE,
    INTERFACE_FILE,
    block_of,
)

_DOWN, _UP = "lora_A", "lora_B"


def summed_files(folders: Sequence[Path], names: Sequence[str], *, is_own: Callable[[int], bool]) -> dict[str, Pieces]:
    """Make the files of the sum; what is the same for all is that of the first.

    Args:
        folders: of the users.
        names: of the files of each; its adapter is one that ``summed_config`` takes.
        is_own: whether the adapters of a block are each user's own. Others never trained, are the same for all, and
            count once, as in every forward of the run.

    Returns:
        Name to content.

    Raises:
        IntegrityError: a file is damaged, or the adapters do not have the same tensors.
    """
    files: dict[str, Pieces] = {name: FilePieces(folders[0] / name) for name in names}
    if (folders[0] / INTERFACE_FILE).is_file():
        files[INTERFACE_FILE] = FilePieces(folders[0] / INTERFACE_FILE)
    files[ADAPTER_FILE] = _summed([opened(folder / ADAPTER_FILE) for folder in folders], folders, is_own)
    for name in (ADAPTER_CONFIG_FILE, AUXILIARY_CONFIG_FILE):
        if name in files:
            files[name] = Pieces.of(_grown(folders[0] / name, len(folders)))
    return files


def opened(path: Path) -> TensorFile:
    """Open the tensors of an adapter.

    Raises:
        IntegrityError: it can't be read.
    """
    try:
        return TensorFile(FilePieces(path), where=str(path))
    except OSError as error:
        raise IntegrityError(f"{path} can't be read ({error}); copy the run's folder again") from error


def _summed(files: Sequence[TensorFile], folders: Sequence[Path], is_own: Callable[[int], bool]) -> Pieces:
    """Write the sums to one file."""
    shapes = {name: (info.dtype, info.shape) for name, info in files[0].infos.items()}
    for file, folder in zip(files, folders, strict=True):
        other = {name: (info.dtype, info.shape) for name, info in file.infos.items()}
        if odd := sorted(name for name in shapes.keys() | other.keys() if shapes.get(name) != other.get(name)):
            raise IntegrityError(
                f"{folder / ADAPTER_FILE} and that of {folders[0].name} differ in {odd[0]}; copy the run's folder again"
            )
    return write_tensors({name: _tensor(files, name, is_own) for name in shapes}, metadata={"format": "pt"})


def _tensor(files: Sequence[TensorFile], name: str, is_own: Callable[[int], bool]) -> TensorPieces:
    """Describe a tensor of the sum without reading it."""
    info, rank, block = files[0].infos[name], _rank(files[0], name), block_of(name)
    shape, size_bytes = list(info.shape), info.nbytes
    if rank:
        shape[0 if name.endswith(_DOWN) else 1] *= len(files)
        size_bytes *= len(files)

    def make() -> Iterator[Piece]:
        tensors = [read_tensor(file.tensor(name)) for file in files]
        if block is not None and not is_own(block):
            tensors = [tensors[0], *(torch.zeros_like(tensor) for tensor in tensors[1:])]
        yield from pieces_of(_added(tensors, name, rank)).data

    return TensorPieces(info.dtype, tuple(shape), Pieces(size_bytes, make))


def _rank(file: TensorFile, name: str) -> int:
    """Return the rank of the product of which a tensor is a factor; 0 of a matrix of its own.

    Raises:
        IntegrityError: the other factor is missing, or they do not fit.
    """
    if not name.endswith((_DOWN, _UP)):
        return 0
    stem = name.removesuffix(_DOWN).removesuffix(_UP)
    down, up = (file.infos[part].shape if (part := stem + end) in file.infos else () for end in (_DOWN, _UP))
    if len(down) != 2 or len(up) != 2 or up[1] < 1 or down[0] % up[1]:
        raise IntegrityError(f"{stem}{_DOWN} and {_UP} of a user do not fit each other; copy the run's folder again")
    return up[1]


def read_tensor(source: TensorPieces) -> torch.Tensor:
    """Read one tensor."""
    tensor = torch.empty(source.shape, dtype=torch_dtype(source.dtype))
    fill(tensor, source)
    return tensor


def _added(tensors: Sequence[torch.Tensor], name: str, rank: int) -> torch.Tensor:
    """Add up matrices, and put the factors of products beside each other.

    Where query, key and value are one matrix, ``lora_A`` has ``rank`` rows for each of them, one after the other.
    """
    if name.endswith(_UP):
        return torch.cat(list(tensors), dim=1)
    if name.endswith(_DOWN):
        apart = [tensor.reshape(-1, rank, tensor.shape[-1]) for tensor in tensors]
        return torch.cat(apart, dim=1).reshape(-1, tensors[0].shape[-1])
    return torch.stack([tensor.double() for tensor in tensors]).sum(0).to(tensors[0].dtype)


def _grown(path: Path, count: int) -> bytes:
    """Return the description of an adapter with the rank of the sum, where it has one."""
    try:
        found: dict[str, Any] = parse_json(path.read_text(encoding="utf-8"))
        if path.name == ADAPTER_CONFIG_FILE:
            found["config"] = _with_rank(found["config"], count)
        elif found.get("library"):
            found["library"] = {**found["library"], "config": _with_rank(found["library"]["config"], count)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise IntegrityError(
            f"{path} does not describe a LoRA adapter ({error}); copy the run's folder again"
        ) from error
    return (json.dumps(found, indent=2) + "\n").encode()


def _with_rank(config: Mapping[str, Any], count: int) -> dict[str, Any]:
    return {**config, **{name: config[name] * count for name in GROWING}}
