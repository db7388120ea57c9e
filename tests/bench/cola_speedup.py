"""Part ``speedup`` of ``make bench-cola``: a weak board with an idle strong one, which helps it or does not.

The boards are those of ``tests.bench.cola_boards``; every link has 1 Gbit/s. A run is carried out without help and with
it, in turns; the weights are the same. The batch is a large one: the weights that come back are as many for a small
one, where there is less to save (part ``cases``).

======================= ===================================================================== =======
offload_step_speedup    median step of a run without help over one with help; median of pairs >= 1.1
======================= ===================================================================== =======
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, Final

from tests.bench.cola_boards import CORES, Case, on_boards

LEAST: Final = 1.1
CASE: Final = Case(32, 16, steps=2)
"""A step takes 20 s, and times of steps are within some percent, so that one is counted."""

PAIRS: Final = 2

Figures = dict[str, Any]


def measure(folder: Path) -> Figures:
    """Run in turns, without and with help."""
    with on_boards(folder) as boards:
        pairs = [boards.pair(CASE) for _ in range(PAIRS)]
    speedups = [pair["speedup"] for pair in pairs]
    return {
        "cores": CORES,
        "case": CASE.name,
        "microbatches": CASE.microbatches,
        "pairs": pairs,
        "figures": {
            "offload_step_speedup": statistics.median(speedups),
            "least_speedup": min(speedups),
            "most_speedup": max(speedups),
        },
    }


def missed(found: Figures) -> list[str]:
    """What misses its bound."""
    speedup = found["figures"]["offload_step_speedup"]
    return [f"offload_step_speedup is {speedup:.2f}, it has to be at least {LEAST}"] if speedup < LEAST else []
