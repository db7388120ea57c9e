"""Read single tensors of a model folder: a node opens the files, reads what it hosts, and closes them.

What a node needs whole is read a piece at a time, so that nothing but the tensor itself is in its memory: a mapped
tensor is resident beside its copy, half as much again where a file in bfloat16 becomes float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from edge.model.finite import first_not_finite
from edge.model.tensor_bytes import TORCH_DTYPES
from ringtune.errors import IntegrityError, ModelError
from ringtune.files.pieces import PIECE_BYTES
from ringtune.models.tensors import StoredTensor, read_headers


class SafetensorsFiles:
    """The tensors of a model folder, by name; a context manager.

    Raises:
        ModelError: the folder has no safetensors file, or its index is not readable.
        IntegrityError: a file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._handles: dict[Path, Any] = {}
        self._stored = read_headers(folder)
        self._piece: torch.Tensor | None = None

    def __enter__(self) -> SafetensorsFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handles.clear()
        self._piece = None

    def find(self, *candidates: str) -> str | None:
        """Return the first of these names that the files have; None if they have none."""
        return next((name for name in candidates if name in self._stored), None)

    def read(self, name: str, dtype: torch.dtype | None = None, *, private: bool = False) -> torch.Tensor:
        """Read one tensor, on the CPU.

        Args:
            name: as the files have it.
            dtype: to convert to, unless it is a tensor of whole numbers; None = the file's.
            private: in memory of its own. Otherwise its bytes may still be the mapped file, of which only pages that
                are used become resident.

        Raises:
            ModelError: the file is gone, has numbers of another kind, or numbers that are not finite; of a mapped
                matrix, which would become resident, the last is not looked at.
            IntegrityError: the file is damaged.
        """
        stored = self._stored[name]
        kind = _kind_of(name, stored)
        wanted = dtype if dtype is not None and kind.is_floating_point else kind
        is_mapped = wanted is kind and not private
        if is_mapped:
            found: torch.Tensor = self._open(stored.path).get_tensor(name)
        else:
            found = _read_in_place(stored, kind) if wanted is kind else self._read_converted(stored, kind, wanted)
        if is_mapped and found.dim() > 1:
            return found
        if wanted.is_floating_point and first_not_finite({name: found}):
            in_words = str(wanted).removeprefix("torch.")
            raise ModelError(
                f"{stored.path}: tensor {name} has numbers that are not finite in {in_words}: the model is damaged, or "
                "was saved in the midst of a training that diverged; fetch it again or give another one"
            )
        return found

    def read_frozen(
        self, name: str, dtype: torch.dtype, *, private: bool = False, device: torch.device | None = None
    ) -> torch.Tensor:
        """Read one tensor that never trains; see ``read``.

        Args:
            name: as the files have it.
            dtype: to convert to.
            private: in memory of its own.
            device: where to; None = the CPU.

        Raises:
            ModelError, IntegrityError: see ``read``.
        """
        tensor = self.read(name, dtype, private=private)
        return tensor if device is None else tensor.to(device)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor that the files have."""
        return self._stored[name].shape

    def row_pieces(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Read a matrix some rows at a time, each time into the same memory.

        Yields:
            The number of the first row, and the rows as they are stored.

        Raises:
            ModelError, IntegrityError: see ``read``.
        """
        stored = self._stored[name]
        columns = stored.shape[1]
        for start, part in _pieces(stored, self._piece_of(_kind_of(name, stored), multiple=columns)):
            yield start // columns, part.view(-1, columns)

    def _read_converted(self, stored: StoredTensor, kind: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
        """Read a tensor into memory of its own, a piece at a time."""
        result = torch.empty(stored.shape, dtype=dtype)
        flat = result.view(-1)
        for start, part in _pieces(stored, self._piece_of(kind)):
            flat[start : start + part.numel()].copy_(part)
        return result

    def _piece_of(self, dtype: torch.dtype, *, multiple: int = 1) -> torch.Tensor:
        """Return memory for a piece: always the same, so that no gaps are left between the tensors that are read."""
        count = max(1, PIECE_BYTES // (multiple * dtype.itemsize)) * multiple
        if self._piece is None or self._piece.numel() < count * dtype.itemsize:
            self._piece = torch.empty(max(PIECE_BYTES, count * dtype.itemsize), dtype=torch.uint8)
        return self._piece[: count * dtype.itemsize].view(dtype)

    def _open(self, path: Path) -> Any:
        if path not in self._handles:
            from safetensors import SafetensorError, safe_open

            try:
                self._handles[path] = safe_open(path, framework="pt", device="cpu")
            except FileNotFoundError as error:
                raise ModelError(f"{path} is missing; fetch the model again") from error
            except (SafetensorError, OSError) as error:
                raise IntegrityError(f"{path} is damaged ({error}); fetch the model again") from error
        return self._handles[path]


def _kind_of(name: str, stored: StoredTensor) -> torch.dtype:
    kind = TORCH_DTYPES.get(stored.info.dtype)
    if kind is None:
        raise ModelError(f"{stored.path}: tensor {name} has numbers of type {stored.info.dtype}; convert the model")
    return kind


def _read_in_place(stored: StoredTensor, dtype: torch.dtype) -> torch.Tensor:
    """Read a tensor into memory of its own."""
    result = torch.empty(stored.shape, dtype=dtype)
    for _ in _pieces(stored, result.view(-1), in_place=True):
        pass
    return result


def _pieces(
    stored: StoredTensor, buffer: torch.Tensor, *, in_place: bool = False
) -> Iterator[tuple[int, torch.Tensor]]:
    """Read a tensor's numbers in order, a piece at a time.

    Args:
        stored: where they are.
        buffer: flat, of the stored type; takes each piece.
        in_place: whether the buffer takes all of them, one behind the other.

    Yields:
        How many numbers came before, and the piece.
    """
    count = math.prod(stored.shape)
    each = min(count, PIECE_BYTES // buffer.element_size()) if in_place else buffer.numel()
    try:
        with stored.path.open("rb", buffering=0) as file:
            file.seek(stored.info.offset)
            for start in range(0, count, max(1, each)):
                num = min(each, count - start)
                part = buffer[start : start + num] if in_place else buffer[:num]
                if file.readinto(part.view(torch.uint8).numpy().data) != part.nbytes:
                    raise IntegrityError(f"{stored.path} is damaged (it ends too soon); fetch the model again")
                yield start, part
    except FileNotFoundError as error:
        raise ModelError(f"{stored.path} is missing; fetch the model again") from error
    except OSError as error:
        raise IntegrityError(f"{stored.path} is damaged ({error}); fetch the model again") from error
