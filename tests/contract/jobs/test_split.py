"""Splits of one file's rows: complete, disjoint, and the same on every machine."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtune.errors import DataError, JobError
from ringtune.jobs.split import even_share, hold_out, split_alpha, split_rows

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


@pytest.mark.parametrize(("split", "alpha"), [("iid", None), ("dirichlet:0.3", 0.3), ("dirichlet:2", 2.0)])
def test_split_alpha_reads_the_concentration(split: str, alpha: float | None) -> None:
    """Two rules of splitting are known."""
    assert split_alpha(split) == alpha


@pytest.mark.parametrize(("num_rows", "num_owners"), [(10, 4), (3, 5), (7, 1), (0, 2)])
def test_even_shares_cover_all_rows_in_order_and_differ_by_one(num_rows: int, num_owners: int) -> None:
    """Ten rows are shared by four as 2, 3, 2 and 3; of three rows two of five owners get none."""
    shares = [even_share(num_rows, num_owners=num_owners, share=index) for index in range(num_owners)]
    assert [row for share in shares for row in share] == list(range(num_rows))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    if (num_rows, num_owners) == (10, 4):
        assert [len(share) for share in shares] == [2, 3, 2, 3]


@given(num_rows=st.integers(2, 300), share=st.floats(1e-6, 0.9), seed=SEEDS)
def test_split_holds_out_a_share_and_loses_no_row(num_rows: int, share: float, seed: int) -> None:
    """Each row is either trained on or held out; there is one of each at least, and the share is met to a row."""
    kept, held_out = hold_out(num_rows, share=share, seed=seed)
    assert sorted((*kept, *held_out)) == list(range(num_rows))
    assert kept and held_out and (list(kept), list(held_out)) == (sorted(kept), sorted(held_out))
    assert abs(len(held_out) - num_rows * share) <= 1


def test_split_holds_nothing_out_of_a_share_of_nothing() -> None:
    """Without the key all rows are trained on, in their order."""
    assert hold_out(5, share=0.0, seed=1) == ((0, 1, 2, 3, 4), ())


def test_split_draws_held_out_rows_by_the_seed() -> None:
    """Another seed holds other rows out, the same seed the same."""
    first, again, other = (hold_out(100, share=0.2, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


def test_split_refuses_to_hold_out_of_one_row() -> None:
    """The remedy is in the message."""
    with pytest.raises(DataError, match=r"rows = 1; give more rows, or set data\.held_out = 0"):
        hold_out(1, share=0.5, seed=0)
