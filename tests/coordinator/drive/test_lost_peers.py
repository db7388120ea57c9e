"""Which complaint about a broken link is believed."""

from __future__ import annotations

from coordinator.drive.lost_peers import GRACE_S, Blame
from ringtune.rounds.rounds import NodeFailed


def complaint(node: str) -> NodeFailed:
    """What a node says that lost a link."""
    return NodeFailed(node, "PeerLostError", f"node {node} lost a link")


def test_blame_waits_for_the_accused_to_speak() -> None:
    """A complaint is believed only after a moment."""
    blame = Blame()
    blame.add(complaint("a"), "b", 10.0)
    assert blame.verdict(10.0 + GRACE_S / 2) is None
    assert blame.verdict(10.0 + GRACE_S) == complaint("a")


def test_blame_prefers_who_kept_silent() -> None:
    """If a complains about b and b about c, it is c who is gone, though a was first."""
    blame = Blame()
    blame.add(complaint("a"), "b", 10.0)
    blame.add(complaint("b"), "c", 10.1)
    assert blame.verdict(10.2 + GRACE_S) == complaint("b")


def test_blame_believes_the_first_if_all_complain() -> None:
    """A cable that is cut between two nodes makes both complain."""
    blame = Blame()
    blame.add(complaint("a"), "b", 10.0)
    blame.add(complaint("b"), "a", 10.1)
    assert blame.verdict(20.0) == complaint("a")
