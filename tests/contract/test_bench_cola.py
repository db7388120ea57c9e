"""The bench of helpers: its parts, what they count, and when they fail; on tiny models, and nothing is trained long."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ringtune.job.job import Job, Model
from ringtune.schedule.course import ALONE, COLLABORATION
from tests.bench import cola, cola_accuracy, cola_errors, cola_host_bytes, cola_users
from tests.bench.cola_accuracy import KINDS, SEEDS, rates_of, summed, training_of
from tests.bench.cola_host_bytes import MERGED, RANGES, Alive
from tests.bench.cola_ring import Inputs, Ring, Training, distance_of_changes
from tests.support.cases import cases
from tests.support.torch_ring import write_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """A tiny model and its rows."""
    folder = write_inputs(tmp_path_factory.mktemp("inputs"))
    return Inputs(model=folder / "model", train=folder / "train.csv", judged=folder / "eval.csv")


@cases("name", cola.PARTS)
def test_part_measures_and_judges(name: str) -> None:
    """Every part of the bench is a module with both functions."""
    part = importlib.import_module(cola.PARTS[name])
    assert callable(part.measure) and callable(part.missed)


@cases(("misses", "code"), [([], 0), (["too much"], 1)])
def test_bench_writes_the_parts_that_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, misses: list[str], code: int
) -> None:
    """Others keep what they had; a miss is exit code 1."""
    out = tmp_path / "bench" / "cola.json"
    monkeypatch.setattr(cola, "OUT", out)
    monkeypatch.setattr(cola_errors, "measure", lambda folder: {"figures": {"error": 0.5}})
    monkeypatch.setattr(cola_errors, "missed", lambda figures: misses)
    out.parent.mkdir()
    out.write_text('{"accuracy": 1}', encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["cola", "--only", "errors"])
    assert cola.main() == code
    assert json.loads(out.read_text(encoding="utf-8")) == {"accuracy": 1, "errors": {"figures": {"error": 0.5}}}


# ---- bytes of a host -------------------------------------------------------------------------------


def test_alive_counts_storages_that_are_there_at_once() -> None:
    """A view counts with its storage, what was dropped does not, and what is left out never."""
    held, left_out = torch.zeros(100), torch.zeros(1000)
    with Alive([held, held[:50]], left_out=[left_out]) as alive:
        for _ in range(3):
            torch.add(held, 1.0)
        assert alive.peak_bytes == 800
        both = torch.cat([held, held]).view(2, 100)
        left_out.add_(1.0)
        assert alive.now_bytes() == alive.peak_bytes == 1200
        del both
    assert (alive.now_bytes(), alive.peak_bytes) == (400, 1200)


def test_host_of_helped_blocks_holds_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Than one that trains them; and with merged adapters no weights but those of the blocks."""
    for name, value in {"WIDTH": 32, "HEADS": 4, "INNER": 64, "TOKENS": 16}.items():
        monkeypatch.setattr(cola_host_bytes, name, value)
    model = cola_host_bytes.write_model(tmp_path / "model")
    every = cola_host_bytes.ways(model, tmp_path)
    assert len(every) == 2 + 2 * len(RANGES) * (4 + len(MERGED))
    beside = ("lora 8, local", "lora 8, one, 1 users", "linear, one, 1 users", "linear, one, 8 users")
    inside = ("linear, each, 1 users, merged", "lora 64, one, 1 users, merged", "linear, one, 8 users, merged")
    local, low_rank, linear, eight, *merged = (every[name](2).measure() for name in (*beside, *inside))
    weights = 4 * 4 * (4 * 32 * 32 + 2 * 32 * 64 + 64 + 5 * 32 + 4 * 32)
    assert [one["held_bytes"] for one in merged] == [weights, weights, weights]
    assert linear["held_bytes"] == weights + 4 * 4 * 2 * 32 * 32
    assert eight["held_bytes"] == weights + 8 * 4 * 4 * 2 * 32 * 32
    assert low_rank["held_bytes"] == weights + 4 * 4 * 2 * 2 * 8 * 32
    assert local["held_bytes"] > weights + 3 * (low_rank["held_bytes"] - weights)
    assert low_rank["peak_bytes"] < local["peak_bytes"]


def test_host_bytes_are_missed_above_the_bound() -> None:
    """A spread of all that is held; that above the weights is told alone."""
    names = [f"{name}, {cut}, {users} users, merged" for name in MERGED for cut in RANGES for users in (1, 8)]
    case = {name: {"peak_bytes": 1000, "held_bytes": 900} for name in names}
    case["linear, one, 8 users, merged"] = {"peak_bytes": 1030, "held_bytes": 900}
    figures = cola_host_bytes.figures_of({"1 rows": case})
    assert figures["above_weights_spread, 1 rows, one"] == 0.3
    assert cola_host_bytes.missed({"figures": figures}) == [
        "host_bytes_merged_spread, 1 rows, one is 0.03, at most 0.02"
    ]


# ---- errors ----------------------------------------------------------------------------------------


def test_errors_are_measured_against_exact_pairs(inputs: Inputs) -> None:
    """Rounding changes an update a little; projecting single numbers, which it comes to at this width, nothing."""
    found = cola_errors.case_errors("mlp", inputs, steps=3)
    assert 0 < found["bfloat16_mean_gradient_error"] <= found["bfloat16_gradient_error"] < 1e-2
    assert found["bfloat16_weight_error"] > 0
    assert found["velora_gradient_error"] == found["velora_weight_error"] == 0.0


def test_errors_above_a_bound_are_named_by_adapter() -> None:
    """The figure is that of the worst."""
    good = {"bfloat16_gradient_error": 1e-3, "bfloat16_weight_error": 1e-2}
    cases = {"lora 8": good, "mlp": good | {"bfloat16_weight_error": 0.06}}
    assert cola_errors.figures_of(cases) == {"bfloat16_gradient_error": 1e-3, "bfloat16_weight_error": 0.06}
    assert cola_errors.missed({"cases": cases}) == ["bfloat16_weight_error of mlp is 6.00e-02, at most 0.05"]


def test_distance_of_changes_is_in_parts_of_the_way() -> None:
    """Not of what the weights are."""
    start, theirs, ours = ({"a": torch.full((2,), at), "b": torch.full((2,), 5.0 + at)} for at in (100.0, 104.0, 105.0))
    assert distance_of_changes(ours, theirs, start) == 0.25


# ---- accuracy --------------------------------------------------------------------------------------


def test_ring_with_a_helper_equals_one_without(inputs: Inputs) -> None:
    """Bit by bit, and both are judged on all rows; with an interval it is another run."""
    ends, counted = [], []
    for is_helped, interval in ((False, 1), (True, 1), (True, 4)):
        ring = Ring(Training(adapter="lora[r=8]", rate=1e-3, steps=5, is_helped=is_helped, interval=interval), inputs)
        start = ring.adapters()
        counted.append(ring.run()["count"])
        ends.append(ring.adapters())
    assert distance_of_changes(ends[1], ends[0], start) == 0.0 < distance_of_changes(ends[2], ends[0], start)
    assert counted == [21.0] * 3


@cases("name", KINDS)
def test_kind_is_taken_by_a_job_and_compared_with_one_of_its_adapter(name: str) -> None:
    """And has rates of its own, or those of the kind that it is like."""
    kind = KINDS[name]
    Job(model=Model(path="m")).with_overrides({"adapter.config": kind.adapter})
    assert training_of(kind, 1e-3, 0).is_helped == (name != "lora")
    assert bool(kind.rates) != bool(kind.like)
    assert not kind.like or KINDS[kind.like].adapter == kind.adapter


def runs(**changed: float) -> list[dict[str, Any]]:
    """The second rate is best."""
    found = []
    for name, kind in KINDS.items():
        accuracy = changed.get(name.replace("-", "_"), 0.78)
        rates = KINDS[kind.like or name].rates
        common = {"kind": name, "accuracy": accuracy}
        found += [{**common, "rate": rates[0], "seed": 0, "accuracy": 0.5}] if kind.rates else []
        found += [{**common, "rate": rates[1], "seed": seed} for seed in SEEDS]
    return found


def test_rates_of_later_seeds_and_rounded_pairs_are_the_best_of_the_first() -> None:
    """The kind with rounded pairs chooses none of its own."""
    assert rates_of("linear-4", 0, []) == KINDS["linear-4"].rates
    assert rates_of("linear-4", 1, runs()) == (KINDS["linear-4"].rates[1],) == rates_of("linear-4-bf16", 0, runs())


@cases(
    ("changed", "missed"),
    [
        ({}, []),
        ({"mlp_4_bf16": 0.77}, ["mlp-4-bf16 is 1.0 points below mlp-4, at most 0.5"]),
        ({"mlp_4": 0.6, "mlp_4_bf16": 0.6}, []),
        ({"lora_4_velora": 0.5}, []),
    ],
)
def test_accuracy_is_missed_by_rounded_pairs_alone(changed: dict[str, float], missed: list[str]) -> None:
    """How far an interval of 4 is below LoRA is told."""
    figures = summed(runs(**changed)) | {"distance_of_helped_low_rank": 0.0}
    assert cola_accuracy.missed(figures) == missed
    assert figures["points_below_lora"]["mlp-4"] == (18.0 if "mlp_4" in changed else 0.0)


def test_accuracy_names_what_was_not_measured() -> None:
    """One seed too few, and a helper that changes something."""
    few = [run for run in runs() if (run["kind"], run["seed"]) != ("lora-4", 2)]
    assert cola_accuracy.missed(summed(few) | {"distance_of_helped_low_rank": 1e-6}) == [
        "low rank with a helper is 1.0e-06 from that at its host",
        "lora-4-bf16 beside lora-4: not measured with all seeds",
        "lora-4-velora beside lora-4: not measured with all seeds",
    ]


# ---- users ---------------------------------------------------------------------------------------------


@cases("other", ["", "linear"])
@cases("users", [ALONE, COLLABORATION])
def test_users_are_judged_by_the_adapters_of_their_training(inputs: Inputs, users: str, other: str) -> None:
    """What is counted by user adds up to what the run's own evaluation counted; also where some have another kind."""
    training = Training(adapter="lora[r=4]", rate=1e-2, steps=4, users=users, num_users=3, other=other)
    ring = Ring(training, inputs)
    counted = ring.run()
    found = cola_users.judge(ring.host, ring.plan)
    assert list(found) == ["user-0", "user-1", "user-2"]
    assert [sum(one[at] for one in found.values()) for at in (0, 1)] == [counted["correct"], counted["count"]]
    assert sum(one[1] for one in cola_users.judge_sum(ring, "lora", users).values()) == counted["count"]


def test_sum_of_users_that_trained_alone_is_that_of_all_their_sets(inputs: Inputs) -> None:
    """After it every row goes through base + sum; an mlp has no sum."""
    ring = Ring(Training(adapter="linear", rate=1e-2, steps=2, users=ALONE, num_users=2), inputs)
    ring.run()
    assert cola_users.judge_sum(ring, "mlp", ALONE) == {}
    host = ring.host._hosted
    assert host.sets is not None
    name = "0.attention.self.query.ringtune.weight"
    change = sum(host.sets.of(user)[name].detach() for user in host.sets.users)
    matrix = host.skeleton.blocks[0].get_parameter("attention.self.query.weight")
    base = matrix.detach().clone()
    cola_users.judge_sum(ring, "linear", ALONE)
    assert torch.allclose(matrix.detach() - base, torch.as_tensor(change), atol=1e-6)
    assert float(torch.as_tensor(change).norm()) > 0
