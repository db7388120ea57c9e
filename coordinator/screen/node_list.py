"""Print the members of a coordinator as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from coordinator.screen.text_table import table_lines
from ringtune.quantities import format_bytes
from ringtune.v1 import control_pb2

_TITLES = ("node", "state", "seen", "data", "device", "threads", "budget", "resident", "system", "address")


def node_lines(members: Sequence[control_pb2.NodeEntry]) -> list[str]:
    """Write one line of JSON for each member."""
    return [
        json.dumps(
            {
                "node": entry.joined.node,
                "state": entry.state,
                "seen_s": round(entry.seen_s, 3),
                "has_data": entry.joined.has_data,
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


def node_table(members: Sequence[control_pb2.NodeEntry]) -> list[str]:
    """Write a table with a line for each member."""
    if not members:
        return ["no node has joined; start one with 'ringtune node --coordinator HOST:PORT'"]
    return table_lines(_TITLES, [_row(entry) for entry in members], left=len(_TITLES))


def _row(entry: control_pb2.NodeEntry) -> tuple[str, ...]:
    joined = entry.joined
    return (
        joined.node,
        entry.state,
        f"{entry.seen_s:.1f} s ago",
        "yes" if joined.has_data else "no",
        joined.device,
        str(joined.threads),
        format_bytes(joined.memory_bytes),
        format_bytes(entry.rss_bytes),
        joined.system,
        joined.address,
    )
