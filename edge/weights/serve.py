"""The gRPC service of an agent that has the model: decode, one call, encode."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import grpc

from edge.wire.options import abort
from ringtune.errors import RingTuneError
from ringtune.v1 import weights_pb2, weights_pb2_grpc
from ringtune.weights.source import Offers

_LOG = logging.getLogger(__name__)


class WeightsServicer(weights_pb2_grpc.WeightsServicer):
    """Serves what ``offers`` has.

    Args:
        offers: models of runs that this process takes part in.
    """

    def __init__(self, offers: Offers) -> None:
        self._offers = offers

    def Manifest(  # noqa: N802
        self, request: weights_pb2.ManifestRequest, context: grpc.ServicerContext
    ) -> weights_pb2.ManifestReply:
        """What the model of a run consists of."""
        try:
            return self._offers.manifest(request)
        except Exception as error:
            _log_bug(error)
            abort(context, error)

    def Fetch(  # noqa: N802
        self, request: weights_pb2.FetchRequest, context: grpc.ServicerContext
    ) -> Iterator[weights_pb2.FetchChunk]:
        """Contents by digest."""
        try:
            yield from self._offers.chunks(request)
        except Exception as error:
            _log_bug(error)
            abort(context, error)


def _log_bug(error: Exception) -> None:
    if not isinstance(error, RingTuneError):
        _LOG.exception("serving weights failed by a bug")
