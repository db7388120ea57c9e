"""Which members take part in a run, and which can't."""

from __future__ import annotations

import pytest

from coordinator.members.recruiting import check_reachable
from coordinator.members.registry import Member
from ringtune.errors import ConnectionFailedError


def member(node: str, address: str) -> Member:
    """A member at an address."""
    return Member(node=node, address=address, instance="one")


def test_recruiting_refuses_a_node_that_the_others_can_not_reach() -> None:
    """A node that told 127.0.0.1 is named before the run begins, and so is one that would look for it in vain."""
    desk, board = member("desk", "127.0.0.1:5"), member("board", "10.0.0.7:5")
    with pytest.raises(ConnectionFailedError, match=r"node desk at 127\.0\.0\.1:5 can't be reached by node board"):
        check_reachable([board, desk])
    check_reachable([desk, member("two", "127.0.0.1:6")])
    check_reachable([board, member("pi", "10.0.0.8:5")])
