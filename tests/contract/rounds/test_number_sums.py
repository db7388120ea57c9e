"""Correlations over all owners from sums that they may send; ranks only where one owner has all rows."""

from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest

from ringtune.rounds.number_sums import number_figures, number_sums, spearman


def rows_of(seed: int, count: int) -> tuple[list[float], list[float]]:
    """Numbers and predictions that go with them, more or less."""
    rng = random.Random(seed)
    true = [rng.gauss(0.3, 1.0) for _ in range(count)]
    return true, [0.7 * value + rng.gauss(-0.1, 0.5) for value in true]


def test_number_figures_of_several_owners_are_those_of_all_rows() -> None:
    """Pearson and the explained share equal numpy's over the rows together; ranks of two owners are none of all."""
    owners = [rows_of(seed, count) for seed, count in ((1, 10), (2, 57))]
    sums = Counter[str]()
    for true, said in owners:
        sums.update(dict(number_sums(true, said)))
    all_true, all_said = (np.array([value for owner in owners for value in owner[part]]) for part in (0, 1))
    found = number_figures({**sums, "count": 67.0})
    assert found["pearson"] == pytest.approx(np.corrcoef(all_true, all_said)[0, 1], rel=1e-12)
    wanted = 1 - ((all_true - all_said) ** 2).sum() / ((all_true - all_true.mean()) ** 2).sum()
    assert found["r2"] == pytest.approx(wanted, rel=1e-12)
    assert found["counted_rows"] == 67 and "spearman" not in found


def test_spearman_is_told_where_one_owner_has_all_rows() -> None:
    """With rows of a second one, who is too small to send sums, it is not."""
    true, said = rows_of(3, 20)
    sums = dict(number_sums(true, said))
    ranks = np.argsort(np.argsort(np.array([true, said]), axis=1), axis=1)
    assert number_figures({**sums, "count": 20.0})["spearman"] == pytest.approx(
        np.corrcoef(ranks[0], ranks[1])[0, 1], rel=1e-12
    )
    assert "spearman" not in number_figures({**sums, "count": 23.0})


def test_spearman_shares_the_ranks_of_equal_numbers() -> None:
    """1, 2, 2, 3 have the ranks 1, 2.5, 2.5, 4."""
    assert spearman([1, 2, 3], [10, 30, 20]) == pytest.approx(0.5)
    ranks = np.array([[1, 2.5, 2.5, 4], [1, 2, 3, 4]])
    assert spearman([1, 2, 2, 3], [0, 1, 5, 9]) == pytest.approx(np.corrcoef(ranks)[0, 1])
    assert spearman([1, 1], [1, 2]) is None


def test_number_sums_keep_what_is_no_number() -> None:
    """A run that diverged has nothing to correlate."""
    true, said = rows_of(4, 10)
    assert number_sums(true, [*said[1:], math.nan]) == ()
    assert number_figures({"count": 9.0, "absolute_sum": 1.0}) == {}


def test_number_figures_without_spread_are_none() -> None:
    """All numbers, or all predictions, may be the same; rounding is no variance."""
    true, said = rows_of(5, 12)
    same = number_figures({**dict(number_sums([0.1] * 12, said)), "count": 12.0})
    assert (same["pearson"], same["r2"]) == (None, None) and "spearman" not in same
    flat = number_figures({**dict(number_sums(true, [0.3] * 12)), "count": 12.0})
    assert flat["pearson"] is None and flat["r2"] <= 0
    perfect = number_figures({**dict(number_sums(true, true)), "count": 12.0})
    assert perfect["pearson"] == pytest.approx(1.0) and perfect["r2"] == pytest.approx(1.0)
