"""Types of the gRPC services of ringtune/v1/ring.proto; written by proto/generate.py, do not edit."""

from collections.abc import Iterator

import grpc
from ringtune.v1 import ring_pb2


class RingStub:
    def __init__(self, channel: grpc.Channel) -> None: ...
    Link: grpc.StreamStreamMultiCallable[ring_pb2.Frame, ring_pb2.Ack]

class RingServicer:
    def Link(self, request_iterator: Iterator[ring_pb2.Frame], context: grpc.ServicerContext) -> Iterator[ring_pb2.Ack]: ...

def add_RingServicer_to_server(
    servicer: RingServicer, server: grpc.Server
) -> None: ...
