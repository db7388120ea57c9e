"""Serve who joins, renews, is drained or removed: decode the request, call once, encode the answer."""

from __future__ import annotations

import grpc

from coordinator.server.coordinator import Coordinator
from coordinator.trust.keeper import Keeper
from ringtune.errors import UsageError
from ringtune.rpc.guard import caller_of
from ringtune.rpc.statuses import answer
from ringtune.trust.parties import SUBMITTER_ROLE, Party, node_party
from ringtune.v1 import trust_pb2, trust_pb2_grpc


class JoiningServicer(trust_pb2_grpc.JoiningServicer):
    """The calls of those who have no certificate yet."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    def Authority(self, request: trust_pb2.AuthorityRequest, context: grpc.ServicerContext) -> trust_pb2.AuthorityReply:
        """Show the certificate of the authority."""
        return trust_pb2.AuthorityReply(authority_pem=self._keeper.authority_pem)

    def Certify(self, request: trust_pb2.CertifyRequest, context: grpc.ServicerContext) -> trust_pb2.CertifyReply:
        """Give a certificate for a token."""
        pem = answer(context, lambda: self._keeper.certify(request.secret, request.request_pem))
        return trust_pb2.CertifyReply(certificate_pem=pem)


class MembershipServicer(trust_pb2_grpc.MembershipServicer):
    """The calls about who stays a member.

    Args:
        coordinator: whose members.
        keeper: of its trust; None = all is plain text.
    """

    def __init__(self, coordinator: Coordinator, keeper: Keeper | None) -> None:
        self._coordinator = coordinator
        self._keeper = keeper

    def Renew(self, request: trust_pb2.RenewRequest, context: grpc.ServicerContext) -> trust_pb2.CertifyReply:
        """Give the caller a certificate for a new key."""
        caller = caller_of(context)

        def renew() -> bytes:
            if caller is None:
                raise _PLAIN
            return self._required().renew(caller, request.request_pem)

        return trust_pb2.CertifyReply(certificate_pem=answer(context, renew))

    def Invite(self, request: trust_pb2.InviteRequest, context: grpc.ServicerContext) -> trust_pb2.InviteReply:
        """Make a token for a node that evaluates once."""
        return trust_pb2.InviteReply(token=answer(context, lambda: self._required().invite(request.node)))

    def Remove(self, request: trust_pb2.RemoveRequest, context: grpc.ServicerContext) -> trust_pb2.RemoveReply:
        """Refuse a node or a user from now on."""

        def remove() -> trust_pb2.RemoveReply:
            is_user = request.role == SUBMITTER_ROLE
            party = Party("submitter", request.node) if is_user else node_party(request.node)
            reason = f"{party} was removed" + (f": {request.reason}" if request.reason else "")
            number = self._keeper.remove(party, reason) if self._keeper is not None else 0
            was_member = not is_user and self._coordinator.remove(request.node, reason, forever=self._keeper is None)
            return trust_pb2.RemoveReply(certificates=number, was_member=was_member)

        return answer(context, remove)

    def DrainNode(self, request: trust_pb2.DrainNodeRequest, context: grpc.ServicerContext) -> trust_pb2.DrainNodeReply:
        """Take a node into no new run."""
        run_id = answer(context, lambda: self._coordinator.drain_node(request.node, undo=request.undo))
        return trust_pb2.DrainNodeReply(run_id=run_id)

    def _required(self) -> Keeper:
        if self._keeper is None:
            raise _PLAIN
        return self._keeper


_PLAIN = UsageError("this coordinator gives no certificates; start it with a trust folder")
