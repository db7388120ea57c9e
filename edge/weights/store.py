"""Keep fetched base weights in a cache on this device.

::

    CACHE/models/<digest of the manifest>/
        lock                          one process at a time
        outline/                      config, tokenizer, and model.safetensors as a sparse file: all headers and a
                                      sample of each tensor, from which a model is planned and a block is timed
        weights/<name>/               a model folder with those tensors that were fetched, one file each

Every name below ``CACHE`` is made here: from digests, from a fixed list of files, and from a model name that has
harmless characters only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from edge.weights.files import PARTIAL, CheckedFile, file_header, write_whole, writing
from ringtune.errors import CapacityError, DeadlineError, IntegrityError, InterruptedRunError
from ringtune.files.safetensors_header import header_bytes
from ringtune.models.tensors import INDEX_FILE, WEIGHTS_FILE, sample_start
from ringtune.quantities import format_bytes
from ringtune.weights.manifest import FileEntry, ModelManifest, TensorEntry

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_LOCK_RETRY_S = 0.1
_SPARE_BYTES = 1 << 24


class ModelCache:
    """One model in the cache, to be used while ``locked``.

    Args:
        root: of the whole cache; made if missing.
        manifest: of the model.
        name: of the model, for the folder that is loaded and hence for the results.

    Raises:
        UsageError: the folder can't be written.
        IntegrityError: a link leads out of the cache.
    """

    def __init__(self, root: Path, manifest: ModelManifest, name: str) -> None:
        self.manifest = manifest
        self._root = root
        self._folder = self._inside(root / "models" / manifest.digest)
        self.outline = self._inside(self._folder / "outline")
        self.weights = self._inside(self._folder / "weights" / (name if _SAFE_NAME.fullmatch(name) else "model"))
        with writing(root):
            for folder in (self.outline, self.weights):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    @contextlib.contextmanager
    def locked(self, *, deadline_s: float, stop: threading.Event) -> Iterator[None]:
        """Keep other processes of this device out; the lock ends with the process.

        Args:
            deadline_s: monotonic seconds.
            stop: set when nobody waits any more.

        Raises:
            DeadlineError: another process fetches for too long.
            InterruptedRunError: stopped.
        """
        lock = FileLock(self._folder / "lock", thread_local=False, fallback_to_soft=False)
        wait_s = max(0.0, deadline_s - time.monotonic())
        with writing(self._root):
            try:
                held = lock.acquire(wait_s, poll_interval=_LOCK_RETRY_S, cancel_check=stop.is_set)
            except Timeout as error:
                if stop.is_set():
                    raise InterruptedRunError("the run was released while its weights were fetched") from error
                raise DeadlineError(
                    f"another process has been fetching into {self._folder}; give --cache DIR"
                ) from error
        with held:
            yield

    # ---- files --------------------------------------------------------------------------------------

    def file(self, entry: FileEntry) -> CheckedFile:
        """Return the cached copy of a file beside the weights, complete or not."""
        path = self._inside(self.outline / entry.name)
        return CheckedFile(path, what=f"file {entry.name}", sha256=entry.sha256, nbytes=entry.nbytes)

    def tensor(self, entry: TensorEntry) -> CheckedFile:
        """Return the cached file of one tensor, complete or not."""
        path = self._inside(self.weights / _file_name(entry))
        what, header = f"tensor {entry.name!r}", file_header(entry)
        return CheckedFile(path, what=what, sha256=entry.sha256, nbytes=entry.nbytes, header=header)

    def require_room(self, wanted: Sequence[CheckedFile]) -> None:
        """Refuse to fetch files for which the disk has no room.

        Raises:
            CapacityError: the disk has less room than these files still need.
        """
        needed_bytes = sum(file.nbytes - file.offset for file in wanted)
        free_bytes = shutil.disk_usage(self._folder).free
        if needed_bytes + _SPARE_BYTES > free_bytes:
            raise CapacityError(
                f"the weights of this node need {format_bytes(needed_bytes)} in {self._root}, "
                f"{format_bytes(free_bytes)} are free; make room, or give --cache DIR on another disk"
            )

    # ---- what loaders see ---------------------------------------------------------------------------

    def write_outline(self) -> Path:
        """Write the outline if it is not there yet; the config in it has to be there.

        Returns:
            Its folder: reads like the model folder, but weights are holes.
        """
        path = self.outline / WEIGHTS_FILE
        header = header_bytes({entry.name: (entry.dtype, entry.shape) for entry in self.manifest.tensors})
        total_bytes = len(header) + sum(entry.nbytes for entry in self.manifest.tensors)
        if path.is_file() and path.stat().st_size == total_bytes:
            return self.outline
        partial = path.with_name(path.name + PARTIAL)
        with writing(self._root):
            with partial.open("wb") as file:
                file.write(header)
                at = len(header)
                for entry in self.manifest.tensors:
                    file.seek(at + sample_start(entry.nbytes))
                    file.write(entry.sample)
                    at += entry.nbytes
                file.truncate(total_bytes)
            partial.replace(path)
        return self.outline

    def publish(self, files: Sequence[FileEntry]) -> Path:
        """Write the index of all tensors that are complete, and put the small files beside it.

        Returns:
            The folder: a model folder, as far as it goes.
        """
        complete = {
            entry.name: _file_name(entry)
            for entry in self.manifest.tensors
            if (self.weights / _file_name(entry)).is_file()
        }
        with writing(self._root):
            for entry in files:
                write_whole(self.weights / entry.name, (self.outline / entry.name).read_bytes())
        write_whole(self.weights / INDEX_FILE, json.dumps({"weight_map": complete}, indent=1).encode())
        return self.weights

    def _inside(self, path: Path) -> Path:
        if not path.resolve().is_relative_to(self._root.resolve()):
            raise IntegrityError(f"{path} leads out of the cache; remove it")
        return path


def _file_name(entry: TensorEntry) -> str:
    """Name of the file of one tensor with this name and content; made of hex digits only."""
    key = json.dumps([entry.name, entry.dtype, entry.shape, entry.sha256])
    return f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.safetensors"
