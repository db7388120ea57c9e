"""Weights of a model by digest: the manifest, its messages, and the source that serves a model folder.

A node without a copy of the model fetches a *manifest* from a node with one: type, shape and digest of every tensor,
and the small files beside the weights. From it the node builds an outline (a sparse file with all headers), which is
enough for planning. Later it fetches the tensors of its slice by digest.

A peer's manifest is the one that the coordinator has named, on which all nodes of the run agree that have the model
(``agreed_manifest``). It is checked before its use: names are never paths, sizes follow from types and shapes, and
files have names of a fixed list. A source hashes its folder once and serves it under the id of a run: a request never
has a path.

Source: the content-addressed objects of Flower (``supercore/inflatable``).
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ringtune.errors import BusyError, FrameError, IntegrityError, ModelError, TrustError
from ringtune.models.families import FAMILIES
from ringtune.models.folder import (
    CONFIG_FILE,
    INDEX_FILE,
    TOKENIZER_FILES,
    base_name,
    read_config,
    read_headers,
    select_tensors,
)
from ringtune.models.tokenizer import is_template_file, template_files
from ringtune.storage.gguf import SUFFIX
from ringtune.storage.pieces import FilePieces, Pieces, file_sha256
from ringtune.storage.tensor_files import stored_bytes
from ringtune.texts import shown
from ringtune.v1 import weights_pb2

CHUNK_BYTES = 1 << 16
"""Most data bytes of a message, half a second at 1 Mbit/s; a broken connection loses at most one message."""

MODEL_FILES = (CONFIG_FILE, *TOKENIZER_FILES)
"""Files besides the weights that may be fetched, with further chat templates; no other file of a folder is sent."""

_MAX_FILE_BYTES = 1 << 26
_MAX_TENSORS = 100_000
_MAX_TOTAL_BYTES = 1 << 42
_MAX_NAME = 256
_MAX_DIMENSIONS = 8
_HEX_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """One tensor of a model."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str

    def __post_init__(self) -> None:
        """Refuse a name, type, shape or digest that is out of range."""
        if not 1 <= len(self.name) <= _MAX_NAME or not self.name.isprintable():
            raise IntegrityError(f"the manifest has a tensor with the name {self.name[:80]!r}; ask another source")
        is_shape = len(self.shape) <= _MAX_DIMENSIONS and all(side >= 0 for side in self.shape)
        if not is_shape or stored_bytes(self.dtype, self.shape) is None:
            raise _refused(self.name, f"has type {self.dtype!r} and shape {self.shape}")
        _check_digest(self.name, self.sha256)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return stored_bytes(self.dtype, self.shape) or 0


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One file besides the weights."""

    name: str
    nbytes: int
    sha256: str

    def __post_init__(self) -> None:
        """Refuse other names, sizes above 64 MiB, and no digest."""
        if self.name not in MODEL_FILES and not is_template_file(self.name):
            raise IntegrityError(f"the manifest has the file {self.name[:80]!r}, which is never fetched")
        if not 0 <= self.nbytes <= _MAX_FILE_BYTES:
            raise _refused(self.name, f"has {self.nbytes:,} bytes, at most {_MAX_FILE_BYTES:,} are allowed")
        _check_digest(self.name, self.sha256)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelManifest:
    """All tensors and small files of a model, by digest."""

    tensors: tuple[TensorEntry, ...]
    files: tuple[FileEntry, ...]

    def __post_init__(self) -> None:
        """Refuse duplicate or unsorted names, too many tensors or bytes, no tensors, and no config."""
        if not 1 <= len(self.tensors) <= _MAX_TENSORS:
            raise IntegrityError(f"the manifest has {len(self.tensors):,} tensors; ask another source")
        if sum(tensor.nbytes for tensor in self.tensors) > _MAX_TOTAL_BYTES:
            raise IntegrityError("the manifest claims more bytes than any model has; ask another source")
        for names in ([tensor.name for tensor in self.tensors], [file.name for file in self.files]):
            if names != sorted(set(names)):
                raise IntegrityError("the manifest has a name twice, or out of order; ask another source")
        if CONFIG_FILE not in {file.name for file in self.files}:
            raise IntegrityError(f"the manifest has no {CONFIG_FILE}; ask another source")

    @property
    def sha256(self) -> str:
        """SHA-256, hex, over names, types, shapes, sizes and digests; it identifies the model."""
        rows: list[Any] = [[entry.name, entry.dtype, entry.shape, entry.sha256] for entry in self.tensors]
        rows += [[entry.name, entry.nbytes, entry.sha256] for entry in self.files]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def agreed_manifest(manifests: Mapping[str, ModelManifest], owners: Collection[str] = ()) -> ModelManifest:
    """Return the manifest of a model of which several nodes have a copy; raises ``ModelError``.

    Tensors have to be equal in every byte, and files of the tokenizer or image processor where nodes have them; nodes
    without data may lack such files. Those that are given to other nodes are the files of ``owners``, who convert rows
    with them; of all nodes if none of these has any. Configs are compared by their values, when a run is planned.
    """
    givers = _givers(manifests, owners)
    if problem := _difference(manifests, givers):
        raise problem
    counts = Counter(manifests[node].sha256 for node in givers)
    return max((manifests[node] for node in givers), key=lambda given: (counts[given.sha256], given.sha256))


def odd_manifests(manifests: Mapping[str, ModelManifest], owners: Collection[str] = ()) -> dict[str, ModelError]:
    """Return the nodes with another model than more than half of all, each with what differs.

    Empty if all agree, or no model is that of more than half. ``owners`` as for ``agreed_manifest``.
    """
    givers = _givers(manifests, owners)
    for node in sorted(manifests):
        pairs = {other: {name: manifests[name] for name in {node, other}} for other in manifests}
        odd = {other: problem for other, pair in pairs.items() if (problem := _difference(pair, givers)) is not None}
        if 2 * len(odd) < len(manifests):
            return odd
    return {}


def _givers(manifests: Mapping[str, ModelManifest], owners: Collection[str]) -> Collection[str]:
    """Return the nodes whose files beside the weights may be given to others."""
    with_files = [node for node, manifest in manifests.items() if len(manifest.files) > 1]
    return [node for node in with_files if node in owners] or with_files or manifests


def _difference(manifests: Mapping[str, ModelManifest], givers: Collection[str]) -> ModelError | None:
    """Return the first difference of the models of some nodes; ``givers`` have the same files beside the config."""
    known: dict[str, tuple[str, str]] = {}
    for node, manifest in sorted(manifests.items()):
        rows = {f"tensor {entry.name}": f"{entry.dtype} {entry.shape} {entry.sha256}" for entry in manifest.tensors}
        missing = known and sorted({name for name in known if name.startswith("tensor ")} ^ rows.keys())
        rows |= {entry.name: entry.sha256 for entry in manifest.files if entry.name != CONFIG_FILE}
        if node in givers:
            rows["the list of files beside the weights"] = " ".join(entry.name for entry in manifest.files)
        differing = missing or [name for name, row in rows.items() if known.get(name, (node, row))[1] != row]
        if differing:
            other = known.get(differing[0], next(iter(known.values())))[0]
            return ModelError(
                f"nodes {other} and {node} have different models: {differing[0]} is not the same; put the same folder "
                "on both (model.path, or ringtune node --model)"
            )
        known |= {name: (node, row) for name, row in rows.items() if name not in known}
    return None


def needed_files(manifest: ModelManifest, *, is_owner: bool) -> tuple[FileEntry, ...]:
    """Return the files that a node needs: the config, and for an owner those to convert rows to tensors."""
    return tuple(file for file in manifest.files if is_owner or file.name == CONFIG_FILE)


def needed_tensors(
    manifest: ModelManifest,
    config: Mapping[str, Any],
    *,
    blocks: Iterable[int],
    is_owner: bool,
    with_decoder: bool,
    with_unused: bool = False,
) -> tuple[TensorEntry, ...]:
    """Return the tensors that a node hosts; a decoder that is tied to the token table is that table.

    ``is_owner`` adds embedding and the units after the last block; ``with_decoder`` and ``with_unused`` as for
    ``select_tensors``.
    """
    family = FAMILIES[config["model_type"]]
    entries = {base_name(entry.name, family): entry for entry in manifest.tensors}
    names = select_tensors(
        {name: entry.shape for name, entry in entries.items()},
        config,
        where="the model that was found",
        blocks=sorted(set(blocks)),
        is_owner=is_owner,
        with_decoder=with_decoder,
        with_unused=with_unused,
    )
    return tuple(entries[name] for name in names)


def _check_digest(name: str, digest: str) -> None:
    if not _HEX_DIGEST.fullmatch(digest):
        raise _refused(name, "has no SHA-256")


def _refused(name: str, reason: str) -> IntegrityError:
    return IntegrityError(f"the manifest is not usable: {name!r} {reason}; ask another source")


DIGEST_BYTES = 32


def manifest_to_proto(manifest: ModelManifest) -> weights_pb2.ManifestReply:
    """Encode a manifest."""
    return weights_pb2.ManifestReply(
        tensors=[
            weights_pb2.TensorEntry(
                name=entry.name,
                dtype=entry.dtype,
                shape=entry.shape,
                sha256=bytes.fromhex(entry.sha256),
            )
            for entry in manifest.tensors
        ],
        files=[
            weights_pb2.FileEntry(name=entry.name, size_bytes=entry.nbytes, sha256=bytes.fromhex(entry.sha256))
            for entry in manifest.files
        ],
    )


def manifest_from_proto(message: weights_pb2.ManifestReply) -> ModelManifest:
    """Decode a manifest; raises ``IntegrityError``."""
    return ModelManifest(
        tensors=tuple(
            TensorEntry(
                name=entry.name,
                dtype=entry.dtype,
                shape=tuple(entry.shape),
                sha256=entry.sha256.hex(),
            )
            for entry in message.tensors
        ),
        files=tuple(
            FileEntry(name=entry.name, nbytes=entry.size_bytes, sha256=entry.sha256.hex()) for entry in message.files
        ),
    )


def pieces_from_proto(message: weights_pb2.FetchRequest) -> tuple[tuple[str, int], ...]:
    """Decode the digests that are requested, each with the offset at which to begin."""
    if any(len(piece.sha256) != DIGEST_BYTES for piece in message.pieces):
        raise IntegrityError("a piece that was asked for has no SHA-256; use one version on all machines")
    return tuple((piece.sha256.hex(), piece.offset) for piece in message.pieces)


class ModelSource:
    """A model folder that is served to other nodes; the constructor hashes all its files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._contents: dict[str, FilePieces] = {}
        read_config(folder)  # refuses an unsupported model
        self._state = _state(folder)
        tensors = []
        for name, stored in sorted(read_headers(folder).items()):
            if stored.four_bit is not None:
                raise ModelError(
                    f"{folder}: tensor {name} has 4 bits a number, which no other node can fetch; put the folder on "
                    "every node (ringtune node --model)"
                )
            digest = stored.sha256
            self._contents[digest] = FilePieces(stored.path, stored.info.offset, stored.info.nbytes)
            tensors.append(TensorEntry(name=name, dtype=stored.info.dtype, shape=stored.shape, sha256=digest))
        files = []
        for name in sorted((*MODEL_FILES, *template_files(folder))):
            path = folder / name
            if path.is_file():
                content = FilePieces(path)
                digest = file_sha256(path, 0, content.size_bytes)
                self._contents[digest] = content
                files.append(FileEntry(name=name, nbytes=content.size_bytes, sha256=digest))
        self.manifest = ModelManifest(tensors=tuple(tensors), files=tuple(files))

    @property
    def is_current(self) -> bool:
        """Whether the files still have the sizes and times from when they were hashed."""
        return _state(self._folder) == self._state

    def read(self, pieces: Sequence[tuple[str, int]]) -> Iterator[tuple[int, bytes]]:
        """Read contents by digest, each from the number of bytes on that the caller has already."""
        for digest, offset in pieces:
            if digest not in self._contents or offset > self._contents[digest].size_bytes:
                raise IntegrityError(
                    f"no content {digest[:16]} with {offset:,} bytes or more in {self._folder.name}; the model there "
                    "is another one"
                )
        for index, (digest, offset) in enumerate(pieces):
            for data in _messages(self._contents[digest], offset):
                yield index, data


_MAX_STREAMS_OF_ONE: Final = 2


class Offers:
    """The model that this process serves, by run, in at most ``max_streams`` concurrent fetches. Safe for threads.

    A caller with a certificate has two of them, as a node fetches one after the other: who reads none leaves others the
    rest.
    """

    def __init__(self, *, max_streams: int = 8) -> None:
        self._max_streams = max_streams
        self._fetching = Counter[str]()
        self._folders: dict[str, Path | None] = {}
        self._initial: dict[str, Pieces] = {}
        self._source: tuple[Path, ModelSource] | None = None
        self._lock = threading.Lock()
        self._hashing = threading.Lock()

    def put(self, run_id: str, folder: Path | None, initial: Pieces | None = None) -> None:
        """Serve ``folder`` to the nodes of a run instead of earlier runs; None = this node has no copy.

        ``initial`` is the file of initial values of the run, if it has one (``techniques.initial_adapter``).
        """
        digest = initial.sha256() if initial is not None else ""
        with self._lock:
            self._folders = {run_id: folder}
            self._initial = {digest: initial} if initial is not None else {}

    def drop(self, run_id: str) -> None:
        """Stop serving a run; an unknown one is no error."""
        with self._lock:
            self._folders.pop(run_id, None)

    def manifest(self, request: weights_pb2.ManifestRequest, *, is_node: bool = False) -> weights_pb2.ManifestReply:
        """Answer a request for the manifest of a run's model; a node (``is_node``) has to know its digest."""
        manifest = self.source(request.run_id).manifest
        if (is_node or request.sha256) and request.sha256 != manifest.sha256:
            raise TrustError(
                f"the model here is not the one that was asked for ({shown(request.sha256[:16])}); a node gets the "
                "digest of its run's model from the coordinator"
            )
        return manifest_to_proto(manifest)

    def chunks(self, request: weights_pb2.FetchRequest, *, caller: str = "") -> Iterator[weights_pb2.FetchChunk]:
        """Yield what a fetch of ``caller`` (of its certificate) requests; raises ``BusyError`` or ``RingTuneError``."""
        with self._lock:
            if self._fetching.total() >= self._max_streams:
                raise BusyError(f"{self._max_streams} nodes fetch from here already; ask again")
            if caller and self._fetching[caller] >= _MAX_STREAMS_OF_ONE:
                raise BusyError(f"{caller} fetches {_MAX_STREAMS_OF_ONE} times from here already; ask again")
            self._fetching[caller] += 1
        try:
            for index, data in self._read(request.run_id, pieces_from_proto(request)):
                yield weights_pb2.FetchChunk(piece=index, data=data)
        finally:
            with self._lock:
                self._fetching[caller] -= 1
                self._fetching += Counter()  # drops callers without a fetch

    def _read(self, run_id: str, pieces: Sequence[tuple[str, int]]) -> Iterator[tuple[int, bytes]]:
        with self._lock:
            initial = self._initial if run_id in self._folders else {}
        if len(pieces) != 1 or pieces[0][0] not in initial:
            yield from self.source(run_id).read(pieces)
            return
        for data in _messages(initial[pieces[0][0]], pieces[0][1]):
            yield 0, data

    def source(self, run_id: str) -> ModelSource:
        """Return the model of a run; the first call hashes it, some 500 MB per second."""
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
    weights = (path.name for pattern in ("*.safetensors", f"*{SUFFIX}") for path in folder.glob(pattern))
    names = {*MODEL_FILES, *template_files(folder), INDEX_FILE, *weights}
    paths = {name: folder / name for name in sorted(names) if (folder / name).is_file()}
    return {name: (path.stat().st_size, path.stat().st_mtime_ns) for name, path in paths.items()}


def _messages(content: Pieces, at: int) -> Iterator[bytes]:
    """Yield what follows the first ``at`` bytes, at most ``CHUNK_BYTES`` at once."""
    try:
        for piece in content.part(at, content.size_bytes - at):
            for start in range(0, len(piece), CHUNK_BYTES):
                yield bytes(piece[start : start + CHUNK_BYTES])
    except IntegrityError as error:  # a peer is told no folder of this machine
        name = content.name if isinstance(content, FilePieces) else "the initial adapter"
        raise IntegrityError(f"{name} can't be read, or became shorter; start the run again") from error
