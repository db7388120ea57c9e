"""Predictions from recorded actions: a replay repeats a run."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from ringtune.schedule.actions import Action, Op
from ringtune.schedule.plan import Plan
from ringtune.schedule.units import EMBEDDING
from sim.prediction import predict
from tests.support.plans import random_plan, two_nodes
from tests.support.profiles import profile_of, random_profile


@pytest.mark.parametrize("seed", range(20))
def test_prediction_replays_a_run_exactly(seed: int) -> None:
    """With the spans of a run in which every action took another time, the replay ends at its very end."""
    rng = random.Random(seed)
    plan = random_plan(rng)
    profile = random_profile(plan, rng)
    jitter = predict(plan, profile, samples=pools(plan, rng), keep_spans=True, seed=seed)
    samples = [(node, action, end_s - start_s) for node, action, start_s, end_s in jitter.spans]
    again = predict(plan, profile, samples=samples, same_run=True)
    assert again.wall_s == pytest.approx(jitter.wall_s, rel=1e-9)
    busy_s = [node.busy_s for node in again.nodes]
    assert busy_s == pytest.approx([node.busy_s for node in jitter.nodes])
    assert busy_s != pytest.approx([node.busy_s for node in predict(plan, profile).nodes], rel=1e-3)


def pools(plan: Plan, rng: random.Random) -> list[tuple[str, Action, float]]:
    """Samples of every kind of work at every node, a straggler among them."""
    ops = (Op.EMBED, Op.FORWARD_FREE, Op.FORWARD, Op.HEAD, Op.BACKWARD, Op.UPDATE)
    units = {Op.EMBED: EMBEDDING, Op.HEAD: plan.course.head}
    kinds = itertools.product(plan.nodes, (0, 1), ops, range(4))
    return [
        (node, Action(op, seq, 0, unit, unit + 1), rng.choice([0.5, 1.0, 30.0]) * rng.random())
        for node, seq, op, _ in kinds
        for unit in [units.get(op, 0)]
    ]


@pytest.mark.parametrize("seed", range(8))
def test_prediction_replays_what_messages_took_from_computing_once(seed: int) -> None:
    """On nodes of one core messages slow actions down; recorded actions have that in them, so it is not added again."""
    rng = random.Random(seed)
    plan = random_plan(rng)
    free = random_profile(plan, rng)
    crowded = dataclasses.replace(
        free,
        nodes=tuple(dataclasses.replace(node, cpu_cores=1.0) for node in free.nodes),
        links=tuple(
            dataclasses.replace(link, send_cpu_s_per_byte=1e-4, receive_cpu_s_per_byte=2e-4) for link in free.links
        ),
    )
    slow = predict(plan, crowded, keep_spans=True)
    samples = [(node, action, end_s - start_s) for node, action, start_s, end_s in slow.spans]
    again = predict(plan, crowded, samples=samples, same_run=True)
    assert again.wall_s == pytest.approx(slow.wall_s, rel=1e-9)
    if slow.links:
        assert sum(node.busy_s for node in slow.nodes) > sum(node.busy_s for node in predict(plan, free).nodes)


def test_prediction_replays_a_straggler() -> None:
    """One slow backward of a recording delays the replay by just that."""
    plan = two_nodes(num_steps=3)
    profile = profile_of(plan)
    plain = predict(plan, profile, keep_spans=True)
    samples = [(node, action, end_s - start_s) for node, action, start_s, end_s in plain.spans]
    slow = next(i for i, (_, action, _) in enumerate(samples) if action.op is Op.BACKWARD and action.seq == 1)
    node, action, seconds = samples[slow]
    samples[slow] = (node, action, seconds + 100)
    assert predict(plan, profile, samples=samples, same_run=True).wall_s == plain.wall_s + 100
