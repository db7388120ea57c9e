"""A node's address that meddles: every gRPC call passes, and forged messages can be slipped into an open link."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from edge.transport.frames import unpack
from ringtune.transport.endpoints import CLIENT_OPTIONS, SERVER_OPTIONS
from ringtune.v1 import ring_pb2

WORKERS = 32
END_S = 30.0
FOREVER_S = 1e6
LINK = "/ringtune.v1.Ring/Link"


class Meddler(grpc.GenericRpcHandler):
    """Listens on ``port``, passes every call to ``target_port``, and every answer back.

    Args:
        target_port: on loopback.

    Attributes:
        refusals: what the target refused on links of the ring.
        keeps_refusals: whether the sender of a link does not learn of them.
        forge: makes the messages that go before a frame with this header; none by default.
    """

    def __init__(self, target_port: int) -> None:
        self.refusals: list[str] = []
        self.keeps_refusals = False
        self.forge: Callable[[ring_pb2.FrameHeader], Iterable[bytes]] = lambda header: ()
        self._channel = grpc.insecure_channel(f"127.0.0.1:{target_port}", options=CLIENT_OPTIONS)
        self._pool = ThreadPoolExecutor(WORKERS)
        self._server = grpc.server(self._pool, handlers=[self], options=SERVER_OPTIONS)
        self.port: int = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def close(self) -> None:
        """End every call."""
        self._server.stop(0).wait(END_S)
        self._channel.close()
        self._pool.shutdown()

    def service(self, handler_call_details: Any) -> Any:
        """Take any call: on the wire each of them is a stream of messages in both directions."""
        method = handler_call_details.method
        own = tuple(pair for pair in handler_call_details.invocation_metadata if pair[0] != "user-agent")
        return grpc.stream_stream_rpc_method_handler(
            lambda messages, context: self._pass(method, own, messages, context)
        )

    def _pass(self, method: str, metadata: Any, messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        sent = self._with_forged(messages) if method == LINK else messages
        passed: Any = self._channel.stream_stream(method)
        call = passed(sent, metadata=metadata, timeout=_timeout_s(context))
        context.add_callback(call.cancel)
        try:
            for answer in call:
                if method != LINK or not self._is_kept(answer):
                    yield answer
        except grpc.RpcError as error:
            context.set_trailing_metadata(call.trailing_metadata())
            context.abort(call.code(), str(error))
        context.set_trailing_metadata(call.trailing_metadata())

    def _with_forged(self, messages: Iterator[bytes]) -> Iterator[bytes]:
        for message in messages:
            header, _ = unpack(message)
            if header is not None:
                yield from self.forge(header)
            yield message

    def _is_kept(self, answer: bytes) -> bool:
        refusal = ring_pb2.Ack.FromString(answer).refusal
        if refusal:
            self.refusals.append(refusal)
        return bool(refusal) and self.keeps_refusals


def _timeout_s(context: Any) -> float | None:
    """What is left of a call's time; gRPC gives a number without meaning for a call that may last for ever."""
    left_s = context.time_remaining()
    return left_s if left_s is not None and left_s < FOREVER_S else None
