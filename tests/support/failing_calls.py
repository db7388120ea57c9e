"""Calls that fail where a failpoint says: for a test the network loses a request or its reply, or a process ends there.

The places are ``call NAME`` at who calls, and ``answer NAME`` before and ``answered NAME`` after at who is called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from tests.support import failpoints
from tests.support.failpoints import Failure


class DroppedCallError(grpc.RpcError, grpc.Call):
    """A call whose request or reply was lost: what gRPC says when a connection breaks."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self._what = what

    def code(self) -> grpc.StatusCode:
        """Return the status of a connection that broke."""
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        """Return what was lost."""
        return self._what

    def initial_metadata(self) -> tuple[Any, ...]:
        """Return nothing, as none came."""
        return ()

    def trailing_metadata(self) -> tuple[Any, ...]:
        """Return nothing, as none came."""
        return ()

    def is_active(self) -> bool:
        """Return that it is over."""
        return False

    def time_remaining(self) -> float:
        """Return that it is over."""
        return 0.0

    def cancel(self) -> bool:
        """Return that it is too late."""
        return False

    def add_callback(self, callback: Any) -> bool:
        """Return that it is too late."""
        return False


class _BrokenStream:
    """The messages of a call that breaks before its last one."""

    def __init__(self, call: Any, what: str) -> None:
        self._call = call
        self._what = what

    def __iter__(self) -> Iterator[Any]:
        """Pass all messages on but the last one, then fail."""
        before: list[Any] = []
        for message in self._call:
            yield from before
            before = [message]
        raise DroppedCallError(self._what)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


class FailingCalls(
    grpc.UnaryUnaryClientInterceptor, grpc.StreamUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor
):
    """Stands between a channel and those who call through it."""

    def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        """Make a call, or lose it."""
        return self._call(continuation, details, request)

    def intercept_stream_unary(self, continuation: Callable[..., Any], details: Any, requests: Any) -> Any:
        """Make a call, or lose it."""
        return self._call(continuation, details, requests)

    def intercept_unary_stream(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        """Make a call, or lose it, or break it before its last message."""
        order = failpoints.reached(f"call {_name(details)}")
        if order is not None and order.failure is Failure.DROP_REQUEST:
            raise DroppedCallError(f"the failpoint {order}")
        outcome = continuation(details, request)
        return outcome if order is None else _BrokenStream(outcome, f"the failpoint {order}")

    def _call(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        order = failpoints.reached(f"call {_name(details)}")
        if order is not None and order.failure is Failure.DROP_REQUEST:
            raise DroppedCallError(f"the failpoint {order}")
        outcome = continuation(details, request)
        if order is not None:
            with contextlib.suppress(grpc.RpcError):  # an error is a reply too
                outcome.result()
            raise DroppedCallError(f"the failpoint {order}")
        return outcome


class FailingAnswers(grpc.ServerInterceptor):
    """Stands between a server and its servicers: around every call but a link."""

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Put failpoints around the handler of a call."""
        handler = continuation(details)
        if handler is None or (handler.request_streaming and handler.response_streaming):
            return handler
        ways = (handler.request_streaming, handler.response_streaming)
        kind = "_".join("stream" if is_stream else "unary" for is_stream in ways)
        behaviour = getattr(handler, kind)
        name = _name(details)

        def failing(request: Any, context: grpc.ServicerContext) -> Any:
            failpoints.reached(f"answer {name}")
            reply = behaviour(request, context)
            failpoints.reached(f"answered {name}")
            return reply

        def failing_stream(request: Any, context: grpc.ServicerContext) -> Any:
            failpoints.reached(f"answer {name}")
            yield from behaviour(request, context)
            failpoints.reached(f"answered {name}")

        make = getattr(grpc, f"{kind}_rpc_method_handler")
        chosen = failing_stream if handler.response_streaming else failing
        return make(chosen, handler.request_deserializer, handler.response_serializer)


def _name(details: Any) -> str:
    """Return the name of a method without its service."""
    method = details.method
    return str(method.decode() if isinstance(method, bytes) else method).rpartition("/")[2]
