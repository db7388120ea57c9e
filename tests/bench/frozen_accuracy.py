"""What frozen weights in 16 and 8 bits cost in accuracy: the demo's model and sentences, three seeds each.

Every run is a process of one node with one thread and leaves a file in ``build/bench/frozen/accuracy``; a run that has
one is not repeated, so that the part may be cut short: remove the folder after a change of the code. Accuracy does not
depend on what else the machine does. ``python -m tests.bench.frozen_weights accuracy`` does the runs alone.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from coordinator.demo.fetch import demo_cache
from coordinator.demo.workspace import prepare
from ringtune.files.durable import write_durably
from ringtune.jobs.job import load_job
from tests.bench.rings import run_ring

OUT = Path("build/bench/frozen/accuracy")
TYPES, SEEDS = ("float32", "bfloat16", "int8"), (0, 1, 2)
MOST_BELOW = {"bfloat16": 0.005, "int8": 0.01}


def train(frozen: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train the demo's job with frozen weights held so, and evaluate it."""
    workspace = prepare(folder, demo_cache())
    job = load_job(workspace.job).with_overrides(
        {"runtime.frozen": frozen, "train.seed": seed, "train.checkpoint_every": 0, "runtime.threads": 1}
    )
    write_durably(folder / "wanted.toml", job.to_toml().encode())
    run = run_ring(folder / "wanted.toml", folder / "run", nodes=1)
    course = json.loads((run.folder / "plan.json").read_text(encoding="utf-8"))["course"]
    return {
        "frozen": course.get("frozen"),
        "seed": seed,
        "steps": run.report["steps"],
        "accuracy": run.accuracy,
        "loss": run.report["eval"]["loss"],
        "count": run.report["eval"]["count"],
        "cpu_s": run.cpu_s,
    }


def measure() -> dict[str, Any]:
    """Do the runs that have no result yet, and sum all of them up."""
    OUT.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in TYPES}
    for seed in SEEDS:
        for name in TYPES:
            path = OUT / f"{name}-{seed}.json"
            if not path.exists():
                with tempfile.TemporaryDirectory(dir=OUT) as folder:
                    write_durably(path, json.dumps(train(name, seed, Path(folder).resolve())).encode())
            results[name].append(json.loads(path.read_text(encoding="utf-8")))
            print(f"accuracy {name} seed {seed}: {results[name][-1]['accuracy']:.4f}", flush=True)  # noqa: T201
    means = {name: statistics.mean(run["accuracy"] for run in runs) for name, runs in results.items()}
    return {
        "runs": results,
        "mean_accuracy": means,
        "below_float32": {name: means["float32"] - means[name] for name in MOST_BELOW},
    }


def missed(figures: dict[str, Any]) -> list[str]:
    """The types that lose more than they may."""
    return [
        f"accuracy with frozen {name} is {100 * figures['below_float32'][name]:.2f} points below float32"
        for name, most in MOST_BELOW.items()
        if figures["below_float32"][name] > most
    ]
