"""The list at a node: what the coordinator's calls change in it, and what the log says of refusals."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from edge.transport.access import RunAccess
from ringtune.errors import FrameError, TrustError
from ringtune.schedule.access import NodeCall, RequestedCall, State
from ringtune.schedule.turns import StartPoint
from ringtune.transport.parties import node_party
from tests.support.plans import make_plan

PLAN = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"]).with_copies(True)
START = StartPoint(step=2, holder="a")
COPY = RequestedCall(NodeCall.KEEP, "a", "r", State.TURN, 0, (0,), False, 4)
FETCH = RequestedCall(NodeCall.FETCH, "a", "r", State.TURN, 0, (0,), False, 2)
DISK = RequestedCall(NodeCall.FETCH, "a", "q", State.DISK, 0, (0,), False, 2)


def allowed(access: RunAccess) -> set[str]:
    """Which of node a's calls are permitted now."""
    found = set()
    asked = {"probe": RequestedCall(NodeCall.PROBE, "a", access._run_id), "copy": COPY, "fetch": FETCH, "disk": DISK}
    for name, one in asked.items():
        try:
            access.require(one, node_party("a"))
            found.add(name)
        except TrustError:
            continue
    return found


def test_access_follows_the_run() -> None:
    """Each call of the coordinator opens what is due, and ends what is over."""
    access = RunAccess("b", wait_s=0.0)
    assert allowed(access) == set()
    access.inspect("r", ["a", "b", "c"], shards_run="q")
    assert allowed(access) == {"probe", "disk"}
    access.require(DISK._replace(node="c"), node_party("c"))  # it may get a part
    access.place("r", PLAN, START)
    with pytest.raises(TrustError, match=r"node b refuses Snapshots\.Fetch of node 'c'"):
        access.require(DISK._replace(node="c"), node_party("c"))
    assert allowed(access) == {"probe", "disk", "copy"}
    access.move("r", PLAN, START, 0, 2)  # nothing of the placement before counts any more
    assert allowed(access) == {"probe", "disk", "fetch"}
    access.place("r", PLAN, START)
    assert allowed(access) == {"probe", "disk", "fetch", "copy"}
    access.release("another run")
    assert len(allowed(access)) == 4
    access.release("r")  # a node that the plan leaves out is released, and others need its disk
    assert allowed(access) == {"disk"}
    access.release("r", is_finished=True)
    assert allowed(access) == set()
    access.inspect("r", [], shards_run="q")
    access.inspect("s", [])
    assert allowed(access) == set()


def test_fetches_of_a_recovery_wait_also_where_others_were_given_up_before_it() -> None:
    """Each recovery that takes the place of another ends the waits of that one."""
    access = RunAccess("b", wait_s=60.0)
    access.place("r", PLAN, START)
    with ThreadPoolExecutor() as pool:
        asked = [FETCH._replace(placement_number=number) for number in (1, 1, 2, 2, 3, 3)]
        calls = [pool.submit(access.require, one, node_party("a")) for one in asked]
        assert [type(call.exception(timeout=30)) for call in calls[:4]] == [TrustError] * 4
        access.move("r", PLAN, START, 3, 2)
        assert [call.result(timeout=30).placement_number for call in calls[4:]] == [3, 3]


def test_links_are_opened_again_where_a_node_is_behind_in_a_move() -> None:
    """A node that has gone back to the placement before the move opens its links once the others are back, too."""
    access, link = RunAccess("b"), RequestedCall(NodeCall.LINK, "a", "r")
    access.place("r", PLAN, None)
    access.require(link, node_party("a"))
    access.move("r", PLAN, START, 0, None)
    with pytest.raises(FrameError, match="node b moves and takes no links yet; try again"):
        access.require(link, node_party("a"))
    access.place("r", PLAN, START)
    access.require(link, node_party("a"))


def test_refusals_are_logged_once_with_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    """The first, the tenth and the hundredth of a node's calls of one kind."""
    access = RunAccess("b", wait_s=0.0)
    access.place("r", PLAN, START)
    with caplog.at_level(logging.WARNING):
        for _ in range(99):
            with pytest.raises(TrustError):
                access.require(COPY._replace(node="z"), node_party("z"))
    assert [line.split(",")[0] for line in caplog.messages] == ["node b refuses Snapshots.Keep of node 'z'"] * 2


@pytest.mark.promise("7 bounded memory")
def test_copies_of_long_ago_are_forgotten() -> None:
    """A run may have any number of turns; those whose copies are permitted now are compared."""
    access = RunAccess("b", wait_s=0.0)
    for step in range(2, 12_000, 2):
        access.require_only(COPY._replace(step=step), "first")
    assert len(access._digests) == 4096
    with pytest.raises(TrustError, match="has another copy of blocks"):
        access.require_only(COPY._replace(step=11_998), "second")


def test_nodes_of_no_run_are_measured_by_nobody() -> None:
    """A call without a name is known by its certificate; in plain text nobody is."""
    access = RunAccess("b", wait_s=0.0)
    access.inspect("r", ["a", "b"])
    access.require_member(NodeCall.PROBE, node_party("a"))
    access.require_member(NodeCall.PROBE, None)
    with pytest.raises(TrustError, match=r"node b refuses Probe\.Link of node 'z'"):
        access.require_member(NodeCall.PROBE, node_party("z"))
