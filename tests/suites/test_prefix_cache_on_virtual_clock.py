"""The prefix cache on the virtual clock: whatever is kept where, by whatever ring, the engines keep all rules."""

from __future__ import annotations

import dataclasses
import random

import pytest

from ringtune.engine.events import TurnGranted
from ringtune.run_control import events as rd
from ringtune.schedule.actions import Op
from ringtune.schedule.methods import Everything
from ringtune.schedule.migration import due
from ringtune.schedule.placement import ActivationCacheSettings, Passage
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Turn, items
from ringtune.techniques.activation_cache import entry_bytes, key_of
from sim.ring import RingResult, VirtualRing
from tests.support.moves import moving_at_random
from tests.support.plans import changed, random_plan
from tests.support.validate import validate_table


def cached_plan(seed: int) -> Plan:
    """Any ring whose rows come again often; every third has room for a few batches only."""
    rng = random.Random(seed)
    plan = random_plan(rng)
    steps = plan.course.local_iterations * rng.randint(8, 20)
    plan = changed(plan, num_steps=steps, eval_every=rng.choice([0, steps // 4]))
    most = 1 << 30
    if seed % 3 == 0:
        placement = changed(plan, cache=ActivationCacheSettings()).placement
        most = 3 * entry_bytes(plan.course, placement, placement.hosts[0].node, plan.course.batch_size)
    return changed(plan, cache=ActivationCacheSettings(max_bytes=most))


def run(plan: Plan, seed: int, loses_at_s: float = 0.0) -> RingResult:
    """With nodes and links of very different speeds; the first host may lose what it keeps."""
    rng = random.Random(seed)
    speeds = {node: rng.choice([0.01, 1.0, 10.0]) for node in plan.nodes}
    ring = VirtualRing(
        plan,
        action_s=lambda node, action: speeds[node] * rng.random(),
        message_s=lambda source, target, payload: rng.choice([0.0, 0.1, 5.0]) * rng.random(),
        items_ahead=rng.choice([1, 4, 16]),
    )
    if loses_at_s:
        lost = rd.TechniqueFailed(plan.placement.hosts[-1].node, "the disk is full")
        ring.clock.at(loses_at_s, ring._tell_rounds, lost)
    return ring.run()


def turns_of(result: RingResult) -> list[Turn]:
    """The turns as they were granted."""
    return [entry.turn for entry in result.logged if isinstance(entry, rd.LogTurn)]


def passages_granted_from(result: RingResult, node: str, at_s: float) -> list[Passage]:
    """The passages of turns of which a node heard after a time."""
    events = [entry.event for entry in result.handled[node] if entry.now_s > at_s]
    return [passage for event in events if isinstance(event, TurnGranted) for passage in event.turn.passages]


def num_reads(plan: Plan, result: RingResult) -> int:
    """How many micro-batches were read; each at the host that had kept the same batch at the same boundary before."""
    kept: dict[object, tuple[int, str]] = {}
    reads = 0
    for turn in turns_of(result):
        course = turn.settled(plan.course)
        for item in items(course, turn):
            key = key_of(course, item) if any(item.passage) else None
            if item.passage.enters:
                assert kept[key] == (item.passage.enters, plan.placement.host_of(item.passage.enters))
                reads += len(course.microbatch_sizes(item.rows))
            elif item.passage.keeps:
                kept[key] = (item.passage.keeps, plan.placement.host_of(item.passage.keeps))
    done = [action for actions in result.order.values() for action in actions if action.op is Op.READ]
    assert len(done) == reads
    return reads


@pytest.mark.parametrize("first", range(0, 160, 20))
@pytest.mark.sampled(1)
def test_ring_with_a_cache_finishes_in_a_valid_order(first: int) -> None:
    """No deadlock and every forward sees its version; what is read was kept there before."""
    reads = 0
    for seed in range(first, first + 20):
        plan = cached_plan(seed)
        result = run(plan, seed)
        assert result.finish == rd.Finish("", ""), (seed, result.finish)
        validate_table(plan, turns_of(result), result.order)
        reads += num_reads(plan, result)
    assert reads > 100


@pytest.mark.parametrize("first", range(0, 60, 20))
@pytest.mark.sampled(1)
def test_host_that_loses_what_it_kept_is_counted_on_no_longer(first: int) -> None:
    """The run goes on without it, and the log says so once."""
    told = 0
    for seed in range(first, first + 20):
        plan = cached_plan(seed)
        whole = run(plan, seed)
        result = run(plan, seed, loses_at_s=whole.wall_s / 2)
        assert result.finish == rd.Finish("", ""), (seed, result.finish)
        validate_table(plan, turns_of(result), result.order)
        lost = [entry for entry in result.logged if isinstance(entry, rd.LogTechniqueFailed)]
        told += len(lost)
        assert len(lost) <= 1
        num_reads(plan, result)
        host = plan.placement.hosts[-1].node
        for passage in passages_granted_from(result, host, whole.wall_s / 2):
            assert plan.placement.host_of(passage.enters or passage.keeps) != host
    assert told > 10


@pytest.mark.parametrize("first", range(0, 60, 20))
@pytest.mark.sampled(1)
def test_ring_that_moves_begins_with_empty_caches(first: int) -> None:
    """Whatever the placements, nothing is read in a placement that was kept in another one."""
    reads = 0
    for seed in range(first, first + 20):
        rng = random.Random(seed)
        plan = cached_plan(seed)
        if plan.course.method.name == "pipeadapter":
            plan = changed(plan, method=Everything())
        plan = moving_at_random(rng, plan)
        cached = tuple(dataclasses.replace(one, cache=ActivationCacheSettings()) for one in plan.placements)
        plan = Plan(plan.course, cached)
        result = run(plan, seed)
        assert result.finish == rd.Finish("", ""), (seed, result.finish)
        kept: dict[object, tuple[int, int]] = {}
        for turn in turns_of(result):
            placement_number = due(plan.course, plan.placements, turn)
            for item in items(plan.course, turn):
                if item.passage.keeps:
                    kept[key_of(plan.course, item)] = (item.passage.keeps, placement_number)
                elif item.passage.enters:
                    assert kept[key_of(plan.course, item)] == (item.passage.enters, placement_number)
                    reads += 1
    assert reads > 20
