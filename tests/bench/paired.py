"""Ratios of paired durations with an interval that says how far noise may have moved them."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

_DRAWS = 2000
_SHARE = 0.95
_LEAST_PAIRS = 6
"""Fewer say nothing of the noise."""


def ratio_figures(pairs: Sequence[tuple[Sequence[float], Sequence[float]]], *, bound: float) -> dict[str, object]:
    """Judge what something costs.

    Args:
        pairs: durations with it, and of the same things without it; a pair of lists is what was measured together, and
            of it everything is drawn or nothing.
        bound: the largest ratio that is asked for.

    Returns:
        The median ratio, its 95 % interval by bootstrap over the pairs, and whether that says that the bound is kept
        ("shown"), that it is not ("missed"), or neither ("open").
    """
    groups = [[with_s / without_s for with_s, without_s in zip(*pair, strict=True)] for pair in pairs]
    ratios = [ratio for group in groups for ratio in group]
    rng = random.Random(0)
    drawn = sorted(
        statistics.median([ratio for group in rng.choices(groups, k=len(groups)) for ratio in group])
        for _ in range(_DRAWS)
    )
    cut = round(_DRAWS * (1 - _SHARE) / 2)
    low, high = drawn[cut], drawn[-cut - 1]
    verdict = "shown" if high <= bound else "missed" if low > bound else "open"
    return {
        "ratio": round(statistics.median(ratios), 4),
        "ratio_95": [round(low, 4), round(high, 4)],
        "ratios": len(ratios),
        "pairs": len(groups),
        "bound": bound,
        "verdict": verdict if len(groups) >= _LEAST_PAIRS else "open",
    }
