"""A run that ends early says why, on the screen and in its files."""

from __future__ import annotations

from coordinator.records.stop_text import stop_text
from ringtune.schedule.turns.early_stop import NONE_DONE, Evaluations
from tests.coordinator.records.test_report import ledger


def test_stop_text_names_the_best_evaluation_and_whose_result_it_is() -> None:
    """The result is that of the last step, not of the best evaluation, and the sentence says so."""
    known = Evaluations(step=40, best=0.5, best_step=20, waited=2)
    assert stop_text(40, known) == (
        "the run ends with step 40: the loss of 2 evaluations was not below 0.5000, that after step 20; the result is "
        "that of step 40"
    )
    assert "1 evaluation was not below that of any" in stop_text(10, NONE_DONE.after(10, float("nan")))


def test_stopped_run_has_the_decision_in_metrics_and_report() -> None:
    """One line, and the same in the report; a run with all its steps has none."""
    books = ledger()
    assert "stopped" not in books.report(run_id="r", wall_s=1.0, phases_s={}, predicted_bytes={})
    line = books.stopped(40, Evaluations(step=40, best=0.5, best_step=20, waited=2))
    assert line == {"kind": "stop", "step": 40, "best": 0.5, "best_step": 20, "waited": 2}
    found = books.report(run_id="r", wall_s=1.0, phases_s={}, predicted_bytes={})["stopped"]
    assert found == {name: value for name, value in line.items() if name != "kind"}
