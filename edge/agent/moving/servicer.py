"""Serve the snapshot of this node to the nodes that host its blocks next."""

from __future__ import annotations

from collections.abc import Iterator

import grpc

from edge.agent.moving.shelf import SnapshotShelf, part_name
from ringtune.files.chunks import cut_pieces
from ringtune.rpc.statuses import answer, answer_stream
from ringtune.v1 import control_pb2, control_pb2_grpc


class SnapshotServicer(control_pb2_grpc.SnapshotsServicer):
    """Serves what is on a shelf.

    Args:
        shelf: of this node.
    """

    def __init__(self, shelf: SnapshotShelf) -> None:
        self._shelf = shelf

    def Fetch(
        self, request: control_pb2.SnapshotRequest, context: grpc.ServicerContext
    ) -> Iterator[control_pb2.FileChunk]:
        """Stream what this node has trained of some blocks."""
        part = answer(
            context, lambda: self._shelf.get(request.run_id, request.plan_epoch).part(request.start, request.stop)
        )
        yield from answer_stream(context, cut_pieces(part_name(request.start, request.stop), part))
