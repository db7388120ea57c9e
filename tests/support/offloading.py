"""A weak host beside a strong helper, with adapters of two sizes: what offloading is for, and what it is not for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

from ringtune.costs.profile import ModelFacts, Profile, Work
from ringtune.schedule.methods import Everything
from ringtune.schedule.plan import Plan
from ringtune.techniques.offload import helped
from tests.support.plans import make_plan
from tests.support.profiles import all_pairs, model_of, node, point, profile_of

WIDTH: Final = 768
BLOCK_PARAMS: Final = 12 * WIDTH**2
LINEAR_PARAMS: Final = 2 * WIDTH**2
"""Of ``linear`` on query and value."""

LOW_RANK_PARAMS: Final = 2 * 2 * 8 * WIDTH
"""Of ``lora[r=8]`` on query and value."""

FLOP_PER_S: Final = 20e9
FASTER: Final = 5
MEGABIT: Final = 125e3
"""Bytes a second of a link of 1 Mbit/s."""


def plan(*, microbatches: int = 4) -> Plan:
    """Four blocks on a weak host, which the helper ``strong`` fits; another node owns the rows."""
    bare = make_plan(
        [("weak", 0, 4)],
        ["owner"],
        num_blocks=4,
        num_steps=6,
        method=Everything(),
        microbatches=microbatches,
        batch_size=4 * microbatches,
        max_length=64,
        hidden_size=WIDTH,
    )
    return helped(bare, {"weak": "strong"})


def model(adapter_params: int) -> ModelFacts:
    """A block of BERT's size; pairs of query and value are one input and two gradients."""
    values = 3 * WIDTH
    return dataclasses.replace(
        model_of(plan()),
        block_bytes=4 * BLOCK_PARAMS,
        adapter_block_bytes=4 * adapter_params,
        pair_token_bytes=4 * values,
        pair_rounded_token_bytes=2 * values,
        pair_projected_token_bytes=4 * (2 * WIDTH + 32),
    )


def times(flop_per_s: float, adapter_params: int, tokens: int) -> Mapping[Work, float]:
    """Seconds by multiplications: a backward has gradients of hidden states, and those of the adapters' weights."""
    forward, adapter = 2 * BLOCK_PARAMS * tokens / flop_per_s, 2 * adapter_params * tokens / flop_per_s
    return {
        Work.EMBED: 1e-4,
        Work.FORWARD: forward + adapter,
        Work.GRAPH: forward + adapter,
        Work.GRAPH_LOWEST: forward + adapter,
        Work.BACKWARD: forward + 2 * adapter,
        Work.BACKWARD_LOWEST: forward + 2 * adapter,
        Work.HEAD: 1e-3,
        Work.HEAD_FREE: 1e-3,
        Work.UPDATE: 6 * adapter_params / flop_per_s,
        Work.UPDATE_HEAD: 1e-4,
        Work.ENCODE: 4 * WIDTH * tokens / 2e9,
        Work.DECODE: 4 * WIDTH * tokens / 2e9,
        Work.HAND_OVER: 1e-3,
        Work.SAVE: 0.0,
    }


def profile(adapter_params: int, *, bytes_per_s: float = 100e6) -> Profile:
    """The weak host computes at ``FLOP_PER_S``, helper and owner ``FASTER`` times as fast; every link has one rate."""
    which, nodes = plan(), []
    rows = which.course.microbatch_sizes()[0]
    for name in which.nodes:
        speed = FLOP_PER_S * (1 if name == "weak" else FASTER)
        table = times(speed, adapter_params, rows * 64)
        points = tuple(point(work, seconds, rows=rows, tokens=64) for work, seconds in table.items())
        found = node(which, name, times=table)
        nodes.append(dataclasses.replace(found, model=model(adapter_params), work_times=points))
    bare = profile_of(which, links=all_pairs(which.nodes, bytes_per_s, 1e-3))
    return dataclasses.replace(bare, nodes=tuple(nodes))
