"""Types of the gRPC services of ringtune/v1/weights.proto; written by proto/generate.py, do not edit."""

from collections.abc import Iterator

import grpc
from ringtune.v1 import weights_pb2


class WeightsStub:
    def __init__(self, channel: grpc.Channel) -> None: ...
    Manifest: grpc.UnaryUnaryMultiCallable[weights_pb2.ManifestRequest, weights_pb2.ManifestReply]
    Fetch: grpc.UnaryStreamMultiCallable[weights_pb2.FetchRequest, weights_pb2.FetchChunk]

class WeightsServicer:
    def Manifest(self, request: weights_pb2.ManifestRequest, context: grpc.ServicerContext) -> weights_pb2.ManifestReply: ...
    def Fetch(self, request: weights_pb2.FetchRequest, context: grpc.ServicerContext) -> Iterator[weights_pb2.FetchChunk]: ...

def add_WeightsServicer_to_server(
    servicer: WeightsServicer, server: grpc.Server
) -> None: ...
