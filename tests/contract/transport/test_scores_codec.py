"""Scores as bytes: what goes out comes back to the last bit, NaN too."""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtune.errors import IntegrityError, PlanError
from ringtune.schedule.operation_tables import BlockScores
from ringtune.schedule.turns import turn_sequence
from ringtune.transport.codecs import scores_from_proto, scores_to_proto
from ringtune.v1 import control_pb2
from tests.support.choosing import DrawnTables, make_choice
from tests.support.plans import changed, make_plan

PLAN = changed(make_plan([("a", 0, 3), ("b", 3, 4)], ["a", "b"], microbatches=3), choice=make_choice(subnets=3))
SCORE = next(turn_sequence(PLAN.course))
SCORES = DrawnTables(PLAN).scores("a", SCORE)


def test_scores_codec_scores_come_back() -> None:
    """Whatever their order; one message for each batch and block, and few bytes beside the numbers."""
    entries = list(SCORES)
    random.Random(1).shuffle(entries)
    messages = list(scores_to_proto(5, entries))
    assert {message.turn for message in messages} == {5} and len(messages) == 3 * 3
    again = [control_pb2.SubnetScores.FromString(message.SerializeToString()) for message in messages]
    found = [entry for message in again for entry in scores_from_proto(message)]
    assert sorted(found) == sorted(SCORES)
    assert sum(message.ByteSize() for message in messages) < len(SCORES) * 2 * 3 * 8 * 1.3


@given(values=st.lists(st.floats(), min_size=1, max_size=12))
def test_scores_codec_keeps_every_bit(values: list[float]) -> None:
    """Any float, as it is."""
    entry = BlockScores("a", 1, 0, 2, (tuple(values),))
    (message,) = scores_to_proto(0, [entry])
    (found,) = scores_from_proto(message)
    assert struct.pack(f"{len(values)}d", *found.values[0]) == struct.pack(f"{len(values)}d", *values)


def test_scores_codec_of_nothing_is_nothing() -> None:
    """A node that hosts nothing."""
    assert list(scores_to_proto(0, [])) == []


@pytest.mark.parametrize(
    "entries",
    [
        [entry for entry in SCORES if entry.micro],
        [*SCORES, SCORES[0]],
        [SCORES[0]._replace(values=((1.0,), (1.0, 2.0))), *SCORES[1:]],
    ],
)
def test_scores_codec_refuses_to_write_half_a_block(entries: list[BlockScores]) -> None:
    """A node that lacks numbers says so, rather than send what can't be read."""
    with pytest.raises(PlanError, match="not complete"):
        list(scores_to_proto(0, entries))


@pytest.mark.parametrize(
    "changes",
    [
        {"values": b""},
        {"values": b"\0" * 7},
        {"values": b"\0" * 8},
        {"scores": 0},
        {"subnets": 0},
        {"scores": 7},
        {"scores": 1, "subnets": 1, "values": b"\0" * (8 << 20) + b"\0" * 8},
    ],
)
def test_scores_codec_bytes_that_are_no_scores_are_refused(changes: dict[str, Any]) -> None:
    """Sizes have to be whole micro-batches of scores of subnets."""
    message = next(scores_to_proto(0, SCORES))
    for name, value in changes.items():
        setattr(message, name, value)
    with pytest.raises(IntegrityError, match="use one version on all machines"):
        scores_from_proto(message)
