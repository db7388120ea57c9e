"""Where each tensor of a model folder lies: in one safetensors file, or in several with an index.

Only headers are read. The index is not trusted: it may name files of the folder only, and what it says has to be
in them.

Source: the layouts that ``save_pretrained`` writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from ringtune.errors import ModelError
from ringtune.files.safetensors_header import TensorInfo, read_safetensors_header

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 20_000_000


class StoredTensor(NamedTuple):
    """A tensor's header entry and the file that it is in."""

    path: Path
    info: TensorInfo

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.info.shape


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder by its name in the file.

    Raises:
        ModelError: no safetensors file, or an index that is not readable or does not fit its files.
        IntegrityError: a file is damaged.
    """
    path = folder / WEIGHTS_FILE
    if path.is_file():
        return {name: StoredTensor(path, info) for name, info in read_safetensors_header(path).items()}
    if not (folder / INDEX_FILE).is_file():
        raise ModelError(_no_weights(folder))
    file_of = _read_index(folder / INDEX_FILE)
    headers = {file: read_safetensors_header(folder / file) for file in sorted(set(file_of.values()))}
    for name, file in file_of.items():
        if name not in headers[file]:
            raise ModelError(f"{folder / file} has no tensor {name!r}, which {INDEX_FILE} says; fetch the model again")
    return {name: StoredTensor(folder / file, headers[file][name]) for name, file in file_of.items()}


def _read_index(path: Path) -> dict[str, str]:
    try:
        if path.stat().st_size > _MAX_INDEX_BYTES:
            raise ModelError(f"{path} has {path.stat().st_size:,} bytes, an index has {_MAX_INDEX_BYTES:,} at most")
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} is not a readable index ({error!r}); fetch the model again") from error
    for file in files.values():
        if Path(file).name != file or file in ("", ".", ".."):
            raise ModelError(f"{path} names the file {file!r}, which is not in the folder; fetch the model again")
    return files


def _no_weights(folder: Path) -> str:
    if any(folder.glob("*.bin")):
        return f"{folder} has pickled weights only, which are never opened; save them as {WEIGHTS_FILE}"
    return f"{folder} has no {WEIGHTS_FILE}; give a folder that has one"
