"""Tests of ``ringtune.transport.codecs``: grants, turns, report checks, scores."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtune.errors import IntegrityError, PlanError
from ringtune.run_control.evaluation import MAX_CLASSES, name_of
from ringtune.schedule.operation_tables import BlockScores, Operations
from ringtune.schedule.placement import Passage
from ringtune.schedule.turns import StepKind, Turn, turn_sequence
from ringtune.transport import codecs
from ringtune.v1 import control_pb2
from tests.support.cases import cases
from tests.support.choosing import DrawnTables, make_choice, table_of
from tests.support.plans import changed, make_plan

COURSE = changed(make_plan([("a", 0, 4)], ["a", "b"], num_steps=40), choice=make_choice()).course
FIRST, SECOND = (table_of(COURSE, seed) for seed in (1, 2))
TURNS = [turn for turn in turn_sequence(COURSE) if turn.kind is StepKind.TRAIN]
SCORE = next(turn_sequence(COURSE))


def grant(writer: codecs.GrantWriter, *tables: Operations) -> control_pb2.GrantRequest:
    """A grant of train turns with these tables, through bytes."""
    turns = [dataclasses.replace(turn, operations=table) for turn, table in zip(TURNS, tables, strict=False)]
    return control_pb2.GrantRequest.FromString(writer.request(turns).SerializeToString())


def test_grants_carry_each_table_once_and_again_after_another() -> None:
    """A table comes with the first turn that uses it; turns after it only name it."""
    writer = codecs.GrantWriter("run")
    sent = [grant(writer, *tables) for tables in ((FIRST, FIRST), (FIRST,), (FIRST, SECOND), (SECOND,), (FIRST,))]
    digests = [[table.digest for table in request.tables] for request in sent]
    assert digests == [[FIRST.digest], [], [SECOND.digest], [], [FIRST.digest]]
    reader = codecs.GrantReader(COURSE)
    found = [[turn.operations for turn in reader.turns(request)] for request in sent]
    assert found == [[FIRST, FIRST], [FIRST], [FIRST, SECOND], [SECOND], [FIRST]]


def test_grants_turns_come_back_whole() -> None:
    """Everything else of a turn, and score turns that have no table yet."""
    turns = [SCORE, dataclasses.replace(TURNS[1], operations=FIRST, unfreeze_at=(4,))]
    request = codecs.GrantWriter("run", 3).request(turns, keep_from_step=7)
    assert (request.run_id, request.placement_number, request.keep_from_step) == ("run", 3, 7)
    assert codecs.GrantReader(COURSE).turns(request) == tuple(turns)


def test_grants_that_come_twice_and_late_are_read() -> None:
    """A grant is repeated as it is, perhaps after the one that followed it; the next one still finds its table."""
    writer, reader = codecs.GrantWriter("run"), codecs.GrantReader(COURSE)
    first, second, third = grant(writer, FIRST), grant(writer, SECOND), grant(writer, SECOND)
    for request in (first, first, second, first, third):
        reader.turns(request)
    assert [turn.operations for turn in reader.turns(third)] == [SECOND]


def test_grants_leave_no_pile_of_tables_at_a_node() -> None:
    """A run that chooses often keeps the newest tables only."""
    writer, reader = codecs.GrantWriter("run"), codecs.GrantReader(COURSE)
    sent = [grant(writer, table_of(COURSE, seed)) for seed in range(codecs.KEPT_TABLES + 2)]
    for request in sent:
        reader.turns(request)
    named = control_pb2.GrantRequest(turns=sent[1].turns)
    with pytest.raises(IntegrityError, match="did not come"):
        reader.turns(named)
    assert reader.turns(control_pb2.GrantRequest(turns=sent[2].turns))[0].operations == table_of(COURSE, 2)


def _without_tables(request: control_pb2.GrantRequest) -> None:
    del request.tables[:]


def _other_table(request: control_pb2.GrantRequest) -> None:
    request.tables[0].table_json = grant(codecs.GrantWriter("run"), SECOND).tables[0].table_json


def _of(table: Operations) -> Callable[[control_pb2.GrantRequest], None]:
    def change(request: control_pb2.GrantRequest) -> None:
        request.tables[0].CopyFrom(
            codecs.GrantWriter("x").request([dataclasses.replace(TURNS[0], operations=table)]).tables[0]
        )

    return change


def _text(text: bytes) -> Callable[[control_pb2.GrantRequest], None]:
    def change(request: control_pb2.GrantRequest) -> None:
        request.tables[0].table_json = text

    return change


def _unnamed(request: control_pb2.GrantRequest) -> None:
    request.turns[0].operations = ""


@cases(
    ("change", "message"),
    [
        (_without_tables, "which did not come"),
        (_other_table, f"{FIRST.digest[:12]}' of the grant has the digest {SECOND.digest[:12]}"),
        (_of(Operations(subnets=3)), "3 subnets a block"),
        (
            _of(table_of(changed(make_plan([("a", 0, 3)], ["a"], num_blocks=3), choice=make_choice()).course, 1)),
            "it has",
        ),
        (_text(b"\xff"), "can't be used"),
        (_text(b"[]"), "can't be used"),
        (_text(b"{}"), "can't be used"),
        (_text(b'{"subnets": 2, "rows": [[2, 8, "!"]], "batches": [["a", 0, 0]]}'), "not readable"),
        (_text(b'{"subnets": 2, "batches": [], "more": 1}'), "unknown key"),
        (_unnamed, "trains without a table of operations"),
    ],
)
def test_grants_with_a_table_that_is_wrong_are_refused(
    change: Callable[[control_pb2.GrantRequest], None], message: str
) -> None:
    """No table is trusted: its digest, its course, and that it came."""
    request = grant(codecs.GrantWriter("run"), FIRST)
    change(request)
    with pytest.raises(IntegrityError, match=message):
        codecs.GrantReader(COURSE).turns(request)


def test_grants_with_a_table_for_a_run_that_chooses_none_are_refused() -> None:
    """The plan of such a run has its table, or none."""
    plain = changed(make_plan([("a", 0, 4)], ["a", "b"], num_steps=40)).course
    with pytest.raises(IntegrityError, match="chooses none"):
        codecs.GrantReader(plain).turns(grant(codecs.GrantWriter("run"), FIRST))
    assert codecs.GrantReader(plain).turns(codecs.GrantWriter("run").request(TURNS)) == tuple(TURNS)


_COUNTS = st.integers(0, 2**40)


@settings(max_examples=40)
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
    text = codecs.turn_to_proto(turn).SerializeToString()
    assert codecs.turn_from_proto(control_pb2.TurnMessage.FromString(text)) == turn


TURN = Turn(index=1, kind=StepKind.TRAIN, owner="a", round=0, first_seq=2, num_items=3, first_step=2, first_batch=0)


@cases(
    "changes",
    [
        {"kind": "tarin"},
        {"kind": ""},
        {"owner": ""},
        {"num_items": 0},
        {"num_items": -1},
        {"index": -1},
        {"first_seq": -2},
        *({"unfreeze_at": steps} for steps in ((0,), (-3, 2), (4, 4), (8, 4))),
    ],
)
def test_codec_turn_that_is_none_is_refused(changes: dict[str, Any]) -> None:
    """An unknown kind, a missing owner, an impossible number, or decisions that are not strictly increasing."""
    values: dict[str, Any] = {"kind": "train", "owner": "a", "num_items": 3, **changes}
    message = control_pb2.TurnMessage(**values)
    with pytest.raises(IntegrityError, match="use one version on all machines"):
        codecs.turn_from_proto(message)


def test_codec_turn_carries_where_its_items_enter_and_are_kept() -> None:
    """One passage for each item; of some items only they are refused."""
    turn = dataclasses.replace(TURN, passages=(Passage(enters=3), Passage(), Passage(keeps=2)))
    message = codecs.turn_to_proto(turn)
    assert codecs.turn_from_proto(control_pb2.TurnMessage.FromString(message.SerializeToString())) == turn
    for field in (message.enters, message.keeps):
        field.append(0)
        with pytest.raises(IntegrityError, match="but has 3; use one version on all machines"):
            codecs.turn_from_proto(message)


@cases("names", [("",), ("loss", "loss")])
def test_codec_numbers_without_distinct_names_are_refused(names: tuple[str, ...]) -> None:
    """A figure without a name, or twice, means that something is wrong."""
    with pytest.raises(IntegrityError, match="distinct names"):
        codecs.numbers_from_proto(codecs.numbers_to_proto((name, 1.0) for name in names))


def check(kind: str, counts: int, others: int = 1) -> None:
    """Check a report of one item with so many counts of classes and other figures."""
    names = [name_of(index // 1000, index % 1000) for index in range(counts)] + [f"f{i}" for i in range(others)]
    values = [control_pb2.Number(name=name, value=1.0) for name in names]
    step = control_pb2.StepReport(seq=1, step=0, kind=kind, values=values)
    codecs.check_report(control_pb2.ReportRequest(node="a", number=1, steps=[step]), last=0, nodes=("a",), end_seq=9)


def test_report_may_count_classes_in_an_evaluation_only() -> None:
    """As many as a table has, beside the usual figures."""
    check("evaluate", MAX_CLASSES**2, others=64)
    with pytest.raises(IntegrityError, match="node a reports 1 counts of classes for item 1 of kind 'train'"):
        check("train", 1)
    with pytest.raises(IntegrityError, match="10301 counts of classes"):
        check("evaluate", MAX_CLASSES * (MAX_CLASSES + 3) + 1)
    with pytest.raises(IntegrityError, match="figures of item 1"):
        check("evaluate", 0, others=65)


@cases(
    ("field", "item", "told"),
    [
        ("notes", "", "1,001 sentences at once"),
        ("turns_done", 7, "the end of 1,001 turns"),
        ("steps", control_pb2.StepReport(kind="train"), "1,001 items at once, 500 are granted"),
    ],
)
def test_report_has_as_many_entries_as_a_run_may_have(field: str, item: object, told: str) -> None:
    """A sentence is a line at the user, and the coordinator looks at each turn and item."""
    for count in (1000, 1001):
        given: dict[str, Any] = {field: [item] * count}
        refused = pytest.raises(IntegrityError, match=f"node a reports {told}")
        with refused if count > 1000 else contextlib.nullcontext():
            codecs.check_report(
                control_pb2.ReportRequest(node="a", number=1, **given), last=0, nodes=("a",), end_seq=500
            )


# ---- scores as bytes ---------------------------------------------------------------------------------

SCORED = changed(make_plan([("a", 0, 3), ("b", 3, 4)], ["a", "b"], microbatches=3), choice=make_choice(subnets=3))
SCORES = DrawnTables(SCORED).scores(SCORED, "a", next(turn_sequence(SCORED.course)))


def test_scores_codec_scores_come_back() -> None:
    """Whatever their order; one message for each batch and block, and few bytes beside the numbers."""
    entries = list(SCORES)
    random.Random(1).shuffle(entries)
    messages = list(codecs.scores_to_proto(5, entries))
    assert {message.turn for message in messages} == {5} and len(messages) == 3 * 3
    again = [control_pb2.SubnetScores.FromString(message.SerializeToString()) for message in messages]
    found = [entry for message in again for entry in codecs.scores_from_proto(message)]
    assert sorted(found) == sorted(SCORES)
    assert sum(message.ByteSize() for message in messages) < len(SCORES) * 2 * 3 * 8 * 1.3


@given(values=st.lists(st.floats(), min_size=1, max_size=12))
def test_scores_codec_keeps_every_bit(values: list[float]) -> None:
    """Any float, as it is."""
    entry = BlockScores("a", 1, 0, 2, (tuple(values),))
    (message,) = codecs.scores_to_proto(0, [entry])
    (found,) = codecs.scores_from_proto(message)
    assert struct.pack(f"{len(values)}d", *found.values[0]) == struct.pack(f"{len(values)}d", *values)


@cases(
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
        list(codecs.scores_to_proto(0, entries))


@cases(
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
    message = next(codecs.scores_to_proto(0, SCORES))
    for name, value in changes.items():
        setattr(message, name, value)
    with pytest.raises(IntegrityError, match="use one version on all machines"):
        codecs.scores_from_proto(message)
