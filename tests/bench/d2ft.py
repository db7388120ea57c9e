"""``python -m tests.bench.d2ft``: what operations cost and save; ``--only PART ...`` does some parts.

Writes ``build/bench/d2ft.json``, exits with 1 if a target is missed; on a quiet machine, the parts on boards as root,
all of it under 15 minutes.

========= ===================================================================================================
part      what is measured
========= ===================================================================================================
compute   one core, 1,024 tokens a micro-batch: a block's step at 3 of 5 and 2 of 4 full, over all full
knapsacks seconds of the solvers, and how even the work of equal boards is
bytes     what all nodes send with tables of whole slices, each of which skips half, over all full
hetero    busy seconds a step of two boards of speed 1 : 2, with counts that the planner chooses
ring      seconds of a step on four boards at 60 % compute over all full, and what was predicted
========= ===================================================================================================
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coordinator.cli.demo_files import demo_cache, prepare
from deploy.testbed.capabilities import MissingCapability
from tests.bench import d2ft_runs, head_groups
from tests.bench import knapsacks as knapsack_solvers
from tests.bench.d2ft_runs import FULL_SIZE, SHORT, TINY, Sizes

OUT = Path("build/bench")
Figures = dict[str, Any]
TARGETS = {
    "compute_ratio_60_seq_bn": 0.66,
    "compute_ratio_60_lora": 0.66,
    "compute_ratio_60_full": 0.70,
    "compute_ratio_50_seq_bn": 0.56,
    "compute_ratio_50_lora": 0.56,
    "compute_ratio_50_full": 0.60,
    **dict.fromkeys(("knapsack_144x5_s", "knapsack_144x5_s_searched", "knapsack_144x5_s_joint"), 0.01),
    **dict.fromkeys(("knapsack_1152x20_s", "knapsack_1152x20_s_searched", "knapsack_1152x20_s_joint"), 0.5),
    "workload_variance": 1e-9,
    "bytes_ratio_slice_tables": 0.52,
    "hetero_busy_spread": 0.10,
    "ring_step_ratio_60": 0.72,
    "ring_step_prediction_error": 0.08,
}
"""The most that each figure may be."""


def compute(folder: Path, model: Path, train: Path, sizes: Sizes) -> Figures:
    """Blocks by head groups, on one core."""
    shape, rounds = (sizes.rows, sizes.tokens), 1 if sizes is TINY else 5
    found = head_groups.compute_ratios(shapes=[shape], rounds=rounds)
    smaller = {} if sizes is TINY else head_groups.compute_ratios(shapes=[(8, 64), (2, 64)], rounds=3)
    return {**worst_ratios(found, shape), "compute_ratios": found | smaller}


def worst_ratios(found: Mapping[str, Mapping[str, float]], shape: tuple[int, int]) -> Figures:
    """For each adapter the ratio of the BERT block that gains least, at one shape (rows, tokens).

    The block of Llama, whose four subnets have padded rows, is reported beside them.
    """
    ending, found = f"{shape[0]}x{shape[1]}", {name: each for name, each in found.items() if name[:5] != "llama"}
    return {
        f"{ratio}_{adapter}": max(each[ratio] for name, each in found.items() if name.endswith(f"_{adapter}_{ending}"))
        for adapter in ("seq_bn", "lora", "full")
        for ratio in ("compute_ratio_60", "compute_ratio_50")
    }


def knapsacks(folder: Path, model: Path, train: Path, sizes: Sizes) -> Figures:
    """The solvers."""
    return {
        **knapsack_solvers.knapsack_seconds(),
        "workload_variance": knapsack_solvers.workload_variance()["two-stage"],
        "workload_variances": knapsack_solvers.workload_variance(),
        "cost_of_decoupling": knapsack_solvers.cost_of_decoupling(),
    }


def sent(folder: Path, model: Path, train: Path, sizes: Sizes) -> Figures:
    """Bytes on loopback of two nodes, and of four; lengths of rows do not matter, so they are short.

    A micro-batch that visits k slices away from its owner travels k + 1 times forward and k times back: half of the
    slices are less than half of the bytes on two nodes, and more than half on four.
    """
    return {
        f"bytes_ratio_slice_tables{name}": d2ft_runs.bytes_ratio(
            folder, model=model, train=train, nodes=nodes, sizes=SHORT
        )
        for name, nodes in (("", 2), ("_4_nodes", 4))
    }


def hetero(folder: Path, model: Path, train: Path, sizes: Sizes) -> Figures:
    """Two unequal boards."""
    return d2ft_runs.hetero_busy_spread(folder, model=model, train=train, sizes=sizes)


def ring(folder: Path, model: Path, train: Path, sizes: Sizes) -> Figures:
    """Four equal boards."""
    return d2ft_runs.ring_step_ratio(folder, model=model, train=train, sizes=sizes)


PARTS: dict[str, Callable[[Path, Path, Path, Sizes], Figures]] = {
    "compute": compute,
    "knapsacks": knapsacks,
    "bytes": sent,
    "hetero": hetero,
    "ring": ring,
}


def misses(figures: Mapping[str, Any]) -> list[str]:
    """Write what is above its target, or was not measured."""
    found = []
    for name, most in TARGETS.items():
        value = figures.get(name)
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            found.append(f"{name}: not measured, target at most {most:g}")
        elif value > most:
            found.append(f"{name}: {value:.4g}, target at most {most:g}")
    return found


def say(text: str) -> None:
    """A line, as soon as it is known."""
    print(text, flush=True)  # noqa: T201


def main() -> int:
    """Measure part after part; write and judge what came out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], choices=list(PARTS), help="these parts; the others are kept")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, which only try it out; nothing is judged")
    options = parser.parse_args()
    workspace, path = prepare(OUT / "d2ft" / "demo", demo_cache()), OUT / "d2ft.json"
    figures: Figures = json.loads(path.read_text(encoding="utf-8")) if path.exists() and options.only else {}
    for name in options.only or PARTS:
        folder = OUT / "d2ft" / name
        folder.mkdir(parents=True, exist_ok=True)
        try:
            found = PARTS[name](
                folder, workspace.model, workspace.job.with_name("train.csv"), TINY if options.tiny else FULL_SIZE
            )
        except MissingCapability as missing:
            say(f"{name}: not measured: {missing}")
            return 77
        figures |= found
        for key, value in found.items():
            say(f"{key}: {value:.4g}" if isinstance(value, float) else f"{key}: {value}")
        if not options.tiny:
            figures["missed"] = misses(figures)
            path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    missed = [] if options.tiny else misses(figures)
    for line in missed:
        say(f"missed: {line}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
