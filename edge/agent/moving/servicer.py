"""Serve the snapshot of this node to the nodes that host its blocks next."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterator

import grpc

from edge.agent.moving.kept import FILE, MAX_BYTES, KeptTurns
from edge.agent.moving.shelf import HEAD_FILE, SnapshotShelf, part_name
from edge.shards.parts import SavedParts
from ringtune.errors import IntegrityError
from ringtune.files.chunks import FileJoiner, cut_pieces
from ringtune.files.pieces import Pieces
from ringtune.rpc.guard import caller_of
from ringtune.rpc.statuses import answer, answer_stream
from ringtune.trust.parties import Party
from ringtune.trust.permissions import require_sender
from ringtune.v1 import control_pb2, control_pb2_grpc


class SnapshotServicer(control_pb2_grpc.SnapshotsServicer):
    """Serves what is on a shelf.

    Args:
        shelf: of this node.
        kept: what it and the host before it in the ring had trained at the ends of turns.
        saved: returns the files on this node's disk of a run; None where it has no folder.
    """

    def __init__(
        self, shelf: SnapshotShelf, kept: KeptTurns, saved: Callable[[str], SavedParts | None] = lambda run_id: None
    ) -> None:
        self._shelf, self._kept, self._saved = shelf, kept, saved

    def Fetch(
        self, request: control_pb2.SnapshotRequest, context: grpc.ServicerContext
    ) -> Iterator[control_pb2.FileChunk]:
        """Stream what this node has trained of some blocks, or the head."""
        part = answer(context, lambda: self._part(request))
        name = HEAD_FILE if request.is_head else part_name(request.start, request.stop)
        yield from answer_stream(context, cut_pieces(name, part))

    def _part(self, request: control_pb2.SnapshotRequest) -> Pieces:
        if request.is_saved:
            saved = self._saved(request.run_id)
            if saved is None:
                raise IntegrityError(f"this node has no folder, so it has nothing of run {request.run_id}")
            asked = (request.step, request.attempt, request.start, request.stop)
            return saved.part(*asked, sha256=request.sha256)
        if request.is_head:
            return self._kept.head(request.run_id, request.step)
        if request.is_kept:
            return self._kept.part(request.run_id, request.step, request.start, request.stop)
        return self._shelf.get(request.run_id, request.placement_number).part(request.start, request.stop)

    def Keep(
        self, request_iterator: Iterator[control_pb2.KeepChunk], context: grpc.ServicerContext
    ) -> control_pb2.Empty:
        """Keep a copy of what another node has trained."""
        caller = caller_of(context)
        answer(context, lambda: self._keep(request_iterator, caller.party if caller else None))
        return control_pb2.Empty()

    def _keep(self, chunks: Iterator[control_pb2.KeepChunk], caller: Party | None) -> None:
        """Take a file into memory, of a run that is under way here, and no larger than a message of links may be.

        Raises:
            FrameError: it is of another run, or from before a recovery.
            TrustError: it is said to be of another node than the caller.
            IntegrityError: it is damaged, too large, or does not say whose it is.
        """
        first = next(chunks, control_pb2.KeepChunk())
        self._kept.check_run(first.run_id)
        peer, file = f"node {first.node}", io.BytesIO()
        if not first.node:
            raise IntegrityError("a copy does not say whose it is; use one version on all machines")
        require_sender(caller, first.node)
        joiner = FileJoiner(FILE, file, source=peer)
        for chunk in itertools.chain([first], chunks):
            if chunk.file.path != FILE or file.tell() + len(chunk.file.chunk) > MAX_BYTES:
                raise IntegrityError(f"{peer} sent what is no copy of trained blocks; use one version on all machines")
            if joiner.add(chunk.file):
                if first.is_head:
                    self._kept.keep_head(
                        first.run_id, first.step, file.getvalue(), placement_number=first.placement_number
                    )
                else:
                    self._kept.keep(
                        first.run_id, first.step, first.node, file.getvalue(), placement_number=first.placement_number
                    )
                return
        raise IntegrityError(f"{FILE} from {peer} is not complete; try again")
