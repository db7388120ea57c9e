"""What the benchmarks call their figures, and when they fail; nothing is measured here."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.testbed import groups
from deploy.testbed.capabilities import MissingCapability
from ringtune.schedule.plan import Plan
from tests.bench import auto_activations, memory_boards, paper_table, predictions, ring, sim, stages_table
from tests.support.cases import cases
from tests.support.plans import make_plan
from tests.support.profiles import node, profile_of

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
        **dict.fromkeys(stages_table.SHOWN, 0.0),
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


def memory_figures(**changes: object) -> Figures:
    """One model's four runs, as they have to be."""
    good: Figures = {
        "free": {"exit_code": 0, "boards": {"board-0": {"error": 0.10}}},
        "limited": {"exit_code": 0, "kills": 0},
        "refused": {"exit_code": 6, "kills": 0},
        "found": {"exit_code": 6, "kills": 0},
    }
    return {"models": {"minilm": {**good, **changes}}}


@cases(
    ("changes", "word"),
    [
        ({"free": {"exit_code": 0, "boards": {"board-0": {"error": -0.11}}}}, "board-0"),
        ({"limited": {"exit_code": 0, "kills": 1}}, "limited"),
        ({"limited": {"exit_code": 4, "kills": 0}}, "limited"),
        ({"refused": {"exit_code": 0, "kills": 0}}, "refused"),
        ({"found": {"exit_code": 0, "kills": 0}}, "found"),
        ({"free": {"exit_code": 4}}, "free"),
    ],
)
def test_memory_bench_names_what_is_missed(changes: Figures, word: str) -> None:
    """A board that is off, a board that died, a run that was not refused."""
    assert memory_boards.missed(memory_figures()) == []
    assert word in " ".join(memory_boards.missed(memory_figures(**changes)))


@pytest.fixture
def row() -> Callable[..., predictions.Row]:
    """One run and its prediction, 4 % too short."""

    def make(**changes: Any) -> predictions.Row:
        values = {"ring": "slow", "method": "ringada", "basis": "own", "steps": 10, "measured_s": 100.0}
        return predictions.Row(**{**values, "predicted_s": 96.0, **changes})

    return make


def test_predictions_bench_judges_median_and_worst_of_each_basis(row: Callable[..., predictions.Row]) -> None:
    """Rows of the profile from before the change are shown only; a run that is too short is a miss."""
    good = [row(), row(), row(predicted_s=109.0), row(basis="old", predicted_s=50.0), row(basis="measure")]
    assert predictions.misses(good, min_s=60.0) == []
    assert "median" in " ".join(predictions.misses([*good, row(predicted_s=107.0), row(predicted_s=107.0)], min_s=60))
    assert "worst" in " ".join(predictions.misses([*good, row(basis="measure", predicted_s=89.0)], min_s=60.0))
    assert "took only 59" in " ".join(predictions.misses([row(measured_s=59.0, predicted_s=59.0)], min_s=60.0))


def test_predictions_bench_changes_every_ring_for_another_method() -> None:
    """Links twice and a board once: a run's own profile is judged with each method."""
    assert set(predictions.CHANGES) == {ring.name for ring in predictions.RINGS}
    assert sorted(method for method, _ in predictions.CHANGES.values()) == sorted(predictions.METHODS)
    assert {change for _, change in predictions.CHANGES.values()} == {
        predictions.change_links,
        predictions.change_board,
    }


def test_predictions_bench_changes_the_board_that_hosts_all_blocks_of_single(monkeypatch: pytest.MonkeyPatch) -> None:
    """The board of most cores gets more of them, and its times are expected to shrink; the others stay."""
    (fast,) = [ring for ring in predictions.RINGS if predictions.CHANGES[ring.name][1] is predictions.change_board]
    written: list[groups.Setting] = []
    mounts = groups.GroupMounts(version=2, cpu=Path("/groups"), memory=Path("/groups"))
    here = SimpleNamespace(choose=lambda layout: (mounts, None))
    monkeypatch.setattr(predictions, "find_capabilities", lambda: here)
    monkeypatch.setattr(groups, "apply", written.extend)
    layout = predictions.layout_of(fast)
    names = [board.name for board in layout.boards]
    before = profile_of(make_plan([(name, at, at + 1) for at, name in enumerate(names)], names, num_blocks=4))
    after = predictions.change_board(layout, before)
    board = names[fast.cores.index(max(fast.cores))]
    assert {setting.path.parent.name for setting in written} == {f"board-{board}"}
    assert written[0].path.name == "cpu.max" and written[0].text == "8000 10000"
    for name in names:
        ratio = before.by_name[name].block_forward_s / after.by_name[name].block_forward_s
        assert ratio == pytest.approx(0.8 / 0.6 if name == board else 1.0)


def ring_figures(**changes: object) -> Figures:
    """Three rings as they have to be, the last one with changes."""
    good: Figures = {"exit_code": 0, "kills": 0, "boards": {"board-0": {"policy": "recompute", "error": -0.1}}}
    return {"seq_bn": good, "full": good, "vit": {**good, **changes}}


@cases(
    ("changes", "word"),
    [
        ({"exit_code": 6, "boards": {}}, "exit code 6"),
        ({"kills": 1}, "1 kills"),
        ({"boards": {"board-0": {"policy": "none", "error": 0.0}}}, "no slice saves activations"),
        ({"boards": {"board-0": {"policy": "both", "error": 0.11}}}, "board-0 is +11.0% off"),
    ],
)
def test_auto_bench_names_what_is_missed(changes: Figures, word: str) -> None:
    """A run that did not end, a board that died, nothing saved, a prediction that is off."""
    assert auto_activations.missed(ring_figures()) == []
    assert word in " ".join(auto_activations.missed(ring_figures(**changes)))
