"""A node that rested finds its quota of processor time full: its next action takes less."""

from __future__ import annotations

import pytest

from ringtune.costs.times.rest import Rest
from sim.ring import VirtualRing
from tests.support.plans import make_plan

PLAN = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_steps=4)


def lengths(rest: Rest, node: str) -> list[float]:
    """Seconds of a node's actions of 1 s each; a message takes 1 s."""
    ring = VirtualRing(PLAN, message_s=lambda source, target, payload: 1.0, rest=lambda name: rest)
    return [round(span.end_s - span.start_s, 6) for span in ring.run().spans[node]]


def test_action_after_a_rest_is_shorter_and_one_after_another_is_not() -> None:
    """A rest of a second is worth the most that there is, 0.3 s; without a rest an action takes its second."""
    found = lengths(Rest(0.3, 0.4), "b")
    assert min(found) == 0.7 and max(found) == 1.0
    assert set(lengths(Rest(0.0, 1.0), "b")) == {1.0}


def test_action_keeps_the_share_that_computing_at_full_speed_takes() -> None:
    """However long the rest: at 0.9 of a core an action of 1 s can't take less than 0.9 s; the rest of it is kept."""
    assert min(lengths(Rest(5.0, 0.9), "b")) == pytest.approx(0.9)
