"""gRPC service for the weights of a model, at an agent or the coordinator."""

from __future__ import annotations

from collections.abc import Iterator

import grpc

from ringtune.models.weights_by_digest import Offers
from ringtune.transport.channels import caller_of
from ringtune.transport.parties import NODE_ROLE
from ringtune.transport.status import answer, answer_stream
from ringtune.v1 import weights_pb2, weights_pb2_grpc


class WeightsServicer(weights_pb2_grpc.WeightsServicer):
    """Serves the models of ``offers``."""

    def __init__(self, offers: Offers) -> None:
        self._offers = offers

    def Manifest(
        self, request: weights_pb2.ManifestRequest, context: grpc.ServicerContext
    ) -> weights_pb2.ManifestReply:
        """Answer with the manifest of a run's model."""
        caller = caller_of(context)
        is_node = caller is not None and caller.party.role == NODE_ROLE
        return answer(context, lambda: self._offers.manifest(request, is_node=is_node))

    def Fetch(
        self, request: weights_pb2.FetchRequest, context: grpc.ServicerContext
    ) -> Iterator[weights_pb2.FetchChunk]:
        """Stream contents by digest."""
        caller = caller_of(context)
        return answer_stream(context, self._offers.chunks(request, caller=str(caller.party) if caller else ""))
