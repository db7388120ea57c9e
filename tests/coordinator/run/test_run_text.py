"""Text about a run: figures with their rows, a loss that rises, a run that ends, an owner that is left out."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
from typing import Any

import pytest

from coordinator.run.recorder import RunRecorder
from coordinator.run.report import figures
from coordinator.run.run_text import all_figures, figures_text, stop_text, training_facts
from coordinator.screen.progress import PlainProgress
from coordinator.web.page_state import metrics_event
from ringtune.costs.profile import Profile
from ringtune.job.job import Job
from ringtune.run_control import events as rd
from ringtune.run_control.evaluation import name_of
from ringtune.schedule.migration import without_owner
from ringtune.schedule.turns import NONE_DONE, Evaluations
from ringtune.v1 import control_pb2
from tests.coordinator.run.test_report import PLAN, ledger
from tests.support.fake_agents import facts, job
from tests.support.plans import make_plan

PROFILE = Profile(nodes=tuple(facts(node) for node in ("a", "b")))


def counted(rows: int) -> dict[str, float]:
    """Sums of an evaluation over 29 rows, of which so many are counted by class; all of class 0 are right."""
    right = 2 * rows // 3
    found = {"count": 29.0, "loss_sum": 29 * 0.5, "correct": 18.0}
    return found | ({name_of(0, 0): float(right), name_of(1, 0): float(rows - right)} if rows else {})


@pytest.mark.parametrize(
    ("entry", "lines"),
    [
        ({"rows": 9, "count": 9, "loss": 0.5, "counted_rows": 9}, ["rows: 9", "loss: 0.5000"]),
        ({"rows": 9, "count": 111, "perplexity": 2.5}, ["rows: 9", "count: 111", "perplexity: 2.5000"]),
        (
            {"rows": 29, "count": 29, "macro_f1": 0.5, "counted_rows": 20, "classes": {}},
            ["rows: 29", "macro_f1: 0.5000 (on 20 of 29 rows)", "counted_rows: 20"],
        ),
    ],
)
def test_a_count_that_is_the_rows_stands_once(entry: dict[str, Any], lines: list[str]) -> None:
    """Tokens of a language model, and rows that are counted by class where they are fewer, stand beside the rows."""
    assert all_figures(entry) == lines


@pytest.mark.parametrize("rows", [0, 20, 29])
def test_a_figure_has_the_same_rows_wherever_it_stands(rows: int) -> None:
    """Line of an evaluation, end of a run and list of the page: a macro F1 of 20 of 29 rows says so on each of them."""
    books = ledger()
    entry = books.evaluation_done(PLAN.course.num_steps, counted(rows))
    words = f"accuracy 0.6207, loss 0.5000 on 29 rows; macro f1 0.3939 on {rows} of 29 rows"
    if rows == 29:
        words = "accuracy 0.6207, macro f1 0.3958, loss 0.5000 on 29 rows"
    if not rows:
        words = "accuracy 0.6207, loss 0.5000 on 29 rows"
    stream = io.StringIO()
    screen = PlainProgress(stream)
    screen.evaluation(entry)
    screen.report(books.report(run_id="r", wall_s=1.0, phases_s={}, predicted_bytes={}))
    told = metrics_event(entry)
    assert told is not None
    assert [words in line for line in stream.getvalue().splitlines() if "accuracy" in line] == [True, True]
    assert words in told.text


def test_figures_of_any_task_stand_once_with_their_rows() -> None:
    """Whatever an evaluation counts, no figure is without rows, and those of fewer rows are apart."""
    parts: list[dict[str, float]] = [
        {"count": 9.0, "loss_sum": 4.5},
        {"correct": 3.0},
        {"tokens": 9.0},
        {"questions": 4.0, "f1_sum": 2.0, "exact_sum": 1.0},
        {"words": 9.0, "cut_words": 2.0},
        {name_of(0, 0): 5.0},
    ]
    for chosen in itertools.product((False, True), repeat=len(parts) - 1):
        values = {**parts[0]}
        for part, is_in in zip(parts[1:], chosen, strict=True):
            values |= part if is_in else {}
        entry: dict[str, Any] = {"count": 9, **figures(values, ("x", "y"))}
        text = figures_text(entry)
        groups = text.split("; ")
        assert all(" on " in group for group in groups), text
        for name in ("accuracy", "macro_f1", "f1", "exact_match", "perplexity", "loss"):
            if entry.get(name) is not None:
                word = f"{name.replace('_', ' ')} {entry[name]:.4f}"
                assert sum(part.strip().startswith(word) for group in groups for part in group.split(",")) == 1, text


def heard(losses: list[float | None], wanted: Job) -> tuple[list[str], dict[str, Any]]:
    """The notes of a run with these evaluations, one after each two steps, and its report."""
    events: list[control_pb2.RunEvent] = []
    books = RunRecorder(PLAN, wanted, PROFILE, events.append)
    for index, loss in enumerate(losses):
        values = (("count", 2.0), ("loss_sum", float("nan") if loss is None else 2 * loss))
        step = PLAN.course.num_steps - 2 * (len(losses) - 1 - index)
        books.log(rd.LogEvaluation(step, values))
    report = books.ledger.report(run_id="r", wall_s=1.0, phases_s={}, predicted_bytes={})
    lines = [json.loads(event.metrics_json) for event in events if event.metrics_json]
    assert lines[-1].get("risen") == report.get("risen")
    return [event.note for event in events if event.note], report


@pytest.mark.parametrize(
    ("losses", "notes", "at_end"),
    [
        ([0.7, 0.6, 0.5, 0.4], 0, False),
        ([0.7, 0.5, 0.51, 0.52], 0, False),  # less than 5 %
        ([0.5, 0.7, 0.4, 0.41], 0, False),
        ([0.7, 0.6, 0.5, 0.9], 0, True),  # told at the end
        ([0.5, 0.8, 0.9, 1.2], 1, True),  # told once on the way
        ([0.5, 0.8, 0.9, 0.4], 1, False),
        ([0.5, None, None, 0.6], 0, True),
        ([None, None, None, None], 0, False),
    ],
)
def test_a_loss_that_rises_is_told_once_on_the_way_and_at_the_end(
    losses: list[float | None], notes: int, at_end: bool
) -> None:
    """5 % above the best after two evaluations that were no better, or with the last one."""
    told, report = heard(losses, job(train__eval_every=2))
    assert len(told) == notes and ("risen" in report) == at_end
    if told:
        assert told == [
            "evaluation loss has risen since step 2 (0.5 -> 0.9): the result of step 2 was better; "
            "train.keep_best = true keeps it"
        ]


def test_a_rise_names_the_key_that_this_job_may_set() -> None:
    """A run that keeps its best result says so; one that can't is told to end earlier; patience has its own words."""
    losses: list[float | None] = [0.5, 0.8, 0.9, 1.2]
    told = {
        name: heard(losses, wanted)[1].get("risen", "").partition(": ")[2]
        for name, wanted in {
            "keeps": job(train__keep_best=True, train__eval_every=2),
            "can't": job(train__eval_every=2, recovery__owners="skip", recovery__copies="next"),
            "patient": job(train__patience_evals=3, train__eval_every=2),
        }.items()
    }
    assert told == {
        "keeps": "the result of step 2 is kept",
        "can't": "the result of step 2 was better; train.max_steps = 2 ends there",
        "patient": "",
    }


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


def test_owner_that_is_left_out_is_told_with_its_turns_and_compared_with_nobody() -> None:
    """Its rows count among all; that others had more turns is no advice to change the job."""
    course = make_plan([("a", 0, 4)], ["a", "b", "c"], num_steps=60, local_iterations=2).course
    found = training_facts(without_owner(course, "b", 4))
    assert found["left_out"] == ["b"]
    assert found["rows"] == 30 and found["rounds"] == 10
    assert {name: own["steps"] for name, own in found["owners"].items()} == {"a": 20, "c": 20, "b": 2}
    assert found["steps"] == 42
    assert "b is lost, and its rows are left out after 1 of its turns" in found["notes"]
    assert not any("times as often" in note for note in found["notes"])
    assert training_facts(course)["left_out"] == []
    by_rows = dataclasses.replace(course, turns="rows")
    assert training_facts(without_owner(by_rows, "b", 4))["steps"] == 42
