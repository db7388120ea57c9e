"""A node's base weights: its own model folder, which it offers to other nodes, or tensors fetched from them.

With a folder the job is unchanged. Without one, ``for_planning`` sets ``model.path`` to the outline in the cache, and
``for_run`` to a folder with the tensors of this node's slice.

A fetch asks its sources in turn and resumes where the last one stopped. A stream without bytes for ``_IDLE_S`` is
cancelled, and the next source is asked. A source that sends a wrong digest is dropped. Partial files stay, however the
fetch ends.
"""

from __future__ import annotations

import contextlib
import logging
import math
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from edge.options import AgentOptions
from edge.weights.weight_cache import CheckedFile, ModelCache
from ringtune.errors import (
    BusyError,
    CapacityError,
    ConnectionFailedError,
    DamagedError,
    DeadlineError,
    FrameError,
    IntegrityError,
    InterruptedRunError,
    ModelError,
    RingTuneError,
    UsageError,
)
from ringtune.job.job import Job
from ringtune.models.family import LANGUAGE_TASKS
from ringtune.models.folder import name_of_folder, read_config
from ringtune.models.weights_by_digest import (
    CHUNK_BYTES,
    FileEntry,
    ModelManifest,
    Offers,
    TensorEntry,
    manifest_from_proto,
    needed_files,
    needed_tensors,
)
from ringtune.quantities import format_bytes
from ringtune.schedule.plan import Plan
from ringtune.techniques.audit import checked_by
from ringtune.techniques.initial_adapter import INITIAL_FILE, MAX_INITIAL_BYTES
from ringtune.transport.channels import open_channel
from ringtune.transport.endpoints import is_allowed
from ringtune.transport.status import error_of_call
from ringtune.v1 import weights_pb2, weights_pb2_grpc

_LOG = logging.getLogger(__name__)


class ModelFetcher:
    """Provides the model folder of each run; one run at a time.

    Args:
        find_sources: returns ``host:port`` of the other nodes, with or without a copy; may raise ``grpc.RpcError``.

    Attributes:
        fetched_bytes: bytes of tensors received since this node started.
    """

    def __init__(self, options: AgentOptions, find_sources: Callable[[], Sequence[str]]) -> None:
        self.offers, self.fetched_bytes = Offers(), 0
        self._options, self._find_sources = options, find_sources
        self._run_id = ""
        self._stop = threading.Event()
        self._manifest: ModelManifest | None = None
        self._model_sha256 = ""
        self._lock = threading.Lock()

    def lacks(self, run_id: str, job: Job) -> bool:
        """Whether this node has no copy of a run's model, so that it needs the manifest's digest; see ``trust``."""
        self._begin(run_id)
        return not self._has_copy(run_id, job)

    def trust(self, run_id: str, sha256: str) -> None:
        """Fetch the model with this digest in a run, and no other; empty = not known."""
        self._begin(run_id)
        self._model_sha256 = sha256

    def for_planning(self, run_id: str, job: Job, *, timeout_s: float) -> Job:
        """Return the job with a model folder from which a run is planned and a block is timed.

        At most ``timeout_s`` seconds pass. Raises ``ModelError`` or ``RingTuneError``.
        """
        fetch = PendingFetch(run_id, time.monotonic() + timeout_s, self._begin(run_id))
        if self._has_copy(run_id, job):
            return job
        with self._open(job, fetch) as (cache, peers):
            files = needed_files(cache.manifest, is_owner=self._options.data is not None)
            return _at(job, self._outline(cache, files, peers, fetch))

    def for_run(self, run_id: str, job: Job, plan: Plan, *, timeout_s: float) -> Job:
        """Return the job with a model folder that has the tensors of this node's slice and of its parts as an owner.

        At most ``timeout_s`` seconds pass. Raises ``ModelError`` or ``RingTuneError``.
        """
        fetch = PendingFetch(run_id, time.monotonic() + timeout_s, self._begin(run_id))
        if self._has_copy(run_id, job):
            return job
        name = self._options.name
        is_owner = plan.owner(name) is not None
        piece = plan.slice_of(name)
        blocks = {*range(plan.placement.private_blocks if is_owner else 0), *range(piece.start, piece.stop)}
        for other in checked_by(plan.placement, name) if job.audit is not None else ():
            blocks |= {*range(plan.slice_of(other).start, plan.slice_of(other).stop)}
        with self._open(job, fetch) as (cache, peers):
            files = needed_files(cache.manifest, is_owner=is_owner)
            config = read_config(self._outline(cache, files, peers, fetch))
            tensors = needed_tensors(
                cache.manifest,
                config,
                blocks=blocks,
                is_owner=is_owner,
                with_decoder=job.model.task in LANGUAGE_TASKS,
                with_unused=is_owner and job.method.full_parameters,  # the result is a whole model
            )
            self.fetched_bytes += _fetch_tensors(cache, tensors, peers, fetch)
            return _at(job, cache.publish(files))

    @contextlib.contextmanager
    def with_initial(self, run_id: str, job: Job, sha256: str, *, timeout_s: float) -> Iterator[Job]:
        """Yield the job with a fetched file of initial values in ``adapter.from``, which is removed with the context.

        Without a digest the job is unchanged. At most ``timeout_s`` seconds pass. Raises ``RingTuneError``.
        """
        if not sha256:
            yield job
            return
        fetch = PendingFetch(run_id, time.monotonic() + timeout_s, self._begin(run_id))
        with tempfile.TemporaryDirectory(prefix="ringtune-") as folder:
            path, what = Path(folder) / INITIAL_FILE, "the file of initial values (adapter.from)"
            file = CheckedFile(path, what=what, sha256=sha256, nbytes=MAX_INITIAL_BYTES)
            with Sources([self._options.coordinator]) as peers:
                peers.fetch_whole(file, fetch)
            yield job.with_overrides({"adapter.from": str(path)})

    def release(self, run_id: str) -> None:
        """Stop the fetch of a run and withdraw its offer, from any thread; an empty ``run_id`` is any run."""
        with self._lock:
            if run_id in ("", self._run_id):
                self._stop.set()
                self.offers.drop(self._run_id)

    # ---- parts --------------------------------------------------------------------------------------

    def _begin(self, run_id: str) -> threading.Event:
        with self._lock:
            if run_id != self._run_id or self._stop.is_set():
                self._stop.set()
                self._stop = threading.Event()
                if run_id != self._run_id:
                    self._manifest, self._model_sha256 = None, ""
                self._run_id = run_id
            return self._stop

    def _has_copy(self, run_id: str, job: Job) -> bool:
        """Whether nothing has to be fetched: the model folder exists, or the user named one with ``--model``.

        A folder that exists is offered to other nodes.
        """
        folder = Path(job.model.path)
        is_here = folder.is_dir()
        self.offers.put(run_id, folder if is_here else None)
        return is_here or self._options.model is not None

    def _sources(self) -> list[str]:
        """List the addresses to ask: other nodes, rotated by this node's name, then the coordinator.

        Without ``--insecure``, plain-text addresses on other machines are left out.
        """
        try:
            addresses = self._find_sources()
        except grpc.RpcError as error:
            raise error_of_call(error, peer=f"the coordinator {self._options.coordinator}") from error
        allowed = sorted({address for address in addresses if is_allowed(address, insecure=self._options.insecure)})
        start = sum(self._options.name.encode()) % max(1, len(allowed))
        return [*allowed[start:], *allowed[:start], self._options.coordinator]

    @contextlib.contextmanager
    def _open(self, job: Job, fetch: PendingFetch) -> Iterator[tuple[ModelCache, Sources]]:
        """Connect to the sources, and lock the cache of the model, inside the context."""
        with Sources(self._sources()) as peers:
            cache = self._cache(job, peers, fetch)
            with cache.locked(deadline_s=fetch.deadline_s, stop=fetch.stop):
                yield cache, peers

    def _cache(self, job: Job, peers: Sources, fetch: PendingFetch) -> ModelCache:
        if not self._model_sha256:
            raise ModelError(
                f"node {self._options.name} has no model folder {job.model.path}, and the coordinator named no model "
                "to fetch; use one version on all machines"
            )
        if self._manifest is None or self._manifest.sha256 != self._model_sha256:
            try:
                self._manifest = peers.manifest(fetch, self._model_sha256)
            except ModelError as error:
                raise ModelError(
                    f"node {self._options.name} has no model folder {job.model.path}, and {error}; check model.path, "
                    "or start a node with --model DIR"
                ) from error
        root = self._options.cache
        return ModelCache(root, self._manifest, name_of_folder(Path(job.model.path)))

    def _outline(self, cache: ModelCache, files: Sequence[FileEntry], peers: Sources, fetch: PendingFetch) -> Path:
        missing = [file for file in map(cache.file, files) if not file.is_complete()]
        _complete(cache, missing, peers, fetch)
        folder = cache.write_outline()
        read_config(folder)  # checks it by allow-list before any other use
        return folder


def _fetch_tensors(cache: ModelCache, tensors: Sequence[TensorEntry], peers: Sources, fetch: PendingFetch) -> int:
    """Fetch the missing tensors; return the bytes received. Of tensors with equal content one is fetched."""
    start_s = time.monotonic()
    missing = [file for file in map(cache.tensor, tensors) if not file.is_complete()]
    first: dict[str, CheckedFile] = {}
    for file in missing:
        first.setdefault(file.sha256, file)
    received_bytes = _complete(cache, list(first.values()), peers, fetch)
    for file in missing:
        if first[file.sha256] is not file:
            for data in first[file.sha256].content():
                file.write(data, "an equal tensor")
            file.finish()
    _LOG.info(
        "run %s: %d of %d tensors were in the cache; %s were fetched in %.1f s",
        fetch.run_id,
        len(tensors) - len(missing),
        len(tensors),
        format_bytes(received_bytes),
        time.monotonic() - start_s,
    )
    return received_bytes


def _complete(cache: ModelCache, missing: Sequence[CheckedFile], peers: Sources, fetch: PendingFetch) -> int:
    for file in missing:
        file.resume()
    cache.require_room(missing)
    return peers.fetch(missing, fetch)


def _at(job: Job, folder: Path) -> Job:
    return job.with_overrides({"model.path": str(folder)})


_ASK_AGAIN_S = 0.2
_MAX_PIECES = 4096
# Bytes in flight when a connection breaks are sent again: one chunk, instead of the usual window.
_OPTIONS = (("grpc.http2.lookahead_bytes", CHUNK_BYTES),)
_CALL_ERRORS = (grpc.RpcError, grpc.FutureCancelledError, RingTuneError)


class Sources:
    """Peers that may have the model; as a context manager it closes their channels.

    ``addresses``, ``host:port``, are asked in their order.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = tuple(dict.fromkeys(addresses))
        self._channels: dict[str, grpc.Channel] = {}

    def __enter__(self) -> Sources:
        return self

    def __exit__(self, *_: object) -> None:
        for channel in self._channels.values():
            channel.close()

    def manifest(self, fetch: PendingFetch, sha256: str) -> ModelManifest:
        """Get the manifest with digest ``sha256`` from the first source that has it.

        Later calls ask that source first, and sources that refused no more. A source that does not know the run yet is
        asked again every 0.2 s, and one that does not answer in its share of the time after the others. Raises
        ``ModelError`` or ``DeadlineError``.
        """
        answers: dict[str, str] = {}
        waiting = list(self.addresses)
        while waiting:
            for address in tuple(waiting):
                fetch.check("the manifest of the model")
                try:
                    manifest = self._ask(address, fetch, sha256, timeout_s=fetch.left_s() / len(waiting))
                except _CALL_ERRORS as raised:
                    fetch.check("the manifest of the model")
                    error = _as_error(raised, address)
                    if isinstance(error, FrameError | BusyError | DeadlineError):  # not known yet, or no answer
                        continue
                    answers[address] = str(error)
                    waiting.remove(address)
                else:
                    others = (other for other in self.addresses if other not in answers and other != address)
                    self.addresses = (address, *others)
                    return manifest
            fetch.stop.wait(_ASK_AGAIN_S if waiting else 0.0)
        said = "; ".join(f"{address}: {answer}" for address, answer in answers.items()) or "there was no source"
        raise ModelError(f"no node has a copy of the model that this one could fetch ({said})")

    def fetch(self, files: Sequence[CheckedFile], request: PendingFetch) -> int:
        """Fetch the missing bytes of ``files``, with ``resume`` called, until all are complete; return bytes received.

        Raises as ``SourceRotation.after``, ``DeadlineError``, or ``InterruptedRunError`` after a release of the run.
        """
        received_bytes = 0
        sources = SourceRotation(self.addresses)
        for file in files:
            _finish_if_whole(file)
        while missing := [file for file in files if not file.path.is_file()][:_MAX_PIECES]:
            what = f"{missing[0].what} and {len(missing) - 1} more"
            request.check(what)
            address, before = sources.address, received_bytes
            begun = [file for file in missing if file.offset]
            error: RingTuneError | None = None
            try:
                for got in self._stream(address, missing, request):
                    received_bytes += got
            except _CALL_ERRORS as raised:
                request.check(what)
                error = _as_error(raised, address)
                if isinstance(error, DamagedError):
                    for file in files:  # with bytes of this source, which sent a wrong digest
                        if address in file.origins and not file.path.is_file():
                            file.discard()
            # a file of several sources with a wrong digest is dropped; the last one then shows whether it is its fault
            is_dropped = any(not file.offset for file in begun)
            if error is None and not is_dropped and not all(file.path.is_file() for file in missing):
                error = ConnectionFailedError(f"{address} ended the stream early")
            request.stop.wait(sources.after(error, what=what, is_further=received_bytes > before))
        return received_bytes

    def fetch_whole(self, file: CheckedFile, fetch: PendingFetch) -> None:
        """Fetch a file of unknown size, which is whole when a stream has ended; raises ``RingTuneError``."""
        sources = SourceRotation(self.addresses)
        while True:
            fetch.check(file.what)
            before = file.offset
            try:
                for _ in self._stream(sources.address, [file], fetch):
                    pass
                file.finish()
                return
            except _CALL_ERRORS as raised:
                fetch.check(file.what)
                error = _as_error(raised, sources.address)
            if isinstance(error, ModelError | IntegrityError):  # asking again would not help
                raise type(error)(f"{file.what} can't be fetched: {error}")
            fetch.stop.wait(sources.after(error, what=file.what, is_further=file.offset > before))

    # ---- one call -----------------------------------------------------------------------------------

    def _ask(self, address: str, fetch: PendingFetch, sha256: str, *, timeout_s: float) -> ModelManifest:
        """Ask one source for its manifest; no idle limit, because the source hashes its copy first."""
        request = weights_pb2.ManifestRequest(run_id=fetch.run_id, sha256=sha256)
        call: Any = self._stub(address).Manifest.future(request, timeout=timeout_s)
        with IdleWatchdog(call, fetch, idle_s=math.inf):
            manifest = manifest_from_proto(call.result())
        if manifest.sha256 != sha256:
            raise IntegrityError(
                f"{address} sends another model ({manifest.sha256[:12]}…) than agreed ({sha256[:12]}…)"
            )
        return manifest

    def _stream(self, address: str, files: Sequence[CheckedFile], fetch: PendingFetch) -> Iterator[int]:
        """Fetch all missing pieces from one source in one call; yield the bytes of each message after their write."""
        request = weights_pb2.FetchRequest(
            run_id=fetch.run_id,
            pieces=[weights_pb2.Piece(sha256=bytes.fromhex(file.sha256), offset=file.offset) for file in files],
        )
        # one that sends a byte now and then leaves half of the time to the others; what has arrived is kept
        timeout_s = min(fetch.left_s(), max(fetch.idle_s, fetch.left_s() / 2))
        call = self._stub(address).Fetch(request, timeout=timeout_s)
        last = -1
        with IdleWatchdog(call, fetch, idle_s=fetch.idle_s) as watch:
            for chunk in call:
                watch.saw_progress()
                if not last <= chunk.piece < len(files) or not 0 < len(chunk.data) <= CHUNK_BYTES:
                    raise DamagedError(f"{address} sends chunks that were not requested")
                last = chunk.piece
                file = files[last]
                try:
                    file.write(chunk.data, address)
                    yield len(chunk.data)
                    _finish_if_whole(file, address)
                except IntegrityError as error:
                    raise DamagedError(f"{address}: {error}") from error

    def _stub(self, address: str) -> weights_pb2_grpc.WeightsStub:
        if address not in self._channels:
            self._channels[address] = open_channel(address, _OPTIONS)
        return weights_pb2_grpc.WeightsStub(self._channels[address])


def _finish_if_whole(file: CheckedFile, address: str = "") -> None:
    """Finish a file if all of its bytes are there.

    A wrong digest is the fault of ``address`` only if it sent all bytes; otherwise the file is fetched again.
    """
    if file.offset < file.nbytes or file.path.is_file():
        return
    origins = set(file.origins)
    try:
        file.finish()
    except IntegrityError as error:
        if origins == {address}:
            raise
        _LOG.warning("%s; it is fetched again", error)


def _as_error(error: Exception, address: str) -> RingTuneError:
    if isinstance(error, RingTuneError):
        return error
    if isinstance(error, grpc.RpcError):
        return error_of_call(error, peer=f"the source {address}")
    return ConnectionFailedError(f"the source {address} sent nothing for too long")


_IDLE_S = 15.0
_WATCH_S = 0.25
_BACK_OFF_S = (0.2, 0.5, 1.0, 2.0)
_BUSY_S = 0.5


class PendingFetch(NamedTuple):
    """The run that waits for a fetch. ``idle_s``: a stream without bytes for this long is cancelled."""

    run_id: str
    deadline_s: float
    stop: threading.Event
    idle_s: float = _IDLE_S

    def left_s(self) -> float:
        """Seconds until the deadline, at least 0.05."""
        return max(0.05, self.deadline_s - time.monotonic())

    def check(self, what: str) -> None:
        """Refuse to continue a fetch after a release or after the deadline."""
        if self.stop.is_set():
            raise InterruptedRunError("the run was released while its weights were fetched")
        if time.monotonic() > self.deadline_s:
            raise DeadlineError(
                f"no more time for {what}; the received bytes are kept, start the run again to continue"
            )


class SourceRotation:
    """Chooses the source to ask, and decides when to give up."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._good = list(addresses)
        self._at = 0
        self._failures = 0

    @property
    def address(self) -> str:
        """The source to ask now."""
        return self._good[self._at % len(self._good)]

    def after(self, error: RingTuneError | None, *, what: str, is_further: bool) -> float:
        """Choose the next source after a stream ended, or give up; return the seconds to wait first.

        ``error`` = None: the source stays. ``is_further``: bytes have arrived.

        Raises:
            IntegrityError: no source is left that sends what its manifest says.
            ConnectionFailedError: no bytes arrived in four rounds over all sources.
            RingTuneError: the cache can't be written, which no other source would change.
        """
        if error is None:
            return 0.0
        if isinstance(error, CapacityError | UsageError):
            raise error
        _LOG.warning("fetching weights from %s: %s", self.address, error)
        if isinstance(error, BusyError):
            self._at += 1
            return _BUSY_S
        if isinstance(error, DamagedError):
            if len(self._good) == 1:
                raise IntegrityError(f"{error}; no other source is left")
            self._good.remove(self.address)
        else:
            self._at += 1
        self._failures = 0 if is_further else self._failures + 1
        rounds = self._failures // len(self._good)
        if rounds >= len(_BACK_OFF_S):
            raise ConnectionFailedError(
                f"{what} can't be fetched ({error}); the received bytes are kept, start the run again"
            )
        return _BACK_OFF_S[rounds] if self._failures else 0.0


class IdleWatchdog:
    """Cancels a call without progress for ``idle_s``, or after its run was released."""

    def __init__(self, call: Any, fetch: PendingFetch, *, idle_s: float) -> None:
        self._call, self._wanted, self._idle_s = call, fetch, idle_s
        self._seen_s = time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch-fetch", daemon=True)

    def __enter__(self) -> IdleWatchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._call.cancel()
        self._thread.join()

    def saw_progress(self) -> None:
        """Restart the idle time."""
        self._seen_s = time.monotonic()

    def _watch(self) -> None:
        while not self._done.wait(_WATCH_S):
            if self._wanted.stop.is_set() or time.monotonic() - self._seen_s > self._idle_s:
                self._call.cancel()
                return
