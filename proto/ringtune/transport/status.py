"""Conversion between errors of RingTune and gRPC statuses."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, NoReturn, TypeVar
from urllib.parse import quote

import grpc

from ringtune.errors import (
    BusyError,
    ConnectionFailedError,
    DeadlineError,
    FrameError,
    IntegrityError,
    InterruptedRunError,
    PeerLostError,
    RingTuneError,
    TrustError,
    UsageError,
    encodable,
    error_from_name,
    internal_error,
)

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
MAX_DETAILS_BYTES: Final = 6000
"""Most bytes of an error text in a status, percent-encoded as sent; gRPC refuses metadata above 8 to 16 KiB."""

ERROR_OF_STATUS: Final[dict[str, type[RingTuneError]]] = {
    "CANCELLED": ConnectionFailedError,
    "UNKNOWN": RingTuneError,
    "INVALID_ARGUMENT": UsageError,
    "DEADLINE_EXCEEDED": DeadlineError,
    "NOT_FOUND": RingTuneError,
    "ALREADY_EXISTS": BusyError,
    "PERMISSION_DENIED": TrustError,
    "RESOURCE_EXHAUSTED": IntegrityError,
    "FAILED_PRECONDITION": FrameError,
    "ABORTED": PeerLostError,
    "OUT_OF_RANGE": IntegrityError,
    "UNIMPLEMENTED": ConnectionFailedError,
    "INTERNAL": RingTuneError,
    "UNAVAILABLE": ConnectionFailedError,
    "DATA_LOSS": IntegrityError,
    "UNAUTHENTICATED": TrustError,
}
"""gRPC status without a RingTune error in its details -> error."""

_REMEDIES: Final = {
    "CANCELLED": "it ended while it was called; see its log, and start it again",
    "UNIMPLEMENTED": "either something else serves there, such as a node where a coordinator is meant, or it runs "
    "another version; correct the address, and use one version on all machines",
    "UNAVAILABLE": "check that it runs and that the address is right",
    "DEADLINE_EXCEEDED": "it did not answer in time; check the machine and the network",
    "RESOURCE_EXHAUSTED": "a message was longer than allowed; use one version on all machines",
}
_CANCELLED_THERE: Final = ("", "CANCELLED")
"""Details of a call that a stopping server cancelled; a call cancelled by its caller has other details."""
_CALLS_EXCEEDED: Final = "Concurrent RPC limit exceeded!"
_DETAILS = re.compile(r"ringtune\.(?P<name>[A-Za-z]+)(?:\[(?P<peer>[^]]+)\])?: (?P<message>.*)", re.DOTALL)
"""Class, other node that may be the cause, and message: ``ringtune.FrameError[e]: node a can't send to node e``."""


class WireStatus(NamedTuple):
    """A gRPC status by name, with its details."""

    name: str
    details: str


def status_of_error(error: BaseException) -> WireStatus:
    """Convert an error to a status; an unforeseen one is described by its class and place."""
    if not isinstance(error, RingTuneError):
        error = internal_error(error)
    peer = f"[{error.peer}]" if error.peer else ""
    return WireStatus(error.status, _cut(encodable(f"ringtune.{type(error).__name__}{peer}: {error}")))


def _cut(text: str) -> str:
    """Cut a text that is too long; a character outside ASCII takes 6 to 12 bytes."""
    if len(text) * 12 <= MAX_DETAILS_BYTES:
        return text
    ends = itertools.accumulate(len(quote(character)) for character in text)
    fits = sum(1 for end in ends if end <= MAX_DETAILS_BYTES)
    return text if fits == len(text) else text[: fits - 1] + "…"


def error_of_status(name: str, details: str, *, peer: str) -> RingTuneError:
    """Convert a status to an error; ``peer`` names the server, for failures of gRPC itself."""
    match = _DETAILS.fullmatch(details)
    if match is not None:
        error = error_from_name(match["name"], match["message"])
        error.peer = match["peer"] or ""
        return error
    remedy = _REMEDIES.get(name, "see its log")
    if name == "RESOURCE_EXHAUSTED" and details == _CALLS_EXCEEDED:
        return BusyError(f"{peer} has more calls open than it takes; try again later")
    if name == "CANCELLED" and details not in _CANCELLED_THERE:
        return InterruptedRunError(f"{peer}: the call was given up here")
    return ERROR_OF_STATUS.get(name, RingTuneError)(f"{peer}: {name}: {details or 'no details'}; {remedy}")


# ---- server ----------------------------------------------------------------------------------------


def answer(context: grpc.ServicerContext, call: Callable[[], T]) -> T:
    """Return the result of ``call``; if it fails, end the gRPC call with its error as a status."""
    try:
        return call()
    except Exception as error:
        abort(context, error)


def answer_stream(context: grpc.ServicerContext, values: Iterator[T]) -> Iterator[T]:
    """Yield the values; an error among them ends the gRPC call with a status."""
    try:
        yield from values
    except Exception as error:
        abort(context, error)


def abort(context: grpc.ServicerContext, error: BaseException) -> NoReturn:
    """End a call with the status of ``error``."""
    if isinstance(error, grpc.RpcError):
        _LOG.debug("a caller is gone: %s", error)  # its request stream broke
    elif not isinstance(error, RingTuneError):
        _LOG.error("a call failed by a bug", exc_info=error)
    status = status_of_error(error)
    context.abort(grpc.StatusCode[status.name], status.details)
    raise AssertionError("abort always raises")  # pragma: no cover


# ---- client ----------------------------------------------------------------------------------------


def error_of_call(error: grpc.RpcError, *, peer: str) -> RingTuneError:
    """Convert the error of a failed call; ``peer`` names the server, such as ``node b at 10.0.0.2:7001``."""
    if not isinstance(error, grpc.Call):
        return ConnectionFailedError(f"{peer}: the call failed without a status ({error}); see its log")
    code = error.code()
    return error_of_status(code.name if code else "UNKNOWN", error.details() or "", peer=peer)
