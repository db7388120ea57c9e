"""Serve a coordinator at an address, bound once and exclusively, and stop it in order."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import grpc

from coordinator.server.coordinator import Coordinator
from coordinator.server.servicer import CoordinatorServicer
from coordinator.server.trust_servicer import JoiningServicer, MembershipServicer
from coordinator.trust.keeper import Keeper
from ringtune.errors import ConnectionFailedError
from ringtune.rpc.addresses import join_address, require_private, split_address
from ringtune.rpc.connections import Server
from ringtune.rpc.weights_servicer import WeightsServicer
from ringtune.v1 import control_pb2_grpc, trust_pb2_grpc, weights_pb2_grpc

_MAX_CALLS = 1024
_STOP_RUN_S = 8.0
_GRACE_S = 1.0
_MAX_JOINING = 4
"""Strangers that are answered at a time; they have threads of their own, so that they keep nobody else waiting."""


class CoordinatorServer:
    """A coordinator that listens as soon as it is made; as a context manager it ends in order.

    Args:
        bind: ``host:port``; port 0 = any free one.
        lease_s: a node that was not heard of for so long is lost.
        insecure: whether ``bind`` and the nodes may be beyond this machine, without encryption.
        keeper: of the trust, where the process speaks as the coordinator; None = all is plain text.
        join_port: where those without a certificate are answered, on the same host; 0 = the port after the one of
            ``bind``, any where that is any.
        before: called with the coordinator and the address, which is taken, before the first call is answered.

    Attributes:
        coordinator: what is served.
        address: ``host:port`` where it listens.

    Raises:
        UsageError: ``bind`` leaves this machine without ``insecure``.
        ConnectionFailedError: the address can't be bound.
    """

    def __init__(
        self,
        bind: str,
        *,
        lease_s: float,
        insecure: bool = False,
        keeper: Keeper | None = None,
        join_port: int = 0,
        before: Callable[[Coordinator, str], object] = lambda coordinator, address: None,
    ) -> None:
        require_private(bind, option="--bind", insecure=insecure)
        self.coordinator = Coordinator(lease_s=lease_s, insecure=insecure)

        def add(server: grpc.Server) -> None:
            control_pb2_grpc.add_CoordinatorServicer_to_server(CoordinatorServicer(self.coordinator), server)
            weights_pb2_grpc.add_WeightsServicer_to_server(WeightsServicer(self.coordinator.offers), server)
            trust_pb2_grpc.add_MembershipServicer_to_server(MembershipServicer(self.coordinator, keeper), server)

        self._server = Server(bind, add, max_calls=_MAX_CALLS, before=lambda address: before(self.coordinator, address))
        self.address = self._server.address
        self._joining: Server | None = None
        if keeper is not None:
            try:
                self._joining = _serve_joining(keeper, bind, join_port)
            except BaseException:
                self._server.stop()
                raise

    def __enter__(self) -> CoordinatorServer:
        """Return the server, which listens already."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop the run, if one is driven, so that its nodes are released; then stop listening."""
        if self._joining is not None:
            self._joining.stop(0.0, wait=False)
        self.coordinator.stop("the coordinator ends", _STOP_RUN_S)
        self._server.stop(_GRACE_S, wait=False)


def _serve_joining(keeper: Keeper, bind: str, join_port: int) -> Server:
    """Answer those who have no certificate yet."""
    host, port = split_address(bind, option="--bind")
    address = join_address(host, join_port or (port + 1 if port else 0))

    def add(server: grpc.Server) -> None:
        trust_pb2_grpc.add_JoiningServicer_to_server(JoiningServicer(keeper), server)

    try:
        server = Server(address, add, max_workers=_MAX_JOINING, max_calls=2 * _MAX_JOINING, is_public=True)
    except ConnectionFailedError as error:
        raise ConnectionFailedError(
            f"can't listen on {address}, where those with a token are answered; take another --join-port"
        ) from error
    keeper.serves_at(server.port)
    return server
