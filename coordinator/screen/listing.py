"""Members, stored runs and status of a coordinator, as tables and as JSON."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.run.run_text import wait_text
from coordinator.screen.progress import step_line
from coordinator.screen.tables import table_lines
from coordinator.server.restart import resumed_by
from coordinator.server.run_record import RunRecord
from ringtune.hints import hint
from ringtune.quantities import format_bytes, format_seconds
from ringtune.texts import printable
from ringtune.v1 import control_pb2, trust_pb2

_NODE_TITLES = (
    "node",
    "state",
    "seen",
    "train rows",
    "eval rows",
    "version",
    "cores",
    "device",
    "budget",
    "resident",
    "system",
    "address",
)


def nodes_json(members: Sequence[control_pb2.NodeEntry]) -> list[dict[str, Any]]:
    """Make a JSON object for each member."""
    return [
        {
            "node": entry.joined.node,
            "state": entry.state,
            "seen_s": round(entry.seen_s, 3),
            "has_data": entry.joined.has_data,
            **{name: _known(entry.joined, name) for name in ("train_rows", "eval_rows")},
            **{name: getattr(entry.joined, name) for name in ("cores", "device", "threads", "memory_bytes")},
            "rss_bytes": entry.rss_bytes,
            **{name: getattr(entry.joined, name) for name in ("system", "rack", "address", "version")},
        }
        for entry in members
    ]


def _known(message: Any, name: str) -> Any:
    """Return an optional field of a message; None if it is not set."""
    return getattr(message, name) if message.HasField(name) else None


def node_table(members: Sequence[control_pb2.NodeEntry], coordinator: str) -> list[str]:
    """Write a table of members; without any, the command with which a node joins ``coordinator``."""
    if not members:
        return [f"no node has joined; start one with: {hint('node', coordinator=coordinator)}"]
    return table_lines(_NODE_TITLES, [_node_row(entry) for entry in members], left=len(_NODE_TITLES))


def node_details(entry: control_pb2.NodeEntry) -> list[str]:
    """Write each column of a member, and its rack, on a line."""
    width = max(map(len, _NODE_TITLES))
    rows = [*zip(_NODE_TITLES, _node_row(entry), strict=True), ("rack", entry.joined.rack)]
    return [f"{title:<{width}}  {value}" for title, value in rows]


def _node_row(entry: control_pb2.NodeEntry) -> tuple[str, ...]:
    joined = entry.joined
    return (
        joined.node,
        entry.state,
        f"{entry.seen_s:.1f} s ago",
        _rows(_known(joined, "train_rows"), has_some=joined.has_data),
        _rows(_known(joined, "eval_rows")),
        joined.version,
        str(joined.cores),
        joined.device,
        format_bytes(joined.memory_bytes),
        format_bytes(entry.rss_bytes),
        joined.system,
        joined.address,
    )


def _rows(count: int | None, *, has_some: bool = False) -> str:
    """Write a number of rows; ``some`` where it depends on the job, ``-`` without rows."""
    if count is None:
        return "some" if has_some else "-"
    return str(count)


_RUN_TITLES = ("run", "state", "model", "method", "by", "started", "steps", "saved", "fetched")
_LEFT = 6


def runs_json(records: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Make a JSON object for each run."""
    return [{**dataclasses.asdict(record), "can_go_on": record.is_resumable} for record in records]


def run_table(records: Sequence[RunRecord]) -> list[str]:
    """Write a table of runs, oldest first, and the messages of failed ones."""
    if not records:
        return ["no run is kept here yet"]
    by_id = {record.run_id: record for record in records}
    failed = [f"{record.run_id}: {_why(record, by_id)}" for record in records if record.message]
    return [*table_lines(_RUN_TITLES, [_run_row(record) for record in records], left=_LEFT), *failed]


def _why(record: RunRecord, records: Mapping[str, RunRecord]) -> str:
    after = resumed_by(records, record.run_id)
    return printable(record.message) + (f"; {after.run_id} resumes it" if after is not None else "")


def _run_row(record: RunRecord) -> tuple[str, ...]:
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.started_unix_s))
    steps = f"{record.steps_done}/{record.num_steps}" if record.num_steps else "-"
    saved = str(record.saved_step) if record.saved_step >= 0 else "-"
    fetched = "-" if not record.has_books else "yes" if record.is_fetched else "no"
    return (
        record.run_id,
        record.state,
        record.model,
        record.method,
        record.submitted_by or "-",
        started,
        steps,
        saved,
        fetched,
    )


_OPTIONAL = ("num_steps", "steps_done", "round", "initiator", "depth", "trains", "loss")


def status_json(status: control_pb2.StatusReply) -> dict[str, Any]:
    """Make a JSON object: ``run``, null before the first run, and ``nodes``; unknown figures are null."""
    run = _run_json(status.run) if status.HasField("run") else None
    return {"version": status.version, "run": run, "nodes": nodes_json(status.nodes)}


def _run_json(run: control_pb2.RunStatus) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "is_over": run.is_over,
        "phase": run.phase,
        "phase_s": round(run.phase_s, 3),
        "run_s": round(run.run_s, 3),
        **{name: _known(run, name) for name in _OPTIONAL},
        "helpers": [
            {"node": helper.node, "host": helper.host, "start": helper.start, "stop": helper.stop}
            for helper in run.helpers
        ],
        "awaited": {"nodes": [*run.awaited], "why": run.awaited_why, "seconds": round(run.awaited_s, 3)}
        if run.awaited_why
        else None,
        "message": run.message,
    }


def status_lines(status: control_pb2.StatusReply, coordinator: str) -> list[str]:
    """Write the run in a few lines, then a table of the nodes."""
    run = _run_lines(status.run) if status.HasField("run") else ["no run yet"]
    return [*run, *node_table(status.nodes, coordinator)]


def _run_lines(run: control_pb2.RunStatus) -> list[str]:
    what = f"run {run.run_id}: {run.phase}"
    if run.is_over:
        lines = [f"{what} {format_seconds(run.phase_s)} ago, after {format_seconds(run.run_s)}; nothing is driven now"]
    else:
        lines = [f"{what} for {format_seconds(run.phase_s)}, {format_seconds(run.run_s)} since its start"]
    if run.HasField("steps_done"):
        figures = {name: _known(run, name) for name in _OPTIONAL}
        lines.append(step_line(figures | {"step": run.steps_done, "num_steps": run.num_steps}))
    if run.awaited_why:
        lines.append(wait_text(run.awaited, f"{format_seconds(run.awaited_s)} more", run.awaited_why))
    for helper in run.helpers:
        lines.append(f"{helper.node} fits the adapters of {helper.host}'s blocks [{helper.start}, {helper.stop})")
    if run.message:
        lines.append(f"error: {printable(run.message)}")
    return lines


def rotation_json(reply: trust_pb2.RotateReply) -> dict[str, Any]:
    """Make a JSON object of how far a rotation of the authority is; ``phase`` is empty if none is under way."""
    state: dict[str, Any] = {"event": "rotation", "phase": reply.phase, "authority_sha256": reply.old_sha256}
    if reply.phase:
        state |= {
            "next_sha256": reply.new_sha256,
            "began_unix_s": reply.began_unix_s,
            "issues_unix_s": reply.issues_unix_s,
            "ends_unix_s": reply.ends_unix_s,
            "unconfirmed": list(reply.unconfirmed),
            "waiting": list(reply.waiting),
            "trust": reply.folder,
            "problem": reply.problem,
        }
    return state


_FINGERPRINT_DIGITS = 16


def rotation_lines(reply: trust_pb2.RotateReply) -> list[str]:
    """Write how far a rotation of the authority is: lines for people."""
    from ringtune.transport.identity import utc  # takes tens of milliseconds

    old, new = reply.old_sha256[:_FINGERPRINT_DIGITS], reply.new_sha256[:_FINGERPRINT_DIGITS]
    if not reply.phase:
        return [f"the authority is {old}; no rotation is under way"]
    lines = [f"authority {old} is replaced by {new} since {utc(reply.began_unix_s)}; members trust both"]
    if reply.phase == "introducing":
        late = f"; not yet: {', '.join(reply.unconfirmed)}" if reply.unconfirmed else ""
        lines.append(
            "certificates are of the new one once all living nodes have confirmed that they trust it, "
            f"from {utc(reply.issues_unix_s)} on in any case{late}"
        )
    else:
        lines.append("certificates are of the new one; each node and user gets one with the next call")
    late = f"; shut out if that were now: {', '.join(reply.waiting)}" if reply.waiting else ""
    lines.append(f"the old one is trusted until all have called, at most until {utc(reply.ends_unix_s)}{late}")
    if reply.problem:
        lines.append(f"it can't go on: {reply.problem}")
    lines.append(
        f"save authority.pem, authority-next.pem and register.sqlite of {reply.folder} now, and authority.pem and "
        "register.sqlite once it is over; standbys need a copy of authority-next.pem"
    )
    return lines
