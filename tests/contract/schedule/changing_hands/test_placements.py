"""Placements that a run can carry out one after another, who hands which blocks to whom, and which are refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from ringtune.errors import PlanError
from ringtune.schedule.changing_hands.placements import Source, sources
from ringtune.schedule.helping.helpers import Helper
from ringtune.schedule.helping.offload import Offload
from ringtune.schedule.plan import Plan
from ringtune.schedule.units import Range
from tests.support.moves import moving
from tests.support.plans import changed, make_plan

FIRST = [("a", 0, 2), ("b", 2, 4)]
NEXT = [("b", 0, 1), ("c", 1, 4)]
PLAN = make_plan(FIRST, ["a"], num_steps=8, every_steps=2)
MOVES = moving(PLAN, (2, NEXT))


def test_part_of_a_plan_is_a_plan_that_is_written_and_read() -> None:
    """Nodes get it; it has a digest of its own, and that of a plan with one placement is the plan's."""
    assert PLAN.at(0) is PLAN and not PLAN.moves and MOVES.moves
    assert MOVES.nodes == ("a", "b", "c") and MOVES.at(1).nodes == ("b", "c", "a")
    for plan in (MOVES, *MOVES.parts):
        assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    digests = {plan.digest for plan in (PLAN, MOVES, MOVES.at(1))}
    assert len(digests) == 3 and MOVES.at(0).digest == PLAN.digest
    with pytest.raises(PlanError, match=r"the plan has no placement 2, it has \[0, 1\]"):
        MOVES.at(2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"placement_number": 0},
            "placement 0 from turn 2 on comes after placement 0 from turn 0 on; numbers count up",
        ),
        ({"first_turn": 0}, "placement 1 from turn 0 on comes after placement 0 from turn 0 on"),
        ({"recompute": (Range(1, 2),)}, "placement 1 runs other blocks again than the one before; give both the same"),
    ],
)
def test_placements_that_do_not_follow_each_other_are_refused(changes: dict[str, Any], message: str) -> None:
    """They count up, and each begins later."""
    last = dataclasses.replace(MOVES.placements[1], **changes)
    with pytest.raises(PlanError, match=message):
        Plan(PLAN.course, (PLAN.placement, last))


def test_placements_have_equal_private_blocks() -> None:
    """What stays with an owner stays there."""
    plan = make_plan([("a", 1, 4)], ["a"], private_blocks=1)
    last = dataclasses.replace(make_plan([("a", 0, 4)], ["a"]).placement, placement_number=1, first_turn=1)
    with pytest.raises(
        PlanError, match="placement 1 has 0 private blocks, the one before 1; give all placements the same"
    ):
        Plan(plan.course, (plan.placement, last))


def test_placement_0_holds_from_the_beginning() -> None:
    """A later one may too: a run that lost a node in its first turn begins again."""
    with pytest.raises(PlanError, match="placement 0 has to hold from turn 0"):
        changed(PLAN, first_turn=2)
    assert changed(PLAN, placement_number=2).placement.placement_number == 2


def test_courses_that_stay_on_one_placement_are_refused_by_name() -> None:
    """Each with its reason; with one placement they are as good as ever."""
    stale = make_plan(FIRST, ["a"], method="pipeadapter")
    helped = changed(PLAN, offload=Offload(blocks=(Range(0, 2),)), helpers=(Helper(node="z", start=0, stop=2),))
    for plan, message in (
        (stale, "the result of pipeadapter depends on the ring; give the plan one placement"),
        (helped, "helpers have fitted adapters that no other node knows; give the plan one placement"),
    ):
        with pytest.raises(PlanError, match=f"a run can't move to another placement: {message}"):
            moving(plan, (1, [("b", 0, 2), ("c", 2, 4)]))


def test_only_blocks_that_were_trained_travel() -> None:
    """After 4 steps two blocks have been trained, one of them for two steps; the others are as all nodes make them."""
    before, after = (one.placement for one in MOVES.parts)
    assert sources(PLAN.course, before, after, "c", 4) == (Source("b", 2, 4),)
    assert sources(PLAN.course, before, after, "b", 4) == ()
    assert sources(PLAN.course, before, after, "c", 6) == (Source("a", 1, 2), Source("b", 2, 4))
    assert sources(PLAN.course, after, before, "b", 6) == (Source("c", 2, 4),)
    assert sources(PLAN.course, before, after, "a", 6) == ()


def test_replica_goes_on_with_its_own_copy() -> None:
    """Others take the blocks from the first host of the stage."""
    both = moving(PLAN, (2, [("a", 0, 4), ("b", 0, 4)]), (3, [("c", 0, 2), ("b", 2, 4)]))
    before, after = (both.at(placement_number).placement for placement_number in (1, 2))
    assert sources(PLAN.course, before, after, "b", 8) == (Source("b", 2, 4),)
    assert sources(PLAN.course, before, after, "c", 8) == (Source("a", 0, 2),)
