"""The side that has a model folder: hashes it once, then reads out what is asked for by digest.

What may be served is what a run uses, under the id of that run: a path never comes from who asks. Agents and the
coordinator serve alike; their gRPC servicers only translate.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ringtune.errors import BusyError, FrameError, IntegrityError, ModelError
from ringtune.models.folder import read_config
from ringtune.models.tensors import INDEX_FILE, read_headers
from ringtune.v1 import weights_pb2
from ringtune.weights.codec import manifest_to_proto, pieces_from_proto
from ringtune.weights.manifest import (
    CHUNK_BYTES,
    MODEL_FILES,
    FileEntry,
    ModelManifest,
    TensorEntry,
)

_READ_BYTES = 1 << 20


class _Place(NamedTuple):
    """Where the bytes of a digest lie: in which file, from where on, how many."""

    path: Path
    offset: int
    nbytes: int


class ModelSource:
    """A model folder that is served.

    Args:
        folder: the model folder.

    Attributes:
        manifest: of the whole model.

    Raises:
        ModelError: the folder can't be used.
        IntegrityError: a file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places: dict[str, _Place] = {}
        read_config(folder)  # refuses what no node may use
        self._state = _state(folder)
        tensors = []
        for name, stored in sorted(read_headers(folder).items()):
            place = _Place(stored.path, stored.info.offset, stored.info.nbytes)
            digest = self._add(place)
            tensors.append(
                TensorEntry(
                    name=name, dtype=stored.info.dtype, shape=stored.shape, sha256=digest, sample=stored.sample()
                )
            )
        files = []
        for name in sorted(MODEL_FILES):
            path = folder / name
            if path.is_file():
                place = _Place(path, 0, path.stat().st_size)
                files.append(FileEntry(name=name, nbytes=place.nbytes, sha256=self._add(place)))
        self.manifest = ModelManifest(tensors=tuple(tensors), files=tuple(files))

    @property
    def is_current(self) -> bool:
        """Whether the folder's files have the sizes and times that they had when they were hashed."""
        return _state(self._folder) == self._state

    def read(self, pieces: Sequence[tuple[str, int]]) -> Iterator[tuple[int, bytes]]:
        """Read out contents from where the other side has stopped.

        Args:
            pieces: digests, and how many bytes of each are there already.

        Yields:
            The index of a piece and its next bytes, at most ``CHUNK_BYTES``.

        Raises:
            IntegrityError: a digest that this model does not have, or an offset behind its end.
        """
        for digest, offset in pieces:
            if digest not in self._places or offset > self._places[digest].nbytes:
                raise IntegrityError(
                    f"no content {digest[:16]} with {offset:,} bytes or more in {self._folder.name}; the model there "
                    "is another one"
                )
        for index, (digest, offset) in enumerate(pieces):
            for data in _read(self._places[digest], offset, CHUNK_BYTES):
                yield index, data

    def _add(self, place: _Place) -> str:
        digest = hashlib.sha256()
        for data in _read(place, 0, _READ_BYTES):
            digest.update(data)
        self._places.setdefault(digest.hexdigest(), place)
        return digest.hexdigest()


class Offers:
    """Which models this process serves: those of runs that it takes part in. Safe to call from any thread.

    Args:
        max_streams: fetches at a time; each holds a thread.
    """

    def __init__(self, *, max_streams: int = 8) -> None:
        self._max_streams = max_streams
        self._slots = threading.BoundedSemaphore(max_streams)
        self._folders: dict[str, Path | None] = {}
        self._source: tuple[Path, ModelSource] | None = None
        self._lock = threading.Lock()
        self._hashing = threading.Lock()

    def put(self, run_id: str, folder: Path | None) -> None:
        """Serve ``folder`` to nodes of a run; None says that there is no copy here. Ends earlier runs' offers."""
        with self._lock:
            self._folders = {run_id: folder}

    def drop(self, run_id: str) -> None:
        """Serve a run no more; an unknown one is no error."""
        with self._lock:
            self._folders.pop(run_id, None)

    def manifest(self, request: weights_pb2.ManifestRequest) -> weights_pb2.ManifestReply:
        """Answer what the model of a run consists of.

        Raises:
            RingTuneError: see ``source``.
        """
        return manifest_to_proto(self.source(request.run_id).manifest)

    def chunks(self, request: weights_pb2.FetchRequest) -> Iterator[weights_pb2.FetchChunk]:
        """Yield the contents that a fetch asks for by digest.

        Raises:
            BusyError: too many fetch already.
            RingTuneError: see ``source`` and ``ModelSource.read``.
        """
        if not self._slots.acquire(blocking=False):
            raise BusyError(f"{self._max_streams} nodes fetch from here already; ask again")
        try:
            source = self.source(request.run_id)
            for index, data in source.read(pieces_from_proto(request)):
                yield weights_pb2.FetchChunk(piece=index, data=data)
        finally:
            self._slots.release()

    def source(self, run_id: str) -> ModelSource:
        """The model of a run, hashed when it is first asked for.

        Hashing some 500 MB takes a second.

        Raises:
            FrameError: the run is not known here, or not yet.
            ModelError: there is no copy here.
            IntegrityError: the copy is damaged.
        """
        with self._lock:
            if run_id not in self._folders:
                raise FrameError(f"run {run_id[:40]} is not known here yet; ask again")
            folder = self._folders[run_id]
        if folder is None:
            raise ModelError("there is no copy of the model here")
        with self._hashing:
            if self._source is None or self._source[0] != folder or not self._source[1].is_current:
                self._source = (folder, ModelSource(folder))
            return self._source[1]


def _state(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and modification time of every file that may be served, by name."""
    names = {*MODEL_FILES, INDEX_FILE, *(path.name for path in folder.glob("*.safetensors"))}
    paths = [folder / name for name in sorted(names) if (folder / name).is_file()]
    return {path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}


def _read(place: _Place, start: int, chunk_bytes: int) -> Iterator[bytes]:
    try:
        with place.path.open("rb", buffering=0) as file:
            at, end = place.offset + start, place.offset + place.nbytes
            file.seek(at)
            while at < end:
                data = file.read(min(chunk_bytes, end - at))
                if not data:
                    raise IntegrityError(f"{place.path.name} became shorter while it was read; start the run again")
                yield data
                at += len(data)
    except OSError as error:
        raise ModelError(f"can't read {place.path.name}: {error.strerror}; start the run again") from error
