"""Transfer of snapshots between nodes: the servicer of this node, and calls that fetch a snapshot or push a copy."""

from __future__ import annotations

import io
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import grpc

from edge.checkpoint.snapshots import FILE, HEAD_FILE, SnapshotShelf, TurnSnapshots, block_of, file_blocks, part_name
from edge.checkpoint.state_folder import RunShards
from edge.transport.access import RunAccess
from ringtune.errors import FrameError, IntegrityError, InterruptedRunError, StorageError
from ringtune.schedule.access import MAX_COPY_BYTES, NOT_PLANNED, CopyBytes, NodeCall, RequestedCall, State, copy_limit
from ringtune.schedule.migration import Source
from ringtune.storage.chunks import FileJoiner, cut_pieces, in_time
from ringtune.storage.durable import temporary_file
from ringtune.storage.pieces import OpenFilePieces, Pieces
from ringtune.storage.tensor_files import TensorFile
from ringtune.transport.channels import caller_of, open_channel
from ringtune.transport.parties import Party, node_party
from ringtune.transport.retry import RetryState
from ringtune.transport.status import answer, answer_stream, error_of_call
from ringtune.v1 import control_pb2, control_pb2_grpc

_LOG = logging.getLogger(__name__)
_MIN_S = 60.0
_SLOWEST_BYTES_PER_S = 32 * 1024
"""Rate of the slowest link over which a copy of a checkpoint has time to arrive."""
_MAX_BLOCKS = 1 << 16
_MAX_FETCHES: Final = 4
_LOOK_S: Final = 0.5


class SnapshotFetcher(NamedTuple):
    """Fetches trained state of a run from other nodes into memory, or with ``attempt`` to files.

    Attributes:
        node: this one.
        run_id: of the run; with ``attempt`` the id under which shards are kept.
        placement_number: in which the sources hosted the blocks.
        addresses: ``host:port`` by node.
        deadline_s: monotonic seconds.
        check: called with node and address; raises if a node may not be reached there.
        lease_s: seconds for which a node without an answer is retried.
        attempt: fetch from disks, as this run trained the blocks; empty = from memory.
        folder: on the disk for the files; None = the one for temporary files.
        sizes: planned; no larger file is received.
    """

    node: str
    run_id: str
    placement_number: int
    addresses: Mapping[str, str]
    deadline_s: float
    check: Callable[[str, str], None]
    lease_s: float = 0.0
    attempt: str = ""
    folder: Path | None = None
    sizes: CopyBytes = NOT_PLANNED

    def blocks(self, source: Source, step: int | None = None) -> Pieces:
        """Fetch blocks of another node: of its snapshot, or as it keeps them after ``step`` steps.

        Raises:
            ConnectionFailedError: the node can't be reached.
            FrameError: it has no such snapshot in memory.
            IntegrityError: the received file is damaged, or larger than planned, or has tensors of other blocks, which
                would take the place of those of another node.
            DeadlineError: the deadline is over.
            StorageError: the disk is full.
        """
        start, stop = source.start, source.stop
        most_bytes = copy_limit(self.sizes, stop - start, on_disk=bool(self.attempt))
        name = part_name(start, stop)
        file = self._file(source.node, name, most_bytes, step, start=start, stop=stop, sha256=source.sha256)
        names = TensorFile(file, where=f"blocks [{start}, {stop}) of node {source.node}").infos
        if odd := next((name for name in names if not start <= block_of(name) < stop), ""):
            raise IntegrityError(
                f"node {source.node} sent a tensor {odd[:60]!r} with the blocks [{start}, {stop}); repair it, or go on "
                "without it"
            )
        return file

    def head(self, source: str, step: int, sha256: str = "") -> Pieces:
        """Fetch another node's copy of the head after ``step`` steps; errors as for ``blocks``.

        With ``attempt`` it is in the shard with digest ``sha256``, or beside the shards.
        """
        most_bytes = copy_limit(self.sizes, 0, has_head=True, on_disk=bool(self.attempt))
        return self._file(source, HEAD_FILE, most_bytes, step, is_head=True, sha256=sha256)

    def _file(self, source: str, name: str, most_bytes: int, step: int | None, **what: Any) -> Pieces:
        address = self.addresses.get(source, "")
        self.check(source, address)
        request = control_pb2.SnapshotRequest(
            node=self.node,
            run_id=self.run_id,
            placement_number=self.placement_number,
            is_saved=bool(self.attempt),
            attempt=self.attempt,
            is_kept=step is not None and not self.attempt,
            step=step,
            **what,
        )
        return _received(request, name, source, address, self.deadline_s, self.lease_s, self.folder, most_bytes)


def _received(
    request: control_pb2.SnapshotRequest,
    name: str,
    node: str,
    address: str,
    deadline_s: float,
    lease_s: float,
    folder: Path | None,
    most_bytes: int,
    held: control_pb2_grpc.SnapshotsStub | None = None,
) -> Pieces:
    """Receive the file ``name`` from another node, from its disk to this one's; ``held`` is a stub of it."""
    peer = f"node {node} at {address}"
    with ExitStack() as end:
        if held is None:
            held = control_pb2_grpc.SnapshotsStub(end.enter_context(open_channel(address, peer=node_party(node))))
        fetch = held.Fetch
        state = RetryState(lease_s=lease_s, timeout_s=deadline_s - time.monotonic())

        def attempt() -> Pieces:
            chunks = fetch(request, timeout=max(0.1, state.left_s()))
            file = temporary_file(folder) if request.is_saved else io.BytesIO()
            try:
                in_order = in_time(chunks, lease_s, source=peer)
                return _joined(in_order, file, name, peer, state.hear, most_bytes)
            except BaseException:
                chunks.cancel()  # of a node that sends on
                file.close()
                raise

        try:
            return state.repeat(attempt, peer=peer)
        except grpc.RpcError as error:
            raise error_of_call(error, peer=peer) from error
        except ValueError as error:  # of gRPC, as the channel was closed with the run
            raise InterruptedRunError(f"{peer} was not asked further: the run was released here") from error


def _joined(
    chunks: Iterable[control_pb2.FileChunk],
    file: BinaryIO,
    name: str,
    peer: str,
    on_progress: Callable[[], None],
    most_bytes: int,
) -> Pieces:
    """Join the chunks of a file of at most ``most_bytes`` in ``file``."""
    joiner = FileJoiner(name, file, source=peer)
    for chunk in chunks:
        on_progress()
        if chunk.path != name:
            raise IntegrityError(f"{peer} sent {chunk.path!r}, not {name!r}; use one version on all machines")
        if file.tell() + len(chunk.chunk) > most_bytes:
            raise IntegrityError(f"{peer} sends more than {most_bytes} B as {name}; use one version everywhere")
        try:
            is_last = joiner.add(chunk)
        except OSError as error:
            raise StorageError(f"{name} from {peer} can't be written: {error.strerror}; make room") from error
        if is_last:
            return Pieces.of(file.getvalue()) if isinstance(file, io.BytesIO) else OpenFilePieces(file)
    raise IntegrityError(f"{name} from {peer} is not complete; try again")


AUDIT_FILE: Final = "audit.safetensors"


def open_stub(node: str, address: str) -> tuple[grpc.Channel, control_pb2_grpc.SnapshotsStub]:
    """Open a channel to another node, with its stub: to make one of a closed channel ends the process."""
    channel = open_channel(address, peer=node_party(node))
    return channel, control_pb2_grpc.SnapshotsStub(channel)


def fetch_audited(
    request: control_pb2.SnapshotRequest,
    source: str,
    address: str,
    deadline_s: float,
    *,
    lease_s: float,
    stub: control_pb2_grpc.SnapshotsStub,
    most_bytes: int = MAX_COPY_BYTES,
) -> Pieces:
    """Fetch what another node keeps of a turn for the audit; errors as for ``SnapshotFetcher.blocks``."""
    request.is_audit = True
    return _received(request, AUDIT_FILE, source, address, deadline_s, lease_s, None, most_bytes, stub)


def push(terms: control_pb2.KeepChunk, content: Pieces, holder: str, address: str, timeout_s: float) -> None:
    """Send another node a copy of trained blocks, or of the head; ``terms`` go with its first chunk.

    ``timeout_s`` is at least 60 s, and the time that a link of 32 KiB/s needs.

    Raises:
        ConnectionFailedError: the holder can't be reached.
        DeadlineError: the timeout is over.
        FrameError: the holder has no part in the run.
        IntegrityError: the copy arrived damaged.
    """

    def chunks() -> Iterator[control_pb2.KeepChunk]:
        for number, file in enumerate(cut_pieces(FILE, content)):
            chunk = control_pb2.KeepChunk(file=file)
            if not number:
                chunk.MergeFrom(terms)
            yield chunk

    limit_s = max(timeout_s, _MIN_S, content.size_bytes / _SLOWEST_BYTES_PER_S)
    with open_channel(address, peer=node_party(holder)) as channel:
        try:
            control_pb2_grpc.SnapshotsStub(channel).Keep(chunks(), timeout=limit_s)
        except grpc.RpcError as error:
            raise error_of_call(error, peer=f"node {holder} at {address}") from error


def _not_audited() -> Pieces:
    raise FrameError("this node keeps nothing for an audit; prepare an audited run first")


def _state_of(request: control_pb2.SnapshotRequest) -> State:
    if request.is_audit:
        return State.AUDIT
    return State.DISK if request.is_saved else State.TURN if request.is_kept else State.PAUSE


class SnapshotServicer(control_pb2_grpc.SnapshotsServicer):
    """Serves this node's snapshots, and receives copies of other nodes'.

    Args:
        saved: returns the copies and heads of a run on this node's disk; None where it has no folder.
        save: writes a copy of a checkpoint to the disk; ``folder`` is for it while it arrives.
        audited: returns what this node keeps of a turn for the audit.
    """

    def __init__(
        self,
        shelf: SnapshotShelf,
        kept: TurnSnapshots,
        access: RunAccess,
        saved: Callable[[str], RunShards | None] = lambda run_id: None,
        save: Callable[[str, int, Pieces], None] = lambda run_id, step, content: None,
        folder: Path | None = None,
        audited: Callable[[control_pb2.SnapshotRequest], Pieces] = lambda request: _not_audited(),
    ) -> None:
        self._shelf, self._kept, self._access, self._audited = shelf, kept, access, audited
        self._saved, self._save, self._folder = saved, save, folder
        self._lock = threading.Lock()
        self._fetches: dict[str, threading.Semaphore] = {}  # by node of the run
        self._arriving: dict[tuple[str, bool], Callable[[], object]] = {}  # node, is_head -> ends the call

    def Fetch(
        self, request: control_pb2.SnapshotRequest, context: grpc.ServicerContext
    ) -> Iterator[control_pb2.FileChunk]:
        """Stream trained blocks of this node, or the head; four calls of a node at a time, further ones wait.

        A call that is not read keeps what it streams in memory, of turns that are dropped meanwhile too.
        """
        caller = caller_of(context)
        answer(context, lambda: self._permit(request, caller.party if caller else None))
        name = HEAD_FILE if request.is_head else part_name(request.start, request.stop)
        name = AUDIT_FILE if request.is_audit else name
        places = self._fetches.setdefault(request.node, threading.Semaphore(_MAX_FETCHES))
        while not places.acquire(timeout=_LOOK_S):
            if not context.is_active():
                return
        try:
            yield from answer_stream(context, cut_pieces(name, answer(context, lambda: self._part(request))))
        finally:
            places.release()

    def _permit(self, request: control_pb2.SnapshotRequest, caller: Party | None) -> None:
        """Refuse what another node may not fetch; raises ``TrustError``, ``FrameError`` or ``IntegrityError``."""
        start, stop = request.start, request.stop
        if stop - start > _MAX_BLOCKS:
            raise IntegrityError(f"blocks [{start}, {stop}) are more than any model has; use one version everywhere")
        call = RequestedCall(
            NodeCall.FETCH,
            request.node,
            request.run_id,
            _state_of(request),
            request.placement_number,
            tuple(range(start, stop)),
            request.is_head,
            request.step,
        )
        self._access.require(call, caller)

    def _part(self, request: control_pb2.SnapshotRequest) -> Pieces:
        """Return what is requested; raises ``FrameError`` or ``IntegrityError``."""
        run_id, step, start, stop = request.run_id, request.step, request.start, request.stop
        if request.is_audit:
            return self._audited(request)
        if request.is_saved:
            saved = self._saved(run_id)
            if saved is None:
                raise IntegrityError(f"this node has no folder, so it has nothing of run {run_id}")
            if request.is_head:
                return saved.head(step, request.attempt, sha256=request.sha256)
            return saved.part(step, request.attempt, start, stop, sha256=request.sha256)
        if request.is_head:
            return self._kept.head(run_id, step)
        if request.is_kept:
            return self._kept.part(run_id, step, start, stop)
        return self._shelf.get(run_id, request.placement_number).part(start, stop)

    def Keep(
        self, request_iterator: Iterator[control_pb2.KeepChunk], context: grpc.ServicerContext
    ) -> control_pb2.Empty:
        """Keep a copy of another node's trained blocks or head."""
        caller = caller_of(context)
        answer(context, lambda: self._keep(request_iterator, caller.party if caller else None, context.cancel))
        return control_pb2.Empty()

    def _keep(
        self, chunks: Iterator[control_pb2.KeepChunk], caller: Party | None, end_call: Callable[[], object] = bool
    ) -> None:
        """Receive a copy of the run that is active here, into memory or to the disk.

        ``end_call`` ends the call: a later one of the same node takes its place, as a node sends one after another.

        Raises:
            FrameError: the copy is of another run, or of a placement before a recovery.
            TrustError: the run gives the caller no such part.
            IntegrityError: the copy is damaged, or larger than planned.
        """
        first = next(chunks, control_pb2.KeepChunk())
        self._kept.check_run(first.run_id)
        state = State.DISK if first.is_saved else State.TURN
        call = RequestedCall(
            NodeCall.KEEP,
            first.node,
            first.run_id,
            state,
            first.placement_number,
            is_head=first.is_head,
            step=first.step,
        )
        most_bytes = self._access.require(call, caller).max_bytes
        files = in_time((chunk.file for chunk in itertools.chain([first], chunks)), _MIN_S, source=f"node {first.node}")
        with self._alone((first.node, first.is_head), end_call):
            self._take(first, call, caller, files, most_bytes)

    @contextmanager
    def _alone(self, key: tuple[str, bool], end_call: Callable[[], object]) -> Iterator[None]:
        """End the call of which a copy of blocks, or of the head, still arrives from the node."""
        with self._lock:
            before = self._arriving.get(key)
            self._arriving[key] = end_call
        if before is not None:
            before()
        try:
            yield
        finally:
            with self._lock:
                if self._arriving.get(key) is end_call:
                    del self._arriving[key]

    def _take(
        self,
        first: control_pb2.KeepChunk,
        call: RequestedCall,
        caller: Party | None,
        files: Iterator[control_pb2.FileChunk],
        most_bytes: int,
    ) -> None:
        """Receive the permitted copy that begins with ``first``."""
        if first.is_saved:
            try:
                with temporary_file(self._folder) as file:
                    content = self._copy(call, caller, files, file, most_bytes)
                    self._save(first.run_id, first.step, content)
            except StorageError as error:  # a full disk loses the copy, not the run: the sender goes on
                _LOG.warning(
                    "no copy of the checkpoint of step %d of node %s is kept: %s", first.step, first.node, error
                )
                for _ in files:
                    pass
            return
        copy = bytes(self._copy(call, caller, files, io.BytesIO(), most_bytes))
        if first.is_head:
            self._kept.keep_head(first.run_id, first.step, copy, placement_number=first.placement_number)
        else:
            self._kept.keep(first.run_id, first.step, first.node, copy, placement_number=first.placement_number)

    def _copy(
        self,
        call: RequestedCall,
        caller: Party | None,
        files: Iterable[control_pb2.FileChunk],
        file: BinaryIO,
        most_bytes: int,
    ) -> Pieces:
        """Join a copy in ``file``; refuse other blocks than its node's, and a second one that differs."""
        peer = f"node {call.node}"
        content = _joined(files, file, FILE, peer, lambda: None, most_bytes)
        blocks = () if call.is_head else tuple(sorted(file_blocks(TensorFile(content, where=f"a copy of {peer}"))))
        self._access.require(call._replace(blocks=blocks), caller)  # again: the run may have moved meanwhile
        self._access.require_only(call, content.sha256())
        return content
