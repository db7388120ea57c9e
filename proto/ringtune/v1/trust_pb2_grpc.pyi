"""Types of the gRPC services of ringtune/v1/trust.proto; written by proto/generate.py, do not edit."""

from collections.abc import Iterator

import grpc
from ringtune.v1 import trust_pb2


class JoiningStub:
    def __init__(self, channel: grpc.Channel) -> None: ...
    Authority: grpc.UnaryUnaryMultiCallable[trust_pb2.AuthorityRequest, trust_pb2.AuthorityReply]
    Certify: grpc.UnaryUnaryMultiCallable[trust_pb2.CertifyRequest, trust_pb2.CertifyReply]

class JoiningServicer:
    def Authority(self, request: trust_pb2.AuthorityRequest, context: grpc.ServicerContext) -> trust_pb2.AuthorityReply: ...
    def Certify(self, request: trust_pb2.CertifyRequest, context: grpc.ServicerContext) -> trust_pb2.CertifyReply: ...

def add_JoiningServicer_to_server(
    servicer: JoiningServicer, server: grpc.Server
) -> None: ...

class MembershipStub:
    def __init__(self, channel: grpc.Channel) -> None: ...
    Renew: grpc.UnaryUnaryMultiCallable[trust_pb2.RenewRequest, trust_pb2.CertifyReply]
    Invite: grpc.UnaryUnaryMultiCallable[trust_pb2.InviteRequest, trust_pb2.InviteReply]
    Remove: grpc.UnaryUnaryMultiCallable[trust_pb2.RemoveRequest, trust_pb2.RemoveReply]
    DrainNode: grpc.UnaryUnaryMultiCallable[trust_pb2.DrainNodeRequest, trust_pb2.DrainNodeReply]
    Rotate: grpc.UnaryUnaryMultiCallable[trust_pb2.RotateRequest, trust_pb2.RotateReply]

class MembershipServicer:
    def Renew(self, request: trust_pb2.RenewRequest, context: grpc.ServicerContext) -> trust_pb2.CertifyReply: ...
    def Invite(self, request: trust_pb2.InviteRequest, context: grpc.ServicerContext) -> trust_pb2.InviteReply: ...
    def Remove(self, request: trust_pb2.RemoveRequest, context: grpc.ServicerContext) -> trust_pb2.RemoveReply: ...
    def DrainNode(self, request: trust_pb2.DrainNodeRequest, context: grpc.ServicerContext) -> trust_pb2.DrainNodeReply: ...
    def Rotate(self, request: trust_pb2.RotateRequest, context: grpc.ServicerContext) -> trust_pb2.RotateReply: ...

def add_MembershipServicer_to_server(
    servicer: MembershipServicer, server: grpc.Server
) -> None: ...
