"""A table as text: batches that do alike are written once, read strictly, and share their rows in memory."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ringtune.errors import PlanError
from ringtune.schedule.operations.packing import pack, packed_length
from ringtune.schedule.operations.table import BatchOperations, Operations

ROW, OTHER = "1131" * 18, "1211" * 18


def table(*rows: tuple[str, ...]) -> Operations:
    """A table of one batch for each entry."""
    return Operations(batches=tuple(BatchOperations(owner="a", batch_id=at, rows=each) for at, each in enumerate(rows)))


def text_of(operations: Operations) -> str:
    """As it travels."""
    return json.dumps(operations.to_json(), separators=(",", ":"))


def test_batches_that_do_alike_are_written_once() -> None:
    """A table of pruned subnets has the same rows for all batches: nine thousand characters, not fifty-eight."""
    pruned = table(*[(ROW,) * 4] * 600)
    assert len(text_of(pruned)) < 9_000
    again = Operations.from_json(json.loads(text_of(pruned)))
    assert again == pruned
    assert len({id(row) for batch in again.batches for row in batch.rows}) == 1


def test_rows_stand_in_the_order_of_first_use() -> None:
    """Equal tables are equal text, and have one digest."""
    mixed = table((OTHER, ROW), (ROW, ROW), (OTHER, ROW))
    assert [at for _, _, at in mixed.to_json()["batches"]] == [0, 1, 0]
    again = Operations.from_json(json.loads(text_of(mixed)))
    assert (again, text_of(again), again.digest) == (mixed, text_of(mixed), mixed.digest)
    assert len({id(row) for batch in again.batches for row in batch.rows}) == 2


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("batches", [["a", 0, 1], ["a", 1, 0]], "in the order in which batches use them"),
        ("batches", [["a", 0, 0]], "in the order in which batches use them"),
        ("batches", [["a", 0, 0], ["a", 1, 2]], r"batches\[1\] is not \[owner, batch id, place in rows\], of 2"),
        ("batches", [["a", 0, -1]], r"batches\[0\] is not"),
        ("batches", [["a", 0, 4, 72, "text"]], r"batches\[0\] is not"),
        ("rows", [[2, 72]], r"rows\[0\] is not"),
        ("rows", None, "rows has to be a list"),
    ],
)
def test_rows_that_no_table_writes_are_refused(name: str, value: Any, message: str) -> None:
    """Rows that none uses, another order, a place that is not there, and the form of older versions."""
    spoiled = table((ROW, ROW), (ROW, OTHER)).to_json()
    spoiled[name] = value
    with pytest.raises(PlanError, match=message):
        Operations.from_json(spoiled)


def test_rows_that_stand_twice_are_refused() -> None:
    """One table has one text."""
    spoiled = table((ROW, ROW), (ROW, OTHER)).to_json()
    spoiled["rows"][1] = spoiled["rows"][0]
    with pytest.raises(PlanError, match="distinct"):
        Operations.from_json(spoiled)


def test_true_is_no_number_of_a_table() -> None:
    """JSON's ``true`` is no batch, no place in the rows, and no number of micro-batches."""
    table = Operations(batches=(BatchOperations(owner="a", batch_id=1, rows=("1",)),))
    assert Operations.from_json(table.to_json()) == table
    for change in (["a", True, 0], ["a", 1, False]):
        with pytest.raises(PlanError, match=r"is not \[owner, batch id, place in rows\]"):
            Operations.from_json({**table.to_json(), "batches": [change]})
    packed = table.to_json()["rows"][0][2]
    with pytest.raises(PlanError, match="codes of each, packed codes"):
        Operations.from_json({**table.to_json(), "rows": [[True, 1, packed]]})


@pytest.mark.parametrize("count", [1, 5, 6, 15, 16, 72, 360])
def test_length_of_packed_codes_is_known_before_them(count: int) -> None:
    """As many characters as are written."""
    assert packed_length(count) == len(pack("1" * count))
