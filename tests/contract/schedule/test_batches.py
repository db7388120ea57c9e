"""Splits and batches: complete, disjoint, stable, and the same on every machine."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtune.errors import DataError, JobError
from ringtune.schedule.batches import BatchStream, eval_rows, split_rows

SEEDS = st.integers(0, 2**31)


@given(num_rows=st.integers(1, 200), num_owners=st.integers(1, 8), seed=SEEDS)
def test_split_iid_shares_are_disjoint_complete_and_even(num_rows: int, num_owners: int, seed: int) -> None:
    """Every row belongs to one owner; sizes differ by one at most."""
    num_owners = min(num_owners, num_rows)
    shares = [split_rows(num_rows, num_owners=num_owners, share=share, seed=seed) for share in range(num_owners)]
    assert sorted(row for share in shares for row in share) == list(range(num_rows))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert all(list(share) == sorted(share) for share in shares)


@given(
    labels=st.lists(st.sampled_from("abc"), min_size=8, max_size=120),
    num_owners=st.integers(1, 8),
    alpha=st.sampled_from([0.001, 0.3, 1, 100]),
    seed=SEEDS,
)
def test_split_dirichlet_shares_are_disjoint_complete_and_not_empty(
    labels: list[str], num_owners: int, alpha: float, seed: int
) -> None:
    """Also where the drawn proportions would leave an owner with nothing."""
    shares = [
        split_rows(
            len(labels), num_owners=num_owners, share=share, seed=seed, split=f"dirichlet:{alpha}", labels=labels
        )
        for share in range(num_owners)
    ]
    assert sorted(row for share in shares for row in share) == list(range(len(labels)))
    assert all(shares)


def test_split_dirichlet_makes_owners_differ_in_classes() -> None:
    """Small concentrations give owners of few classes, large ones owners alike."""
    labels = ["a", "b", "c", "d"] * 100

    def classes(alpha: float) -> list[Counter[str]]:
        rule = f"dirichlet:{alpha}"
        rows = [split_rows(400, num_owners=4, share=share, seed=1, split=rule, labels=labels) for share in range(4)]
        return [Counter(labels[row] for row in share) for share in rows]

    assert all(max(share.values()) / share.total() < 0.35 for share in classes(1000))
    assert max(max(share.values()) / share.total() for share in classes(0.05)) > 0.6


def test_split_depends_on_seed_shares_and_rule_only() -> None:
    """Golden values: a node that reads the same file alone finds its own share."""
    assert split_rows(12, num_owners=3, share=0, seed=0) == (1, 2, 7, 8)
    labels = ["a", "b"] * 6
    rows = split_rows(12, num_owners=3, share=1, seed=0, split="dirichlet:0.5", labels=labels)
    assert rows == (1, 5, 7)
    assert split_rows(12, num_owners=3, share=0, seed=1) != (1, 2, 7, 8)


@pytest.mark.parametrize(
    ("num_rows", "num_owners", "share", "message"),
    [
        (10, 2, 2, "share 2 is not in [0, 2)"),
        (10, 2, -1, "share -1 is not in [0, 2)"),
        (1, 2, 0, "1 rows can't be shared by 2 owners; give more rows or fewer owners"),
        (0, 1, 0, "0 rows can't be shared by 1 owners"),
    ],
)
def test_split_refuses_what_cannot_be_shared(num_rows: int, num_owners: int, share: int, message: str) -> None:
    """Every owner needs a row."""
    with pytest.raises(DataError) as caught:
        split_rows(num_rows, num_owners=num_owners, share=share, seed=0)
    assert message in str(caught.value)


def test_split_dirichlet_needs_a_label_for_each_row() -> None:
    """Without labels the rule has no meaning."""
    for labels in (None, ["a"]):
        with pytest.raises(DataError, match="needs the label of each of the 4 rows"):
            split_rows(4, num_owners=2, share=0, seed=0, split="dirichlet:1", labels=labels)


def test_split_refuses_an_unknown_rule() -> None:
    """The message has both rules."""
    with pytest.raises(JobError, match="it has to be 'iid' or 'dirichlet:ALPHA'"):
        split_rows(4, num_owners=2, share=0, seed=0, split="random")


STREAM = {"num_rows": st.integers(1, 60), "batch_size": st.integers(1, 20), "seed": SEEDS}


@given(**STREAM)
def test_batches_of_an_epoch_have_every_row(num_rows: int, batch_size: int, seed: int) -> None:
    """All batches are full; only as many rows repeat as the last batch lacks."""
    stream = BatchStream(num_rows, batch_size, seed, "a")
    epoch = [stream.rows(index) for index in range(stream.num_batches)]
    assert {len(batch) for batch in epoch} == {batch_size}
    counts = Counter(row for batch in epoch for row in batch)
    assert set(counts) == set(range(num_rows))
    assert counts.total() == stream.num_batches * batch_size
    if batch_size <= num_rows:
        assert max(counts.values()) <= 2


@given(**STREAM, epoch=st.integers(0, 5))
def test_batches_keep_their_rows_and_id_for_the_whole_run(
    num_rows: int, batch_size: int, seed: int, epoch: int
) -> None:
    """What is keyed by (owner, batch id) stays true: only the order changes from epoch to epoch."""
    stream = BatchStream(num_rows, batch_size, seed, "a")
    first = {stream.batch_id(index): stream.rows(index) for index in range(stream.num_batches)}
    start = epoch * stream.num_batches
    later = {stream.batch_id(index): stream.rows(index) for index in range(start, start + stream.num_batches)}
    assert later == first
    assert sorted(first) == list(range(stream.num_batches))


def test_batches_come_in_another_order_in_each_epoch() -> None:
    """Twenty batches: two epochs in the same order would be a bug."""
    stream = BatchStream(100, 5, 0, "a")
    orders = [[stream.batch_id(epoch * 20 + index) for index in range(20)] for epoch in range(4)]
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


def test_batches_of_fewer_rows_than_a_batch_repeat_them() -> None:
    """Two rows in batches of five: each row at least twice."""
    assert Counter(BatchStream(2, 5, 0, "a").rows(3)).most_common()[-1][1] == 2


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
