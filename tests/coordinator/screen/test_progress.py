"""Progress as JSON lines, as plain lines and on a terminal, and what a command waits for."""

from __future__ import annotations

import io
import json
import threading
from typing import Any

import pytest
from rich.console import Console

from coordinator.screen.live_tables import LiveProgress
from coordinator.screen.progress import (
    JsonProgress,
    PlainProgress,
    Progress,
    WaitNotice,
)
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
