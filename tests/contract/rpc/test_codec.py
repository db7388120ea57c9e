"""Messages and values: what goes out comes back, and every error has its status."""

from __future__ import annotations

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtune.errors import (
    BusyError,
    ConnectionFailedError,
    DeadlineError,
    FrameError,
    IntegrityError,
    RingTuneError,
    all_errors,
)
from ringtune.rpc import codec
from ringtune.schedule.turns import StepKind, Turn
from ringtune.v1 import control_pb2

_COUNTS = st.integers(0, 2**40)


@given(
    turn=st.builds(
        Turn,
        index=_COUNTS,
        kind=st.sampled_from(StepKind),
        owner=st.from_regex(r"[a-z0-9][a-z0-9._-]{0,62}", fullmatch=True),
        round=_COUNTS,
        first_seq=_COUNTS,
        num_items=st.integers(1, 2**40),
        first_step=_COUNTS,
        first_batch=_COUNTS,
        unfreeze_at=st.sets(st.integers(1, 2**40), max_size=5).map(lambda steps: tuple(sorted(steps))),
    )
)
def test_codec_turn_comes_back(turn: Turn) -> None:
    """A turn survives its message, through bytes."""
    text = codec.turn_to_proto(turn).SerializeToString()
    assert codec.turn_from_proto(control_pb2.TurnMessage.FromString(text)) == turn


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "tarin"},
        {"kind": ""},
        {"owner": ""},
        {"num_items": 0},
        {"num_items": -1},
        {"index": -1},
        {"first_seq": -2},
    ],
)
def test_codec_turn_that_is_none_is_refused(changes: dict[str, object]) -> None:
    """An unknown kind, a missing owner or an impossible number is no turn."""
    turn = Turn(index=1, kind=StepKind.TRAIN, owner="a", round=0, first_seq=2, num_items=3, first_step=2, first_batch=0)
    message = codec.turn_to_proto(turn)
    for name, value in changes.items():
        setattr(message, name, value)
    with pytest.raises(IntegrityError, match="use one version on all machines"):
        codec.turn_from_proto(message)


@pytest.mark.parametrize("steps", [(0,), (-3, 2), (4, 4), (8, 4)])
def test_codec_turn_that_unfreezes_out_of_order_is_refused(steps: tuple[int, ...]) -> None:
    """Decisions are steps after the first one, strictly increasing."""
    turn = Turn(index=1, kind=StepKind.TRAIN, owner="a", round=0, first_seq=2, num_items=3, first_step=2, first_batch=0)
    message = codec.turn_to_proto(turn)
    message.unfreeze_at.extend(steps)
    with pytest.raises(IntegrityError, match="turn 1 of the grant unfreezes at"):
        codec.turn_from_proto(message)


def test_codec_empty_message_is_no_turn() -> None:
    """A message of another kind parses as an empty one; it is refused, not taken for turn 0."""
    with pytest.raises(IntegrityError):
        codec.turn_from_proto(control_pb2.TurnMessage())


def test_codec_numbers_keep_order_and_value() -> None:
    """Figures come back in order, infinities included."""
    values = (("loss_sum", 12.5), ("count", 8.0), ("correct", float("inf")))
    assert codec.numbers_from_proto(codec.numbers_to_proto(values)) == values


@pytest.mark.parametrize("names", [("",), ("loss", "loss")])
def test_codec_numbers_without_distinct_names_are_refused(names: tuple[str, ...]) -> None:
    """A figure without a name, or twice, means that something is wrong."""
    with pytest.raises(IntegrityError, match="distinct names"):
        codec.numbers_from_proto(codec.numbers_to_proto((name, 1.0) for name in names))


def test_codec_status_names_are_those_of_grpc() -> None:
    """The statuses known here are all that gRPC has, in the order of their numbers."""
    assert tuple(status.name for status in sorted(grpc.StatusCode, key=lambda s: s.value[0])) == codec.STATUS_NAMES


def test_codec_every_error_has_a_status() -> None:
    """The table error -> status is total, and names no status that gRPC does not have."""
    assert set(codec.STATUS_OF_ERROR) == set(all_errors())
    assert set(codec.STATUS_OF_ERROR.values()) <= set(codec.STATUS_NAMES) - {"OK"}


def test_codec_every_status_has_an_error() -> None:
    """The table status -> error is total: whatever gRPC says becomes an error of ours."""
    assert set(codec.ERROR_OF_STATUS) == set(codec.STATUS_NAMES) - {"OK"}
    assert set(codec.ERROR_OF_STATUS.values()) <= set(all_errors())


@pytest.mark.parametrize("cls", all_errors(), ids=lambda cls: cls.__name__)
def test_codec_error_crosses_the_wire_as_itself(cls: type[RingTuneError]) -> None:
    """Class, exit code and message of every error arrive; several lines and non-ASCII included."""
    message = "node jetson-2: 3,100 MiB\nbut has 2,048 MiB: größer"
    status = codec.status_of_error(cls(message))
    error = codec.error_of_status(*status, peer="node b")
    assert (type(error), str(error), error.exit_code) == (cls, message, cls.exit_code)


def test_codec_error_that_is_not_ours_is_internal() -> None:
    """A bug crosses as the root class, with its type in the message."""
    status = codec.status_of_error(ValueError("boom"))
    assert status.name == "INTERNAL"
    error = codec.error_of_status(*status, peer="node b")
    assert type(error) is RingTuneError
    assert "ValueError: boom" in str(error)


def test_codec_error_of_a_newer_version_keeps_its_message() -> None:
    """A class that this version does not know becomes the root class."""
    error = codec.error_of_status("ABORTED", "ringtune.TooHotError: node pi-4 is at 85 C", peer="node pi-4")
    assert (type(error), str(error)) == (RingTuneError, "node pi-4 is at 85 C")


def test_codec_long_error_is_cut() -> None:
    """A message longer than a status may be is cut, not lost."""
    status = codec.status_of_error(FrameError("x" * 100_000))
    assert len(status.details) == codec.MAX_DETAILS_CHARS
    assert type(codec.error_of_status(*status, peer="node b")) is FrameError


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("UNAVAILABLE", ConnectionFailedError),
        ("DEADLINE_EXCEEDED", DeadlineError),
        ("UNIMPLEMENTED", ConnectionFailedError),
        ("ALREADY_EXISTS", BusyError),
        ("no such status", RingTuneError),
    ],
)
def test_codec_status_of_grpc_itself_names_the_peer(name: str, expected: type[RingTuneError]) -> None:
    """A status without an error of ours becomes one that says who was called, and what to do."""
    error = codec.error_of_status(name, "connect failed", peer="node b at 127.0.0.1:9")
    assert type(error) is expected
    assert str(error).startswith(f"node b at 127.0.0.1:9: {name}: connect failed; ")
