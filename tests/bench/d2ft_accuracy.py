"""``python -m tests.bench.d2ft_accuracy``: what operations cost in accuracy, on text and images, three seeds each.

Each kind has three learning rates of its own. Each is tried with the first seed; the best of them, by accuracy, trains
with the other seeds too. Every run is a process of one node with one thread and keeps its result in
``build/bench/d2ft_accuracy/runs``; a run that has one is not repeated: remove the folder after a change of the code. So
``--only TASK ADAPTER OPTIMIZER LABEL ...`` does the bench in parts, two of them side by side too. At the end, and with
``--only table``, the tables of all results are written to ``build/bench/d2ft_accuracy.json`` and ``.md``. Exits with 1
if a target is missed.

Policies: standard (all full), and standard for 60 % of the steps; at 60 % compute, which is 3 of 5 micro-batches of 4
rows full: rotate (two-stage, ties together, the table turned in each pass), together, spread, random, magnitude and
magnitude-gradient; rotate with 2 full and 2 forward-only of 5. With ``adapter.config`` full, seq_bn and lora, and with
AdamW and momentum.

Targets: rotate at 60 % at most 1 point below standard with ``full``, 2 points with LoRA and seq_bn, and above every
other kind of equal compute. Text is MiniLM on sentences of film reviews. Images are five classes of Fashion-MNIST that
a small vision transformer never saw.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coordinator.cli.demo_files import demo_cache, prepare
from ringtune.storage.durable import write_durably
from tests.bench.rings import conclude, run_ring, say, write_job

OUT = Path("build/bench/d2ft_accuracy")
DATA = OUT / "data"
BATCH_SIZE = 20
ADAPTERS = {"full": "full", "seq_bn": "seq_bn", "lora": "lora[r=8]"}
MAX_BELOW = {"full": 0.01, "seq_bn": 0.02, "lora": 0.02}
OPTIMIZERS = ("adamw", "momentum")
SEEDS = (0, 1, 2)
_SHORT_STEPS, _MICROBATCHES = 0.6, 5
_TURNED: dict[str, object] = {
    "operations.policy": "two-stage",
    "operations.ties": "together",
    "operations.rotate": True,
}
_COMPUTE: dict[str, object] = {"operations.compute": 0.6}
_MIXED: dict[str, object] = {"operations.full": 2, "operations.forward_only": 2}
POLICIES: dict[str, dict[str, object]] = {
    "standard": {},
    "standard 60": {},
    "rotate": {**_TURNED, **_COMPUTE},
    "together": {**_TURNED, **_COMPUTE, "operations.rotate": False},
    "spread": {"operations.policy": "two-stage", "operations.ties": "spread", "operations.rotate": False, **_COMPUTE},
    **{name: {"operations.policy": name, **_COMPUTE} for name in ("random", "magnitude", "magnitude-gradient")},
    "rotate 2+2": {**_TURNED, **_MIXED},
}
"""The keys of each policy; all but the first and the last have 60 % of the compute of the first."""

EQUAL_COMPUTE = tuple(label for label in POLICIES if label not in ("standard", "rotate", "rotate 2+2"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Data, model and length of the runs of a task."""

    title: str
    kind: str
    steps: int
    tokens: int
    learning_rates: Mapping[tuple[str, str], tuple[float, ...]]
    files: Callable[[], tuple[Path, Path, Path]]


def sentences() -> tuple[Path, Path, Path]:
    """The demo's model; its first sentences, 600 to train on and 1,000 held out."""
    workspace = prepare(DATA / "demo", demo_cache())
    folder = workspace.job.parent
    for name, rows in (("train", 600), ("held_out", 1000)):
        if (DATA / f"{name}.csv").exists():  # another part of the bench may read it just now
            continue
        with (folder / f"{name}.csv").open(encoding="utf-8", newline="") as file:
            lines = list(csv.reader(file))
        with (DATA / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows(lines[: rows + 1])
    return workspace.model, DATA / "train.csv", DATA / "held_out.csv"


def clothes() -> tuple[Path, Path, Path]:
    """The model of the example of operations; 200 images of each class to train on and 400 held out."""
    from docs.examples.fashion import prepare as fashion

    example = Path("build/examples/operations")
    made = [example / "model", example / "train.npz", example / "held_out.npz"]
    if not (made[0] / "recipe.json").exists() or not all(path.exists() for path in made[1:]):
        fashion.prepare(example)
    DATA.mkdir(parents=True, exist_ok=True)
    for path, most in ((made[1], 200), (made[2], 400)):
        if not (DATA / path.name).exists():
            _fewer(path, DATA / path.name, most)
    return made[0], DATA / "train.npz", DATA / "held_out.npz"


def _fewer(path: Path, to: Path, most: int) -> None:
    """Keep the first images of each class."""
    with np.load(path) as arrays:
        images, labels = arrays["image"], arrays["label"]
    kept = np.sort(np.concatenate([np.flatnonzero(labels == label)[:most] for label in np.unique(labels)]))
    np.savez(to, image=images[kept], label=labels[kept])


def _both(**rates: tuple[float, ...]) -> dict[tuple[str, str], tuple[float, ...]]:
    """The rates of both kinds of adapters, by optimizer."""
    return {(optimizer, adapter): each for optimizer, each in rates.items() for adapter in ("seq_bn", "lora")}


TASKS = {
    "text": Task(
        title="Text: MiniLM, film reviews, 600 sentences, 1,000 held out",
        kind="sequence-classification",
        steps=120,
        tokens=48,
        learning_rates={
            ("adamw", "full"): (3e-5, 1e-4, 3e-4),
            ("momentum", "full"): (1e-3, 3e-3, 1e-2),
            **_both(adamw=(3e-4, 1e-3, 3e-3), momentum=(1e-2, 3e-2, 1e-1)),
        },
        files=sentences,
    ),
    "images": Task(
        title="Images: a small vision transformer, five classes of clothes, 1,000 images, 2,000 held out",
        kind="image-classification",
        steps=300,
        tokens=64,
        learning_rates={
            ("adamw", "full"): (3e-4, 1e-3, 3e-3),
            ("momentum", "full"): (1e-2, 3e-2, 1e-1),
            **_both(adamw=(1e-3, 3e-3, 1e-2), momentum=(3e-2, 1e-1, 3e-1)),
        },
        files=clothes,
    ),
}
"""By name."""


class Kind(NamedTuple):
    """What is trained: a task, an adapter, an optimizer, and the keys that ``label`` names in the tables."""

    task: str
    adapter: str
    optimizer: str
    label: str
    keys: Mapping[str, object]

    @property
    def rates(self) -> tuple[float, ...]:
        """Learning rates to choose from."""
        return TASKS[self.task].learning_rates[self.optimizer, self.adapter]

    @property
    def steps(self) -> int:
        """Steps of a run."""
        steps = TASKS[self.task].steps
        return round(_SHORT_STEPS * steps) if self.label == "standard 60" else steps

    def name(self, rate: float, seed: int) -> str:
        """The name of a run, fit for a file."""
        words = (self.task, self.adapter, self.optimizer, self.label, f"{rate:g}", str(seed))
        return "-".join(words).replace(" ", "_").replace(",", "")


def kinds() -> Iterator[Kind]:
    """Every kind."""
    for task, adapter, optimizer in itertools.product(TASKS, ADAPTERS, OPTIMIZERS):
        yield from (Kind(task, adapter, optimizer, label, keys) for label, keys in POLICIES.items())


def train(kind: Kind, rate: float, seed: int, steps: int) -> dict[str, Any]:
    """Train and evaluate; returns the result."""
    folder, began_s = OUT / "work" / kind.name(rate, seed), time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    task = TASKS[kind.task]
    model, rows, held_out = task.files()
    more: dict[str, object] = {
        "model.task": task.kind,
        "data.eval": str(held_out.resolve()),
        "adapter.config": ADAPTERS[kind.adapter],
        "train.optimizer": kind.optimizer,
        "train.learning_rate": rate,
        "train.lr_schedule": "linear",
        "train.batch_size": BATCH_SIZE,
        "train.local_iterations": 4,
        "train.seed": seed,
        **kind.keys,
    }
    job = write_job(
        folder / "job.toml",
        model=model,
        train=rows,
        steps=steps,
        method="all",
        microbatches=_MICROBATCHES,
        tokens=task.tokens,
        more=more,
    )
    report = run_ring(job, folder / "run", nodes=1).report
    shutil.rmtree(folder)
    return {
        **{name: value for name, value in kind._asdict().items() if name != "keys"},
        "rate": rate,
        "seed": seed,
        "steps": report["steps"],
        "accuracy": report["eval"]["accuracy"],
        "loss": report["eval"]["loss"],
        "rows": report["eval"]["rows"],
        "shares": report.get("operations"),
        "seconds": time.monotonic() - began_s,
    }


def keep_result(path: Path, train: Callable[[], Mapping[str, Any]]) -> None:
    """Train and write the result, unless the file has one."""
    if not path.exists():
        result = train()
        write_durably(path, (json.dumps(result) + "\n").encode())
        say(f"{path.stem}: {result['accuracy']:.4f} in {result['seconds']:.0f} s")


def results_of(folder: Path) -> list[dict[str, Any]]:
    """Every result that was kept, by name."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def spread_text(values: Sequence[float]) -> str:
    """Mean and spread in percent: ``81.2 % (80.1 to 82.0, 3 seeds)``."""
    least, most = 100 * min(values), 100 * max(values)
    seeds = f"{len(values)} seed{'s' if len(values) > 1 else ''}"
    return f"{100 * statistics.mean(values):.1f} % ({least:.1f} to {most:.1f}, {seeds})"


Column = tuple[str, str, str]
"""Task, optimizer, adapter."""
Groups = dict[tuple[Column, str], list[float]]


def at_best(results: Sequence[Mapping[str, Any]]) -> Groups:
    """Accuracies at the best rate of the first seed, by (column, label)."""
    by_kind: dict[tuple[Column, str], list[Mapping[str, Any]]] = {}
    for result in results:
        column = (result["task"], result["optimizer"], result["adapter"])
        by_kind.setdefault((column, result["label"]), []).append(result)
    return {
        key: [run["accuracy"] for run in runs if run["rate"] == best]
        for key, runs in by_kind.items()
        for best in [best_rate(runs)]
    }


def best_rate(runs: Sequence[Mapping[str, Any]]) -> float | None:
    """The learning rate of the best run of a kind with the first seed, the lowest of equals; None without any."""
    first = [run for run in runs if run["seed"] == SEEDS[0]]
    return float(max(first, key=lambda run: (run["accuracy"], -run["rate"]))["rate"]) if first else None


def table_text(groups: Groups) -> str:
    """Write the results as a table in Markdown for each task, with a row for each policy."""
    parts = []
    for task in TASKS:
        columns = list(dict.fromkeys(column for column, _ in groups if column[0] == task))
        if not columns:
            continue
        lines = [["", *(f"{adapter}, {optimizer}" for _, optimizer, adapter in columns)], ["---"] * (len(columns) + 1)]
        for label in POLICIES:
            values = [groups.get((column, label)) for column in columns]
            lines.append([label, *(spread_text(each) if each else "-" for each in values)])
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        parts.append(f"{TASKS[task].title}\n\n{table}\n")
    return "\n".join(parts)


def misses(groups: Groups) -> list[str]:
    """Write which targets are missed, or were not measured with all seeds."""
    found = []
    for column in itertools.product(TASKS, OPTIMIZERS, ADAPTERS):
        name, labels = ", ".join(column), ("standard", "rotate", *EQUAL_COMPUTE)
        values = {label: groups.get((column, label), []) for label in labels}
        if missing := [label for label, each in values.items() if len(each) < len(SEEDS)]:
            found.append(f"{name}: not measured with all seeds: {', '.join(missing)}")
            continue
        means = {label: statistics.mean(each) for label, each in values.items()}
        chosen, limit = means["rotate"], MAX_BELOW[column[2]]
        if chosen < means["standard"] - limit:
            found.append(f"{name}: rotate {chosen:.1%}, standard {means['standard']:.1%}, at most {limit:.0%} below")
        found += [
            f"{name}: rotate {chosen:.1%} is not above {other} {means[other]:.1%}"
            for other in EQUAL_COMPUTE
            if chosen <= means[other]
        ]
    return found


def wanted(words: Sequence[str]) -> list[Kind]:
    """The kinds that have every word: a task, an adapter, an optimizer, a label."""
    return [kind for kind in kinds() if all(word in kind[:4] for word in words)]


def rates_of(kind: Kind, seed: int, results: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    """The rates of a kind to train with a seed: all with the first one, then the best of them."""
    if seed == SEEDS[0]:
        return kind.rates
    own = [run for run in results if tuple(run[name] for name in Kind._fields[:4]) == kind[:4]]
    best = best_rate(own)
    return (best,) if best is not None else ()


def main() -> int:
    """Train what has no result yet; write and judge all results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    known = list(dict.fromkeys(word for kind in kinds() for word in kind[:4]))
    parser.add_argument(
        "--only", nargs="*", default=[], choices=[*known, "table"], help="kinds with all of these words"
    )
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS), help="seeds of the runs")
    parser.add_argument("--steps", type=int, default=0, help="of each run; 0 = those of its kind; few only try it out")
    options = parser.parse_args()
    folder = OUT / ("runs" if not options.steps else f"runs-{options.steps}-steps")
    for seed in [] if "table" in options.only else options.seeds:
        for kind in wanted(options.only):
            for rate in rates_of(kind, seed, results_of(folder)):
                steps = options.steps or kind.steps
                path = folder / f"{kind.name(rate, seed)}.json"
                keep_result(path, functools.partial(train, kind, rate, seed, steps))
    results = results_of(folder)
    groups = at_best(results)
    table = table_text(groups)
    say(table)
    if options.steps:
        return 0
    write_durably(OUT.with_suffix(".md"), table.encode())
    return conclude(OUT.with_suffix(".json"), {"runs": results}, misses(groups))


if __name__ == "__main__":
    sys.exit(main())
