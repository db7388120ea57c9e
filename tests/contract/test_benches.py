"""The benchmarks: each explains itself and names what it missed, and what it compares is alike; nothing is measured."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ringtune.job.job import Job, Model
from tests.bench import d2ft_accuracy, paper_table, trust
from tests.bench.outcomes import ROWS
from tests.support.board_ring import COORDINATOR, NAMES
from tests.support.cases import cases
from tests.support.outcomes import STRIKES, Outcome
from tests.support.trials import Trial, differences

BENCHES = sorted(
    f"tests.bench.{path.stem}"
    for path in Path(paper_table.__file__).parent.glob("*.py")
    if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")
)


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


def test_rows_name_what_there_is() -> None:
    """Every strike and victim exists, no row is there twice, and what ends a run has its exit code and words."""
    assert len({each.title for each in ROWS}) == len(ROWS)
    for each in ROWS:
        assert each.strike in STRIKES and each.victim in (*NAMES, COORDINATOR)
        assert (each.outcome is Outcome.RESUMED) == bool(each.code and each.says), each.title


def test_run_differs_in_weights_or_in_lines_of_its_books() -> None:
    """What is missing or there twice is named; lines in another order are no undisturbed run's either."""
    assert differences(1e-9, [1, 2, 3], [1, 2, 3]) == []
    assert differences(1e-6, [1, 2, 3], [1, 2, 3]) == ["weights differ by 1e-06"]
    assert differences(0.0, [1, 3, 3], [1, 2, 3]) == ["3 lines of books in place of 3; missing or twice: 2, 3"]
    assert len(differences(0.0, [2, 1, 3], [1, 2, 3])) == 1


class Rings:
    """Rings of a bench that carry nothing out; ``made`` has the name of each, and its trials."""

    def __init__(self) -> None:
        self.made: list[list[str]] = []

    @contextmanager
    def open(self, _: Path, name: str) -> Iterator[list[str]]:
        """The next ring."""
        self.made.append([name])
        yield self.made[-1]


def case(name: str, ring: str = "still", *, is_last: bool = False, ends: bool = True) -> trust.Case:
    """A trial that is good, or has no outcome."""

    def carry_out(made: list[str]) -> Trial:
        made.append(name)
        if not ends:
            raise AssertionError("the run does not end")
        return Trial(problems=(), wall_s=2.0, figures={"deaths": len(made), "noticed_s": 1.0})

    return trust.Case("fixed", name, carry_out, ring, is_last)


def carried_out(rings: Rings, cases: list[trust.Case], *, go_on: bool = False) -> dict[str, list[Trial]]:
    """The trials of some cases."""
    return trust.carry_out(cases, rings.open, trust.KeptTrials("some", go_on=go_on))


def test_cases_share_a_ring_until_one_has_no_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or is the last of its ring; what an earlier call has kept is not done again, however often a case is repeated."""
    monkeypatch.setattr(trust, "FOLDER", tmp_path / "trials")
    all_cases = [
        case("a"),
        case("b", ends=False),
        case("c"),
        case("c"),
        case("d", is_last=True),
        case("e"),
        case("f", "moves"),
    ]
    rings, again = Rings(), Rings()
    (trials,) = carried_out(rings, all_cases).values()
    assert rings.made == [["still", "a", "b"], ["still", "c", "c", "d"], ["still", "e"], ["moves", "f"]]
    assert [trial.problems for trial in trials if trial.problems] == [("no outcome: the run does not end",)]
    assert carried_out(again, [*all_cases, case("c")], go_on=True)["fixed"][:-1] == trials
    assert again.made == [["still", "c"]]
    figures = trust.summary(trials)
    assert (figures["trials"], figures["good"], figures["deaths"]) == (7, 6, {"sum": 15, "largest": 4})
    assert figures["noticed_s"] == {"count": 6, "median_s": 1.0, "p95_s": 1.0, "longest_s": 1.0}
