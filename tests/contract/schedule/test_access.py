"""The access list of a run: whole tables of small plans, and every change of a permitted call."""

from __future__ import annotations

import dataclasses

import pytest

from ringtune.errors import TrustError
from ringtune.schedule.access import (
    AHEAD,
    MAX_COPY_BYTES,
    AccessRight,
    CopyBytes,
    NodeCall,
    RequestedCall,
    State,
    copy_limit,
    copy_rights,
    fetch_rights,
    inspected_rights,
    link_rights,
    require_right,
)
from ringtune.schedule.lowering import links
from ringtune.schedule.methods.hift import Hift
from ringtune.schedule.placement import Helper
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StartPoint
from tests.support.cases import cases
from tests.support.plans import make_plan

FIRST = make_plan([("a", 0, 3), ("b", 3, 6)], ["a", "b"], num_blocks=6, num_steps=40, local_iterations=5)
PLAN = Plan(FIRST.course, (dataclasses.replace(FIRST.placement, placement_number=3, copies=True),))
START = StartPoint(step=10, holder="b", first_turn=2, first_seq=10, placement_number=4)


def row(call: NodeCall, node: str, state: State, blocks: str, steps: range | None, placement_number: int | None) -> str:
    """A row as the docstring of the rule writes it."""
    return f"{call}  {node}  {state or 'as in the schedule'}  {placement_number}  {blocks}  {steps}"


def table(rights: tuple[AccessRight, ...]) -> list[str]:
    """The rows in words."""
    return [
        row(
            one.call,
            one.node,
            one.state,
            "head" if one.is_head and one.blocks == () else str(one.blocks),
            one.steps,
            one.placement_number,
        )
        for one in rights
    ]


def test_access_of_a_ring_of_two() -> None:
    """Copies of the host and the owner before, of this placement; and what each node takes over in the next one."""
    steps = range(5, 41, 5)
    assert table((*link_rights("r", PLAN, "b", None), *copy_rights("r", PLAN, "b", None))) == [
        "Ring.Link  a  as in the schedule  None  None  None",
        f"Snapshots.Keep  a  ends of turns  3  (0, 1, 2)  {steps}",
        f"Snapshots.Keep  a  ends of turns  3  head  {steps}",
    ]
    after = make_plan([("a", 0, 2), ("b", 2, 4), ("c", 4, 6)], ["a", "b"], num_blocks=6)
    assert table(fetch_rights("r", after, START, 3, None)) == [
        "Snapshots.Fetch  a  the pause  3  (0, 1)  range(0, 1)",
        "Snapshots.Fetch  b  the pause  3  (2, 3)  range(0, 1)",
        "Snapshots.Fetch  c  the pause  3  (4, 5)  range(0, 1)",
    ]
    assert table(fetch_rights("r", after, START, 4, 10))[-2:] == [
        "Snapshots.Fetch  c  ends of turns  4  (4, 5)  range(10, 11)",
        "Snapshots.Fetch  b  ends of turns  4  head  range(10, 11)",
    ]
    assert table(inspected_rights("r", ["a"], shards_run="q")) == [
        "Probe.Link  a  as in the schedule  None  None  None",
        "Snapshots.Fetch  a  files on its disk  None  None  None",
    ]


def test_access_of_runs_that_keep_other_copies() -> None:
    """None without copies; of checkpoints on disks where all parameters train, and no head; none of replicas.

    A helper trains blocks of a host, so that the host sends no copies of them, and takes them over.
    """
    assert copy_rights("r", PLAN.with_copies(False), "b", None) == ()
    full = Plan(dataclasses.replace(PLAN.course, method=Hift()), PLAN.placements)
    (only,) = copy_rights("r", full, "b", START)
    assert (only.state, only.node, only.steps) == (State.DISK, "a", range(15, 41, 5))
    helper = Helper(node="z", start=1, stop=2)
    helped = Plan(PLAN.course, (dataclasses.replace(PLAN.placement, helpers=(helper,)),))
    assert copy_rights("r", helped, "b", None)[0].blocks == (0, 2)  # what a trains itself
    assert [one.blocks for one in fetch_rights("r", helped, START, 3, None)] == [(0, 1, 2), (3, 4, 5), (1,)]
    alike = make_plan([("a", 0, 6), ("b", 0, 6)], ["a"], num_blocks=6).with_copies(True)
    assert copy_rights("r", alike, "b", None) == ()


@pytest.mark.promise("2 right version")
@cases("names", ["abcd", "bcda", "dcba"])
def test_access_lets_every_planned_link_in_and_no_other(names: str) -> None:
    """The rows of all nodes together are the links of the schedule."""
    plan = make_plan([(names[0], 0, 1), (names[1], 1, 3), (names[2], 3, 4)], ["a", "d"])
    found = {(one.node, node) for node in plan.nodes for one in link_rights("r", plan, node, None)}
    assert found == links(plan)


GOOD = RequestedCall(NodeCall.KEEP, "a", "r", State.TURN, 3, (0, 2), False, 15)


@cases(
    "change",
    [
        ({"call": NodeCall.FETCH}, "no part in this call"),
        ({"node": "b"}, "no part in this call"),
        ({"run_id": "s"}, "its part is in run r"),
        ({"state": State.DISK}, "its part is ends of turns"),
        ({"state": State.PAUSE}, "its part is ends of turns"),
        ({"placement_number": 2}, "its part is in placement 3"),
        ({"placement_number": 4}, "its part is in placement 3"),
        ({"blocks": (2, 3)}, "its part is blocks"),
        ({"blocks": (-1,)}, "its part is blocks"),
        ({"is_head": True}, "its part is the head"),
        ({"step": 10}, "after step 10, up to step 42"),
        ({"step": 41}, "after step 10, up to step 42"),
        ({"step": 47}, "after step 10, up to step 42"),
    ],
)
def test_access_refuses_every_other_part(change: tuple[dict[str, object], str]) -> None:
    """One change of a permitted call is enough; the error names the caller, the part and the reason."""
    changes, why = change
    course = dataclasses.replace(PLAN.course, num_steps=42)
    rights = copy_rights("r", Plan(course, PLAN.placements), "b", START)
    for step in (15, 40, 42):  # the last turn is short
        require_right(rights, GOOD._replace(step=step), node="b", granted_step=15)
    with pytest.raises(TrustError, match=f"node b refuses .* of node .*{why}.*; use one version on all machines"):
        require_right(rights, GOOD._replace(**changes), node="b", granted_step=15)  # type: ignore[arg-type]


def test_access_to_copies_ends_some_turns_beyond_the_newest_granted_one() -> None:
    """A sender may have a grant earlier, or send later, but no turn of a long run that nobody can have begun."""
    course = dataclasses.replace(PLAN.course, num_steps=100_000)
    rights = copy_rights("r", Plan(course, PLAN.placements), "b", None)
    for step, fits in ((500 + 5 * AHEAD, True), (505 + 5 * AHEAD, False), (5, True)):
        asked = GOOD._replace(step=step)
        if fits:
            require_right(rights, asked, node="b", granted_step=500)
        else:
            with pytest.raises(TrustError, match="the newest turn that was granted here ends with step 500"):
                require_right(rights, asked, node="b", granted_step=500)


def test_access_limits_copies_to_the_planned_bytes() -> None:
    """With room for names; what is not planned has the limit of memory, or of a disk."""
    sizes = CopyBytes(block=1000, head=50)
    limits = [one.max_bytes for one in copy_rights("r", PLAN, "b", None, sizes)]
    assert limits == [copy_limit(sizes, 3), copy_limit(sizes, 0, has_head=True)] == [3000 + (4 << 16), 50 + (1 << 16)]
    assert [one.max_bytes for one in copy_rights("r", PLAN, "b", None)] == [MAX_COPY_BYTES] * 2
    large = CopyBytes(block=MAX_COPY_BYTES)  # a plan has room for it
    assert copy_limit(large, 3) > 3 * MAX_COPY_BYTES
    assert copy_limit(CopyBytes(block=1 << 40), 3) == copy_limit(CopyBytes(), 3, on_disk=True)
