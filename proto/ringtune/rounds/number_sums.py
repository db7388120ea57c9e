"""Sum up numbers and what was predicted for them, and compute correlations from the sums of all owners.

An owner adds its rows up over a whole evaluation and sends only the sums. Pearson's correlation and the share of the
variance that is explained follow from them over all rows of all owners. Ranks do not: an owner computes Spearman's
correlation, which is told where this owner has all rows.

Sums of squares lose the digits that a large mean takes: with a mean a thousand times the spread, six of sixteen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

_ROWS: Final = "numbers"
_OWNERS: Final = "ranked_owners"
_SPEARMAN: Final = "spearman_sum"
_TRUE, _TRUE_SQUARES = "true_sum", "true_squares"
_SAID, _SAID_SQUARES = "predicted_sum", "predicted_squares"
_PRODUCTS: Final = "products_sum"
SIGNED: Final = (_TRUE, _TRUE_SQUARES, _SAID, _SAID_SQUARES, _PRODUCTS, _SPEARMAN)
"""Names of sums that are no counts: they may be below 0, or beyond what a number holds exactly."""

_NOTHING: Final = 1e-12
"""A variance below this share of the mean square is rounding."""


def number_sums(true: Sequence[float], predicted: Sequence[float]) -> tuple[tuple[str, float], ...]:
    """Sum an owner's rows up; where a number is not finite, there are no sums.

    Args:
        true: the numbers of the rows.
        predicted: what was predicted for them.
    """
    if not all(map(math.isfinite, predicted)):
        return ()
    found = {
        _ROWS: float(len(true)),
        _TRUE: math.fsum(true),
        _TRUE_SQUARES: math.fsum(value * value for value in true),
        _SAID: math.fsum(predicted),
        _SAID_SQUARES: math.fsum(value * value for value in predicted),
        _PRODUCTS: math.fsum(first * second for first, second in zip(true, predicted, strict=True)),
        _OWNERS: 1.0,
    }
    rho = spearman(true, predicted)
    return tuple((found | ({} if rho is None else {_SPEARMAN: rho})).items())


def number_figures(values: Mapping[str, float]) -> dict[str, Any]:
    """Compute correlations from the sums of all owners.

    Args:
        values: figures of an evaluation by name.

    Returns:
        ``pearson`` and ``r2``, None where all numbers are the same, and the ``counted_rows`` that they are over;
        ``spearman`` where one owner has all rows that are evaluated. Nothing where nobody sent sums.
    """
    count = values.get(_ROWS, 0.0)
    if not count:
        return {}
    true, said = values[_TRUE] / count, values[_SAID] / count
    true_variance = _variance(values[_TRUE_SQUARES] / count, true)
    said_variance = _variance(values[_SAID_SQUARES] / count, said)
    covariance = values[_PRODUCTS] / count - true * said
    error = (values[_TRUE_SQUARES] - 2 * values[_PRODUCTS] + values[_SAID_SQUARES]) / count
    both = math.sqrt(true_variance) * math.sqrt(said_variance)
    found: dict[str, Any] = {
        "pearson": min(1.0, max(-1.0, covariance / both)) if both else None,
        "r2": 1 - max(0.0, error) / true_variance if true_variance else None,
        "counted_rows": round(count),
    }
    if values.get(_OWNERS) == 1 and count == values.get("count") and _SPEARMAN in values:
        found["spearman"] = values[_SPEARMAN]
    return found


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Correlate the ranks of two rows of numbers; equal numbers share the mean of their ranks. None without spread.

    Example: 1, 2, 3 and 10, 30, 20 are 0.5.
    """
    ranks = [_centred(_ranks(values)) for values in (first, second)]
    both = math.prod(math.sqrt(math.fsum(rank * rank for rank in centred)) for centred in ranks)
    return math.fsum(a * b for a, b in zip(*ranks, strict=True)) / both if both else None


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    first = 0
    while first < len(order):
        last = first
        while last + 1 < len(order) and values[order[last + 1]] == values[order[first]]:
            last += 1
        for place in order[first : last + 1]:
            ranks[place] = (first + last) / 2
        first = last + 1
    return ranks


def _centred(values: Sequence[float]) -> list[float]:
    mean = math.fsum(values) / max(1, len(values))
    return [value - mean for value in values]


def _variance(mean_square: float, mean: float) -> float:
    found = mean_square - mean * mean
    return found if found > _NOTHING * mean_square else 0.0
