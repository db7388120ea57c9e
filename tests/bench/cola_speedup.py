"""Part ``speedup`` of ``make bench-cola``: a weak board with an idle strong one, which helps it or does not.

The boards are those of ``tests.bench.cola_boards``; every link has 1 Gbit/s. Each case is carried out without help and
with it, in turns. In the first two the weights are the same both ways; the others are worth a look, and have no bound.
The figure is of the larger batch: the weights that come back are as many for a small one, and there is less to save.

======================= ===================================================================== =======
offload_step_speedup    median step of a run without help over one with help; median of pairs >= 1.1
small_batch_speedup     the same with 4 rows a step                                           -
======================= ===================================================================== =======

With an interval of 4 the helper adds up gradients where the run without help updates at each step: as many steps, not
as many updates.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, Final

from ringtune.schedule.offload import Manner
from tests.bench.cola_boards import CORES, Boards, Case, on_boards

LEAST: Final = 1.1
MAIN: Final = Case(32, 16, steps=3)
SMALL: Final = Case(4, 2)
PAIRS: Final = {
    MAIN: 2,
    SMALL: 2,
    Case(16, 8, steps=4): 1,
    Case(4, 2, manner=Manner(pairs="bfloat16")): 1,
    Case(4, 2, manner=Manner(overlap=True)): 1,
    Case(4, 2, steps=9, manner=Manner(interval=4)): 1,
}
"""How often each case is carried out both ways."""

Figures = dict[str, Any]


def measure(folder: Path) -> Figures:
    """Carry out every case in turns, without and with help."""
    with on_boards(folder) as boards:
        rows = {case: [_pair(boards, case) for _ in range(count)] for case, count in PAIRS.items()}
    speedups = {case: [pair["speedup"] for pair in pairs] for case, pairs in rows.items()}
    return {
        "cores": CORES,
        "cases": {case.name: {"microbatches": case.microbatches, "pairs": pairs} for case, pairs in rows.items()},
        "figures": {
            "offload_step_speedup": statistics.median(speedups[MAIN]),
            "least_speedup": min(speedups[MAIN]),
            "most_speedup": max(speedups[MAIN]),
            "small_batch_speedup": statistics.median(speedups[SMALL]),
        },
    }


def _pair(boards: Boards, case: Case) -> dict[str, float]:
    alone_s, helped_s = (boards.step_s(case, is_helped=is_helped) for is_helped in (False, True))
    print(f"{case.name}: {alone_s:.3f} s alone, {helped_s:.3f} s helped", flush=True)  # noqa: T201
    return {"alone_s": alone_s, "helped_s": helped_s, "speedup": alone_s / helped_s}


def missed(found: Figures) -> list[str]:
    """What misses its bound."""
    speedup = found["figures"]["offload_step_speedup"]
    return [f"offload_step_speedup is {speedup:.2f}, it has to be at least {LEAST}"] if speedup < LEAST else []
