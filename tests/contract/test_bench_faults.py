"""The benchmarks of faults: what they state, how they judge, and what they keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.bench import kept_trials, trust
from tests.bench.kept_trials import KeptTrials
from tests.bench.outcomes import ROWS, UNHARMED, figures_of
from tests.support.board_ring import COORDINATOR, LEASE_S, NAMES
from tests.support.cases import cases
from tests.support.outcomes import Outcome, Row, problems_of
from tests.support.strikes import STRIKES

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


def test_rows_that_lose_somebody_are_longer_than_a_lease() -> None:
    """A node that is stopped or cut off for less than a lease is lost by no row, for longer by all; no coordinator."""
    for each in ROWS:
        if each.victim == COORDINATOR and each.strike == "stopped":
            assert each.outcome is UNHARMED, each.title
        elif each.strike in ("stopped", "link down", "unheard by all", "unheard by the coordinator"):
            assert (each.seconds < LEASE_S) == (each.outcome is UNHARMED), each.title


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


def test_figures_of_a_row_count_what_went_otherwise() -> None:
    """A trial without an end counts as one that is not as stated, and has no times."""
    trials: list[dict[str, Any]] = [
        LOST_RUN | {"problems": [], "rejoined_s": 0.1, "wall_s": 9.0},
        {"problems": ["no outcome: it hangs"]},
    ]
    found = figures_of(row(Outcome.WITHOUT), trials)
    assert (found["trials"], found["as_stated"], found["problems"]) == (2, 1, ["no outcome: it hangs"])
    assert found["detection"]["median_s"] == 5.5 and found["rejoined"]["count"] == 1


def test_trials_are_kept_for_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their case; a call that does not go on forgets them."""
    monkeypatch.setattr(kept_trials, "FOLDER", tmp_path)
    KeptTrials("some", go_on=False).add("a", {"n": 1})
    assert KeptTrials("some", go_on=True).of("a") == [{"n": 1}]
    assert KeptTrials("some", go_on=True).of("b") == []
    assert KeptTrials("some", go_on=False).of("a") == []


def test_parts_that_went_well_are_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One that failed is, and how each went is kept after each."""
    monkeypatch.setattr(trust, "DONE", tmp_path / "parts.json")
    parts = {"well": ("tests.no_such_module",), "ill": ("tests.no_such_module",), "new": ("keyword",)}
    found = trust.carry_out(parts, {"well": "done, 3.0 minutes", "ill": "failed with 1, 2.0 minutes"}, go_on=True)
    assert found["well"] == "done, 3.0 minutes"
    assert found["ill"].startswith("failed with 1, 0.0") and found["new"].startswith("done")
    assert (tmp_path / "parts.json").is_file() and "== new: done" in capfd.readouterr().out
