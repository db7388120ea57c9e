"""A coordinator that listens: bound once, exclusively, and stopped in order."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import grpc

from coordinator.members.addresses import require_private, split_address
from coordinator.server.service import Coordinator, CoordinatorServicer
from coordinator.server.weights_servicer import WeightsServicer
from ringtune.errors import ConnectionFailedError
from ringtune.rpc.channel_options import SERVER_OPTIONS
from ringtune.v1 import control_pb2_grpc, weights_pb2_grpc

_MAX_WORKERS = 64
_MAX_CALLS = 256
_STOP_RUN_S = 8.0
_GRACE_S = 1.0


class CoordinatorServer:
    """Serves a coordinator while in its context.

    Args:
        bind: ``host:port``; port 0 = any free one.
        lease_s: a node that was not heard of for so long is lost.
        insecure: whether ``bind`` and the nodes may be beyond this machine, without encryption.

    Raises:
        UsageError: ``bind`` leaves this machine without ``insecure``.
        ConnectionFailedError: the address can't be bound.
    """

    def __init__(self, bind: str, *, lease_s: float, insecure: bool = False) -> None:
        require_private(bind, option="--bind", insecure=insecure)
        self.coordinator = Coordinator(lease_s=lease_s, insecure=insecure)
        self._pool = ThreadPoolExecutor(max_workers=_MAX_WORKERS, thread_name_prefix="grpc")
        self._server = grpc.server(self._pool, options=SERVER_OPTIONS, maximum_concurrent_rpcs=_MAX_CALLS)
        control_pb2_grpc.add_CoordinatorServicer_to_server(CoordinatorServicer(self.coordinator), self._server)
        weights_pb2_grpc.add_WeightsServicer_to_server(WeightsServicer(self.coordinator.offers), self._server)
        host, _ = split_address(bind, option="--bind")
        port = _bind(self._server, bind)
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def __enter__(self) -> CoordinatorServer:
        """Begin to listen."""
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop the run, if any, so that its nodes are released; then stop listening."""
        self.coordinator.stop("the coordinator ends", _STOP_RUN_S)
        self._server.stop(_GRACE_S).wait(2 * _GRACE_S)
        self._pool.shutdown(wait=False, cancel_futures=True)


def _bind(server: grpc.Server, bind: str) -> int:
    advice = f"can't listen at {bind}: the port is in use or the address is not this machine's; choose another --bind"
    try:
        port = server.add_insecure_port(bind)
    except RuntimeError as error:
        raise ConnectionFailedError(advice) from error
    if port == 0:
        raise ConnectionFailedError(advice)
    return port
