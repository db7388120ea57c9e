"""Read single tensors of a model folder: a node opens the files, reads what it hosts, and closes them."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ringtune.errors import IntegrityError, ModelError
from ringtune.models.tensors import read_headers


class SafetensorsFiles:
    """The tensors of a model folder, by name; a context manager.

    Raises:
        ModelError: the folder has no safetensors file, or its index is not readable.
        IntegrityError: a file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._handles: dict[Path, Any] = {}
        self._file_of = {name: stored.path for name, stored in read_headers(folder).items()}

    def __enter__(self) -> SafetensorsFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Unmap the files, so that copied tensors are not resident twice; reading maps the files again."""
        self._handles.clear()

    def find(self, *candidates: str) -> str | None:
        """Return the first of these names that the files have; None if they have none."""
        return next((name for name in candidates if name in self._file_of), None)

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor, on the CPU, in the file's dtype; its bytes may still be the mapped file."""
        tensor: torch.Tensor = self._open(self._file_of[name]).get_tensor(name)
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
