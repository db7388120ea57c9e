"""``make bench-ring``: what the ring costs over one process, and what it does to accuracy.

Real MiniLM and the demo's sentences, one compute thread a process. Writes ``build/bench/ring.json`` anew:

=========================== ================================================================== ==========
one_node_wall_ratio         a one-node ring over the plain loop in one process: same depths,   <= 1.05
                            batches and micro-batches; after start-up; median of interleaved
                            pairs
one_node_cpu_ratio          the same in processor seconds: steadier where the machine has     reported
                            other work
four_node_cpu_ratio         processor seconds of four nodes over those of one, same steps;     <= 1.15
                            a short run is subtracted from a long one, so building cancels
same_schedule_accuracy_gap  four-node ring and one plain process, same steps                    <= 0.002
all_unfrozen_accuracy_gap   everything trainable from the first step, less RingAda's schedule;  reported
                            same number of steps, mean of three seeds
=========================== ================================================================== ==========
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from coordinator.cli.demo_files import Workspace, demo_cache, prepare
from tests.bench.rings import Figures, RingRun, conclude, machine, missed, run_plain, run_ring, say, write_job

OUT = Path("build/bench")
PAIRS = 5
CPU_REPEATS = 3
SHORT_STEPS, LONG_STEPS = 10, 58
SEEDS = (0, 1, 2)
TARGETS: dict[str, tuple[str, float]] = {
    "one_node_wall_ratio": ("<=", 1.05),
    "four_node_cpu_ratio": ("<=", 1.15),
    "same_schedule_accuracy_gap": ("<=", 0.002),
}


def timing_job(workspace: Workspace, steps: int) -> Path:
    """A job for timings, as a file. One owner and no evaluation: the very same steps on any number of nodes."""
    more = {"data.owners": 1, "unfreeze.every_steps": 10}
    train = workspace.job.with_name("train.csv")
    return write_job(OUT / f"steps-{steps}.toml", model=workspace.model, train=train, steps=steps, more=more)


def measure_cost(workspace: Workspace) -> Figures:
    """One node against one process by the clock, four nodes against one by processor seconds."""
    long, short = timing_job(workspace, LONG_STEPS), timing_job(workspace, SHORT_STEPS)
    ring_s, plain_s, plain_cpu_s = [], [], []
    for pair in range(PAIRS):
        one = run_ring(long, OUT / "one", nodes=1)
        ring_s.append(one.wall_s(SHORT_STEPS, LONG_STEPS - 1))
        plain = run_plain(one.folder, first_step=SHORT_STEPS)
        plain_s.append(plain["wall_s"])
        plain_cpu_s.append(plain["cpu_s"] * (LONG_STEPS - SHORT_STEPS) / (LONG_STEPS - SHORT_STEPS - 1))
        say(f"pair {pair}: ring {ring_s[-1]:.2f} s, plain {plain_s[-1]:.2f} s, ratio {ring_s[-1] / plain_s[-1]:.3f}")
    one_cpu_s, four_cpu_s = [], []
    for repeat in range(CPU_REPEATS):
        one_cpu_s.append(cpu_of_steps(short, long, nodes=1))
        four_cpu_s.append(cpu_of_steps(short, long, nodes=4))
        say(f"repeat {repeat}: one node {one_cpu_s[-1]:.2f} CPU s, four nodes {four_cpu_s[-1]:.2f}")
    wall_ratios = ratios(ring_s, plain_s)
    cpu_ratios = ratios(four_cpu_s, one_cpu_s)
    return {
        "one_node_wall_ratio": statistics.median(wall_ratios),
        "one_node_cpu_ratio": statistics.median(one_cpu_s) / statistics.median(plain_cpu_s),
        "four_node_cpu_ratio": statistics.median(cpu_ratios),
        "samples": {
            "one_node_wall_ratio": wall_ratios,
            "one_node_ring_wall_s": ring_s,
            "plain_wall_s": plain_s,
            "plain_cpu_s": plain_cpu_s,
            "four_node_cpu_ratio": cpu_ratios,
            "one_node_cpu_s": one_cpu_s,
            "four_node_cpu_s": four_cpu_s,
        },
    }


def cpu_of_steps(short: Path, long: Path, *, nodes: int) -> float:
    """Processor seconds of the steps that the long run has and the short one has not."""
    less = run_ring(short, OUT / f"cpu-{nodes}", nodes=nodes).cpu_s
    return run_ring(long, OUT / f"cpu-{nodes}", nodes=nodes).cpu_s - less


def measure_accuracy(workspace: Workspace) -> Figures:
    """The ring against one process with the same steps, and RingAda's schedule against everything trainable."""
    start_s = time.monotonic()
    ring: RingRun = run_ring(workspace.job, OUT / "demo", nodes=4)
    wall_s = time.monotonic() - start_s
    say(f"four nodes, {wall_s:.0f} s: accuracy {ring.accuracy:.4f}")
    cases = [(method, seed) for method in ("ringada", "all") for seed in SEEDS]
    with ThreadPoolExecutor(max_workers=max(1, os.cpu_count() or 1)) as pool:
        futures = [pool.submit(run_plain, ring.folder, method=method, seed=seed) for method, seed in cases]
        accuracy = {case: float(future.result()["accuracy"]) for case, future in zip(cases, futures, strict=True)}
    for (method, seed), value in accuracy.items():
        say(f"one process, {method}, seed {seed}: accuracy {value:.4f}")
    gaps = [accuracy["all", seed] - accuracy["ringada", seed] for seed in SEEDS]
    return {
        "same_schedule_accuracy_gap": abs(ring.accuracy - accuracy["ringada", 0]),
        "all_unfrozen_accuracy_gap": statistics.mean(gaps),
        "four_node_accuracy": ring.accuracy,
        "four_node_demo_wall_s": wall_s,
        "samples": {
            "ringada_accuracy": [accuracy["ringada", seed] for seed in SEEDS],
            "all_unfrozen_accuracy": [accuracy["all", seed] for seed in SEEDS],
            "all_unfrozen_accuracy_gap": gaps,
        },
    }


PARTS: dict[str, Callable[[Workspace], Figures]] = {"cost": measure_cost, "accuracy": measure_accuracy}


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Pairwise."""
    return [one / other for one, other in zip(above, below, strict=True)]


def main() -> int:
    """Measure the parts that are asked for; 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, action="append", help="measure only this part; may be repeated")
    options = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    result = OUT / "ring.json"
    result.unlink(missing_ok=True)
    workspace = prepare(OUT / "workspace", demo_cache())
    figures: Figures = {}
    samples: Figures = {}
    for name in options.only or PARTS:
        found = PARTS[name](workspace)
        samples.update(found.pop("samples", {}))
        figures.update(found)
    misses = missed(figures, TARGETS)
    return conclude(result, {**figures, "targets": TARGETS, "samples": samples, "machine": machine()}, misses)


if __name__ == "__main__":
    sys.exit(main())
