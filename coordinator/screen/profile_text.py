"""Write a profile as text: each node's seconds for a block, and each link's rate and latency."""

from __future__ import annotations

import json
from collections.abc import Sequence

from coordinator.screen.text_table import table_lines
from ringtune.costs.profile import LinkFacts, NodeFacts, Profile
from ringtune.quantities import format_bytes, format_seconds

_NODE_TITLES = ("node", "forward", "with graph", "backward", "head", "budget", "threads", "hardware")
_LINK_TITLES = ("link", "rate", "quartiles", "latency")


def profile_json(profile: Profile) -> str:
    """Write a profile as one line of JSON, an event."""
    return json.dumps({"event": "profile", "profile": profile.to_json()})


def profile_text(profile: Profile) -> list[str]:
    """Write two tables: nodes with the times of one block for the largest micro-batch, and links."""
    lines = [_title(profile), *_table(_NODE_TITLES, [_node(node) for node in profile.nodes])]
    if profile.links:
        lines += ["", *_table(_LINK_TITLES, [_link(link) for link in profile.links])]
    return lines


def _title(profile: Profile) -> str:
    shape = profile.nodes[0].shape
    return f"one block, {shape.rows} rows of up to {shape.tokens} tokens, {shape.adapter}, {shape.dtype}:"


def _node(node: NodeFacts) -> tuple[str, ...]:
    head = max((point.median_s for point in node.work_times if point.work == "head"), default=0.0)
    return (
        node.node,
        _seconds(node.block_forward_s),
        _seconds(node.block_graph_s),
        _seconds(node.block_backward_s),
        _seconds(head),
        format_bytes(node.memory_bytes),
        str(node.threads),
        node.hardware,
    )


def _link(link: LinkFacts) -> tuple[str, ...]:
    low, high = (_rate(rate) for rate in (link.rate_low_bytes_per_s, link.rate_high_bytes_per_s))
    return (
        f"{link.source} -> {link.target}",
        _rate(link.rate_bytes_per_s),
        f"{low} to {high}",
        _seconds(link.latency_s),
    )


def _seconds(seconds: float) -> str:
    return format_seconds(seconds) if seconds else "-"


def _rate(bytes_per_s: float) -> str:
    return f"{format_bytes(round(bytes_per_s))}/s"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"  {line}" for line in table_lines(titles, rows, left=len(titles))]
