"""Opening channels and servers with the project's options, and carrying errors over gRPC.

Everything that binds or dials goes through here, so that no server shares its port by accident and no
channel waits for minutes on a frozen peer.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import grpc

from ringtune.errors import ConnectionFailedError, RingTuneError
from ringtune.rpc.channel_options import CLIENT_OPTIONS, SERVER_OPTIONS, Options
from ringtune.rpc.codec import error_of_status, status_of_error


def open_channel(address: str, more: Options = ()) -> grpc.Channel:
    """A channel to ``host:port``, with ``more`` options than all have; it connects at the first call. Close it."""
    return grpc.insecure_channel(address, options=(*CLIENT_OPTIONS, *more))


class NodeServer:
    """A gRPC server on one address, with its own threads.

    Args:
        address: ``host:port``; port 0 takes a free one.
        add: adds servicers to the server before it starts.
        max_workers: calls at a time; every incoming link holds one for as long as its run.

    Raises:
        ConnectionFailedError: the port is busy, or the host is not one of this machine.
    """

    def __init__(self, address: str, add: Callable[[grpc.Server], None], *, max_workers: int = 64) -> None:
        self._pool = ThreadPoolExecutor(max_workers=max_workers, thread_name_prefix="ringtune-rpc")
        self._server = grpc.server(self._pool, options=SERVER_OPTIONS)
        add(self._server)
        host = address.rpartition(":")[0]
        try:
            self.port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            self._pool.shutdown()
            raise ConnectionFailedError(
                f"can't listen on {address}: the port is busy or the host is not this machine's; take another port"
            ) from error
        self.address = f"{host}:{self.port}"
        self._server.start()

    def stop(self, grace_s: float = 0.5) -> None:
        """Refuse new calls, let the running ones end for ``grace_s``, cancel the rest, end all threads."""
        stopped = self._server.stop(grace_s)
        stopped.wait(grace_s + 5.0)
        self._pool.shutdown(wait=True)


def abort(context: grpc.ServicerContext, error: BaseException) -> NoReturn:
    """End a call with the status that carries ``error``."""
    status = status_of_error(error)
    context.abort(grpc.StatusCode[status.name], status.details)
    raise AssertionError("abort always raises")  # pragma: no cover


def error_of_call(error: grpc.RpcError, *, peer: str) -> RingTuneError:
    """The error that a failed call carries.

    Args:
        error: as raised by a stub.
        peer: who was called, in words, for the message: ``node b at 10.0.0.2:7001``.
    """
    if not isinstance(error, grpc.Call):
        return ConnectionFailedError(f"{peer}: the call failed without a status ({error}); see its log")
    code = error.code()
    return error_of_status(code.name if code else "UNKNOWN", error.details() or "", peer=peer)
