"""The prefix cache on the virtual clock: what is read was kept there before, and what a host has lost is not read.

Orders, versions and what waits are those of any plan: ``test_any_plan_on_virtual_clock``.
"""

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
from ringtune.schedule.turns import items
from ringtune.techniques.activation_cache import key_of
from tests.features.plans import SOON_KNOWN, cached_plan, ring_of, run
from tests.support.moves import granted, moving_at_random
from tests.support.plans import changed
from tests.support.recorded_ring import RecordedResult
from tests.support.validate import validate_table


def losing(plan: Plan, seed: int, at_s: float) -> RecordedResult:
    """The run of a plan whose last host loses what it keeps."""
    ring = ring_of(plan, random.Random(seed), **SOON_KNOWN)
    lost = rd.TechniqueFailed(plan.placement.hosts[-1].node, "the disk is full")
    ring.clock.at(at_s, ring._tell_rounds, lost)
    return ring.run()


def passages_granted_from(result: RecordedResult, node: str, at_s: float) -> list[Passage]:
    """The passages of turns of which a node heard after a time."""
    events = [entry.event for entry in result.handled[node] if entry.now_s > at_s]
    return [passage for event in events if isinstance(event, TurnGranted) for passage in event.turn.passages]


def num_reads(plan: Plan, result: RecordedResult) -> int:
    """How many micro-batches were read; each at the host that had kept the same batch at the same boundary before."""
    kept: dict[object, tuple[int, str]] = {}
    reads = 0
    for turn in granted(result):
        course = plan.course.decided(turn.unfreeze_at, turn.operations)
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


@pytest.mark.parametrize("first", range(10))
@pytest.mark.sampled(1)
def test_host_that_loses_what_it_kept_is_counted_on_no_longer(first: int) -> None:
    """The run goes on without it, and the log says so once; whatever is read was kept at that host before."""
    told = reads = 0
    for seed in range(first, 60, 10):
        plan = cached_plan(seed)
        whole = run(plan, random.Random(seed), **SOON_KNOWN)
        reads += num_reads(plan, whole)
        result = losing(plan, seed, whole.wall_s / 2)
        assert result.finish == rd.Finish("", ""), (seed, result.finish)
        validate_table(plan, granted(result), result.order)
        lost = [entry for entry in result.logged if isinstance(entry, rd.LogTechniqueFailed)]
        told += len(lost)
        assert len(lost) <= 1
        num_reads(plan, result)
        host = plan.placement.hosts[-1].node
        for passage in passages_granted_from(result, host, whole.wall_s / 2):
            assert plan.placement.host_of(passage.enters or passage.keeps) != host
    assert told > 2 and reads > 5


@pytest.mark.parametrize("first", range(6))
@pytest.mark.sampled(1)
def test_ring_that_moves_begins_with_empty_caches(first: int) -> None:
    """Whatever the placements, nothing is read in a placement that was kept in another one."""
    reads = 0
    for seed in range(first, 60, 6):
        rng = random.Random(seed)
        plan = cached_plan(seed)
        if plan.course.method.name == "pipeadapter":
            plan = changed(plan, method=Everything())
        plan = moving_at_random(rng, plan)
        cached = tuple(dataclasses.replace(one, cache=ActivationCacheSettings()) for one in plan.placements)
        plan = Plan(plan.course, cached)
        result = run(plan, random.Random(seed), **SOON_KNOWN)
        assert result.finish == rd.Finish("", ""), (seed, result.finish)
        kept: dict[object, tuple[int, int]] = {}
        for turn in granted(result):
            placement_number = due(plan.course, plan.placements, turn)
            for item in items(plan.course, turn):
                if item.passage.keeps:
                    kept[key_of(plan.course, item)] = (item.passage.keeps, placement_number)
                elif item.passage.enters:
                    assert kept[key_of(plan.course, item)] == (item.passage.enters, placement_number)
                    reads += 1
    assert reads
