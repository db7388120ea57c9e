"""What a run that moves needs of its nodes, and given plans with several placements."""

from __future__ import annotations

import dataclasses

import pytest

from coordinator.planner.given_plan import GivenPlan, accept_plan
from coordinator.planner.make_plan import make_plan, plan_memory
from ringtune.costs.memory_estimate import moving_memory, refuse_full_moves
from ringtune.costs.profile import NodeFacts
from ringtune.errors import CapacityError, PlanError
from ringtune.job.job import Job
from ringtune.schedule.placement import Slice
from ringtune.schedule.plan import Plan
from tests.coordinator.planner.test_replicas import boards, job_of
from tests.support.moves import moving


def own_weights() -> Job:
    """The blocks' own weights train, so that what was trained is as large as the blocks."""
    return job_of(adapter__config="full", placement__replicas="never", train__max_steps=120)


def facts_of(job: Job) -> dict[str, NodeFacts]:
    """Two boards without limits."""
    found, _ = boards((1, 1), num_blocks=12)
    return found


def planned(job: Job) -> Plan:
    """Half of the blocks each, then the other half each, from turn 4 on."""
    plan = make_plan(job, facts_of(job)).plan
    first = tuple(Slice(node=node, start=start, stop=stop) for node, start, stop in (("n0", 0, 6), ("n1", 6, 12)))
    plan = Plan.of(plan.course, dataclasses.replace(plan.placement, slices=first))
    return moving(plan, (4, (("n1", 0, 6), ("n0", 6, 12))))


def test_needs_of_a_plan_are_those_of_its_fullest_placement() -> None:
    """A node is told the most that it holds in any of them."""
    job = own_weights()
    plan, facts = planned(job), facts_of(job)
    first, second = (plan_memory(job, part, facts) for part in plan.parts)
    for node, found in plan_memory(job, plan, facts).items():
        assert found.total_bytes == max(first[node].total_bytes, second[node].total_bytes)
    assert accept_plan(GivenPlan(plan=plan), job, facts).memory_bytes == {
        node: found.total_bytes for node, found in plan_memory(job, plan, facts).items()
    }


def test_move_needs_room_for_the_next_slice_and_what_was_trained() -> None:
    """Activations are not there then; the node that has no room is named with the move and both numbers."""
    job = own_weights()
    plan, facts = planned(job), facts_of(job)
    before, after = (plan_memory(job, part, facts) for part in plan.parts)
    while_moving = moving_memory((plan.placements[0], plan.placements[1]), before, after)["n1"]
    parts, old, new = while_moving.parts(), before["n1"].parts(), after["n1"].parts()
    assert parts["activations"] == parts["buffers"] == 0
    # all six blocks of its next slice are new to it: they come from the other node, beside its own six
    assert parts["adapters"] == old["adapters"] + 2 * new["adapters"] and parts["weights"] == new["weights"]
    facts["n1"] = dataclasses.replace(facts["n1"], memory_bytes=while_moving.total_bytes)
    refuse_full_moves(plan, (before, after), facts)
    facts["n1"] = dataclasses.replace(facts["n1"], memory_bytes=while_moving.total_bytes - 1)
    with pytest.raises(CapacityError, match=r"node n1 needs .* to move to placement 1 but has"):
        refuse_full_moves(plan, (before, after), facts)


def test_move_needs_room_for_what_others_send_only_where_blocks_are_new() -> None:
    """Two of the eight blocks of one node come from the other one, which gets none."""
    job = own_weights()
    facts = facts_of(job)
    plan = moving(Plan.of(planned(job).course, planned(job).placement), (4, (("n0", 0, 4), ("n1", 4, 12))))
    before, after = (plan_memory(job, part, facts) for part in plan.parts)
    needs = moving_memory((plan.placements[0], plan.placements[1]), before, after)
    coming = {
        node: sum(term.total_bytes for term in one.terms if term.part == "adapters" and "others send" in term.what)
        for node, one in needs.items()
    }
    assert coming["n0"] == 0
    assert coming["n1"] == pytest.approx(after["n1"].parts()["adapters"] / 4, abs=10)


def test_part_of_a_plan_is_not_given_as_a_plan() -> None:
    """It lacks its beginning."""
    job = own_weights()
    with pytest.raises(PlanError, match="the plan begins with placement 1: it is a part of a plan; give the whole one"):
        accept_plan(GivenPlan(plan=planned(job).at(1)), job, facts_of(job))


def test_placement_that_never_holds_is_refused() -> None:
    """With 12 turns there is no turn 12."""
    job = own_weights()
    plan = planned(job)
    late = dataclasses.replace(plan.placements[1], first_turn=12)
    message = "placement 1 of the plan holds from turn 12 on, which is step 120, but the run has 120; leave it out"
    with pytest.raises(PlanError, match=message):
        accept_plan(GivenPlan(plan=Plan(plan.course, (plan.placement, late))), job, facts_of(job))
