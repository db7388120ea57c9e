"""Show a run's events as plain lines or as JSON lines; terminals have ``live_progress``."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from coordinator.records.step_lines import STEP_KIND, LastStep
from coordinator.records.training_facts import training_facts
from coordinator.screen.join_hints import join_lines, listening_line
from coordinator.screen.planned.helpers_text import helper_lines
from coordinator.screen.planned.training_text import training_lines
from coordinator.screen.progress_lines import (
    evaluating_line,
    evaluation_line,
    operations_line,
    plan_lines,
    report_lines,
    step_line,
    unfreeze_line,
)
from ringtune.schedule.plan import Plan
from ringtune.texts import printable

_PLAIN_INTERVAL_S = 2.0


class Progress:
    """The interface that shows a run's events; this class shows nothing."""

    def __enter__(self) -> Self:
        """Begin to show events."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the terminal as it was."""

    def state(self, state: str) -> None:
        """Show that the run is in this phase now."""

    def plan(self, plan: Plan, memory_bytes: Mapping[str, int]) -> None:
        """Show the plan, with the bytes of memory that each node is expected to need."""

    def step(self, step: Mapping[str, Any]) -> None:
        """Show an item that is done."""

    def unfreeze(self, entry: Mapping[str, Any]) -> None:
        """Show the step from which one more block trains, as the run has decided."""

    def operations(self, entry: Mapping[str, Any]) -> None:
        """Show from which step on another operation table holds, as the run has chosen."""

    def evaluation(self, entry: Mapping[str, Any]) -> None:
        """Show a complete evaluation."""

    def report(self, report: Mapping[str, Any]) -> None:
        """Show the totals of a run that is done."""

    def listening(self, address: str, reachable: str, *, trust: Path | None = None) -> None:
        """Show where a coordinator listens, and the address at which nodes and users reach it."""

    def note(self, text: str) -> None:
        """Show any other line of text."""


class SpokenProgress(Progress):
    """Shows the rare events as lines, each passed to ``note``."""

    def unfreeze(self, entry: Mapping[str, Any]) -> None:
        """Show step and depth on a line."""
        self.note(unfreeze_line(entry))

    def operations(self, entry: Mapping[str, Any]) -> None:
        """Show the shares of the three operations on a line."""
        self.note(operations_line(entry))

    def evaluation(self, entry: Mapping[str, Any]) -> None:
        """Show accuracy and loss on a line."""
        self.note(evaluation_line(entry))

    def report(self, report: Mapping[str, Any]) -> None:
        """Show a line for all nodes and one for each."""
        for line in report_lines(report):
            self.note(line)

    def listening(self, address: str, reachable: str, *, trust: Path | None = None) -> None:
        """Show the address, and the commands with which nodes join."""
        for line in (listening_line(address), *join_lines(reachable, trust=trust)):
            self.note(line)


class PlainProgress(SpokenProgress):
    """Shows plain lines: each phase, and a step every few seconds."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last = LastStep()
        self._shown_at_s = 0.0

    def state(self, state: str) -> None:
        """Show the phase on a line."""
        self.note(f"{state} ...")

    def plan(self, plan: Plan, memory_bytes: Mapping[str, int]) -> None:
        """Show a line for each node."""
        for line in [*plan_lines(plan, memory_bytes), *training_lines(plan.course), *helper_lines(plan)]:
            self.note(line)

    def step(self, step: Mapping[str, Any]) -> None:
        """Show at most a step every two seconds, and the last one."""
        is_newest = self._last.take(step)
        now_s = time.monotonic()
        if (is_newest and step["step"] == step["num_steps"]) or now_s - self._shown_at_s >= _PLAIN_INTERVAL_S:
            self._shown_at_s = now_s
            self.note(evaluating_line(step) if step["kind"] != STEP_KIND else step_line(self._last.line))

    def note(self, text: str) -> None:
        """Write the text on a line."""
        self._stream.write(printable(text) + "\n")
        self._stream.flush()


class JsonProgress(Progress):
    """Writes one JSON object a line, each with an ``event``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def _write(self, event: str, value: Mapping[str, Any]) -> None:
        self._stream.write(json.dumps({"event": event, **value}) + "\n")
        self._stream.flush()

    def state(self, state: str) -> None:
        """Write a line with the phase as ``state``."""
        self._write("state", {"state": state})

    def plan(self, plan: Plan, memory_bytes: Mapping[str, int]) -> None:
        """Write a line with slices, owners, memory, and what is trained on (null where nothing is)."""
        slices = {piece.node: [piece.start, piece.stop] for piece in plan.placement.slices}
        owners = [owner.node for owner in plan.course.owners]
        value = {"digest": plan.digest, "slices": slices, "owners": owners, "num_steps": plan.course.num_steps}
        training = training_facts(plan.course) if plan.course.num_steps else None
        self._write("plan", {**value, "memory_bytes": dict(memory_bytes), "training": training})

    def step(self, step: Mapping[str, Any]) -> None:
        """Write a line with the item's numbers."""
        self._write("step", step)

    def unfreeze(self, entry: Mapping[str, Any]) -> None:
        """Write a line with step and depth."""
        self._write("unfreeze", {name: entry[name] for name in ("step", "depth")})

    def operations(self, entry: Mapping[str, Any]) -> None:
        """Write a line with step, digest and counts."""
        self._write("operations", {name: value for name, value in entry.items() if name != "kind"})

    def evaluation(self, entry: Mapping[str, Any]) -> None:
        """Write a line with accuracy, loss and count."""
        self._write("evaluation", entry)

    def report(self, report: Mapping[str, Any]) -> None:
        """Write a line with the whole report."""
        self._write("report", {"report": dict(report)})

    def listening(self, address: str, reachable: str, *, trust: Path | None = None) -> None:
        """Write a line with the address, that at which it is reached, and the commands."""
        hints = join_lines(reachable, trust=trust)
        self._write("listening", {"address": address, "reachable": reachable, "hints": hints})

    def note(self, text: str) -> None:
        """Write a line with the text."""
        self._write("note", {"text": text})
