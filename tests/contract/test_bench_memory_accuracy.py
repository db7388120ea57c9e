"""The accuracy bench of HiFT and VeLoRA: its jobs, which rate is the best, and when it fails; nothing is trained."""

from __future__ import annotations

import math
from typing import Any

from ringtune.job.job import Job, Model
from tests.bench.memory_accuracy import KINDS, at_best, best_rate, misses, table_text
from tests.support.cases import cases

ACCURACIES = {"full": 0.80, "velora": 0.797, "bottom2up": 0.79, "top2down": 0.785, "random": 0.79, "full-short": 0.7}
ACCURACIES |= {"lora": 0.78, "lora-velora": 0.776}


def runs(**changed: float) -> list[dict[str, Any]]:
    """The middle rate is best and has three seeds, half a point apart; the others have the first seed."""
    found = []
    for name, kind in KINDS.items():
        accuracy = changed.get(name.replace("-", "_"), ACCURACIES[name])
        common = {"kind": name, "steps": kind.steps, "seconds": 1.0}
        found += [{**common, "rate": rate, "seed": 0, "accuracy": accuracy - 0.1} for rate in kind.rates[::2]]
        found += [
            {**common, "rate": kind.rates[1], "seed": seed, "accuracy": accuracy + 0.005 * (seed - 1)}
            for seed in (0, 1, 2)
        ]
    return found


@cases("name", KINDS)
def test_keys_of_a_kind_are_taken_by_a_job(name: str) -> None:
    """And velora kinds do save by VeLoRA."""
    job = Job(model=Model(path="m")).with_overrides(KINDS[name].keys)
    assert (job.memory.activations == "velora") == ("velora" in name)


def test_best_rate_is_of_the_first_seed() -> None:
    """Other seeds do not choose; of equals the lowest is taken."""
    results = runs()
    assert best_rate(results, "full") == KINDS["full"].rates[1]
    for run in results:
        if run["seed"]:
            run["accuracy"] = 0.0
    assert best_rate(results, "full") == KINDS["full"].rates[1]
    for run in results:
        run["accuracy"] = 0.5
    assert best_rate(results, "full") == KINDS["full"].rates[0]


def test_runs_at_best_are_of_one_rate() -> None:
    """Three seeds, in their order."""
    for name, found in at_best(runs()).items():
        assert [(run["rate"], run["seed"]) for run in found] == [(KINDS[name].rates[1], seed) for seed in (0, 1, 2)]


@cases(
    ("changed", "missed"),
    [
        ({}, []),
        ({"velora": 0.794}, ["velora is 0.60 points below full, at most 0.5"]),
        ({"random": 0.77}, ["random is 3.00 points below full, at most 2"]),
        ({"full_short": 0.1}, []),
        ({"lora_velora": 0.77}, ["lora-velora is 1.00 points below lora, at most 0.5"]),
    ],
)
def test_misses_compare_means_at_the_best_rate(changed: dict[str, float], missed: list[str]) -> None:
    """Each kind with the one that it is like."""
    assert misses(runs(**changed)) == missed


def test_misses_name_what_was_not_measured() -> None:
    """One seed is not a comparison of three."""
    few = [run for run in runs() if (run["kind"], run["seed"]) != ("random", 2)]
    assert misses(few) == ["random beside full: not measured with all seeds"]
    assert len(misses([])) == sum(bool(kind.like) for kind in KINDS.values())


def test_table_has_the_best_rate_and_what_the_others_gave() -> None:
    """A line a kind."""
    assert "| velora | 625 | 6e-05 | 79.7 % (79.2 to 80.2, 3 seeds) | 2e-05: 69.7%, 6e-05: 79.2%, 0.0002: 69.7% |" in (
        table_text(runs())
    )
    assert KINDS["full-short"].steps == math.ceil(625 / 8)
