"""Tests of ``ringtune.schedule.batches``: split, batches, random stream."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtune.errors import DataError, JobError
from ringtune.schedule.batches import (
    BatchStream,
    RandomStream,
    eval_rows,
    even_share,
    hold_out,
    pack_rows,
    split_rows,
)
from tests.support.cases import cases

SEEDS = st.integers(0, 2**31)


@settings(max_examples=60)
@given(lengths=st.lists(st.integers(1, 20), max_size=60), size=st.integers(20, 40))
def test_packed_rows_are_those_of_trying_every_sequence(lengths: list[int], size: int) -> None:
    """Every row once, uncut, in the sequence with the least room for it; only one may be at most half full."""
    waiting: list[list[int]] = []  # the one that was changed last is last
    begun: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        rooms = [size - sum(lengths[other] for other in rows) for rows in waiting]
        fitting = [(room, place) for place, room in enumerate(rooms) if room >= lengths[row]]
        rows = waiting.pop(min(fitting)[1]) if fitting else []
        begun += [] if fitting else [rows]
        rows.append(row)
        waiting.append(rows)
    found = pack_rows(lengths, size)
    assert found == tuple(tuple(sorted(rows)) for rows in begun)
    assert sorted(row for rows in found for row in rows) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in rows) <= size for rows in found)
    assert sum(2 * sum(lengths[row] for row in rows) <= size for rows in found) <= 1


def test_packed_row_that_is_too_long_is_refused() -> None:
    """Nothing is cut in silence."""
    assert pack_rows([3, 6, 2, 5], 8) == ((1, 2), (0, 3))
    with pytest.raises(DataError, match=r"a row has 9 tokens, a sequence has 8; cut the row"):
        pack_rows([3, 9], 8)


@settings(max_examples=40)
@given(num_rows=st.integers(1, 200), num_owners=st.integers(1, 8), seed=SEEDS)
def test_split_iid_shares_are_disjoint_complete_and_even(num_rows: int, num_owners: int, seed: int) -> None:
    """Every row belongs to one owner; sizes differ by one at most."""
    num_owners = min(num_owners, num_rows)
    shares = [split_rows(num_rows, num_owners=num_owners, share=share, seed=seed) for share in range(num_owners)]
    assert sorted(row for share in shares for row in share) == list(range(num_rows))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert all(list(share) == sorted(share) for share in shares)


@settings(max_examples=40)
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


@cases(
    ("num_rows", "num_owners", "share", "message"),
    [
        (10, 2, 2, "share 2 is not in [0, 2)"),
        (10, 2, -1, "share -1 is not in [0, 2)"),
        (1, 2, 0, "1 row can't be shared by 2 owners; give more rows or fewer owners"),
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


@cases(("num_rows", "num_owners"), [(10, 4), (3, 5), (7, 1), (0, 2)])
def test_even_shares_cover_all_rows_in_order_and_differ_by_one(num_rows: int, num_owners: int) -> None:
    """Ten rows are shared by four as 2, 3, 2 and 3; of three rows two of five owners get none."""
    shares = [even_share(num_rows, num_owners=num_owners, share=index) for index in range(num_owners)]
    assert [row for share in shares for row in share] == list(range(num_rows))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    if (num_rows, num_owners) == (10, 4):
        assert [len(share) for share in shares] == [2, 3, 2, 3]


@settings(max_examples=40)
@given(num_rows=st.integers(2, 300), share=st.floats(1e-6, 0.9), seed=SEEDS)
def test_split_holds_out_a_share_and_loses_no_row(num_rows: int, share: float, seed: int) -> None:
    """Each row is either trained on or held out; there is one of each at least, and the share is met to a row."""
    kept, held_out = hold_out(num_rows, share=share, seed=seed)
    assert sorted((*kept, *held_out)) == list(range(num_rows))
    assert kept and held_out and (list(kept), list(held_out)) == (sorted(kept), sorted(held_out))
    assert abs(len(held_out) - num_rows * share) <= 1


def test_split_draws_held_out_rows_by_the_seed() -> None:
    """Another seed holds other rows out, the same seed the same."""
    first, again, other = (hold_out(100, share=0.2, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


def test_split_refuses_to_hold_out_of_one_row() -> None:
    """The remedy is in the message."""
    with pytest.raises(DataError, match=r"rows = 1; give more rows, or set data\.held_out = 0"):
        hold_out(1, share=0.5, seed=0)


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


@given(num_rows=st.integers(0, 100), batch_size=st.integers(1, 30))
def test_eval_rows_pass_every_row_once_in_order(num_rows: int, batch_size: int) -> None:
    """The last batch may be short; none is empty."""
    batches = [eval_rows(num_rows, batch_size, index) for index in range(-(-num_rows // batch_size))]
    assert [row for batch in batches for row in batch] == list(range(num_rows))
    assert all(batches)


def test_random_stream_gives_these_numbers_for_ever() -> None:
    """Golden values: a change here would change every split and every order of batches."""
    stream = RandomStream("golden", 0)
    assert [stream.word() for _ in range(5)] == [
        16544337626191367169,
        13941727583932763925,
        9062622625341836767,
        1620007908681781323,
        12622399254854143111,
    ]
    assert RandomStream("golden", 1).permutation(10) == (6, 4, 8, 1, 0, 5, 9, 7, 3, 2)
    assert [RandomStream("golden", 2).below(10) for _ in range(3)] == [8] * 3


def test_permutations_are_even() -> None:
    """All 24 orders of 4 things occur about equally often (chi-square with 23 degrees, far in the tail: 60)."""
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(4800):
        order = RandomStream("even", seed).permutation(4)
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 60


@given(alpha=st.floats(1e-6, 1e6), size=st.integers(1, 20), seed=st.integers(0, 100))
def test_dirichlet_shares_sum_to_one(alpha: float, size: int, seed: int) -> None:
    """Also for concentrations at which the numbers themselves underflow."""
    shares = RandomStream("dirichlet", seed).dirichlet(alpha, size)
    assert len(shares) == size
    assert math.fsum(shares) == pytest.approx(1)
    assert min(shares) >= 0
