"""The gRPC service of the weights of a model, at an agent or the coordinator: decode, one call, encode."""

from __future__ import annotations

from collections.abc import Iterator

import grpc

from ringtune.models.weights_by_digest import Offers
from ringtune.transport.status import answer, answer_stream
from ringtune.v1 import weights_pb2, weights_pb2_grpc


class WeightsServicer(weights_pb2_grpc.WeightsServicer):
    """Serves what ``offers`` has.

    Args:
        offers: models of runs that this process takes part in.
    """

    def __init__(self, offers: Offers) -> None:
        self._offers = offers

    def Manifest(
        self, request: weights_pb2.ManifestRequest, context: grpc.ServicerContext
    ) -> weights_pb2.ManifestReply:
        """Answer what the model of a run consists of."""
        return answer(context, lambda: self._offers.manifest(request))

    def Fetch(
        self, request: weights_pb2.FetchRequest, context: grpc.ServicerContext
    ) -> Iterator[weights_pb2.FetchChunk]:
        """Stream the contents that are asked for by digest."""
        return answer_stream(context, self._offers.chunks(request))
