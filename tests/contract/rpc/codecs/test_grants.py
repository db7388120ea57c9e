"""Grants with operation tables: each node gets each table once, and trusts none that does not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from ringtune.errors import IntegrityError
from ringtune.rpc.codecs.grants import KEPT_TABLES, GrantReader, GrantWriter
from ringtune.schedule.operations.table import Operations
from ringtune.schedule.turns.turns import StepKind, Turn, turn_sequence
from ringtune.v1 import control_pb2
from tests.support.choosing import make_choice, table_of
from tests.support.plans import changed, make_plan

COURSE = changed(make_plan([("a", 0, 4)], ["a", "b"], num_steps=40), choice=make_choice()).course
FIRST, SECOND = (table_of(COURSE, seed) for seed in (1, 2))
TURNS = [turn for turn in turn_sequence(COURSE) if turn.kind is StepKind.TRAIN]
SCORE = next(turn_sequence(COURSE))


def grant(writer: GrantWriter, *tables: Operations) -> control_pb2.GrantRequest:
    """A grant of train turns with these tables, through bytes."""
    turns = [dataclasses.replace(turn, operations=table) for turn, table in zip(TURNS, tables, strict=False)]
    return control_pb2.GrantRequest.FromString(writer.request(turns).SerializeToString())


def test_grants_carry_each_table_once_and_again_after_another() -> None:
    """A table comes with the first turn that uses it; turns after it only name it."""
    writer = GrantWriter("run")
    sent = [grant(writer, *tables) for tables in ((FIRST, FIRST), (FIRST,), (FIRST, SECOND), (SECOND,), (FIRST,))]
    digests = [[table.digest for table in request.tables] for request in sent]
    assert digests == [[FIRST.digest], [], [SECOND.digest], [], [FIRST.digest]]
    reader = GrantReader(COURSE)
    found = [[turn.operations for turn in reader.turns(request)] for request in sent]
    assert found == [[FIRST, FIRST], [FIRST], [FIRST, SECOND], [SECOND], [FIRST]]


def test_grants_turns_come_back_whole() -> None:
    """Everything else of a turn, and score turns that have no table yet."""
    turns = [SCORE, dataclasses.replace(TURNS[1], operations=FIRST, unfreeze_at=(4,))]
    request = GrantWriter("run", 3).request(turns, keep_from_step=7)
    assert (request.run_id, request.placement_number, request.keep_from_step) == ("run", 3, 7)
    assert GrantReader(COURSE).turns(request) == tuple(turns)


def test_grants_that_come_twice_and_late_are_read() -> None:
    """A grant is repeated as it is, perhaps after the one that followed it; the next one still finds its table."""
    writer, reader = GrantWriter("run"), GrantReader(COURSE)
    first, second, third = grant(writer, FIRST), grant(writer, SECOND), grant(writer, SECOND)
    for request in (first, first, second, first, third):
        reader.turns(request)
    assert [turn.operations for turn in reader.turns(third)] == [SECOND]


def test_grants_leave_no_pile_of_tables_at_a_node() -> None:
    """A run that chooses often keeps the newest tables only."""
    writer, reader = GrantWriter("run"), GrantReader(COURSE)
    sent = [grant(writer, table_of(COURSE, seed)) for seed in range(KEPT_TABLES + 2)]
    for request in sent:
        reader.turns(request)
    named = control_pb2.GrantRequest(turns=sent[1].turns)
    with pytest.raises(IntegrityError, match="did not come"):
        reader.turns(named)
    assert reader.turns(control_pb2.GrantRequest(turns=sent[2].turns))[0].operations == table_of(COURSE, 2)


def _without_tables(request: control_pb2.GrantRequest) -> None:
    del request.tables[:]


def _other_table(request: control_pb2.GrantRequest) -> None:
    request.tables[0].table_json = grant(GrantWriter("run"), SECOND).tables[0].table_json


def _of(table: Operations) -> Callable[[control_pb2.GrantRequest], None]:
    def change(request: control_pb2.GrantRequest) -> None:
        request.tables[0].CopyFrom(GrantWriter("x").request([_turn(table)]).tables[0])

    return change


def _turn(table: Operations) -> Turn:
    return dataclasses.replace(TURNS[0], operations=table)


def _text(text: bytes) -> Callable[[control_pb2.GrantRequest], None]:
    def change(request: control_pb2.GrantRequest) -> None:
        request.tables[0].table_json = text

    return change


def _unnamed(request: control_pb2.GrantRequest) -> None:
    request.turns[0].operations = ""


@pytest.mark.parametrize(
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
    request = grant(GrantWriter("run"), FIRST)
    change(request)
    with pytest.raises(IntegrityError, match=message):
        GrantReader(COURSE).turns(request)


def test_grants_with_a_table_for_a_run_that_chooses_none_are_refused() -> None:
    """The plan of such a run has its table, or none."""
    plain = changed(make_plan([("a", 0, 4)], ["a", "b"], num_steps=40)).course
    with pytest.raises(IntegrityError, match="chooses none"):
        GrantReader(plain).turns(grant(GrantWriter("run"), FIRST))
    assert GrantReader(plain).turns(GrantWriter("run").request(TURNS)) == tuple(TURNS)
