"""The benchmarks: each explains itself and names what it missed, and what it compares is alike; nothing is measured."""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.testbed.capabilities import MissingCapability
from ringtune.job.job import Job, Model
from ringtune.schedule.plan import Plan
from tests.bench import d2ft_accuracy, paper_table, ring, sim
from tests.bench.outcomes import ROWS, UNHARMED
from tests.support.board_ring import COORDINATOR, NAMES
from tests.support.cases import cases
from tests.support.outcomes import Outcome, Row, problems_of
from tests.support.profiles import node
from tests.support.strikes import STRIKES

BENCHES = sorted(
    f"tests.bench.{path.stem}"
    for path in Path(sim.__file__).parent.glob("*.py")
    if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")
)
Figures = dict[str, Any]


@cases("name", BENCHES)
def test_bench_explains_itself(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its module loads, and ``--help`` prints its options."""
    module = importlib.import_module(name)
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_jobs_of_the_accuracy_bench_are_taken() -> None:
    """Every kind of training and policy is one that a job may have; no name of a run stands for two."""
    job = Job(model=Model(path="m")).with_overrides({"train.batch_size": 20})
    kinds = list(d2ft_accuracy.kinds())
    for one in kinds:
        found = job.with_overrides({"train.microbatches": 5, **one.keys})
        assert found.operations.is_chosen == (not one.label.startswith("standard")), one.label
    assert len({one.name(rate, 0) for one in kinds for rate in one.rates}) == 3 * len(kinds)


def test_operations_are_judged_at_the_best_rate_of_the_first_seed() -> None:
    """Within one point of standard with ``full`` and two with adapters, and above all of equal compute."""

    def results(**changes: float) -> list[dict[str, Any]]:
        means = {"standard": 0.80, "rotate": 0.791, **dict.fromkeys(d2ft_accuracy.EQUAL_COMPUTE, 0.78), **changes}
        return [
            {"part": "policies", "task": task, "optimizer": optimizer, "adapter": adapter, "label": label, "rate": rate,
             "seed": seed, "accuracy": mean + (seed - 1) / 100 - (rate == 0.1) / 10}
            for task, optimizer, adapter in itertools.product(
                ("text", "images"), d2ft_accuracy.OPTIMIZERS, d2ft_accuracy.ADAPTERS
            )
            for label, mean in means.items()
            for rate, seed in ((0.1, 0), (0.2, 0), (0.2, 1), (0.2, 2))
        ]  # fmt: skip

    def missed(found: list[dict[str, Any]]) -> list[str]:
        return d2ft_accuracy.misses(d2ft_accuracy.at_best(found))

    first = next(d2ft_accuracy.kinds())
    assert [d2ft_accuracy.rates_of(first, seed, results()) for seed in (0, 1)] == [first.rates, (0.2,)]
    assert missed(results()) == []
    assert missed(results(standard=0.805))[0] == "text, adamw, full: rotate 79.1%, standard 80.5%, at most 1% below"
    assert len(missed(results(standard=0.805))) == 4
    assert missed(results(spread=0.792))[0] == "text, adamw, full: rotate 79.1% is not above spread 79.2%"
    few = [result for result in results() if (result["label"], result["seed"]) != ("random", 2)]
    assert missed(few)[0] == "text, adamw, full: not measured with all seeds: random"
    text = d2ft_accuracy.table_text(d2ft_accuracy.at_best(results()))
    assert "| rotate | 79.1 % (78.1 to 80.1, 3 seeds) | 79.1 % (78.1 to 80.1, 3 seeds) |" in text


# ---- what is compared with what --------------------------------------------------------------------


def peak_bytes(plan: Plan) -> int:
    """Another figure for each method and number of micro-batches."""
    return {"single": 7, "pipeadapter": 100, "ringada": 1000}[plan.course.method.name] * plan.course.microbatches


def test_memory_over_single_divides_runs_of_equal_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    """RingAda with 4 micro-batches over Single with 4: Single with more of them holds fewer activations too."""
    seen: list[tuple[str, int, int]] = []

    def predict(plan: Plan, profile: object, **changes: object) -> SimpleNamespace:
        course = plan.course
        seen.append((course.method.name, course.microbatches, course.num_steps))
        size = peak_bytes(plan) * (2 if changes else 3)
        nodes = [SimpleNamespace(peak_memory_bytes=1), SimpleNamespace(peak_memory_bytes=size)]
        return SimpleNamespace(train_s=float(course.microbatches), bubble_share=0.0, nodes=nodes, depths=())

    monkeypatch.setattr(paper_table, "predict", predict)
    facts = node(paper_table.plan_of("single", 1, hosts=1, owners=1), paper_table.BOARDS[0])
    found = paper_table.table(facts)
    for count in paper_table.MICROBATCHES:
        assert found[f"memory_over_single_{count}"] == 1000 / 7
        assert found[f"memory_over_single_resident_{count}"] == 1000 / 7
        runs = found["runs"]
        assert runs[f"single-{count}"]["memory_touched_bytes"] == 2 * 7 * count
        assert runs[f"ringada-{count}"]["memory_resident_bytes"] == 3 * 1000 * count
    assert {steps for *_, steps in seen} == {paper_table.STEPS}, "speed-ups compare equal numbers of steps"


# ---- when a benchmark fails ------------------------------------------------------------------------


@cases("key", sim.TARGETS)
def test_reason_in_place_of_a_figure_misses_its_target(key: str) -> None:
    """What could not be measured is not reached; the bound itself is."""
    sign, bound = sim.TARGETS[key]
    beyond = bound * (1.01 if sign == "<=" else 0.99)
    assert not sim.is_reached(key, "not measured: no network namespaces")
    assert not sim.is_reached(key, None)
    assert sim.is_reached(key, bound) and not sim.is_reached(key, beyond)
    assert "MISSED" in sim.verdict(key, "not measured: no root")


def figures_at(targets: dict[str, tuple[str, float]], **changes: object) -> Figures:
    """Every target reached, but for the changes."""
    return {**{key: bound for key, (_, bound) in targets.items()}, **changes}


def main_of_sim(patch: pytest.MonkeyPatch, out: Path, figures: Figures, **parts: Callable[..., Figures]) -> int:
    """Run ``tests.bench.sim`` with parts that give these figures, but for those that are given."""
    known: Figures = {
        **dict.fromkeys(paper_table.SHOWN, 0.0),
        **dict.fromkeys(paper_table.STAGES_SHOWN, 0.0),
        "planner_over_even": 1.0,
        "microbatch_speedup_measured": 1.0,
    }
    known |= {"confirmed_depths": {}, "planner_over_even_on_boards": [], **figures}
    known |= {f"short_rows_speedup_{kind}": 1.0 for kind in ("simulated", "measured")}

    def part(found: Figures, **options: object) -> Figures:
        return known

    whole = sim.parts_of(sim.STEPS, 1)
    assert parts.keys() <= whole.keys()
    replaced = {name: (parts.get(name, part), keys) for name, (_, keys) in whole.items()}
    patch.setattr(sim, "parts_of", lambda steps, repeats: replaced)
    patch.setattr(sim, "OUT", out)
    patch.setattr("sys.argv", ["sim"])
    return sim.main()


def main_of_ring(patch: pytest.MonkeyPatch, out: Path, figures: Figures) -> int:
    """Run ``tests.bench.ring`` with one part that gives these figures."""
    patch.setattr(ring, "PARTS", {"all": lambda workspace: dict(figures)})
    patch.setattr(ring, "prepare", lambda *arguments: None)
    patch.setattr(ring, "demo_cache", lambda: None)
    patch.setattr(ring, "OUT", out)
    patch.setattr("sys.argv", ["ring"])
    return ring.main()


MAINS = {"sim": (main_of_sim, sim.TARGETS), "ring": (main_of_ring, ring.TARGETS)}


@cases("name", MAINS)
def test_bench_ends_with_1_on_a_miss_and_with_0_if_all_is_reached(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each target alone decides; the file says which were missed."""
    main, targets = MAINS[name]
    assert main(monkeypatch, tmp_path, figures_at(targets)) == 0
    for key, (sign, bound) in targets.items():
        bad = bound + 1 if sign == "<=" else bound - 1
        assert main(monkeypatch, tmp_path, figures_at(targets, **{key: bad})) == 1
        (line,) = json.loads((tmp_path / f"{name}.json").read_text())["missed"]
        assert line.startswith(key)


def test_simulation_bench_without_a_testbed_ends_with_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Figures that need boards hold the reason, and count as missed."""

    def missing(*arguments: object, **options: object) -> Figures:
        raise MissingCapability("no root")

    timed = {f"{method}_time_error" for method in sim.STEPS}
    others = {key: bound for key, bound in figures_at(sim.TARGETS).items() if key not in timed}
    assert main_of_sim(monkeypatch, tmp_path, others, times=missing) == 1
    found = json.loads((tmp_path / "sim.json").read_text())
    assert set(found["missed"]) == timed
    assert {found[key] for key in timed} == {"not measured: no root"}


# ---- faults ----------------------------------------------------------------------------------------

UNHARMED_RUN = {
    "code": 0,
    "message": "",
    "detection_s": None,
    "recovery_s": None,
    "steps_lost": 0,
    "steps_repeated": 0,
    "difference": 0.0,
}
LOST_RUN = UNHARMED_RUN | {"detection_s": 5.5, "recovery_s": 7.0}
ENDED_RUN = UNHARMED_RUN | {"code": 9, "message": "node c did not save step 8", "detection_s": 1.0}


def row(outcome: Outcome, **changes: object) -> Row:
    """A row of the matrix."""
    values = {"name": "F0", "strike": "stopped", "victim": "c", "seconds": 1.0, "outcome": outcome, "code": 0}
    return Row(**{**values, **changes})  # type: ignore[arg-type]


def test_rows_name_what_there_is() -> None:
    """Every strike and victim exists, no row is there twice, and what ends a run has its exit code and words."""
    assert len({each.title for each in ROWS}) == len(ROWS)
    for each in ROWS:
        assert each.strike in STRIKES and each.victim in (*NAMES, COORDINATOR)
        assert (each.outcome is Outcome.RESUMED) == bool(each.code and each.says), each.title


@cases(
    ("stated", "found", "is_resumed", "problem"),
    [
        (row(UNHARMED), UNHARMED_RUN, False, ""),
        (row(UNHARMED), LOST_RUN, False, "not unharmed"),
        (row(UNHARMED), UNHARMED_RUN | {"difference": 1e-6}, False, "weights differ by 1e-06"),
        (row(UNHARMED), UNHARMED_RUN | {"steps_lost": 2}, False, "2 steps are missing"),
        (row(Outcome.WITHOUT, detected_s=8.0), LOST_RUN, False, ""),
        (row(Outcome.WITHOUT, detected_s=5.0), LOST_RUN, False, "detected after 5.5 s, not within 5 s"),
        (row(Outcome.WITHOUT), UNHARMED_RUN, False, "did not go on without it"),
        (row(Outcome.WITHOUT), LOST_RUN, True, "did not go on without it"),
        (row(Outcome.RESUMED, code=9, says="node c"), ENDED_RUN, True, ""),
        (row(Outcome.RESUMED, code=9, says="node d"), ENDED_RUN, True, "did not end with 9 and 'node d'"),
        (row(Outcome.RESUMED, code=4, says="node c"), ENDED_RUN, True, "did not end with 4"),
        (row(Outcome.RESUMED, code=9, says="node c"), LOST_RUN, False, "did not end with 9"),
    ],
)
def test_judgement_says_what_is_not_as_stated(
    stated: Row, found: dict[str, object], is_resumed: bool, problem: str
) -> None:
    """One line, which begins with what is wrong; none where all is as stated."""
    problems = problems_of(stated, found, is_resumed=is_resumed)
    assert len(problems) == bool(problem)
    assert all(line.startswith(problem) for line in problems)
