"""Progress as JSON lines, as plain lines and on a terminal, and what a command waits for."""

from __future__ import annotations

import io
import json
import threading
from typing import Any

import pytest
from rich.console import Console

from coordinator.api.output import make_progress
from coordinator.screen.live_tables import LiveProgress
from coordinator.screen.progress import (
    JsonProgress,
    PlainProgress,
    Progress,
    WaitNotice,
    evaluating_line,
    evaluation_line,
    report_lines,
)
from ringtune.techniques.operations import chosen_line
from tests.support.plans import make_plan

PLAN = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"])
EVALUATION = {"step": 8, "count": 10, "loss": 0.25, "accuracy": 0.9}
REPORT: dict[str, Any] = {
    "steps": 8,
    "wall_s": 2.5,
    "steps_s": 1.5,
    "predicted_steps_s": 1.2,
    "phases_s": {"planning": 0.4, "training": 2.0},
    "nodes": {"a": {"busy_s": 1.0, "peak_rss_bytes": 2**20, "sent_bytes": 10}},
    "eval": EVALUATION,
}


def step(number: int, *, loss: float | None = 0.5) -> dict[str, Any]:
    """Progress of one step."""
    return {
        "kind": "train",
        "seq": number,
        "step": number,
        "num_steps": 8,
        "round": 1,
        "initiator": "a",
        "depth": 2,
        "loss": loss,
    }


OPERATIONS = {"kind": "operations", "step": 6, "digest": "ab", "full": 12, "forward_only": 3, "shortcut": 5}


def test_lines_of_operations_and_scores() -> None:
    """A table that names no batch leaves every batch as it is."""
    nothing = {**OPERATIONS, "full": 0, "forward_only": 0, "shortcut": 0}
    assert chosen_line(nothing) == "operations chosen after step 6: all full"
    # The lines of a turn differ, and say how many are to come
    scored = {**step(0), "kind": "score", "batch": 3, "batches": 30}
    assert evaluating_line(scored) == "score after step 0: 3 of 30 batches, a"
    assert evaluating_line(scored | {"kind": "generate"}) == "generate after step 0: 3 of 30 tokens, a"


def show(progress: Progress) -> None:
    """A whole run."""
    with progress:
        progress.state("training")
        progress.plan(PLAN, {"a": 2**20, "b": 2**20})
        for number in range(1, 9):
            progress.step(step(number))
        progress.step({**step(8, loss=0.0012), "kind": "evaluate"})
        for line in ({"kind": "unfreeze", "step": 6, "depth": 3}, OPERATIONS, {"kind": "evaluation", **EVALUATION}):
            progress.item(line)
        progress.report(REPORT)
        progress.note("done")


def test_json_progress_is_an_object_a_line() -> None:
    """Every line parses, says what it is, and no step is left out."""
    stream = io.StringIO()
    show(JsonProgress(stream))
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [event["event"] for event in events] == [
        "state",
        "plan",
        *["step"] * 9,
        "unfreeze",
        "operations",
        "evaluation",
        "report",
        "note",
    ]
    assert events[-5] == {"event": "unfreeze", "step": 6, "depth": 3}
    assert events[-4] == {"event": "operations", **{key: OPERATIONS[key] for key in OPERATIONS if key != "kind"}}
    assert events[1]["slices"] == {"a": [0, 2], "b": [2, 4]}
    assert events[-2]["report"]["wall_s"] == 2.5


def test_plain_progress_is_terse() -> None:
    """Where output is no terminal, the first and the last step are shown, and some between."""
    stream = io.StringIO()
    show(PlainProgress(stream))
    lines = stream.getvalue().splitlines()
    assert "  a  blocks [0, 2), owns 10 rows, needs 1.0 MiB" in lines
    assert [line for line in lines if line.startswith("step")][-1] == "step 8/8: round 1, a, depth 2, loss 0.5000"
    assert "operations chosen after step 6: 60 % full, 15 % forward-only, 25 % skipped" in lines
    assert "evaluation after 8 steps: accuracy 0.9000, loss 0.2500 on 10 rows" in lines
    at = lines.index("8 steps in 1.5 s (predicted 1.2 s)")
    whole = "whole run with joining, measuring and collecting 2.5 s"
    assert lines[at + 1] == f"training with evaluations and checkpoints 2.0 s, {whole}"
    assert "0.0012" not in stream.getvalue(), "the loss of one evaluation batch is no loss of the run"
    assert "\x1b" not in stream.getvalue()


def test_plain_progress_shows_no_step_that_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of all parameters that goes back to a checkpoint trains its last steps again."""
    monkeypatch.setattr("coordinator.screen.progress._PLAIN_INTERVAL_S", 0.0)
    stream = io.StringIO()
    shown = PlainProgress(stream)
    for number in (1, 2, 3, 2, 3, 4):
        shown.step(step(number))
    assert [line.partition(":")[0] for line in stream.getvalue().splitlines()] == [f"step {n}/8" for n in (1, 2, 3, 4)]


def test_report_of_one_step_with_a_move_counts_the_move_as_training() -> None:
    """One step has no plural and no mean; the seconds of training are those that ``sim`` calls measured."""
    phases = {"training": 2.0, "moving": 0.5}
    train = {"first_loss": 0.5, "last_loss": 0.5, "mean_loss": 0.5, "mean_steps": 1}
    audit = {"drawn": 8, "checked": 8, "disagreed": 1, "seconds": 0.25}
    lines = report_lines({**REPORT, "steps": 1, "phases_s": phases, "train": train, "audit": audit})
    (told,) = (line for line in lines if line.startswith("audit: 8 of 8 drawn micro-batches"))
    assert told.endswith("1 with another result; turns waited 250 ms for it")
    assert lines[0] == "1 step in 1.5 s (predicted 1.2 s), loss of the last one 0.5000"
    assert lines[1].startswith("training with evaluations, checkpoints and moves 2.5 s, whole run with joining")
    assert evaluation_line({**EVALUATION, "step": 1}).startswith("evaluation after 1 step: ")


def test_evaluation_line_names_what_the_loss_is_a_mean_of() -> None:
    """A language model predicts tokens, a long context has several windows."""
    rows: list[tuple[dict[str, Any], str]] = [
        ({"accuracy": 0.5}, "accuracy 0.5000, loss 1.0000 on 7 rows"),
        ({"accuracy": 0.5, "perplexity": 2.5}, "accuracy 0.5000, perplexity 2.5000, loss 1.0000 on 7 tokens"),
        (
            {"f1": 0.5, "exact_match": 0.25, "questions": 5},
            "loss 1.0000 on 7 windows; f1 0.5000, exact match 0.2500 on 5 questions",
        ),
    ]
    for figures, words in rows:
        entry = {"step": 8, "count": 7, "loss": 1.0, **figures}
        assert evaluation_line(entry) == f"evaluation after 8 steps: {words}"


def test_plain_progress_names_the_units_of_a_group_and_a_diverged_loss() -> None:
    """What a step of HiFT trained is no depth: of embedding and head it would be 0."""
    stream = io.StringIO()
    PlainProgress(stream).step({**step(8), "depth": 0, "trains": "embedding"})
    assert stream.getvalue() == "step 8/8: round 1, a, trains embedding, loss 0.5000\n"
    # A loss that is no number does not end the program
    stream = io.StringIO()
    progress = PlainProgress(stream)
    progress.step(step(8, loss=None))
    progress.item({"kind": "evaluation", **EVALUATION, "loss": None})
    assert "loss -" in stream.getvalue()


def test_live_progress_shows_nodes_and_bar_on_a_terminal() -> None:
    """On a terminal each node has a line with what it hosts and trains."""
    stream = io.StringIO()
    show(LiveProgress(Console(file=stream, force_terminal=True, width=120)))
    text = stream.getvalue()
    assert "[2, 4)" in text
    assert "2 of 2" in text
    assert "8/8" in text
    # Pipes and files get plain lines
    assert isinstance(make_progress(as_json=False, stream=io.StringIO()), PlainProgress)
    assert isinstance(make_progress(as_json=True, stream=io.StringIO()), JsonProgress)


def test_live_progress_ends_with_the_table_then_the_result() -> None:
    """What is below the last table is the result, and no other loss than the last step's is beside the bar."""
    stream = io.StringIO()
    progress = LiveProgress(Console(file=stream, force_terminal=True, width=120))
    with progress:
        progress.plan(PLAN, {})
        progress.step(step(8, loss=0.25))
        progress.step(step(7, loss=0.75))
        progress.step({**step(8, loss=0.0012), "kind": "evaluate"})
        progress.state("collecting")
        progress.report(REPORT)
        progress.note("the run's files are in out")
    text = stream.getvalue()
    result = text.index("8 steps in 1.5 s")
    assert "8/8" not in text[result:] and "[2, 4)" not in text[result:]
    assert text.rstrip().endswith("the run's files are in out")
    last = text[:result].rpartition("done")[2]
    assert "8/8" in last and "loss 0.2500" in last
    assert "0.0012" not in text and "0.7500" not in last


WAIT_S = 30.0


class Screen(io.StringIO):
    """A stream that knows when something was written, and may be a terminal."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal
        self.written = threading.Event()

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._is_terminal

    def write(self, text: str) -> int:
        """Take a text, and tell."""
        count = super().write(text)
        self.written.set()
        return count


def test_waiting_says_each_thing_once_and_leaves_a_terminal_as_it_was() -> None:
    """A line for each thing that takes long; the result of the work is not touched."""
    screen = Screen(is_terminal=False)
    with WaitNotice("reading train.csv", stream=screen, quiet_s=0.0) as waiting:
        assert screen.written.wait(WAIT_S)
        screen.written.clear()
        waiting.state("joining")
        assert screen.written.wait(WAIT_S)
    assert screen.getvalue() == "reading train.csv ...\nwaiting for nodes to join ...\n"
    # The line with the seconds is written over with blanks in the end
    screen = Screen(is_terminal=True)
    with WaitNotice("planning", stream=screen, quiet_s=0.0):
        assert screen.written.wait(WAIT_S)
    first, *_, blank, end = screen.getvalue().split("\r")[1:]
    assert first.startswith("planning ... ") and blank.isspace() and end == ""
    # Nothing is written before the quiet time is over, whatever ends it
    screen = Screen(is_terminal=True)
    with pytest.raises(ValueError, match="wrong"), WaitNotice("planning", stream=screen, quiet_s=WAIT_S):
        raise ValueError("wrong")
    assert screen.getvalue() == ""
