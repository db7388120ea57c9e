"""The gRPC service of an agent that has the model: decode, one call, encode."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import grpc

from edge.wire.options import abort
from ringtune.errors import BusyError, RingTuneError
from ringtune.v1 import weights_pb2, weights_pb2_grpc
from ringtune.weights_codec import manifest_to_proto, pieces_from_proto
from ringtune.weights_source import Offers

_LOG = logging.getLogger(__name__)


class WeightsServicer(weights_pb2_grpc.WeightsServicer):
    """Serves what ``offers`` has.

    Args:
        offers: models of runs that this process takes part in.
        max_streams: fetches at a time; each holds a thread.
    """

    def __init__(self, offers: Offers, *, max_streams: int = 8) -> None:
        self._offers = offers
        self._max_streams = max_streams
        self._slots = threading.BoundedSemaphore(max_streams)

    def Manifest(  # noqa: N802
        self, request: weights_pb2.ManifestRequest, context: grpc.ServicerContext
    ) -> weights_pb2.ManifestReply:
        """What the model of a run consists of."""
        try:
            return manifest_to_proto(self._offers.source(request.run_id).manifest)
        except Exception as error:
            _log_bug(error)
            abort(context, error)

    def Fetch(  # noqa: N802
        self, request: weights_pb2.FetchRequest, context: grpc.ServicerContext
    ) -> Iterator[weights_pb2.FetchChunk]:
        """Contents by digest."""
        if not self._slots.acquire(blocking=False):
            abort(context, BusyError(f"{self._max_streams} nodes fetch from here already; ask again"))
        try:
            source = self._offers.source(request.run_id)
            for index, data in source.read(pieces_from_proto(request)):
                if not context.is_active():
                    return
                yield weights_pb2.FetchChunk(piece=index, data=data)
        except Exception as error:
            _log_bug(error)
            abort(context, error)
        finally:
            self._slots.release()


def _log_bug(error: Exception) -> None:
    if not isinstance(error, RingTuneError):
        _LOG.exception("serving weights failed by a bug")
