"""In which order owners have their turns."""

from __future__ import annotations

from coordinator.planner.drafting.initiators import initiator_order


def test_initiators_follow_the_best_links() -> None:
    """From the start of the shortest round on, always the best link to who has not had its turn."""
    seconds = {frozenset("ac"): 3.0, frozenset("bc"): 1.0, frozenset("ab"): 5.0}
    far = 10.0

    def hand_over_s(source: str, target: str) -> float:
        return seconds.get(frozenset((source, target)), far)

    assert initiator_order(["d", "c", "a", "b"], hand_over_s) == ("a", "c", "b", "d")


def test_initiators_may_go_one_way_only() -> None:
    """Links are directed: the round goes where they are good."""
    good = {("a", "c"), ("c", "b"), ("b", "a")}
    assert initiator_order(["a", "b", "c"], lambda *pair: 1.0 if pair in good else 2.0) == ("a", "c", "b")


def test_initiators_without_links_come_by_name() -> None:
    """Names decide without links, among two, and among equals."""
    assert initiator_order(["c", "a", "b"], None) == ("a", "b", "c")
    assert initiator_order(["b", "a"], lambda *pair: 1.0) == ("a", "b")
    assert initiator_order(["c", "a", "b"], lambda *pair: 1.0) == ("a", "b", "c")
