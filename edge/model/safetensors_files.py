"""Read single tensors of a model folder: a node opens the files, reads what it hosts, and closes them.

What a node needs whole is read a piece at a time, so that nothing but the tensor itself is in its memory: a mapped
tensor is resident beside its copy, half as much again where a file in bfloat16 becomes float32.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import torch

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

    def __enter__(self) -> SafetensorsFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handles.clear()

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
            ModelError: the file is gone, or has numbers of another kind.
            IntegrityError: the file is damaged.
        """
        stored = self._stored[name]
        kind = TORCH_DTYPES.get(stored.info.dtype)
        if kind is None:
            raise ModelError(f"{stored.path}: tensor {name} has numbers of type {stored.info.dtype}; convert the model")
        wanted = dtype if dtype is not None and kind.is_floating_point else kind
        if private or wanted is not kind:
            return _read_private(stored, kind, wanted)
        tensor: torch.Tensor = self._open(stored.path).get_tensor(name)
        return tensor

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


def _read_private(stored: StoredTensor, kind: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """Read a tensor into memory of its own: straight into its place, or a piece at a time if it is converted."""
    result = torch.empty(stored.shape, dtype=dtype)
    flat, num_items = result.view(-1), PIECE_BYTES // kind.itemsize
    piece = None if dtype is kind else torch.empty(min(num_items, flat.numel()), dtype=kind)
    try:
        with stored.path.open("rb", buffering=0) as file:
            file.seek(stored.info.offset)
            for start in range(0, flat.numel(), num_items):
                target = flat[start : start + num_items]
                part = target if piece is None else piece[: target.numel()]
                if file.readinto(part.view(torch.uint8).numpy().data) != part.nbytes:
                    raise IntegrityError(f"{stored.path} is damaged (it ends too soon); fetch the model again")
                if part is not target:
                    target.copy_(part)
    except FileNotFoundError as error:
        raise ModelError(f"{stored.path} is missing; fetch the model again") from error
    except OSError as error:
        raise IntegrityError(f"{stored.path} is damaged ({error}); fetch the model again") from error
    return result
