"""``make bench-examples``: each example as a user runs it, against the same steps in one process.

Prepares ``docs/examples/NAME`` in ``build/examples/NAME``, trains its job with ``ringtune train --local 3``, trains the
plain reference (``tests.bench.plain``: transformers and adapters, same schedule, steps, seed and batches) and writes
``build/bench/examples.json`` anew. Per example:

======================== ======================================================================== =======
ring_loss, plain_loss    mean training loss of the last 30 steps, one turn of each owner
relative_gap             between the two                                                          <= 0.01
ring_eval_loss,          loss of the held-out rows after training
plain_eval_loss
eval_relative_gap        between the two                                                          <= 0.01
before, after            what the ring's evaluation of the held-out rows gave with the adapter    reported
                         and head as they begin (one step at learning rate 0), and in the end
wall_s                   ``ringtune train`` from start to end, processes and evaluation included  reported
plain_steps_s            the plain loop from its first to its last step, nothing else             reported
sent_bytes               between nodes, training and evaluation                                   reported
======================== ======================================================================== =======

All figures come from one run each, with one seed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coordinator.run.run_text import is_step
from ringtune.job.job import load_job
from tests.bench.ring import machine, say
from tests.bench.rings import RingRun, run, run_plain, run_ring

NAMES = ("shakespeare", "squad", "fashion")
EXAMPLES = Path("docs/examples")
PREPARED = Path("build/examples")
OUT = Path("build/bench")
NUM_NODES = 3
LAST_STEPS = 30
LARGEST_GAP = 0.01
GAPS = ("relative_gap", "eval_relative_gap")
# Of evaluations of different tasks: those of the others are not there, or are none.
FIGURES = ("loss", "accuracy", "perplexity", "f1", "exact_match", "questions", "count")

Figures = dict[str, Any]


def measure(name: str, data: Path | None) -> Figures:
    """One example: prepare, the ring before and after training, the plain loop, and what they differ by."""
    source = ["--from", str(data)] if data else []
    say(f"{name}: preparing")
    run([sys.executable, "-m", f"docs.examples.{name}.prepare", "--to", str(PREPARED / name), *source])
    job = EXAMPLES / name / "job.toml"
    before = run_ring(untrained(job, OUT / f"{name}-before.toml"), OUT / f"{name}-before", nodes=NUM_NODES).report
    say(f"{name}: before {judged(before)}")
    start_s = time.monotonic()
    ring = run_ring(job, OUT / name, nodes=NUM_NODES)
    wall_s = time.monotonic() - start_s
    say(f"{name}: ring, {wall_s:.0f} s: {judged(ring.report)}")
    plain = run_plain(OUT / name)
    figures = compared(losses_of(ring), ring.report, plain)
    say(f"{name}: one process: gaps {[figures[gap] for gap in GAPS]}")
    return {
        **figures,
        "before": judged(before),
        "after": judged(ring.report),
        "steps": ring.report["steps"],
        "wall_s": wall_s,
        "plain_steps_s": plain["wall_s"],
        "cpu_s": ring.cpu_s,
        "sent_bytes": sum(int(node["sent_bytes"]) for node in ring.report["nodes"].values()),
    }


def untrained(job: Path, path: Path) -> Path:
    """The same job with one step that changes nothing."""
    changed = load_job(job).with_overrides(
        {"train.learning_rate": 0.0, "train.weight_decay": 0.0, "train.warmup_steps": 0, "train.max_steps": 1}
    )
    path.write_text(changed.to_toml(), encoding="utf-8")
    return path


def losses_of(ring: RingRun) -> list[float]:
    """Training loss of each step."""
    lines = (ring.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [float(line["loss"]) for line in map(json.loads, lines) if is_step(line)]


def compared(losses: Sequence[float], report: Mapping[str, Any], plain: Mapping[str, Any]) -> Figures:
    """Losses of ring and plain loop, and the gaps.

    Raises:
        ValueError: they did not do the same number of steps.
    """
    if len(losses) != len(plain["losses"]):
        raise ValueError(f"the ring did {len(losses)} steps, one process {len(plain['losses'])}; compare the same run")
    ring_loss, plain_loss = (statistics.mean(found[-LAST_STEPS:]) for found in (losses, plain["losses"]))
    ring_eval, plain_eval = float(report["eval"]["loss"]), float(plain["eval_loss"])
    return {
        "ring_loss": ring_loss,
        "plain_loss": plain_loss,
        "relative_gap": abs(ring_loss - plain_loss) / plain_loss,
        "ring_eval_loss": ring_eval,
        "plain_eval_loss": plain_eval,
        "eval_relative_gap": abs(ring_eval - plain_eval) / plain_eval,
    }


def judged(report: Mapping[str, Any]) -> Figures:
    """What the last evaluation of a run found, without what its task does not count."""
    return {name: report["eval"][name] for name in FIGURES if report["eval"].get(name) is not None}


def missed(examples: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Gaps that are too large, in words; one that is no number is too large."""
    return [
        f"{name}: {gap} is {figures[gap]:.4f}, the target is <= {LARGEST_GAP}"
        for name, figures in examples.items()
        for gap in GAPS
        if not figures[gap] <= LARGEST_GAP
    ]


def main() -> int:
    """Measure what is asked for; 1 if a gap is too large."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", nargs="?", choices=(*NAMES, "all"), default="all")
    parser.add_argument("--data", type=Path, help="folder with packages that were fetched already")
    options = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    result = OUT / "examples.json"
    result.unlink(missing_ok=True)
    names = NAMES if options.example == "all" else (options.example,)
    examples = {name: measure(name, options.data) for name in names}
    figures = {"examples": examples, "missed": missed(examples), "machine": machine()}
    result.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=1))  # noqa: T201
    for line in figures["missed"]:
        say(line)
    return 1 if figures["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
