"""Describe the events of a run in words, a line or a few for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coordinator.records.evaluation_text import figure, figures_text
from coordinator.screen.class_text import class_lines
from coordinator.screen.planned.operations_text import saved_lines
from ringtune.quantities import format_bytes, format_seconds
from ringtune.schedule.plan import Plan
from ringtune.schedule.slice_policy import NONE


def plan_lines(plan: Plan, memory_bytes: Mapping[str, int]) -> list[str]:
    """Describe which blocks each node hosts and which rows it owns, on a line for each."""
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
    """Describe a step that is done."""
    return (
        f"step {step['step']}/{step['num_steps']}: round {step['round']}, {step['initiator']}, "
        f"{trained_text(step['depth'], step.get('trains', ''))}, loss {figure(step['loss'])}"
    )


def trained_text(depth: int, trains: str) -> str:
    """Say what a step trained: ``depth 3``, or ``trains block 3`` where a group of units has a name."""
    return f"trains {trains}" if trains else f"depth {depth}"


def evaluating_line(step: Mapping[str, Any]) -> str:
    """Describe an item that trains nothing; a batch's loss is no loss of the run, so it is not told.

    Example: ``score after step 0: 3 of 30 batches, a``.
    """
    count = f"{step['batch']} of {step['batches']} batches, " if "batch" in step else ""
    return f"{step['kind']} after step {step['step']}: {count}{step['initiator']}"


def unfreeze_line(entry: Mapping[str, Any]) -> str:
    """Describe the decision to unfreeze."""
    return f"the loss has stopped improving: {entry['depth']} blocks train after step {entry['step']}"


def operations_line(entry: Mapping[str, Any]) -> str:
    """Describe an operation table by the shares of its operations for blocks that train.

    Example: ``operations chosen after step 0: 60 % full, 0 % forward-only, 40 % skipped``.
    """
    counts = [entry["full"], entry["forward_only"], entry["shortcut"]]
    if not sum(counts):
        return f"operations chosen after step {entry['step']}: all full"
    full, forward_only, skipped = (100 * count / sum(counts) for count in counts)
    shares = f"{full:.0f} % full, {forward_only:.0f} % forward-only, {skipped:.0f} % skipped"
    return f"operations chosen after step {entry['step']}: {shares}"


def evaluation_line(entry: Mapping[str, Any]) -> str:
    """Describe an evaluation."""
    if not entry["count"]:
        return f"evaluation after {_steps_text(entry['step'])}: no rows"
    return f"evaluation after {_steps_text(entry['step'])}: {figures_text(entry)}"


def _steps_text(steps: int) -> str:
    """Write a number of steps: ``1 step``, ``80 steps``."""
    return f"{steps} step{'s' * (steps != 1)}"


def _times(report: Mapping[str, Any]) -> list[str]:
    """Write the seconds of the steps, of training and of the whole run, each with what it contains.

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
    """Describe the loss of the last step, and the mean over some steps before it, as one batch says little."""
    if train.get("last_loss") is None:
        return ""
    last = f", loss of the last one {figure(train['last_loss'])}"
    if train["mean_steps"] < 2:  # the mean of one loss is that loss
        return last
    return f"{last}, mean of the last {train['mean_steps']} steps {figure(train['mean_loss'])}"


def _device_peak(totals: Mapping[str, Any]) -> str:
    """Name an accelerator with its peak of memory, against which the needs stand; empty for a processor."""
    if "device_bytes" not in totals:
        return ""
    most, peak = format_bytes(totals["device_bytes"]), format_bytes(totals["peak_device_bytes"])
    return f"{totals['device']} {peak} of {most}, "


def report_lines(report: Mapping[str, Any]) -> list[str]:
    """Describe the totals of a run: all steps, each node, and the last evaluation."""
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
    lines += saved_lines(report.get("operations"))
    return [*lines, *_result_lines(report)]


def _result_lines(report: Mapping[str, Any]) -> list[str]:
    """Describe how good the result is, of which step it is, and whether the loss had begun to rise."""
    found, best = report["eval"], report.get("best")
    lines = [figures_text(found), *class_lines(found)] if found["count"] else []
    if best and found.get("step") == best["step"]:
        lines[:1] = [f"the result is that of step {best['step']}, the best evaluation: {lines[0]}"]
    elif best:  # its figures are known to an earlier part of the run, which this one resumes
        lines.append(f"the result is that of step {best['step']}, the best evaluation: loss {figure(best['loss'])}")
    last = (report.get("evaluations") or [found])[-1]
    if "macro_f1" in last and "macro_f1" not in found:
        lines.append("classes were counted after the last step only, not for this result; ringtune eval counts them")
    if report.get("risen"):
        lines.append(report["risen"])
    return lines
