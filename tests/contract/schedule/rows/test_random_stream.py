"""Random numbers that never change: golden values, bounds, and the shape of the distributions."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtune.schedule.rows.random_stream import RandomStream


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


def test_random_stream_keys_are_not_mixed_up() -> None:
    """("a", 1, 2) and ("a", 12) are different purposes."""
    keys: list[tuple[str | int, ...]] = [("a", 1, 2), ("a", 12), ("a1", 2), ("a", "1,2"), ("a", 2, 1), ("a",), ()]
    assert len({RandomStream(*key).word() for key in keys}) == len(keys)


@given(size=st.integers(0, 300), seed=st.integers())
def test_permutation_has_every_number_once(size: int, seed: int) -> None:
    """Any size, any seed."""
    assert sorted(RandomStream("test", seed).permutation(size)) == list(range(size))


@given(bound=st.integers(1, 2**64), seed=st.integers())
def test_below_stays_below(bound: int, seed: int) -> None:
    """Up to the full range of 64 bits."""
    assert 0 <= RandomStream("test", seed).below(bound) < bound


def test_permutations_are_even() -> None:
    """All 24 orders of 4 things occur about equally often (chi-square with 23 degrees, far in the tail: 60)."""
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(4800):
        order = RandomStream("even", seed).permutation(4)
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 60


def test_normal_has_mean_zero_and_width_one() -> None:
    """Moments of 4,000 numbers, within five standard errors."""
    stream = RandomStream("normal")
    numbers = [stream.normal() for _ in range(4000)]
    assert abs(statistics.fmean(numbers)) < 5 / math.sqrt(4000)
    assert abs(statistics.pstdev(numbers) - 1) < 5 / math.sqrt(8000)


@pytest.mark.parametrize("shape", [0.3, 1.0, 4.0])
def test_gamma_has_the_right_mean_and_variance(shape: float) -> None:
    """Mean and variance of a gamma distribution both equal its shape."""
    stream = RandomStream("gamma", str(shape))
    numbers = [math.exp(stream.log_gamma_variate(shape)) for _ in range(4000)]
    assert statistics.fmean(numbers) == pytest.approx(shape, rel=0.15)
    assert statistics.pvariance(numbers) == pytest.approx(shape, rel=0.3)


@given(alpha=st.floats(1e-6, 1e6), size=st.integers(1, 20), seed=st.integers(0, 100))
def test_dirichlet_shares_sum_to_one(alpha: float, size: int, seed: int) -> None:
    """Also for concentrations at which the numbers themselves underflow."""
    shares = RandomStream("dirichlet", seed).dirichlet(alpha, size)
    assert len(shares) == size
    assert math.fsum(shares) == pytest.approx(1)
    assert min(shares) >= 0


def test_dirichlet_is_even_for_large_and_uneven_for_small_alpha() -> None:
    """The concentration says how alike the owners are."""
    largest = {
        alpha: statistics.fmean(max(RandomStream("share", seed).dirichlet(alpha, 4)) for seed in range(200))
        for alpha in (0.01, 1.0, 1000.0)
    }
    assert largest[0.01] > 0.95
    assert 0.4 < largest[1.0] < 0.65
    assert largest[1000.0] < 0.3
