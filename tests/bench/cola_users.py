"""Part ``users`` of ``make bench-cola``: eight users train together, alone, or in collaboration, on real sentences.

MiniLM with 1,000 sentences of film reviews, 125 of each user, in batches of 8 that mix users, two passes over them; a
helper fits adapters at query and value after every step. Each user is judged on 250 other sentences. Kinds, by
adapter (``lora``, ``linear``, ``mlp``; ``lora+linear`` and ``lora+mlp``, where the upper four users have the second)::

    joint            all rows train one set of adapters
    alone            each user's rows train a set of their own, beside the matrices
    collaboration    they do, and every row goes through the sum of all sets, inside the matrices

Judged twice: *own* is what the user has in training (the set of all, the own set, the sum of all), *sum* is the sum of
all sets for everybody, as after a merge. The paper's table finds that users who trained alone lose by it, and that
those who collaborated are as good as those who trained together. The head is common to all users, as always.

Two learning rates with the first seed; the better one by *own* is that of the other seeds. No target: figures. Each run
leaves a file in ``build/bench/cola/users``, and a run that has one is not repeated: remove the folder after a change of
the code.

Source: ColA, section 4.3 and Table 4.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from edge.data.tokens import Batch
from edge.model.slice import BlockRunner
from edge.runtime.executor import NodeExecutor
from edge.techniques.offload.merged_matrices import MergedMatrices
from ringtune.schedule.course import ALONE, COLLABORATION, JOINT
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Item, StepKind, items, turn_sequence
from ringtune.storage.durable import write_durably
from ringtune.techniques.offload import rows_of_users
from tests.bench.cola_ring import HELPER, LINEAR, LORA, MLP, Inputs, Ring, Training
from tests.bench.kept_results import results_of, say, spread_text
from tests.bench.memory_accuracy import best_rate, sentences

OUT: Final = Path("build/bench/cola/users")
SEEDS: Final = (0, 1, 2)
STEPS, USERS = 250, 8
ADAPTERS: Final = {
    "lora": (LORA, "", (1e-3, 3e-3)),
    "linear": (LINEAR, "", (1e-4, 3e-4)),
    "mlp": (MLP, "", (3e-4, 1e-3)),
    "lora+linear": (LORA, LINEAR, (3e-4, 1e-3)),
    "lora+mlp": (LORA, MLP, (3e-4, 1e-3)),
}
"""Adapter, that of the upper half of the users, and learning rates to choose from, by the first word of a kind."""

KINDS: Final = (
    ("lora", JOINT),
    ("lora", ALONE),
    ("lora", COLLABORATION),
    ("linear", JOINT),
    ("linear", ALONE),
    ("linear", COLLABORATION),
    ("mlp", JOINT),
    ("mlp", ALONE),
    ("lora+linear", ALONE),
    ("lora+linear", COLLABORATION),
    ("lora+mlp", ALONE),
)
Correct = dict[str, list[int]]
"""Of each user the sentences that were judged rightly, and all."""


def name_of(adapter: str, users: str) -> str:
    """Name a kind: ``lora-alone``."""
    return f"{adapter}-{users}"


def rates_of(adapter: str, users: str, seed: int, results: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    """The learning rates of a kind with a seed: all of them with the first seed, then the best one."""
    return ADAPTERS[adapter][2] if seed == SEEDS[0] else (best_rate(results, name_of(adapter, users)),)


def train(adapter: str, users: str, rate: float, seed: int, steps: int = STEPS) -> dict[str, Any]:
    """Train and judge; returns the result."""
    model, rows, judged = sentences()
    began_s = time.process_time()
    config, other, _ = ADAPTERS[adapter]
    training = Training(adapter=config, rate=rate, seed=seed, steps=steps, users=users, num_users=USERS, other=other)
    ring = Ring(training, Inputs(model=model, train=rows, judged=judged))
    ring.run()
    own, merged = judge(ring.host, ring.plan), judge_sum(ring, adapter, users)
    return {
        "kind": name_of(adapter, users),
        "rate": rate,
        "seed": seed,
        "steps": steps,
        "accuracy": accuracy(own.values()),
        "accuracy_of_sum": accuracy(merged.values()) if merged else None,
        "own": own,
        "sum": merged,
        "cpu_s": round(time.process_time() - began_s, 1),
    }


def accuracy(counted: Iterable[Sequence[int]]) -> float:
    """The share of sentences that were judged rightly."""
    both = list(counted)
    return sum(one[0] for one in both) / sum(one[1] for one in both)


def judge(host: NodeExecutor, plan: Plan) -> Correct:
    """Count by user, with the adapters that each user has in training."""
    sets = host._hosted.sets
    runners = {user: runner for kind, runner in host._hosted.kinds.items() for user in kind.users}

    def around(user: str) -> Any:
        return sets.using(user) if sets is not None else torch.no_grad()

    return _judged(host, plan, around, runners if sets is not None else {})


def judge_sum(ring: Ring, adapter: str, manner: str) -> Correct:
    """Count by user, with the sum of all users' adapters for everybody; nothing of adapters that have no sum."""
    if manner == COLLABORATION:
        return judge(ring.host, ring.plan)
    if MLP in ADAPTERS[adapter] or manner == JOINT:
        return {}
    blocks, hosted = range(ring.plan.course.num_blocks), ring.host._hosted
    (models,) = ring.carrier.executors[HELPER]._hosted.helped
    sums = models.sums(0, len(blocks))
    first, *others = hosted.kinds.items()
    merged = MergedMatrices(
        hosted.skeleton,
        blocks,
        Path(ring.job.model.path),
        ring.job,
        users=len(first[0].users),
        others=[(runner.skeleton, len(kind.users)) for kind, runner in others],
    )
    merged.install(sums, blocks, where="the sums of all users")
    return _judged(ring.host, ring.plan, lambda user: torch.no_grad())


def _judged(
    host: NodeExecutor,
    plan: Plan,
    around: Callable[[str], Any],
    runners: Mapping[str, BlockRunner] = MappingProxyType({}),
) -> Correct:
    """Judge every user's sentences, some at a time."""
    found: Correct = {}
    turns = [turn for turn in turn_sequence(plan.course) if turn.kind is StepKind.EVALUATE]
    for item in items(plan.course, turns[-1]):
        for user, positions in rows_of_users(plan.course, item, 0):
            with torch.no_grad(), around(user):
                right = _right(host, plan, item, list(positions), runners.get(user, host._hosted.blocks))
            known = found.setdefault(user, [0, 0])
            found[user] = [known[0] + right, known[1] + len(positions)]
    return found


def _right(host: NodeExecutor, plan: Plan, item: Item, positions: list[int], blocks: BlockRunner) -> int:
    """Judge some rows of a batch."""
    hosted, dataset = host._hosted, host._dataset
    assert hosted.owner is not None and dataset is not None
    whole = dataset.batch(plan.course, item)
    batch = Batch(*(None if tensor is None else tensor[positions] for tensor in whole))  # type: ignore[arg-type]
    hidden = hosted.owner.embed(batch)
    context = blocks.context(hidden, batch.mask)
    hidden = blocks.run(hidden, batch.mask, context, 0, plan.course.num_blocks)
    return int(dict(hosted.owner.evaluate(hidden, batch).values)["correct"])


def measure(folder: Path) -> dict[str, Any]:
    """Do the runs that have no result yet, and sum all of them up."""
    torch.set_num_threads(1)
    OUT.mkdir(parents=True, exist_ok=True)
    for adapter, users in KINDS:
        for seed in SEEDS:
            for rate in rates_of(adapter, users, seed, results_of(OUT)):
                path = OUT / f"{name_of(adapter, users)}-{rate:g}-{seed}.json"
                if not path.exists():
                    result = train(adapter, users, rate, seed)
                    write_durably(path, (json.dumps(result) + "\n").encode())
                    say(f"{path.stem}: {result['accuracy']} own, {result['accuracy_of_sum']} sum, {result['cpu_s']} s")
    return summed(results_of(OUT))


def summed(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Say for each kind its rate, and both accuracies of all users and of each."""
    figures: dict[str, Any] = {}
    for name in (name_of(*kind) for kind in KINDS):
        if not any(run["kind"] == name for run in results):
            continue
        rate = best_rate(results, name)
        runs = [run for run in results if (run["kind"], run["rate"]) == (name, rate)]
        figures[name] = {
            "rate": rate,
            "own": spread_text([run["accuracy"] for run in runs]),
            "sum": spread_text([run["accuracy_of_sum"] for run in runs]) if runs[0]["sum"] else "",
            "by_user": {
                user: round(100 * statistics.mean(run["own"][user][0] / run["own"][user][1] for run in runs), 1)
                for user in runs[0]["own"]
            },
        }
    return {"runs": list(results), "figures": figures}


def missed(figures: dict[str, Any]) -> list[str]:
    """Name what was not measured with all seeds; there is no target."""
    counted = {name: sum(run["kind"] == name for run in figures["runs"]) for name in figures["figures"]}
    wanted = {name_of(adapter, users): len(SEEDS) + len(ADAPTERS[adapter][2]) - 1 for adapter, users in KINDS}
    return [
        f"{name}: {counted.get(name, 0)} of {count} runs"
        for name, count in wanted.items()
        if counted.get(name, 0) < count
    ]
