"""Read single tensors of a checkpoint: one safetensors file, or several with an index.

A node opens the files, reads the tensors that it hosts, and closes them; nothing else is touched.

Source: the layouts that ``save_pretrained`` writes (``model.safetensors``, ``model.safetensors.index.json``).
"""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ringtune.errors import IntegrityError, ModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Checkpoint:
    """The tensors of a model folder, by name; a context manager.

    Attributes:
        names_read: every tensor that was read, in order.

    Raises:
        ModelError: the folder has no safetensors file, or its index is not readable.
        IntegrityError: a file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names_read: list[str] = []
        self._handles: dict[str, Any] = {}
        self._file_of = self._list_tensors()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Unmap the files, so that what was copied out of them is not resident twice; reading maps them again."""
        self._handles.clear()

    def find(self, *candidates: str) -> str | None:
        """The first of these names that the checkpoint has."""
        return next((name for name in candidates if name in self._file_of), None)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU, in the file's dtype; its bytes may still be the mapped file."""
        self.names_read.append(name)
        tensor: torch.Tensor = self._open(self._file_of[name]).get_tensor(name)
        return tensor

    def _list_tensors(self) -> dict[str, str]:
        if (self.folder / SINGLE).is_file():
            return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        index = self.folder / INDEX
        if not index.is_file():
            raise ModelError(
                f"{self.folder} has neither {SINGLE} nor {INDEX}; save the model with safe_serialization=True"
            )
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {str(name): str(file) for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} is not readable ({error}); fetch the model again") from error
        for file in files.values():
            if Path(file).name != file:
                raise ModelError(f"{index} names the file {file!r}, which is not in the folder; fetch the model again")
        return files

    def _open(self, file: str) -> Any:
        if file not in self._handles:
            from safetensors import SafetensorError, safe_open

            path = self.folder / file
            try:
                self._handles[file] = safe_open(path, framework="pt", device="cpu")
            except FileNotFoundError as error:
                raise ModelError(f"{path} is missing; fetch the model again") from error
            except (SafetensorError, OSError) as error:
                raise IntegrityError(f"{path} is damaged ({error}); fetch the model again") from error
        return self._handles[file]
