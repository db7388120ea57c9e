"""Which complaint about a broken link is believed."""

from __future__ import annotations

import dataclasses

import pytest

from coordinator.drive.hearing.lost_peers import GRACE_S, Blame, with_role
from ringtune.rounds.rounds import NodeFailed
from ringtune.schedule.helping.helpers import Helper
from ringtune.schedule.plan import Plan
from tests.support.plans import make_plan


def complaint(node: str) -> NodeFailed:
    """What a node says that lost a link."""
    return NodeFailed(node, "PeerLostError", f"node {node} lost a link")


def test_blame_waits_for_the_accused_to_speak() -> None:
    """A complaint is believed only after a moment."""
    blame = Blame()
    blame.add(complaint("a"), "b", 10.0)
    assert blame.verdict(10.0 + GRACE_S / 2) is None
    assert blame.verdict(10.0 + GRACE_S) == complaint("a")
    assert blame.verdict(10.0 + GRACE_S) is None, "it is told once"


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


@pytest.mark.parametrize("node", ["a", "b", "z"])
def test_lost_node_that_only_helped_is_called_a_helper(node: str) -> None:
    """With what it did and the remedy; a host that helps another one is a lost host."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"])
    helpers = (Helper(node="b", start=0, stop=1), Helper(node="z", start=1, stop=2), Helper(node="z", start=2, stop=4))
    found = with_role("it is lost", node, Plan.of(plan.course, dataclasses.replace(plan.placement, helpers=helpers)))
    assert found == "it is lost" + (
        "; helper z fits the adapters of a's blocks [1, 2), b's blocks [2, 4): start it again and --resume the run, or "
        "train anew with another helper in [offload]"
        if node == "z"
        else ""
    )
