"""Messages and values: what goes out comes back."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtune.errors import IntegrityError
from ringtune.rpc.codecs import codec
from ringtune.schedule.passage import Passage
from ringtune.schedule.turns.turns import StepKind, Turn
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


def test_codec_turn_carries_where_its_items_enter_and_are_kept() -> None:
    """One passage for each item; of some items only they are refused."""
    turn = Turn(index=1, kind=StepKind.TRAIN, owner="a", round=0, first_seq=2, num_items=3, first_step=2, first_batch=0)
    turn = dataclasses.replace(turn, passages=(Passage(enters=3), Passage(), Passage(keeps=2)))
    message = codec.turn_to_proto(turn)
    assert codec.turn_from_proto(control_pb2.TurnMessage.FromString(message.SerializeToString())) == turn
    for field in (message.enters, message.keeps):
        field.append(0)
        with pytest.raises(IntegrityError, match="but has 3; use one version on all machines"):
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
