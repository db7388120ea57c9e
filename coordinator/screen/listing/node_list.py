"""Print the members of a coordinator as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from coordinator.screen.text_table import table_lines
from ringtune.hints import hint
from ringtune.quantities import format_bytes
from ringtune.v1 import control_pb2

_TITLES = (
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


def node_lines(members: Sequence[control_pb2.NodeEntry]) -> list[str]:
    """Write one line of JSON for each member."""
    return [
        json.dumps(
            {
                "node": entry.joined.node,
                "state": entry.state,
                "seen_s": round(entry.seen_s, 3),
                "has_data": entry.joined.has_data,
                "train_rows": entry.joined.train_rows if entry.joined.HasField("train_rows") else None,
                "eval_rows": entry.joined.eval_rows if entry.joined.HasField("eval_rows") else None,
                "cores": entry.joined.cores,
                "device": entry.joined.device,
                "threads": entry.joined.threads,
                "memory_bytes": entry.joined.memory_bytes,
                "rss_bytes": entry.rss_bytes,
                "system": entry.joined.system,
                "address": entry.joined.address,
                "version": entry.joined.version,
            }
        )
        for entry in members
    ]


def node_table(members: Sequence[control_pb2.NodeEntry], coordinator: str) -> list[str]:
    """Write a table with a line for each member.

    Args:
        members: of a coordinator.
        coordinator: ``host:port`` of it, for the command with which a node joins.
    """
    if not members:
        return [f"no node has joined; start one with: {hint('node', coordinator=coordinator)}"]
    return table_lines(_TITLES, [_row(entry) for entry in members], left=len(_TITLES))


def node_details(entry: control_pb2.NodeEntry) -> list[str]:
    """Write a line for each thing that is known of a member."""
    width = max(map(len, _TITLES))
    return [f"{title:<{width}}  {value}" for title, value in zip(_TITLES, _row(entry), strict=True)]


def _row(entry: control_pb2.NodeEntry) -> tuple[str, ...]:
    joined = entry.joined
    return (
        joined.node,
        entry.state,
        f"{entry.seen_s:.1f} s ago",
        _rows(joined.train_rows if joined.HasField("train_rows") else None, has_some=joined.has_data),
        _rows(joined.eval_rows if joined.HasField("eval_rows") else None),
        joined.version,
        str(joined.cores),
        joined.device,
        format_bytes(joined.memory_bytes),
        format_bytes(entry.rss_bytes),
        joined.system,
        joined.address,
    )


def _rows(count: int | None, *, has_some: bool = False) -> str:
    """Write a number of rows; ``some`` where only a job tells how many, ``-`` where there are none."""
    if count is None:
        return "some" if has_some else "-"
    return str(count)
