"""``python -m tests.bench.d2ft_accuracy``: what operations cost in accuracy, on text and images, three seeds each.

Every run is a process of one node with one thread and keeps its result in ``build/bench/d2ft_accuracy/runs``; a run
that has one is not repeated: remove the folder after a change of the code. So ``--only TASK ADAPTER POLICY ...`` does
the bench in parts, two of them side by side too. At the end, and with ``--only table``, the tables of all results are
written to ``build/bench/d2ft_accuracy.json`` and ``.md``. Exits with 1 if a target is missed.

======== =========================================================================================================
part     what is trained
======== =========================================================================================================
policies standard (all full); at 60 % compute, which is 3 of 5 micro-batches full: two-stage, random, magnitude and
         magnitude-gradient; with ``adapter.config`` full, seq_bn and lora. Beside them, not judged: two-stage and
         random with 2 full and 2 forward-only of 5, and two-stage whose ties fall together
pairs    the eight pairs of scores of the paper's Table III: two-stage, 2 full and 2 forward-only of 5, ``full``
======== =========================================================================================================

Targets: with ``full``, two-stage at most 2 points below standard, and above random, magnitude and magnitude-gradient.
Text is MiniLM on sentences of film reviews. Images are five classes of Fashion-MNIST that a small vision transformer
never saw.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ringtune.storage.durable import write_durably
from tests.bench.d2ft_tasks import TASKS, Task
from tests.bench.kept_results import conclude, results_of, say, spread_text
from tests.bench.rings import run_ring

OUT = Path("build/bench/d2ft_accuracy")
ADAPTERS = {"full": "full", "seq_bn": "seq_bn", "lora": "lora[r=8]"}
_COMPUTE: dict[str, object] = {"operations.compute": 0.6}
_MIXED: dict[str, object] = {"operations.full": 2, "operations.forward_only": 2}
BUDGETS: dict[str, dict[str, object]] = {
    "standard": {},
    "two-stage": {"operations.policy": "two-stage", **_COMPUTE},
    "random": {"operations.policy": "random", **_COMPUTE},
    "magnitude": {"operations.policy": "magnitude", **_COMPUTE},
    "magnitude-gradient": {"operations.policy": "magnitude-gradient", **_COMPUTE},
    "two-stage 2+2": {"operations.policy": "two-stage", **_MIXED},
    "random 2+2": {"operations.policy": "random", **_MIXED},
    "two-stage together": {"operations.policy": "two-stage", "operations.ties": "together", **_COMPUTE},
}
"""The keys of each policy; the first five are judged, the others stand beside them."""

POLICIES = tuple(BUDGETS)
JUDGED = ("standard", "two-stage", "random", "magnitude", "magnitude-gradient")
WORSE = ("random", "magnitude", "magnitude-gradient")
PAIRS = (
    ("weight-magnitude", "fisher"),
    ("fisher", "weight-magnitude"),
    ("weight-magnitude", "gradient-magnitude"),
    ("gradient-magnitude", "weight-magnitude"),
    ("fisher", "taylor"),
    ("taylor", "fisher"),
    ("weight-magnitude", "taylor"),
    ("taylor", "weight-magnitude"),
)
"""(backward, forward), in the order of the paper."""

SEEDS = (0, 1, 2)
MICROBATCHES, MAX_BELOW = 5, 0.02


class Run(NamedTuple):
    """One run: what is trained how, and its keys of ``[operations]``; ``label`` stands in the table."""

    task: str
    adapter: str
    label: str
    seed: int
    operations: Mapping[str, object]

    @property
    def name(self) -> str:
        """Unique, and fit for a file."""
        return f"{self.task}-{self.adapter}-{self.label.replace(' ', '_')}-{self.seed}"


def all_runs(seeds: Iterable[int]) -> list[Run]:
    """Every run, seed by seed, so that a bench that is cut short has all kinds."""
    return [run for seed in seeds for task in TASKS for run in (*_policies(task, seed), *_pairs(task, seed))]


def _policies(task: str, seed: int) -> list[Run]:
    return [Run(task, adapter, policy, seed, keys) for adapter in ADAPTERS for policy, keys in BUDGETS.items()]


def _pairs(task: str, seed: int) -> list[Run]:
    counts: dict[str, object] = {"operations.policy": "two-stage", "operations.full": 2, "operations.forward_only": 2}
    return [
        Run(
            task,
            "full",
            f"pair {backward} {forward}",
            seed,
            {**counts, "operations.backward_score": backward, "operations.forward_score": forward},
        )
        for backward, forward in PAIRS
    ]


def train(run: Run, task: Task, steps: int) -> dict[str, Any]:
    """Train and evaluate; returns the result."""
    folder, began_s = OUT / "work" / run.name, time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    job = task.write_job(
        folder / "job.toml",
        adapter=ADAPTERS[run.adapter],
        learning_rate=task.learning_rates[run.adapter],
        seed=run.seed,
        steps=steps,
        microbatches=MICROBATCHES,
        operations=run.operations,
    )
    report = run_ring(job, folder / "run", nodes=1).report
    return {
        **run._asdict(),
        "operations": dict(run.operations),
        "steps": report["steps"],
        "accuracy": report["eval"]["accuracy"],
        "loss": report["eval"]["loss"],
        "rows": report["eval"]["rows"],
        "shares": report.get("operations"),
        "seconds": time.monotonic() - began_s,
    }


# ---- the table -------------------------------------------------------------------------------------

Groups = dict[tuple[str, str, str], list[float]]


def grouped(results: Sequence[Mapping[str, Any]]) -> Groups:
    """Accuracies by (task, adapter, label)."""
    found: Groups = {}
    for result in results:
        if result["accuracy"] is not None:
            found.setdefault((result["task"], result["adapter"], result["label"]), []).append(result["accuracy"])
    return found


def table_text(groups: Groups) -> str:
    """Write the results as tables in Markdown: one of policies and one of pairs for each task."""
    parts = []
    for task in TASKS:
        rows = [
            [policy, *(_cell(groups, task, adapter, policy) for adapter in ADAPTERS)]
            for policy in POLICIES
            if any((task, adapter, policy) in groups for adapter in ADAPTERS)
        ]
        pairs = [
            [backward, forward, _cell(groups, task, "full", f"pair {backward} {forward}")]
            for backward, forward in PAIRS
            if (task, "full", f"pair {backward} {forward}") in groups
        ]
        for titles, lines in ((["policy", *ADAPTERS], rows), (["backward score", "forward score", "full"], pairs)):
            if lines:
                table = "\n".join("| " + " | ".join(line) + " |" for line in (titles, ["---"] * len(titles), *lines))
                parts.append(f"{TASKS[task].title}\n\n{table}\n")
    return "\n".join(parts)


def _cell(groups: Groups, task: str, adapter: str, label: str) -> str:
    values = groups.get((task, adapter, label))
    return spread_text(values) if values else "-"


def misses(groups: Groups) -> list[str]:
    """Write which targets are missed, or were not measured."""
    found = []
    for task in TASKS:
        means = {policy: statistics.mean(values) for policy in JUDGED if (values := groups.get((task, "full", policy)))}
        if len(means) < len(JUDGED):
            found.append(f"{task}: not measured: {', '.join(policy for policy in JUDGED if policy not in means)}")
            continue
        chosen = means["two-stage"]
        if chosen < means["standard"] - MAX_BELOW:
            found.append(f"{task}: two-stage {chosen:.1%}, standard {means['standard']:.1%}, at most 2 points below")
        found += [
            f"{task}: two-stage {chosen:.1%} is not above {other} {means[other]:.1%}"
            for other in WORSE
            if chosen <= means[other]
        ]
    return found


def wanted(runs: Iterable[Run], words: Sequence[str]) -> list[Run]:
    """The runs that have every word: a task, an adapter, a policy, ``policies`` or ``pairs``."""
    return [run for run in runs if all(word in (run.task, run.adapter, run.label, _kind(run)) for word in words)]


def _kind(run: Run) -> str:
    return "policies" if run.label in POLICIES else "pairs"


def main() -> int:
    """Train what has no result yet; write and judge all results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    known = [*TASKS, *ADAPTERS, *POLICIES, "policies", "pairs", "table"]
    parser.add_argument("--only", nargs="*", default=[], choices=known, help="runs that have all of these words")
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS), help="seeds of the runs")
    parser.add_argument("--steps", type=int, default=0, help="of each run; 0 = those of its task; few only try it out")
    options = parser.parse_args()
    kept = OUT / ("runs" if not options.steps else f"runs-{options.steps}-steps")
    for run in [] if "table" in options.only else wanted(all_runs(options.seeds), options.only):
        path = kept / f"{run.name}.json"
        if path.exists():
            continue
        task = TASKS[run.task]
        result = train(run, task, options.steps or task.steps)
        write_durably(path, (json.dumps(result) + "\n").encode())
        say(f"{run.name}: {result['accuracy']:.4f} in {result['seconds']:.0f} s")
    results = results_of(kept)
    groups = grouped(results)
    missed = [] if options.steps else misses(groups)
    return conclude(OUT, results, table_text(groups), missed, is_tried_out=bool(options.steps))


if __name__ == "__main__":
    sys.exit(main())
