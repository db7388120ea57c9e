"""``python -m tests.bench.memory_accuracy``: what HiFT and VeLoRA cost in accuracy, on real sentences.

MiniLM, 1,000 sentences of film reviews in batches of 8, five passes over them, a linear schedule; judged on 2,000 other
sentences. Every kind has three learning rates of its own. Each is tried with the first seed; the best of them, by
accuracy, trains with the other seeds too.

======================= ================================================================================================
kind                    what is trained
======================= ================================================================================================
full                    all units at each step: ``hift`` with one group; three seeds, as for the kinds up to full-short
velora                  as full, with VeLoRA in all blocks (query, key, value, down)
bottom2up               one unit at a step, in this order; so for top2down and random
head                    one unit at a step and the head at each, ``hift.always_active``
group-2, group-4        so many units at a step
head-updates            as head, for as many steps as give each unit the updates of full; so for the groups; not judged
full-short              as full, for as many steps as HiFT updates each unit; not judged
lora                    LoRA on query, value, up and down, with a frozen base; five seeds, as for the others below
lora-velora             as lora, with VeLoRA in the A at down, which is the default
lora-velora-value       in those at value and down, as the authors; this and those below are not judged
lora-velora-others      in those at query and up
lora-velora-all         in all of them; also with 96 and 192 parts, of 384 and 1,536 values, in place of 32
lora-velora-values-32   as lora-velora, with sub-tokens of 32 values: 48 parts
lora-velora-svd         as lora-velora, with this init; so for random and running
======================= ================================================================================================

Five passes are as many steps of the same batches for each kind, so HiFT updates each of its eight units an eighth as
often as ``full`` does; ``full-short`` is equal in updates instead.

Every run is a process of one node with one thread and keeps its result in ``build/bench/memory_accuracy/runs``; a run
that has one is not repeated: remove the folder after a change of the code. ``--only KIND ...`` trains some kinds. The
table of all results is written to ``build/bench/memory_accuracy.json`` and ``.md``. Exits with 1 if a target is missed,
or was not measured.
"""

from __future__ import annotations

import argparse
import csv
import functools
import shutil
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from coordinator.cli.demo_files import demo_cache, prepare
from tests.bench.d2ft_accuracy import best_rate, conclude_table, keep_result, results_of, spread_text
from tests.bench.rings import run_ring, write_job

OUT = Path("build/bench/memory_accuracy")
TRAIN_ROWS, OTHER_ROWS, BATCH, TOKENS, UNITS = 1000, 934, 8, 64, 8
STEPS = 5 * TRAIN_ROWS // BATCH
FULL_RATES, HIFT_RATES, LORA_RATES = (2e-5, 6e-5, 2e-4), (3e-5, 1e-4, 3e-4), (3e-4, 1e-3, 3e-3)


class Kind(NamedTuple):
    """One way to train: its keys of the job, the rates to choose from, the steps, and how many seeds."""

    keys: Mapping[str, object]
    rates: tuple[float, ...] = HIFT_RATES
    steps: int = STEPS
    seeds: int = 3


def _hift(group_size: int, order: str = "bottom2up", **more: object) -> dict[str, object]:
    keys = {"group_size": group_size, "order": order, **more}
    return {"train.method": "hift", **{f"hift.{key}": value for key, value in keys.items()}}


_FULL = _hift(UNITS)
_VELORA: dict[str, object] = {"memory.activations": "velora"}
_LORA = {"train.method": "all", "adapter.config": "lora[r=8,alpha=16,intermediate_lora=True,output_lora=True]"}
_GROUPS = {
    "head": (_hift(1, always_active=["head"]), UNITS - 1),
    "group-2": (_hift(2), UNITS // 2),
    "group-4": (_hift(4), UNITS // 4),
}
"""Keys, and the number of groups: steps of a sweep."""


def _lora_velora(*sites: str, **more: object) -> Kind:
    """LoRA with VeLoRA in the A at some layers, all without a name."""
    layers = [f"adapter_down:{site}" for site in sites] or ["adapter_down"]
    settings = {f"velora.{key}": value for key, value in more.items()}
    return Kind(_LORA | _VELORA | {"velora.layers": layers} | settings, LORA_RATES, seeds=5)


KINDS = {
    "full": Kind(_FULL, FULL_RATES),
    "velora": Kind(_FULL | _VELORA, FULL_RATES),
    **{order: Kind(_hift(1, order)) for order in ("bottom2up", "top2down", "random")},
    **{name: Kind(keys) for name, (keys, _) in _GROUPS.items()},
    **{f"{name}-updates": Kind(keys, steps=STEPS * groups) for name, (keys, groups) in _GROUPS.items()},
    "full-short": Kind(_FULL, FULL_RATES, -(-STEPS // UNITS)),
    "lora": Kind(_LORA, LORA_RATES, seeds=5),
    "lora-velora": _lora_velora("down"),
    "lora-velora-value": _lora_velora("value", "down"),
    "lora-velora-others": _lora_velora("query", "up"),
    "lora-velora-all": _lora_velora(),
    "lora-velora-all-96": _lora_velora(parts=96),
    "lora-velora-all-192": _lora_velora(parts=192),
    "lora-velora-values-32": _lora_velora("down", values=32),
    **{f"lora-velora-{init}": _lora_velora("down", init=init) for init in ("svd", "random", "running")},
}
"""By name."""
TARGETS = {
    "velora": ("full", 0.005),
    **dict.fromkeys(("bottom2up", "top2down", "random", *_GROUPS), ("full", 0.02)),
    "lora-velora": ("lora", 0.003),
}
"""Kind -> the kind that it may be below by so much accuracy at most."""


def sentences() -> tuple[Path, Path, Path]:
    """The demo's model, sentences to train on, and those to judge by: the demo's held out and others."""
    workspace = prepare(OUT / "demo", demo_cache())
    folder = workspace.job.parent
    train, held_out = (_rows(folder / f"{name}.csv") for name in ("train", "held_out"))
    return (
        workspace.model,
        _written(OUT / "train.csv", train[: TRAIN_ROWS + 1]),
        _written(OUT / "judged.csv", [*held_out, *train[-OTHER_ROWS:]]),
    )


def _rows(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def _written(path: Path, rows: Iterable[Sequence[str]]) -> Path:
    if not path.exists():  # another part of the bench may read it just now
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows(rows)
    return path


def train(name: str, rate: float, seed: int, steps: int) -> dict[str, Any]:
    """Train and evaluate; returns the result."""
    model, rows, judged = sentences()
    folder, began_s = (OUT / "work" / f"{name}-{rate:g}-{seed}").resolve(), time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    keys = KINDS[name].keys
    more: dict[str, object] = {
        "data.eval": str(judged.resolve()),
        "train.learning_rate": rate,
        "train.lr_schedule": "linear",
        "train.batch_size": BATCH,
        "train.seed": seed,
    }
    job = write_job(
        folder / "job.toml",
        model=model,
        train=rows,
        method=str(keys["train.method"]),
        steps=steps,
        microbatches=1,
        tokens=TOKENS,
        more={**more, **keys},
    )
    report = run_ring(job, folder / "run", nodes=1).report
    shutil.rmtree(folder)
    measured = {key: report["eval"][key] for key in ("accuracy", "loss", "rows")}
    seconds = time.monotonic() - began_s
    return {"kind": name, "rate": rate, "seed": seed, "steps": report["steps"], **measured, "seconds": seconds}


def at_best(results: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Accuracies of each kind at the best rate of the first seed, by seed."""
    found = {}
    for name in KINDS:
        runs = sorted((run for run in results if run["kind"] == name), key=lambda run: run["seed"])
        if runs:
            best = best_rate(runs)
            found[name] = [run["accuracy"] for run in runs if run["rate"] == best]
    return found


def misses(best: Mapping[str, Sequence[float]]) -> list[str]:
    """Write which targets are missed, or were not measured with all seeds."""
    found = []
    for name, (like, most) in TARGETS.items():
        if any(len(best.get(each, ())) < KINDS[each].seeds for each in (name, like)):
            found.append(f"{name} beside {like}: not measured with all seeds")
        elif (below := statistics.mean(best[like]) - statistics.mean(best[name])) > most:
            found.append(f"{name} is {100 * below:.2f} points below {like}, at most {100 * most:g}")
    return found


def main() -> int:
    """Train what has no result yet; write and judge all results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=list(KINDS), default=list(KINDS), help="kinds")
    parser.add_argument("--steps", type=int, default=0, help="of each run; 0 = those of its kind; few only try it out")
    options = parser.parse_args()
    folder = OUT / ("runs" if not options.steps else f"runs-{options.steps}-steps")
    for name in options.only:
        kind = KINDS[name]
        for seed in range(kind.seeds):
            best = best_rate([run for run in results_of(folder) if run["kind"] == name]) if seed else None
            for rate in kind.rates if best is None else (best,):
                path = folder / f"{name}-{rate:g}-{seed}.json"
                keep_result(path, functools.partial(train, name, rate, seed, options.steps or kind.steps))
    results = results_of(folder)
    best_runs = at_best(results)
    lines = [f"| {name} | {spread_text(values)} |\n" for name, values in best_runs.items()]
    table = "".join(["| kind | accuracy |\n|---|---|\n", *lines])
    return conclude_table(OUT, results, table, misses(best_runs), is_tried_out=options.steps > 0)


if __name__ == "__main__":
    sys.exit(main())
