"""Another placement for the steps that are left, when boards or links are not as they were."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from coordinator.planner.draft import drafts_of
from coordinator.planner.judge import simulated_steps_s
from coordinator.planner.make_plan import make_plan, refuse_if_full
from coordinator.planner.replan import _of_the_rest, placed_without, replanned
from coordinator.planner.ring_costs import ring_costs
from ringtune.costs.profile import NodeFacts, Profile
from ringtune.errors import CapacityError
from ringtune.job.job import Job
from ringtune.schedule.plan import Plan
from tests.coordinator.planner.test_replicas import job_of, planned
from tests.support.planner_rings import MIB, QUICK


def slowed(profile: Profile, node: str, factor: float) -> Profile:
    """The profile with one node whose work takes so many times as long."""

    def changed(facts: NodeFacts) -> NodeFacts:
        if facts.node != node:
            return facts
        times = tuple(
            dataclasses.replace(
                time, median_s=factor * time.median_s, low_s=factor * time.low_s, high_s=factor * time.high_s
            )
            for time in facts.work_times
        )
        return dataclasses.replace(facts, work_times=times)

    return dataclasses.replace(profile, nodes=tuple(map(changed, profile.nodes)))


def case(*, num_blocks: int = 6, **changes: object) -> tuple[Job, Plan, Profile]:
    """A job on three equal boards, as it was planned."""
    job = job_of(train__microbatches=8, train__max_steps=120, **changes)
    found = planned(job, (1, 1, 1), num_blocks=num_blocks)
    assert found.profile is not None
    return job, found.plan, found.profile


@pytest.mark.parametrize("replicas", ["auto", "never"])
@pytest.mark.sampled(1)
def test_slow_board_gets_less_to_do(replicas: str) -> None:
    """At a quarter of its speed it takes fewer micro-batches or blocks; gain and cost of the move are told."""
    job, plan, profile = case(placement__replicas=replicas)
    slow = plan.placement.hosts[-1].node
    found = replanned(plan, job, slowed(profile, slow, 4.0), step=30, move_s=1.5, effort=QUICK)
    assert found is not None and found.moves_s < 0.9 * found.stays_s
    assert found.cost_s >= 1.5 and found.is_worth_it
    assert found.line().startswith(found.text) and "gains" in found.line() and "costs" in found.line()

    def load(one: Plan) -> float:
        stage = next(stage for stage in one.placement.stages if slow in [piece.node for piece in stage])
        own = next(piece for piece in stage if piece.node == slow)
        return own.num_blocks * own.share / sum(piece.share for piece in stage)

    after = Plan(plan.course, (dataclasses.replace(found.placement, placement_number=0, first_turn=0),))
    hosts = [piece.node for piece in after.placement.hosts]
    assert slow not in hosts or load(after) < load(plan)


def test_link_that_became_slow_is_gone_around() -> None:
    """Messages between two hosts take thirty times as long now: the next ring sends nothing over that link, or less."""
    job, plan, profile = case(placement__replicas="never")
    first, second = (piece.node for piece in plan.placement.hosts[:2])
    links = tuple(
        dataclasses.replace(link, rate_bytes_per_s=link.rate_bytes_per_s / 30)
        if (link.source, link.target) in ((first, second), (second, first))
        else link
        for link in profile.links
    )
    slow = dataclasses.replace(profile, links=links)
    found = replanned(plan, job, slow, step=30, move_s=1.5, effort=QUICK)
    assert found is not None and found.is_worth_it
    after = [piece.node for piece in found.placement.hosts]
    assert (first, second) not in itertools.pairwise(after)
    assert (second, first) not in itertools.pairwise(after)


def test_placement_is_the_best_for_the_steps_that_are_left_and_not_for_all() -> None:
    """The last steps train most blocks; the best ring for all steps takes a tenth longer for them."""
    job = job_of(
        train__microbatches=8,
        train__max_steps=240,
        train__dropout=0.1,  # so that the last block takes as long as any
        unfreeze__every_steps=20,
        placement__replicas="never",
    )
    made = planned(job, (1.0, 1.0, 0.5, 0.3), num_blocks=12)
    assert made.profile is not None
    slow = slowed(made.profile, "n3", 2.0)
    found = replanned(made.plan, job, slow, step=180, move_s=1.5, effort=QUICK)
    for_all = make_plan(job, slow.by_name, links=slow.links, effort=QUICK).plan
    costs = _of_the_rest(ring_costs(drafts_of(for_all)[0], slow, optimizer="adamw"), for_all.course, 180)
    assert found is not None
    assert found.moves_s < 0.95 * simulated_steps_s(for_all, slow, costs, optimizer="adamw")


@pytest.mark.thorough
def test_hosts_keep_hidden_states_in_another_placement_too() -> None:
    """The cache is of the job; a move only empties it."""
    job, plan, profile = case(cache__prefix="auto")
    slow = slowed(profile, plan.placement.hosts[-1].node, 2.0)
    found = replanned(plan, job, slow, step=30, move_s=1.5, effort=QUICK)
    assert plan.placement.cache is not None
    assert found is not None and found.placement.cache == plan.placement.cache


@pytest.mark.thorough
def test_run_whose_blocks_run_again_finds_another_placement_too() -> None:
    """The same blocks run again there; also where a board is lost whose blocks no others could keep everything of."""
    job, plan, profile = case(num_blocks=12, memory__activations="recompute")
    slow = next(piece.node for piece in plan.placement.hosts if plan.owner(piece.node) is None)
    found = replanned(plan, job, slowed(profile, slow, 2.0), step=30, move_s=1.5, effort=QUICK)
    assert plan.placement.recompute and found is not None and found.is_worth_it
    assert found.placement.recompute == plan.placement.recompute
    tight = dataclasses.replace(
        profile, nodes=tuple(dataclasses.replace(node, memory_bytes=160 * MIB) for node in profile.nodes)
    )
    placed = placed_without(plan, job, tight, {slow}, QUICK)
    assert placed.recompute == plan.placement.recompute and slow not in [piece.node for piece in placed.slices]
    kept = dataclasses.replace(plan.placement, recompute=())
    with pytest.raises(CapacityError, match=r"no ring of .* has memory for the model"):
        placed_without(Plan.of(plan.course, kept), job, tight, {slow}, QUICK)


@pytest.mark.thorough
def test_boards_as_planned_gain_nothing_by_a_move() -> None:
    """The best other placement is not worth its cost."""
    job, plan, profile = case()
    found = replanned(plan, job, profile, step=30, move_s=5.0, effort=QUICK)
    assert found is None or not found.is_worth_it


@pytest.mark.thorough
def test_few_steps_that_are_left_are_not_worth_a_move() -> None:
    """With one turn left the pause costs more; with none there is nothing to look for."""
    job, plan, profile = case()
    slow = slowed(profile, plan.placement.hosts[-1].node, 2.0)
    found = replanned(plan, job, slow, step=110, move_s=60.0, effort=QUICK)
    assert found is not None and not found.is_worth_it
    assert replanned(plan, job, slow, step=120, move_s=1.0, effort=QUICK) is None


def test_placement_that_does_not_fit_is_not_offered() -> None:
    """Nodes without a byte to spare stay where they are."""
    job, plan, profile = case(placement__replicas="never")
    slow = slowed(profile, plan.placement.hosts[-1].node, 2.0)
    full = dataclasses.replace(
        slow, nodes=tuple(dataclasses.replace(node, memory_bytes=1 << 20) for node in slow.nodes)
    )
    assert replanned(plan, job, full, step=30, move_s=1.0, effort=QUICK) is None


@pytest.mark.thorough
def test_placement_for_what_the_losses_have_decided_leaves_room_for_what_they_may_decide() -> None:
    """Where losses decide, times are those of the blocks that train now, memory is that of all that could train."""
    job, _, profile = case()
    auto = job.with_overrides({"unfreeze.at": "auto"})
    plan = make_plan(auto, profile.by_name, links=profile.links).plan
    slow = slowed(profile, plan.placement.hosts[-1].node, 2.0)
    found = replanned(plan, auto, slow, step=30, move_s=1.5, effort=QUICK, unfreeze_at=(20,))
    assert found is not None and found.moves_s < found.stays_s
    later = plan.extended(found.placement, 3)
    memory = refuse_if_full(auto, later, slow.by_name).memory
    assert all(memory[node].total_bytes <= slow.by_name[node].memory_bytes for node in memory)
