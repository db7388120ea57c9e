"""From which rate of the link on a helper pays, by the simulator: ``python -m tests.bench.offload_rates``.

A weak host with four blocks as wide as BERT's, a helper that computes five times as fast, micro-batches of 4 rows of 64
tokens. Seconds are by multiplications (``tests/support/offloading.py``), not measured; so are the rates that are told.
"""

from __future__ import annotations

import argparse
import json
import sys

from ringtune.schedule.helped import helped
from ringtune.schedule.helping.offload import Manner
from sim.what_ifs.break_even import break_even_bytes_per_s, gained_s
from tests.support.offloading import LINEAR_PARAMS, LOW_RANK_PARAMS, MEGABIT, plan, profile

ADAPTERS = {"linear on query and value": LINEAR_PARAMS, "lora[r=8] on query and value": LOW_RANK_PARAMS}
MANNERS = (
    Manner(),
    Manner(pairs="bfloat16"),
    Manner(pairs="velora"),
    Manner(interval=4),
    Manner(interval=4, pairs="bfloat16"),
    Manner(overlap=True),
)
RATES = (MEGABIT, 10 * MEGABIT, 100 * MEGABIT, 1000 * MEGABIT, 10_000 * MEGABIT)


def main() -> None:
    """Print a line of JSON for each adapter and manner: the break-even rate, and the gain at some rates."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    for name, params in ADAPTERS.items():
        at = profile(params)
        for manner in MANNERS:
            asked = helped(plan(), {"weak": "strong"}, manner)
            even = break_even_bytes_per_s(asked, at)
            line = {
                "adapter": name,
                "interval": manner.interval,
                "pairs": manner.pairs,
                "overlap": manner.overlap,
                "break_even_mb_per_s": None if even is None else round(even / 1e6, 1),
                "gained_s": {f"{rate * 8 / 1e6:g} Mbit/s": round(gained_s(asked, at, rate), 3) for rate in RATES},
            }
            sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
