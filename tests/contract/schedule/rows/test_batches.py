"""Batches: complete, stable, and the same on every machine."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtune.errors import DataError
from ringtune.schedule.rows.batches import BatchStream, eval_rows

SEEDS = st.integers(0, 2**31)
STREAM = {"num_rows": st.integers(1, 60), "batch_size": st.integers(1, 20), "seed": SEEDS}


@given(**STREAM)
def test_batches_of_a_pass_have_every_row(num_rows: int, batch_size: int, seed: int) -> None:
    """All batches are full; only as many rows repeat as the last batch lacks."""
    stream = BatchStream(num_rows, batch_size, seed, "a")
    one_pass = [stream.rows(index) for index in range(stream.num_batches)]
    size = min(batch_size, num_rows)
    assert {len(batch) for batch in one_pass} == {size}
    assert all(len(set(batch)) == size for batch in one_pass), "no batch has a row twice"
    counts = Counter(row for batch in one_pass for row in batch)
    assert set(counts) == set(range(num_rows))
    assert counts.total() == stream.num_batches * size
    assert max(counts.values()) <= 2


@given(**STREAM, pass_index=st.integers(0, 5))
def test_batches_keep_their_rows_and_id_for_the_whole_run(
    num_rows: int, batch_size: int, seed: int, pass_index: int
) -> None:
    """What is keyed by (owner, batch id) stays true: only the order changes from pass to pass."""
    stream = BatchStream(num_rows, batch_size, seed, "a")
    first = {stream.batch_id(index): stream.rows(index) for index in range(stream.num_batches)}
    start = pass_index * stream.num_batches
    later = {stream.batch_id(index): stream.rows(index) for index in range(start, start + stream.num_batches)}
    assert later == first
    assert sorted(first) == list(range(stream.num_batches))


def test_batches_come_in_another_order_in_each_pass() -> None:
    """Twenty batches: two passes in the same order would be a bug."""
    stream = BatchStream(100, 5, 0, "a")
    orders = [[stream.batch_id(pass_index * 20 + index) for index in range(20)] for pass_index in range(4)]
    assert len({tuple(order) for order in orders}) == 4


def test_batches_can_be_asked_in_any_order() -> None:
    """A stream has no hidden state: a node may look ahead or back."""
    stream = BatchStream(50, 4, 7, "a")
    forward = [stream.rows(index) for index in range(40)]
    assert [BatchStream(50, 4, 7, "a").rows(index) for index in reversed(range(40))] == forward[::-1]


def test_batches_differ_by_owner_and_seed() -> None:
    """Two owners with equal row counts do not see the same pattern."""
    rows = {tuple(BatchStream(50, 8, seed, owner).rows(0)) for seed in (0, 1) for owner in ("a", "b")}
    assert len(rows) == 4


def test_batches_are_these_for_ever() -> None:
    """Golden values: resuming and comparing runs depend on them."""
    stream = BatchStream(7, 3, 0, "node-0")
    assert [(stream.batch_id(index), stream.rows(index)) for index in range(6)] == [
        (0, (0, 4, 1)),
        (2, (5, 0, 4)),
        (1, (3, 6, 2)),
        (1, (3, 6, 2)),
        (2, (5, 0, 4)),
        (0, (0, 4, 1)),
    ]


def test_batches_of_fewer_rows_than_a_batch_have_each_row_once() -> None:
    """Two rows and batches of five: every batch has both, and neither twice."""
    stream = BatchStream(2, 5, 0, "a")
    assert stream.num_batches == 1
    assert [sorted(stream.rows(index)) for index in range(4)] == [[0, 1]] * 4


def test_batches_need_rows_and_a_size() -> None:
    """An owner without data is none."""
    with pytest.raises(DataError, match="owner a has no rows"):
        BatchStream(0, 4, 0, "a")
    with pytest.raises(DataError, match="batch_size is 0"):
        BatchStream(4, 0, 0, "a")


@given(num_rows=st.integers(0, 100), batch_size=st.integers(1, 30))
def test_eval_rows_pass_every_row_once_in_order(num_rows: int, batch_size: int) -> None:
    """The last batch may be short; none is empty."""
    batches = [eval_rows(num_rows, batch_size, index) for index in range(-(-num_rows // batch_size))]
    assert [row for batch in batches for row in batch] == list(range(num_rows))
    assert all(batches)
