"""The benchmarks: each explains itself and names what it missed, and what it compares is alike; nothing is measured."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from ringtune.job.job import Job, Model
from tests.bench import d2ft_accuracy, paper_table
from tests.bench.outcomes import ROWS
from tests.support.board_ring import COORDINATOR, NAMES
from tests.support.cases import cases
from tests.support.outcomes import STRIKES, Outcome
from tests.support.trials import differences

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
