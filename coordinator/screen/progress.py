"""Progress of a run as plain lines or JSON lines, text about its training, and notices of waits.

None of this goes to the standard output, which is for results.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shlex
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self, TextIO

from coordinator.run.run_text import STEP_KIND, LastStep, figure, figures_text, training_facts
from coordinator.screen.tables import class_lines
from ringtune.costs.offload_costs import step_traffic
from ringtune.costs.profile import NodeFacts
from ringtune.hints import hint, hint_to_start_coordinator
from ringtune.quantities import format_bytes, format_seconds
from ringtune.schedule.course import Course
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import BY_ROWS
from ringtune.schedule.turns import StepKind
from ringtune.techniques import DECISION_LINES, TECHNIQUES
from ringtune.techniques.activation_checkpointing import NONE
from ringtune.texts import counted, listed, printable, visible
from ringtune.transport.credentials import is_encrypted
from ringtune.transport.endpoints import is_loopback, is_wildcard, join_address, split_address
from ringtune.transport.parties import ADMIN, VARIABLE


def reachable_address(bound: str, machine_address: str) -> str:
    """Return ``host:port`` at which a coordinator is reached, in place of a wildcard.

    Example: ``0.0.0.0:7070`` on a machine that is 10.0.0.7 is ``10.0.0.7:7070``. An empty ``machine_address`` gives
    ``HOST:7070``.
    """
    port = split_address(bound, option="--bind")[1]
    return join_address(machine_address or "HOST", port) if is_wildcard(bound) else bound


def listening_line(bound: str) -> str:
    """Describe the address of a coordinator; a loopback one with the command for other machines."""
    if not is_loopback(bound):
        return f"listening at {bound}"
    port = split_address(bound, option="--bind")[1]
    other = hint_to_start_coordinator(join_address("HOST", port))
    return f"listening at {bound}, for this machine only; other machines need: {other}"


def join_lines(reachable: str, *, trust: Path | None = None) -> list[str]:
    """List the commands for a coordinator at ``reachable``, each on a line.

    ``trust`` is its folder of keys, where that is not the default of commands.
    """
    nodes, train = (
        hint(*words, coordinator=reachable) for words in (("nodes",), ("train", "job.toml", "--out", "run"))
    )
    ask = [f"who is there, and a run:  {nodes}", f"                          {train}"]
    owner = "a node that owns rows has --data FILE too; without it a node only computes"
    if is_encrypted():
        where = ["--trust", str(trust)] if trust else []
        made = hint("coordinator", "token", "NAME", "--save", "FILE", *where)
        with_file = hint("node", "--token-file", "FILE", coordinator=reachable)
        trusted = [f"certificates of commands: export {VARIABLE}={shlex.quote(str(trust / ADMIN))}"] if trust else []
        return [
            f"FILE for the node NAME:   {made}",
            f"the node, with its FILE:  {with_file}",
            owner,
            *trusted,
            *ask,
        ]
    here = f"a node of this machine:   {hint('node', '--name', 'node-1', coordinator=reachable)}"
    there = f"a node of another one:    {hint('node', coordinator=reachable)}"
    return [*([here] if is_loopback(reachable) else [there, here]), owner, *ask]


def plan_lines(plan: Plan, memory_bytes: Mapping[str, int]) -> list[str]:
    """Describe blocks, rows and needs of each node, each on a line."""
    width = max(len(node) for node in plan.nodes)
    lines = []
    for node in plan.nodes:
        piece, owner = plan.slice_of(node), plan.owner(node)
        hosts = f"blocks [{piece.start}, {piece.stop})" if piece.num_blocks else "no blocks"
        owns = f", owns {owner.train_rows} rows" if owner else ""
        needs = f", needs {format_bytes(memory_bytes[node])}" if node in memory_bytes else ""
        lines.append(f"  {node:<{width}}  {hosts}{owns}{needs}")
    return lines


def step_line(step: Mapping[str, Any]) -> str:
    """Describe a finished step."""
    return (
        f"step {step['step']}/{step['num_steps']}: round {step['round']}, {step['initiator']}, "
        f"{trained_text(step['depth'], step.get('trains', ''))}, loss {figure(step['loss'])}"
    )


def trained_text(depth: int, trains: str) -> str:
    """Describe the units that a step trained: ``depth 3``, or ``trains block 3`` for a named group of units."""
    return f"trains {trains}" if trains else f"depth {depth}"


def evaluating_line(step: Mapping[str, Any]) -> str:
    """Describe an item without an update; the loss of one batch is left out.

    Example: ``score after step 0: 3 of 30 batches, a``; where texts are written, tokens are counted.
    """
    unit = "tokens" if step["kind"] == StepKind.GENERATE else "batches"
    count = f"{step['batch']} of {step['batches']} {unit}, " if "batch" in step else ""
    return f"{step['kind']} after step {step['step']}: {count}{step['initiator']}"


def _unfreeze_line(entry: Mapping[str, Any]) -> str:
    return f"the loss has stopped improving: {entry['depth']} blocks train after step {entry['step']}"


def evaluation_line(entry: Mapping[str, Any]) -> str:
    """Describe an evaluation."""
    if not entry["count"]:
        return f"evaluation after {_steps_text(entry['step'])}: no rows"
    return f"evaluation after {_steps_text(entry['step'])}: {figures_text(entry)}"


def _steps_text(steps: int) -> str:
    """Write a number of steps: ``1 step``, ``80 steps``."""
    return f"{steps} step{'s' * (steps != 1)}"


def _times(report: Mapping[str, Any]) -> list[str]:
    """Write the seconds of the steps, of training and of the whole run, each with its contents.

    Example: ``80 steps in 12.1 s (predicted 8.1 s), loss of the last one 0.6885``, and below it ``training with
    evaluations and checkpoints 15.6 s, whole run with joining, measuring and collecting 25.8 s``.
    """
    phases = report.get("phases_s", {})
    whole, training, moving = format_seconds(report["wall_s"]), phases.get("training"), phases.get("moving", 0.0)
    steps, loss = _steps_text(report["steps"]), _last_loss(report.get("train", {}))
    if report.get("steps_s") is None or training is None:  # a report of an older version
        return [f"{steps}, whole run {whole}{loss}"]
    predicted = report.get("predicted_steps_s")
    thought = f" (predicted {format_seconds(predicted)})" if predicted is not None else ""
    return [
        f"{steps} in {format_seconds(report['steps_s'])}{thought}{loss}",
        f"training with {'evaluations, checkpoints and moves' if moving else 'evaluations and checkpoints'} "
        f"{format_seconds(training + moving)}, whole run with joining, measuring and collecting {whole}",
    ]


def _last_loss(train: Mapping[str, Any]) -> str:
    """Describe the loss of the last step, and a mean over steps, as one batch says little."""
    if train.get("last_loss") is None:
        return ""
    last = f", loss of the last one {figure(train['last_loss'])}"
    if train["mean_steps"] < 2:  # the mean of one loss is that loss
        return last
    return f"{last}, mean of the last {train['mean_steps']} steps {figure(train['mean_loss'])}"


def _device_peak(totals: Mapping[str, Any]) -> str:
    """Describe an accelerator with its peak memory; empty for a processor."""
    if "device_bytes" not in totals:
        return ""
    most, peak = format_bytes(totals["device_bytes"]), format_bytes(totals["peak_device_bytes"])
    return f"{totals['device']} {peak} of {most}, "


def report_lines(report: Mapping[str, Any]) -> list[str]:
    """Describe the totals of a run: all steps, each node, and the result."""
    lines = _times(report)
    width = max((len(node) for node in report["nodes"]), default=0)
    for node, totals in report["nodes"].items():
        busy, peak = format_seconds(totals["busy_s"]), format_bytes(totals["peak_rss_bytes"])
        needed = totals.get("predicted_bytes", 0)
        needs = f"needs {format_bytes(needed)}, " if needed else ""
        policy = totals.get("activations", {}).get("policy", NONE)
        saved = "" if policy == NONE else f", activations {policy}"
        sent = format_bytes(totals["sent_bytes"])
        had = _device_peak(totals)
        lines.append(f"  {node:<{width}}  busy {busy}, {needs}{had}whole process {peak}, sent {sent}{saved}")
    if report["nodes"]:
        lines.append("  (needs: what the plan reserved; whole process: its peak, with the libraries that it loads)")
    if any("device_bytes" in totals for totals in report["nodes"].values()):
        lines.append("  (on a GPU, needs are of its memory with CUDA's context, its peak is of tensors without it)")
    lines += [report["busy"]] if report.get("busy") else []
    lines += [line for technique in TECHNIQUES for line in technique.report_lines(report)]
    return [*lines, *_result_lines(report)]


def _result_lines(report: Mapping[str, Any]) -> list[str]:
    """Describe the figures and the step of the result, and a rise of the loss."""
    figures, best = report["eval"], report.get("best")
    lines = [figures_text(figures), *class_lines(figures)] if figures["count"] else []
    if best and figures.get("step") == best["step"]:
        lines[:1] = [f"the result is that of step {best['step']}, the best evaluation: {lines[0]}"]
    elif best:  # its figures are known to an earlier part of the run, which this one resumes
        lines.append(f"the result is that of step {best['step']}, the best evaluation: {best_text(best)}")
    last = (report.get("evaluations") or [figures])[-1]
    if "macro_f1" in last and "macro_f1" not in figures:
        lines.append("classes were counted after the last step only, not for this result; ringtune eval counts them")
    if report.get("risen"):
        lines.append(report["risen"])
    return lines


def best_text(best: Mapping[str, Any]) -> str:
    """Name the figure of the best evaluation with its value: ``loss 0.5000``."""
    return ", ".join(f"{name} {figure(value)}" for name, value in best.items() if name != "step")


_PLAIN_INTERVAL_S = 2.0


class Progress:
    """Interface for a run's events on a screen; this class shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the terminal."""

    def state(self, state: str) -> None:
        """Show the present phase."""

    def plan(self, plan: Plan, memory_bytes: Mapping[str, int]) -> None:
        """Show the plan, with the needs of each node in bytes."""

    def item(self, line: Mapping[str, Any]) -> None:
        """Show an item that is done, an evaluation, or a decision of a run, by its ``kind``."""
        (self.decision if line.get("kind") in DECISIONS else self.step)(line)

    def step(self, step: Mapping[str, Any]) -> None:
        """Show an item that is done."""

    def decision(self, entry: Mapping[str, Any]) -> None:
        """Show a complete evaluation, or a decision: to unfreeze, or one of a technique."""

    def report(self, report: Mapping[str, Any]) -> None:
        """Show the totals of a run that is done."""

    def listening(self, address: str, reachable: str, *, trust: Path | None = None) -> None:
        """Show the address of a coordinator, and its address for nodes and users."""

    def note(self, text: str) -> None:
        """Show a line of text."""


_LINES: Final = {
    "unfreeze": _unfreeze_line,
    **{kind: lines.progress for kind, lines in DECISION_LINES.items()},
    "evaluation": evaluation_line,
}
DECISIONS: Final = tuple(_LINES)
"""Kinds of the lines of ``metrics.jsonl`` that are no items, and are shown."""


class LineProgress(Progress):
    """Shows rare events as lines, each passed to ``note``."""

    def decision(self, entry: Mapping[str, Any]) -> None:
        """Show depth, a technique's decision or figures, with the step."""
        self.note(_LINES[entry["kind"]](entry))

    def report(self, report: Mapping[str, Any]) -> None:
        """Show totals, each node, and the result."""
        for line in report_lines(report):
            self.note(line)

    def listening(self, address: str, reachable: str, *, trust: Path | None = None) -> None:
        """Show the address and the commands for nodes."""
        for line in (listening_line(address), *join_lines(reachable, trust=trust)):
            self.note(line)


class PlainProgress(LineProgress):
    """Shows plain lines: each phase, and a step every ``_PLAIN_INTERVAL_S`` seconds."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last = LastStep()
        self._shown_at_s = 0.0

    def state(self, state: str) -> None:
        """Show the phase."""
        self.note(f"{state} ...")

    def plan(self, plan: Plan, memory_bytes: Mapping[str, int]) -> None:
        """Show nodes, training and helpers."""
        for line in [*plan_lines(plan, memory_bytes), *run_lines(plan)]:
            self.note(line)

    def step(self, step: Mapping[str, Any]) -> None:
        """Show the last step, or at most one item every ``_PLAIN_INTERVAL_S`` seconds; no step that is repeated."""
        is_newest = self._last.take(step)
        if step["kind"] == STEP_KIND and not is_newest:
            return
        now_s = time.monotonic()
        if (is_newest and step["step"] == step["num_steps"]) or now_s - self._shown_at_s >= _PLAIN_INTERVAL_S:
            self._shown_at_s = now_s
            self.note(evaluating_line(step) if step["kind"] != STEP_KIND else step_line(self._last.line))

    def note(self, text: str) -> None:
        """Write the text on a line."""
        self._stream.write(printable(text) + "\n")
        self._stream.flush()


class JsonProgress(Progress):
    """Writes one JSON object per line, each with an ``event``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def _write(self, event: str, value: Mapping[str, Any]) -> None:
        self._stream.write(json.dumps({"event": event, **value}) + "\n")
        self._stream.flush()

    def state(self, state: str) -> None:
        """Write the phase as ``state``."""
        self._write("state", {"state": state})

    def plan(self, plan: Plan, memory_bytes: Mapping[str, int]) -> None:
        """Write slices, owners, memory, and the training facts (null without steps)."""
        slices = {piece.node: [piece.start, piece.stop] for piece in plan.placement.slices}
        owners = [owner.node for owner in plan.course.owners]
        value = {"digest": plan.digest, "slices": slices, "owners": owners, "num_steps": plan.course.num_steps}
        training = training_facts(plan.course) if plan.course.num_steps else None
        self._write("plan", {**value, "memory_bytes": dict(memory_bytes), "training": training})

    def step(self, step: Mapping[str, Any]) -> None:
        """Write the item's numbers."""
        self._write("step", step)

    def decision(self, entry: Mapping[str, Any]) -> None:
        """Write step and depth, digest and counts, or the figures."""
        is_whole = entry["kind"] == "evaluation"
        self._write(entry["kind"], {name: value for name, value in entry.items() if is_whole or name != "kind"})

    def report(self, report: Mapping[str, Any]) -> None:
        """Write the whole report."""
        self._write("report", {"report": dict(report)})

    def listening(self, address: str, reachable: str, *, trust: Path | None = None) -> None:
        """Write the address, the reachable one, and the commands."""
        hints = join_lines(reachable, trust=trust)
        self._write("listening", {"address": address, "reachable": reachable, "hints": hints})

    def note(self, text: str) -> None:
        """Write the text."""
        self._write("note", {"text": text})


QUIET_S: Final = 2.0
"""Waits up to this time are not shown."""
_PHASES: Final = {
    "joining": "waiting for nodes to join",
    "inspecting": "nodes load the model, count their rows and time their work; then they are planned for",
}


class WaitNotice(Progress):
    """Shows a wait in its context once it takes longer than ``quiet_s``; as a ``Progress`` it shows each phase.

    A terminal shows the seconds on one line, removed at the end; elsewhere each wait is written once, on a line.

    Args:
        what: the reason of the wait, e.g. ``reading train.csv``.
        quiet_s: time without a notice, in seconds; None = ``QUIET_S``.
    """

    def __init__(self, what: str, *, stream: TextIO | None = None, quiet_s: float | None = None) -> None:
        self._what, self._quiet_s = what, QUIET_S if quiet_s is None else quiet_s
        self._stream = sys.stderr if stream is None else stream
        self._since_s = time.monotonic()
        self._changed = threading.Condition()
        self._is_over = False
        self._thread = threading.Thread(target=self._say, name="waiting", daemon=True)

    def __enter__(self) -> Self:
        self._since_s = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join()

    def state(self, state: str) -> None:
        """Start another wait: for a phase of a run, or as given in words."""
        with self._changed:
            self._what, self._since_s = _PHASES.get(state, state), time.monotonic()
            self._changed.notify()

    def _say(self) -> None:
        said, width = "", 0
        with self._changed, contextlib.suppress(OSError, ValueError):  # nobody reads it, or it is closed
            while not self._is_over:
                took_s = time.monotonic() - self._since_s
                if took_s < self._quiet_s:
                    self._changed.wait(self._quiet_s - took_s)
                elif self._stream.isatty():
                    width = _write(self._stream, f"{self._what} ... {format_seconds(round(took_s))}", width)
                    self._changed.wait(1.0)
                else:
                    if said != self._what:
                        self._stream.write(f"{self._what} ...\n")
                        self._stream.flush()
                        said = self._what
                    self._changed.wait()
            if width:
                _write(self._stream, "", width)
                _write(self._stream, "", 0)


def _write(stream: TextIO, text: str, width: int) -> int:
    """Overwrite a line of ``width`` characters; return the new width."""
    stream.write(f"\r{text.ljust(width)}")
    stream.flush()
    return len(text)


_MAX_OWNERS = 8
_MAX_CLASSES = 8
_LONGEST_NAME = 30


def training_lines(course: Course) -> list[str]:
    """Describe rows, epochs and turns of a course, with warnings; empty for a course without steps."""
    if not course.num_steps:
        return []
    facts, row = training_facts(course), "sequence" if course.packed else "row"
    how = f"turns of {counted(course.local_iterations, 'step')}, {'by rows' if course.turns == BY_ROWS else 'equal'}"
    lines = [
        f"trains {counted(facts['steps'], 'step')} in {counted(facts['rounds'], 'round')} ({how}): "
        f"{facts['used_rows']:,} of {facts['rows']:,} {row}s ({facts['used_share']:.0%}), {facts['epochs']:.3g} epochs"
    ]
    owners = list(facts["owners"].items())
    width = max(len(name) for name, _ in owners)
    for name, counts in owners[:_MAX_OWNERS]:
        times = _each_row(counts["least_times"], counts["most_times"])
        lines.append(
            f"  {name:<{width}}  {counted(counts['steps'], 'step')} of {counted(counts['rows_of_batch'], row)}: "
            f"{counts['used_rows']:,} of its {counts['rows']:,} {row}s{times}"
        )
    if len(owners) > _MAX_OWNERS:
        epochs = [counts["epochs"] for _, counts in owners[_MAX_OWNERS:]]
        lines.append(f"  and {counted(len(epochs), 'more owner')}, {min(epochs):.3g} to {max(epochs):.3g} epochs each")
    if course.labels:
        lines.append(f"{len(course.labels)} classes: {_classes(course.labels)}")
    lines += [line for technique in TECHNIQUES for line in technique.course_lines(course)]
    return [*lines, *(f"note: {text}" for text in facts["notes"])]


def _each_row(least: int, most: int) -> str:
    """Say how often each used row is used."""
    least = max(1, least)
    if most <= 1:
        return ", each once" if most else ""
    return f", each {most} times" if least == most else f", each {least} to {most} times"


def _classes(labels: tuple[str, ...]) -> str:
    """List the first names; those with spaces at an end or invisible characters in quotes."""
    shown = map(visible, labels)
    cut = [name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…" for name in shown]
    return listed(cut, _MAX_CLASSES)


def helper_lines(plan: Plan, facts: NodeFacts | None = None) -> list[str]:
    """Describe what techniques do at other nodes than hosts and owners; ``facts`` of any node add the bytes."""
    traffic = functools.partial(step_traffic, plan, facts=facts) if facts is not None else None
    kinds = facts.model.kinds if facts is not None else ()
    return [line for technique in TECHNIQUES for line in technique.helper_lines(plan, traffic, kinds)]


def run_lines(plan: Plan) -> list[str]:
    """Describe the training of a run and its helpers, for a screen beside the nodes."""
    return [*training_lines(plan.course), *helper_lines(plan)]
