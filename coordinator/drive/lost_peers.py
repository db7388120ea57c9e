"""Who is to blame when links break: a node that fails closes its links, and its neighbours may be quicker to say so.

Pure: every method is told the time.
"""

from __future__ import annotations

from ringtune.rounds.rounds import NodeFailed

GRACE_S = 1.0
"""How long the node that others complain about has to say itself what happened."""


class Blame:
    """Complaints about lost peers, until one of them is believed."""

    def __init__(self) -> None:
        self._complaints: dict[str, tuple[float, NodeFailed]] = {}
        self._complainers: set[str] = set()

    def add(self, failed: NodeFailed, lost_peer: str, now_s: float) -> None:
        """``failed.node`` says that its link with ``lost_peer`` broke."""
        self._complainers.add(failed.node)
        self._complaints.setdefault(lost_peer, (now_s + GRACE_S, failed))

    def verdict(self, now_s: float) -> NodeFailed | None:
        """A complaint whose time is up; rather about a node that kept silent than one that complained itself."""
        due = {peer: failed for peer, (until_s, failed) in self._complaints.items() if now_s >= until_s}
        silent = [failed for peer, failed in due.items() if peer not in self._complainers]
        return next(iter([*silent, *due.values()]), None)
