"""``make bench-memory-accuracy``: what HiFT and VeLoRA cost in accuracy, on real sentences, three or five seeds each.

MiniLM with all parameters training, 1,000 sentences of film reviews in batches of 8, five passes over them, a linear
schedule; judged on 2,000 other sentences. Every kind has three learning rates of its own. Each is tried with the first
seed; the best of them, by accuracy, trains with the other seeds too.

======================= ================================================================================================
kind                    what is trained
======================= ================================================================================================
full                    all units at each step: ``hift`` with one group
bottom2up               one unit at a step, in this order; so for top2down and random
velora                  as full, with VeLoRA in all blocks (query, key, value, down)
full-short              as full, for as many steps as HiFT updates each unit; not judged
head                    one unit at a step and the head at each, ``hift.always_active``
group-2, group-4        so many units at a step
head-updates            as head, for as many steps as give each unit the updates of full; so for the groups; not judged
lora                    LoRA on query, value, up and down, with a frozen base; five seeds, as for the others below
lora-velora             as lora, with VeLoRA in the A at down, which is the default
lora-velora-value       in those at value and down, as the authors; this and those below are not judged
lora-velora-others      in those at query and up
lora-velora-all         in all of them; also with 96 and 192 parts, of 384 and 1,536 values, in place of 32
lora-velora-values-32   as lora-velora, with sub-tokens of 32 values: 48 parts
lora-velora-svd         as lora-velora, with this init; so for random and running
======================= ================================================================================================

``--shares`` trains nothing: one forward of the first batch tells, for every input of LoRA, how much of it VeLoRA keeps
on its vector.

Five passes are as many steps of the same batches for each kind, so HiFT updates each of its eight units an eighth as
often as ``full`` does; ``full-short`` is equal in updates instead. Targets: each order of HiFT at most 2 points below
``full``, ``velora`` at most 0.5 below ``full``, ``lora-velora`` at most 0.3 below ``lora``.

Every run is a process of one node with one thread and keeps its result in ``build/bench/memory_accuracy/runs``; a run
that has one is not repeated: remove the folder after a change of the code. ``--only KIND ...`` trains some kinds. The
table of all results is written to ``build/bench/memory_accuracy.json`` and ``.md``. Exit code 1 if a target is missed,
or was not measured.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from coordinator.cli.demo_files import demo_cache, prepare
from edge.techniques.velora import Vectors, project, subtokens
from ringtune.schedule.saved_activations import INITS, subtoken_size
from tests.bench.jobs import write_job
from tests.bench.kept_results import conclude, kept_result, results_of, say, spread_text
from tests.bench.rings import run_ring

OUT = Path("build/bench/memory_accuracy")
SEEDS, LORA_SEEDS = (0, 1, 2), (0, 1, 2, 3, 4)
TRAIN_ROWS, OTHER_ROWS, BATCH, EPOCHS, TOKENS, UNITS = 1000, 934, 8, 5, 64, 8
STEPS = TRAIN_ROWS * EPOCHS // BATCH
FULL_RATES, HIFT_RATES, LORA_RATES = (2e-5, 6e-5, 2e-4), (3e-5, 1e-4, 3e-4), (3e-4, 1e-3, 3e-3)
Result = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One way to train.

    Attributes:
        rates: learning rates to choose from.
        keys: of the job.
        seeds: the first one chooses the rate.
        steps: of a run.
        like: the kind that it may not be far below.
        max_below: accuracy, as a share.
    """

    rates: tuple[float, ...]
    keys: Mapping[str, object]
    seeds: tuple[int, ...] = SEEDS
    steps: int = STEPS
    like: str = ""
    max_below: float = 0.0


def _hift(group_size: int, order: str) -> dict[str, object]:
    return {"train.method": "hift", "hift.group_size": group_size, "hift.order": order}


_LORA: dict[str, object] = {
    "train.method": "all",
    "adapter.config": "lora[r=8,alpha=16,intermediate_lora=True,output_lora=True]",
}
_VELORA: dict[str, object] = {"memory.activations": "velora"}
_HIFT: dict[str, tuple[dict[str, object], int]] = {
    "head": (_hift(1, "bottom2up") | {"hift.always_active": ["head"]}, UNITS - 1),
    "group-2": (_hift(2, "bottom2up"), UNITS // 2),
    "group-4": (_hift(4, "bottom2up"), UNITS // 4),
}
"""Keys, and the number of groups: steps of a sweep."""


def _lora_velora(*sites: str, **more: object) -> Kind:
    """LoRA with VeLoRA in the A at some layers, all without a name."""
    layers = [f"adapter_down:{site}" for site in sites] or ["adapter_down"]
    settings = {f"velora.{key}": value for key, value in more.items()}
    return Kind(rates=LORA_RATES, keys=_LORA | _VELORA | {"velora.layers": layers} | settings, seeds=LORA_SEEDS)


KINDS = {
    "full": Kind(rates=FULL_RATES, keys=_hift(UNITS, "bottom2up")),
    "velora": Kind(rates=FULL_RATES, keys=_hift(UNITS, "bottom2up") | _VELORA, like="full", max_below=0.005),
    **{
        order: Kind(rates=HIFT_RATES, keys=_hift(1, order), like="full", max_below=0.02)
        for order in ("bottom2up", "top2down", "random")
    },
    **{name: Kind(rates=HIFT_RATES, keys=keys, like="full", max_below=0.02) for name, (keys, _) in _HIFT.items()},
    **{
        f"{name}-updates": Kind(rates=HIFT_RATES, keys=keys, steps=STEPS * groups)
        for name, (keys, groups) in _HIFT.items()
    },
    "full-short": Kind(rates=FULL_RATES, keys=_hift(UNITS, "bottom2up"), steps=-(-STEPS // UNITS)),
    "lora": Kind(rates=LORA_RATES, keys=_LORA, seeds=LORA_SEEDS),
    "lora-velora": dataclasses.replace(_lora_velora("down"), like="lora", max_below=0.003),
    "lora-velora-value": _lora_velora("value", "down"),
    "lora-velora-others": _lora_velora("query", "up"),
    "lora-velora-all": _lora_velora(),
    "lora-velora-all-96": _lora_velora(parts=96),
    "lora-velora-all-192": _lora_velora(parts=192),
    "lora-velora-values-32": _lora_velora("down", values=32),
    **{f"lora-velora-{init}": _lora_velora("down", init=init) for init in ("svd", "random", "running")},
}
"""By name."""


def sentences() -> tuple[Path, Path, Path]:
    """The demo's model, sentences to train on, and those to judge by: the demo's held out and others."""
    workspace = prepare(OUT / "demo", demo_cache())
    folder = workspace.job.parent
    train, held_out = (_rows(folder / f"{name}.csv") for name in ("train", "held_out"))
    return (
        workspace.model,
        _written(OUT / "train.csv", train[0], train[1 : TRAIN_ROWS + 1]),
        _written(OUT / "judged.csv", train[0], [*held_out[1:], *train[-OTHER_ROWS:]]),
    )


def _rows(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def _written(path: Path, names: Sequence[str], rows: Iterable[Sequence[str]]) -> Path:
    if not path.exists():  # another part of the bench may read it just now
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([names, *rows])
    return path.resolve()


def train(name: str, rate: float, seed: int, steps: int) -> dict[str, Any]:
    """Train and evaluate; returns the result."""
    model, rows, judged = sentences()
    folder, began_s = (OUT / "work" / f"{name}-{rate:g}-{seed}").resolve(), time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    more: dict[str, object] = {
        "data.eval": str(judged),
        "train.learning_rate": rate,
        "train.lr_schedule": "linear",
        "train.batch_size": BATCH,
        "train.seed": seed,
    }
    keys = dict(KINDS[name].keys)
    job = write_job(
        folder / "job.toml",
        model=model,
        train=rows,
        method=str(keys["train.method"]),
        steps=steps,
        microbatches=1,
        tokens=TOKENS,
        more=more | keys,
    )
    report = run_ring(job, folder / "run", nodes=1).report
    shutil.rmtree(folder)
    return {
        "kind": name,
        "rate": rate,
        "seed": seed,
        "steps": report["steps"],
        "accuracy": report["eval"]["accuracy"],
        "loss": report["eval"]["loss"],
        "rows": report["eval"]["rows"],
        "seconds": time.monotonic() - began_s,
    }


def best_rate(results: Iterable[Result], name: str) -> float:
    """The learning rate of the best run of a kind with the first seed; the lowest of equals."""
    runs = [run for run in results if run["kind"] == name and run["seed"] == SEEDS[0]]
    return float(max(runs, key=lambda run: (run["accuracy"], -run["rate"]))["rate"])


def at_best(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The runs of each kind at its best rate, by seed."""
    kinds = dict.fromkeys(run["kind"] for run in results if run["seed"] == SEEDS[0])
    best = {name: best_rate(results, name) for name in kinds}
    ordered = sorted(results, key=lambda run: run["seed"])
    return {name: [run for run in ordered if (run["kind"], run["rate"]) == (name, best[name])] for name in kinds}


def table_text(results: Sequence[Result]) -> str:
    """Write the results as a table in Markdown."""
    rows = [["kind", "steps", "best rate", "accuracy at it", "accuracy of each rate, first seed"]]
    rows.append(["---"] * len(rows[0]))
    for name, runs in at_best(results).items():
        tried = sorted(
            (run for run in results if run["kind"] == name and run["seed"] == SEEDS[0]), key=lambda run: run["rate"]
        )
        rates = ", ".join(f"{run['rate']:g}: {run['accuracy']:.1%}" for run in tried)
        rows.append([name, str(runs[0]["steps"]), f"{runs[0]['rate']:g}", spread_text(_accuracies(runs)), rates])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def _accuracies(runs: Iterable[Result]) -> list[float]:
    return [float(run["accuracy"]) for run in runs]


def misses(results: Sequence[Result]) -> list[str]:
    """Write which targets are missed, or were not measured with all seeds."""
    found, best = [], {name: _accuracies(runs) for name, runs in at_best(results).items()}
    for name, kind in KINDS.items():
        if not kind.like:
            continue
        if any(len(best.get(each, ())) < len(KINDS[each].seeds) for each in (name, kind.like)):
            found.append(f"{name} beside {kind.like}: not measured with all seeds")
            continue
        below = statistics.mean(best[kind.like]) - statistics.mean(best[name])
        if below > kind.max_below:
            found.append(f"{name} is {100 * below:.2f} points below {kind.like}, at most {100 * kind.max_below:g}")
    return found


SITES = {"query, value": "attention.self.query", "up": "intermediate.dense", "down": "output.dense"}
"""Layers that LoRA is beside -> the matrix of a BERT's block that reads the same input."""
CUTS: dict[str, Callable[[int], int]] = {
    "32 parts": lambda width: subtoken_size(width, 32),
    "of 32 values": lambda width: 32,
}
"""Name -> values of a sub-token of an input."""


@torch.no_grad()
def shares_text() -> str:
    """Write a table of the inputs of LoRA in the first batch, before any step, as means over all blocks.

    ``|mean| / rms`` is the length of the mean sub-token over the root mean square of the lengths of all; a share is
    that of |x|^2 which the projections on a vector of an init keep.
    """
    model_folder, rows, _ = sentences()
    model = transformers.AutoModel.from_pretrained(model_folder).eval()
    texts = [row[0] for row in _rows(rows)[1 : BATCH + 1]]
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    inputs: dict[str, list[torch.Tensor]] = {site: [] for site in SITES}
    for block in model.encoder.layer:
        for site, path in SITES.items():
            block.get_submodule(path).register_forward_pre_hook(
                lambda _, args, site=site: inputs[site].append(args[0].detach())
            )
    model(**tokenizer(texts, truncation=True, max_length=TOKENS, padding=True, return_tensors="pt"))
    inits = [init for init in INITS if init != "running"]
    table = [["input of", "sub-tokens", "|mean| / rms", *(f"share, {init}" for init in inits)]]
    table.append(["---"] * len(table[0]))
    for site, tensors in inputs.items():
        for name, cut in CUTS.items():
            size = cut(tensors[0].shape[-1])
            means = [_mean_share(x, size) for x in tensors]
            kept = [[_kept_share(x, size, init, at) for at, x in enumerate(tensors)] for init in inits]
            table.append([site, name, *(f"{statistics.mean(values):.3f}" for values in (means, *kept))])
    return "\n".join("| " + " | ".join(row) + " |" for row in table)


def _mean_share(x: torch.Tensor, size: int) -> float:
    parts = subtokens(x, size)
    return float(parts.mean(0).norm() / parts.square().sum(1).mean().sqrt())


def _kept_share(x: torch.Tensor, size: int, init: str, block: int) -> float:
    vector = Vectors({f"{block}": size}, init=init, seed=0).next(f"{block}", x)
    return float(project(x, vector).square().sum() / x.square().sum())


def main() -> int:
    """Train what has no result yet; write and judge all results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=list(KINDS), default=list(KINDS), help="kinds")
    parser.add_argument("--steps", type=int, default=0, help="of each run; 0 = those of its kind; few only try it out")
    parser.add_argument("--shares", action="store_true", help="tell what VeLoRA keeps of LoRA's inputs; train nothing")
    options = parser.parse_args()
    if options.shares:
        say(shares_text())
        return 0
    folder = OUT / ("runs" if not options.steps else f"runs-{options.steps}-steps")
    for seed in LORA_SEEDS:
        for name in options.only:
            kind = KINDS[name]
            if seed not in kind.seeds:
                continue
            rates = kind.rates if seed == SEEDS[0] else (best_rate(results_of(folder), name),)
            for rate in rates:
                steps = options.steps or kind.steps
                path = folder / f"{name}-{rate:g}-{seed}.json"
                kept_result(path, functools.partial(train, name, rate, seed, steps))
    results = results_of(folder)
    return conclude(OUT, results, table_text(results), misses(results), is_tried_out=bool(options.steps))


if __name__ == "__main__":
    sys.exit(main())
