"""The accuracy bench of operations: which runs there are, which rates count, and when it fails; nothing is trained."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from ringtune.job.job import Job, Model
from tests.bench.d2ft_accuracy import (
    ADAPTERS,
    EQUAL_COMPUTE,
    OPTIMIZERS,
    PAIRS,
    POLICIES,
    SEEDS,
    at_best,
    kinds,
    misses,
    rates_of,
    table_text,
    wanted,
)
from tests.bench.d2ft_tasks import TASKS

MEANS = {"standard": 0.80, "rotate": 0.791, **dict.fromkeys(EQUAL_COMPUTE, 0.78)}


def test_runs_are_every_policy_and_every_table_and_jobs_take_them() -> None:
    """Every name once, so that no result is taken for another's; a heads count divides the model's heads."""
    every = list(kinds())
    names = {kind.name(rate, seed) for kind in every for rate in kind.rates for seed in SEEDS}
    assert len(names) == 9 * len(every)
    assert len(every) == 2 * (3 * 2 * len(POLICIES) + len(PAIRS) + 3 + 5 + 3 + 3)
    for kind in every:
        job = Job(model=Model(path="m")).with_overrides({"train.batch_size": 20, "train.microbatches": 5, **kind.keys})
        assert job.operations.is_chosen == (not kind.label.startswith("standard")), kind.label
    short, whole = (wanted(["text", "lora", "momentum", label])[0] for label in ("standard 60", "standard"))
    assert (short.steps, whole.steps) == (72, 120)


def results(means: Mapping[str, float] = MEANS) -> list[dict[str, Any]]:
    """Three seeds of each policy in each column, two points apart; the first with another rate, which is worse."""
    return [
        {"part": "policies", "task": task, "optimizer": optimizer, "adapter": adapter, "label": label, "rate": rate,
         "seed": seed, "accuracy": mean + (seed - 1) / 100 - (rate == 0.1) / 10}
        for task, optimizer, adapter in itertools.product(TASKS, OPTIMIZERS, ADAPTERS)
        for label, mean in means.items()
        for rate, seed in ((0.1, 0), (0.2, 0), (0.2, 1), (0.2, 2))
    ]  # fmt: skip


def test_other_seeds_train_at_the_best_rate_of_the_first() -> None:
    """The first tries all."""
    kind = next(iter(kinds()))
    assert rates_of(kind, 0, results()) == kind.rates
    assert rates_of(kind, 1, results()) == (0.2,)
    assert rates_of(kind, 1, []) == ()


def test_misses_compare_means_at_the_best_rate() -> None:
    """Within one point of standard with ``full`` and two with adapters, and above all of equal compute."""
    assert misses(at_best(results())) == []
    below = misses(at_best(results({**MEANS, "standard": 0.805})))
    assert below == [
        f"{task}, {optimizer}, full: rotate 79.1%, standard 80.5%, at most 1% below"
        for task in TASKS
        for optimizer in OPTIMIZERS
    ]
    worse = misses(at_best(results({**MEANS, "standard 60": 0.792})))
    assert worse[0] == "text, adamw, full: rotate 79.1% is not above standard 60 79.2%"
    few = [result for result in results() if (result["label"], result["seed"]) != ("random", 2)]
    assert misses(at_best(few))[0] == "text, adamw, full: not measured with all seeds: random"


def test_table_has_mean_and_spread() -> None:
    """A column for each optimizer and adapter; what was not run is a dash."""
    some = [result for result in results() if (result["label"], result["adapter"]) != ("rotate", "lora")]
    text = table_text(at_best(some))
    assert "| policies | full, adamw | seq_bn, adamw | lora, adamw | full, momentum |" in text
    assert "| rotate | 79.1 % (78.1 to 80.1, 3 seeds) | 79.1 % (78.1 to 80.1, 3 seeds) | - |" in text
