"""Find the node that failed when links break: its neighbours may be quicker to report the broken links.

Pure: every method is told the time.
"""

from __future__ import annotations

from ringtune.rounds.rounds import NodeFailed
from ringtune.schedule.plan import Plan

GRACE_S = 1.0
"""Seconds that a node has to report its own failure after another node complained about it."""


class Blame:
    """Complaints of nodes about lost peers, each kept until its time is up."""

    def __init__(self) -> None:
        self._complaints: dict[str, tuple[float, NodeFailed]] = {}
        self._complainers: set[str] = set()

    def add(self, failed: NodeFailed, lost_peer: str, now_s: float) -> None:
        """Take the complaint of ``failed.node`` that its link with ``lost_peer`` broke.

        Only the first complaint about a peer is kept.
        """
        self._complainers.add(failed.node)
        self._complaints.setdefault(lost_peer, (now_s + GRACE_S, failed))

    def verdict(self, now_s: float) -> NodeFailed | None:
        """Take out a complaint that is ``GRACE_S`` old, first one about a peer that has not complained itself.

        Example: a complains about b, and b about c. Only c has not complained, so b's complaint about c is chosen.
        """
        due = {peer: failed for peer, (until_s, failed) in self._complaints.items() if now_s >= until_s}
        silent = [failed for peer, failed in due.items() if peer not in self._complainers]
        found = next(iter([*silent, *due.values()]), None)
        if found is not None:  # it is told once
            self._complaints = {peer: kept for peer, kept in self._complaints.items() if kept[1] is not found}
        return found


def with_role(message: str, node: str, plan: Plan) -> str:
    """Add to the message that a node is lost what it did and what can be done, if all it did was to help."""
    helped = plan.placement.joined_helpers(node)
    if not helped or plan.slice_of(node).num_blocks or plan.owner(node) is not None:
        return message
    blocks = ", ".join(f"{plan.placement.host_of(one.start)}'s blocks {one.text}" for one in helped)
    return (
        f"{message}; helper {node} fits the adapters of {blocks}: start it again and --resume the run, or train anew "
        "with another helper in [offload]"
    )
