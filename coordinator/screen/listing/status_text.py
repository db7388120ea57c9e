"""Write what a coordinator does now, as text and as JSON."""

from __future__ import annotations

import json
from typing import Any

from coordinator.records.evaluation_text import figure
from coordinator.screen.listing.node_list import node_lines, node_table
from coordinator.screen.progress_lines import trained_text
from ringtune.quantities import format_seconds
from ringtune.texts import printable
from ringtune.v1 import control_pb2

_OPTIONAL = ("num_steps", "steps_done", "round", "initiator", "depth", "trains", "loss")


def status_json(status: control_pb2.StatusReply) -> str:
    """Write one line of JSON: ``run``, null before the first run, and ``nodes``; a figure not known yet is null."""
    value = {
        "version": status.version,
        "run": _run_json(status.run) if status.HasField("run") else None,
        "nodes": [json.loads(line) for line in node_lines(status.nodes)],
    }
    return json.dumps(value)


def _run_json(run: control_pb2.RunStatus) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "is_over": run.is_over,
        "phase": run.phase,
        "phase_s": round(run.phase_s, 3),
        "run_s": round(run.run_s, 3),
        **{name: getattr(run, name) if run.HasField(name) else None for name in _OPTIONAL},
        "helpers": [{"node": one.node, "host": one.host, "start": one.start, "stop": one.stop} for one in run.helpers],
        "awaited": {"nodes": [*run.awaited], "why": run.awaited_why, "seconds": round(run.awaited_s, 3)}
        if run.awaited_why
        else None,
        "message": run.message,
    }


def status_lines(status: control_pb2.StatusReply, coordinator: str) -> list[str]:
    """Write the run in a few lines, then a table of the nodes.

    Args:
        status: of a coordinator.
        coordinator: ``host:port`` of it, for the command with which a node joins.
    """
    run = _run_lines(status.run) if status.HasField("run") else ["no run yet"]
    return [*run, *node_table(status.nodes, coordinator)]


def _run_lines(run: control_pb2.RunStatus) -> list[str]:
    what = f"run {run.run_id}: {run.phase}"
    if run.is_over:
        lines = [f"{what} {format_seconds(run.phase_s)} ago, after {format_seconds(run.run_s)}; nothing is driven now"]
    else:
        lines = [f"{what} for {format_seconds(run.phase_s)}, {format_seconds(run.run_s)} since its start"]
    if run.HasField("steps_done"):
        lines.append(
            f"step {run.steps_done}/{run.num_steps}: round {run.round}, {run.initiator}, "
            f"{trained_text(run.depth, run.trains)}, loss {figure(run.loss if run.HasField('loss') else None)}"
        )
    if run.awaited_why:
        lines.append(
            f"waits for node {', '.join(run.awaited)}, {format_seconds(run.awaited_s)} more: {run.awaited_why}; "
            "start it again with its name and its data, or stop the run and --resume it later"
        )
    for one in run.helpers:
        lines.append(f"{one.node} fits the adapters of {one.host}'s blocks [{one.start}, {one.stop})")
    if run.message:
        lines.append(f"error: {printable(run.message)}")
    return lines
