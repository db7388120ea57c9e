"""Errors and statuses: every error has its status, and comes back from it."""

from __future__ import annotations

from urllib.parse import quote

import grpc

from ringtune.errors import (
    BusyError,
    ConnectionFailedError,
    DeadlineError,
    FrameError,
    InterruptedRunError,
    RingTuneError,
    all_errors,
)
from ringtune.transport import status as statuses
from tests.support.cases import cases

STATUS_NAMES = {status.name for status in grpc.StatusCode}


def test_statuses_and_errors_have_each_other() -> None:
    """Every error has a status that gRPC has, and whatever gRPC says becomes an error of ours."""
    assert {cls.status for cls in all_errors()} <= STATUS_NAMES - {"OK"}
    assert set(statuses.ERROR_OF_STATUS) == STATUS_NAMES - {"OK"}
    assert set(statuses.ERROR_OF_STATUS.values()) <= set(all_errors())


@cases("cls", all_errors())
def test_statuses_error_crosses_the_wire_as_itself(cls: type[RingTuneError]) -> None:
    """Class, exit code and message of every error arrive; several lines and non-ASCII included."""
    message = "node jetson-2: 3,100 MiB\nbut has 2,048 MiB: größer"
    for peer in ("", "jetson-3"):  # another node that may be the cause
        sent = cls(message)
        sent.peer = peer
        error = statuses.error_of_status(*statuses.status_of_error(sent), peer="node b")
        assert (type(error), str(error), error.exit_code, error.peer) == (cls, message, cls.exit_code, peer)


def test_statuses_error_that_is_not_ours_is_internal() -> None:
    """A bug crosses as the root class, with its type in the message, and without its text."""
    status = statuses.status_of_error(ValueError("boom"))
    assert status.name == "INTERNAL"
    error = statuses.error_of_status(*status, peer="node b")
    assert type(error) is RingTuneError
    assert "internal error, ValueError" in str(error)
    assert "boom" not in str(error)


def test_statuses_error_of_a_newer_version_keeps_its_message() -> None:
    """A class that this version does not know becomes the root class."""
    error = statuses.error_of_status("ABORTED", "ringtune.TooHotError: node pi-4 is at 85 C", peer="node pi-4")
    assert (type(error), str(error)) == (RingTuneError, "node pi-4 is at 85 C")


def test_statuses_cancelled_call_tells_who_ended_it() -> None:
    """A server that ends cancels its calls, which is no Ctrl-C of the caller."""
    there = statuses.error_of_status("CANCELLED", "CANCELLED", peer="coordinator 10.0.0.1:7000")
    assert type(there) is ConnectionFailedError
    assert "it ended while it was called" in str(there)
    for details in ("Locally cancelled by application!", "Channel closed!", "Stream removed (Channel closed!)"):
        assert type(statuses.error_of_status("CANCELLED", details, peer="node b")) is InterruptedRunError


@cases("character", ["\u6570", "\U0001f600", "\ud83d", "\u00e4", "%", "a"])
def test_statuses_long_error_in_any_script_is_cut_and_keeps_its_kind(character: str) -> None:
    """What travels is percent-encoded, so those bytes are counted; what UTF-8 has no bytes for is escaped."""
    most = statuses.MAX_DETAILS_BYTES
    for count, least in ((1900, 0), (100_000, 4000 if character in "\ud83da" else most - 24)):  # an error has 4,000
        status = statuses.status_of_error(FrameError(character * count))
        assert least <= len(quote(status.details)) <= most + 9
        assert type(statuses.error_of_status(*status, peer="node b")) is FrameError
    whole = statuses.status_of_error(FrameError("\u6570" * 600))  # 9 bytes each
    assert whole.details == "ringtune.FrameError: " + "\u6570" * 600


@cases(
    ("name", "expected"),
    [
        ("UNAVAILABLE", ConnectionFailedError),
        ("DEADLINE_EXCEEDED", DeadlineError),
        ("UNIMPLEMENTED", ConnectionFailedError),
        ("ALREADY_EXISTS", BusyError),
        ("no such status", RingTuneError),
    ],
)
def test_statuses_status_of_grpc_itself_names_the_peer(name: str, expected: type[RingTuneError]) -> None:
    """A status without an error of ours becomes one that says who was called, and what to do."""
    error = statuses.error_of_status(name, "connect failed", peer="node b at 127.0.0.1:9")
    assert type(error) is expected
    assert str(error).startswith(f"node b at 127.0.0.1:9: {name}: connect failed; ")
