"""Between the messages of the wire and the values of the rules: turns, numbers, errors.

Actions travel as the words of :mod:`ringtune.schedule.table`.

Pure of grpc: statuses are named by their gRPC names, so that any driver can look them up. Nothing here
trusts its input: what does not read as a value raises :class:`~ringtune.errors.IntegrityError`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from ringtune.errors import (
    BusyError,
    ConnectionFailedError,
    DeadlineError,
    FrameError,
    IntegrityError,
    InterruptedRunError,
    PeerLostError,
    RingTuneError,
    UsageError,
    all_errors,
    error_from_name,
)
from ringtune.schedule.turns import StepKind, Turn
from ringtune.v1 import control_pb2

MAX_DETAILS_CHARS: Final = 2000
"""Longest error text in a status; gRPC refuses metadata of more than about 8 KiB."""

# ---- turns -----------------------------------------------------------------------------------------


def turn_to_proto(turn: Turn) -> control_pb2.TurnMessage:
    """The message of a turn."""
    return control_pb2.TurnMessage(
        index=turn.index,
        kind=turn.kind.value,
        owner=turn.owner,
        round=turn.round,
        first_seq=turn.first_seq,
        num_items=turn.num_items,
        first_step=turn.first_step,
        first_batch=turn.first_batch,
        unfreeze_at=turn.unfreeze_at,
    )


def turn_from_proto(message: control_pb2.TurnMessage) -> Turn:
    """The turn of a message.

    Raises:
        IntegrityError: an unknown kind, no owner, no items, a negative number, or unfreezing steps out of order.
    """
    counts = (message.index, message.round, message.first_seq, message.first_step, message.first_batch)
    steps = tuple(message.unfreeze_at)
    if any(later <= earlier for earlier, later in itertools.pairwise((0, *steps))):
        raise IntegrityError(
            f"turn {message.index} of the grant unfreezes at {list(steps)}; use one version on all machines"
        )
    if not message.owner or message.num_items < 1 or min(counts) < 0:
        raise IntegrityError(f"turn {message.index} of the grant is not readable; use one version on all machines")
    return Turn(
        index=message.index,
        kind=_step_kind(message.kind),
        owner=message.owner,
        round=message.round,
        first_seq=message.first_seq,
        num_items=message.num_items,
        first_step=message.first_step,
        first_batch=message.first_batch,
        unfreeze_at=steps,
    )


def _step_kind(text: str) -> StepKind:
    try:
        return StepKind(text)
    except ValueError as error:
        known = ", ".join(StepKind)
        raise IntegrityError(f"step kind {text!r} is not one of {known}; use one version on all machines") from error


# ---- numbers ---------------------------------------------------------------------------------------


def numbers_to_proto(values: Iterable[tuple[str, float]]) -> list[control_pb2.Number]:
    """Named figures as messages, in the given order."""
    return [control_pb2.Number(name=name, value=value) for name, value in values]


def numbers_from_proto(messages: Iterable[control_pb2.Number]) -> tuple[tuple[str, float], ...]:
    """Named figures, in the given order.

    Raises:
        IntegrityError: a figure without a name, or a name that comes twice.
    """
    values = tuple((message.name, message.value) for message in messages)
    names = [name for name, _ in values]
    if "" in names or len(set(names)) != len(names):
        raise IntegrityError(f"figures {names} have no distinct names; use one version on all machines")
    return values


# ---- errors ----------------------------------------------------------------------------------------

STATUS_NAMES: Final = (
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
)
"""Every gRPC status, in the order of its number."""

STATUS_OF_ERROR: Final[dict[type[RingTuneError], str]] = {cls: cls.status for cls in all_errors()}
"""The total table error class -> status name."""

ERROR_OF_STATUS: Final[dict[str, type[RingTuneError]]] = {
    "CANCELLED": InterruptedRunError,
    "UNKNOWN": RingTuneError,
    "INVALID_ARGUMENT": UsageError,
    "DEADLINE_EXCEEDED": DeadlineError,
    "NOT_FOUND": RingTuneError,
    "ALREADY_EXISTS": BusyError,
    "PERMISSION_DENIED": ConnectionFailedError,
    "RESOURCE_EXHAUSTED": IntegrityError,
    "FAILED_PRECONDITION": FrameError,
    "ABORTED": PeerLostError,
    "OUT_OF_RANGE": IntegrityError,
    "UNIMPLEMENTED": ConnectionFailedError,
    "INTERNAL": RingTuneError,
    "UNAVAILABLE": ConnectionFailedError,
    "DATA_LOSS": IntegrityError,
    "UNAUTHENTICATED": ConnectionFailedError,
}
"""What a status means that gRPC itself gave, without an error of ours in its details."""

_REMEDIES: Final = {
    "UNIMPLEMENTED": "it runs another version; use one version on all machines",
    "UNAVAILABLE": "check that it runs and that the address is right",
    "DEADLINE_EXCEEDED": "it did not answer in time; check the machine and the network",
    "RESOURCE_EXHAUSTED": "a message was longer than allowed; use one version on all machines",
}
_DETAILS = re.compile(r"ringtune\.(?P<name>[A-Za-z]+): (?P<message>.*)", re.DOTALL)


class WireStatus(NamedTuple):
    """A gRPC status by name, with its details."""

    name: str
    details: str


def status_of_error(error: BaseException) -> WireStatus:
    """The status that carries ``error``; anything that is not ours becomes the root class with its type named."""
    if not isinstance(error, RingTuneError):
        error = RingTuneError(f"internal error, {type(error).__name__}: {error}; please report it")
    text = f"ringtune.{type(error).__name__}: {error}"
    if len(text) > MAX_DETAILS_CHARS:
        text = text[: MAX_DETAILS_CHARS - 1] + "…"
    return WireStatus(STATUS_OF_ERROR[type(error)], text)


def error_of_status(name: str, details: str, *, peer: str) -> RingTuneError:
    """The error that a status carries.

    Args:
        name: gRPC name of the status.
        details: its text.
        peer: who answered, or should have: for the message when gRPC itself failed the call.
    """
    match = _DETAILS.fullmatch(details)
    if match is not None:
        return error_from_name(match["name"], match["message"])
    remedy = _REMEDIES.get(name, "see its log")
    return ERROR_OF_STATUS.get(name, RingTuneError)(f"{peer}: {name}: {details or 'no details'}; {remedy}")
