"""Part ``cases`` of ``make bench-cola``: what else a helper is worth, on the boards and links of part ``speedup``.

A small batch, whose weights are the same with help and without; and manners that change the result, beside the same run
without help. With an interval of 4 the helper adds up gradients where the run without help updates at each step:
as many steps, not as many updates.

======================= ===================================================================== =======
small_batch_speedup     median step of a run without help over one with it, 4 rows a step      -
======================= ===================================================================== =======
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, Final

from ringtune.schedule.helping.offload import Manner
from tests.bench.cola_boards import Case, on_boards

SMALL: Final = Case(4, 2)
PAIRS: Final = {
    SMALL: 2,
    Case(4, 2, manner=Manner(pairs="bfloat16")): 1,
    Case(4, 2, manner=Manner(overlap=True)): 1,
    Case(4, 2, steps=9, manner=Manner(interval=4)): 1,
}
"""How often each case is carried out both ways."""

Figures = dict[str, Any]


def measure(folder: Path) -> Figures:
    """Carry out every case in turns, without and with help."""
    with on_boards(folder) as boards:
        rows = {case: [boards.pair(case) for _ in range(count)] for case, count in PAIRS.items()}
    return {
        "cases": {case.name: {"microbatches": case.microbatches, "pairs": pairs} for case, pairs in rows.items()},
        "figures": {"small_batch_speedup": statistics.median(pair["speedup"] for pair in rows[SMALL])},
    }


def missed(found: Figures) -> list[str]:
    """Nothing: these have no bound."""
    return []
