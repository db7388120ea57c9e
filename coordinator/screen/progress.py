"""What the user sees while a run goes on: live on a terminal, plain lines otherwise, JSON lines for machines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, TextIO

from ringtune.quantities import format_bytes, format_seconds
from ringtune.schedule.plan import Plan

_TASK_FIGURES = ("accuracy", "perplexity", "f1", "exact_match")
_PLAIN_INTERVAL_S = 2.0


class Progress(Protocol):
    """Where a run's events are shown."""

    def __enter__(self) -> Progress:
        """Begin to show."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the terminal as it was."""

    def state(self, state: str) -> None:
        """The run is in this phase now."""

    def plan(self, plan: Plan, memory_bytes: Mapping[str, int]) -> None:
        """The plan is made; with the memory that each node is expected to need."""

    def step(self, step: Mapping[str, Any]) -> None:
        """An item is through."""

    def unfreeze(self, entry: Mapping[str, Any]) -> None:
        """The run has decided from which step on one more block trains."""

    def evaluation(self, entry: Mapping[str, Any]) -> None:
        """An evaluation is complete."""

    def report(self, report: Mapping[str, Any]) -> None:
        """The totals."""

    def listening(self, address: str) -> None:
        """A coordinator is there."""

    def note(self, text: str) -> None:
        """Anything else worth a line."""


def make_progress(*, as_json: bool, live: bool = True, stream: TextIO | None = None) -> Progress:
    """The right kind of progress for where the output goes.

    Args:
        as_json: JSON lines, wherever it goes.
        live: whether a terminal may be redrawn.
        stream: the standard output if not given.
    """
    stream = sys.stdout if stream is None else stream
    if as_json:
        return JsonProgress(stream)
    if live and stream.isatty():
        from coordinator.screen.live_progress import LiveProgress

        return LiveProgress()
    return PlainProgress(stream)


class _Quiet:
    """Context handling for the kinds that hold no terminal."""

    def __enter__(self) -> Any:
        """Nothing to begin."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Nothing to restore."""


class SilentProgress(_Quiet):
    """Shows nothing."""

    def state(self, state: str) -> None:
        """Nothing."""

    def plan(self, plan: Plan, memory_bytes: Mapping[str, int]) -> None:
        """Nothing."""

    def step(self, step: Mapping[str, Any]) -> None:
        """Nothing."""

    def unfreeze(self, entry: Mapping[str, Any]) -> None:
        """Nothing."""

    def evaluation(self, entry: Mapping[str, Any]) -> None:
        """Nothing."""

    def report(self, report: Mapping[str, Any]) -> None:
        """Nothing."""

    def listening(self, address: str) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""


class JsonProgress(_Quiet):
    """One JSON object a line, each with an ``event``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def _write(self, event: str, value: Mapping[str, Any]) -> None:
        self._stream.write(json.dumps({"event": event, **value}) + "\n")
        self._stream.flush()

    def state(self, state: str) -> None:
        """A line with ``state``."""
        self._write("state", {"state": state})

    def plan(self, plan: Plan, memory_bytes: Mapping[str, int]) -> None:
        """A line with slices, owners and memory."""
        slices = {piece.node: [piece.start, piece.stop] for piece in plan.placement.slices}
        owners = [owner.node for owner in plan.course.owners]
        value = {"digest": plan.digest, "slices": slices, "owners": owners, "num_steps": plan.course.num_steps}
        self._write("plan", {**value, "memory_bytes": dict(memory_bytes)})

    def step(self, step: Mapping[str, Any]) -> None:
        """A line with the item's numbers."""
        self._write("step", step)

    def unfreeze(self, entry: Mapping[str, Any]) -> None:
        """A line with step and depth."""
        self._write("unfreeze", {name: entry[name] for name in ("step", "depth")})

    def evaluation(self, entry: Mapping[str, Any]) -> None:
        """A line with accuracy, loss and count."""
        self._write("evaluation", entry)

    def report(self, report: Mapping[str, Any]) -> None:
        """A line with the whole report."""
        self._write("report", {"report": dict(report)})

    def listening(self, address: str) -> None:
        """A line with the address."""
        self._write("listening", {"address": address})

    def note(self, text: str) -> None:
        """A line with a text."""
        self._write("note", {"text": text})


class PlainProgress(_Quiet):
    """Plain lines: each phase, and a step every few seconds."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown_at_s = 0.0

    def _write(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def state(self, state: str) -> None:
        """The phase on a line."""
        self._write(f"{state} ...")

    def plan(self, plan: Plan, memory_bytes: Mapping[str, int]) -> None:
        """A line for each node."""
        for line in plan_lines(plan, memory_bytes):
            self._write(line)

    def step(self, step: Mapping[str, Any]) -> None:
        """At most a line every two seconds, and the last step."""
        is_last = step["kind"] == "train" and step["step"] + 1 == step["num_steps"]
        now_s = time.monotonic()
        if is_last or now_s - self._shown_at_s >= _PLAIN_INTERVAL_S:
            self._shown_at_s = now_s
            self._write(step_line(step))

    def unfreeze(self, entry: Mapping[str, Any]) -> None:
        """Step and depth on a line."""
        self._write(unfreeze_line(entry))

    def evaluation(self, entry: Mapping[str, Any]) -> None:
        """Accuracy and loss on a line."""
        self._write(evaluation_line(entry))

    def report(self, report: Mapping[str, Any]) -> None:
        """A line for each node and one for all."""
        for line in report_lines(report):
            self._write(line)

    def listening(self, address: str) -> None:
        """The address, and how nodes join."""
        self._write(listening_line(address))

    def note(self, text: str) -> None:
        """The text on a line."""
        self._write(text)


def listening_line(address: str) -> str:
    """Where a coordinator is, and how nodes join."""
    return f"listening at {address}; a node joins with: ringtune node --coordinator {address} --name NAME --data FILE"


def plan_lines(plan: Plan, memory_bytes: Mapping[str, int]) -> list[str]:
    """Who hosts and owns what, a line for each node."""
    width = max(len(node) for node in plan.nodes)
    lines = []
    for node in plan.nodes:
        piece, owner = plan.slice_of(node), plan.owner(node)
        hosts = f"blocks [{piece.start}, {piece.stop})" if piece.num_blocks else "no blocks"
        owns = f", owns {owner.train_rows} rows" if owner else ""
        needs = f", needs {format_bytes(memory_bytes[node])}" if node in memory_bytes else ""
        lines.append(f"  {node:<{width}}  {hosts}{owns}{needs}")
    return lines


def figure(value: float | None) -> str:
    """A loss or accuracy with four digits; ``-`` if there is none."""
    return "-" if value is None else f"{value:.4f}"


def step_line(step: Mapping[str, Any]) -> str:
    """An item in words."""
    loss = figure(step["loss"])
    if step["kind"] != "train":
        return f"{step['kind']} at step {step['step']}: {step['initiator']}, loss {loss}"
    return (
        f"step {step['step'] + 1}/{step['num_steps']}: round {step['round']}, {step['initiator']}, "
        f"depth {step['depth']}, loss {loss}"
    )


def unfreeze_line(entry: Mapping[str, Any]) -> str:
    """A decision in words; steps are counted from 1 there, as in ``step_line``."""
    return f"the loss has stopped improving: {entry['depth']} blocks train from step {entry['step'] + 1} on"


def evaluation_line(entry: Mapping[str, Any]) -> str:
    """An evaluation in words."""
    if not entry["count"]:
        return f"evaluation after {entry['step']} steps: no rows"
    return f"evaluation after {entry['step']} steps: {_evaluation(entry)}"


def _evaluation(entry: Mapping[str, Any]) -> str:
    """The figures that the task has, e.g. accuracy, perplexity, F1."""
    names = [name for name in _TASK_FIGURES if entry.get(name) is not None]
    figures = "".join(f"{name.replace('_', ' ')} {figure(entry[name])}, " for name in names)
    return f"{figures}loss {figure(entry['loss'])} on {entry['count']} {_counted(entry)}"


def _counted(entry: Mapping[str, Any]) -> str:
    """What the loss is a mean of: a language model predicts tokens, a question may have several windows."""
    if entry.get("perplexity") is not None:
        return "tokens"
    return "windows" if entry.get("questions") else "rows"


def report_lines(report: Mapping[str, Any]) -> list[str]:
    """The totals in words."""
    lines = [f"{report['steps']} steps in {format_seconds(report['wall_s'])}"]
    width = max((len(node) for node in report["nodes"]), default=0)
    for node, totals in report["nodes"].items():
        busy, peak = format_seconds(totals["busy_s"]), format_bytes(totals["peak_rss_bytes"])
        lines.append(f"  {node:<{width}}  busy {busy}, peak {peak}, sent {format_bytes(totals['sent_bytes'])}")
    if report["eval"]["count"]:
        lines.append(_evaluation(report["eval"]))
    return lines
