"""Rings of made-up devices for the planner's tests: classes with documented ratios of compute, links and memory.

========  ==================  ==================  ============
class     block forward       link                memory
========  ==================  ==================  ============
laptop    18 ms (MiniLM,      60 MB/s, 2 ms       8 GiB
          8 x 64 tokens)
jetson    6 ms                100 MB/s, 1 ms      4 GiB
pi        120 ms              10 MB/s, 4 ms       1 GiB
========  ==================  ==================  ============

A pair's link has the rate of its slower end and the larger latency, varied a little.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from coordinator.planner.draft import Draft
from coordinator.planner.limits import Effort
from ringtune.costs.profile import LinkFacts, ModelFacts, NodeFacts, Profile, Work, WorkTime
from ringtune.schedule.course import Course
from ringtune.schedule.run_shape import Owner
from tests.support.plans import make_method
from tests.support.profiles import MINILM

MIB = 2**20
QUICK = Effort(evaluations=600, judged_actions=8000, now_s=lambda: 0.0)
"""An effort that finds the plans of small rings, by counts alone."""
CLASSES = {
    "laptop": (0.018, 60e6, 0.002, 8192 * MIB),
    "jetson": (0.006, 100e6, 0.001, 4096 * MIB),
    "pi": (0.120, 10e6, 0.004, 1024 * MIB),
}
_RATIOS = {
    Work.EMBED: 0.05,
    Work.FORWARD: 1.0,
    Work.GRAPH: 1.1,
    Work.GRAPH_LOWEST: 1.05,
    Work.BACKWARD: 1.2,
    Work.BACKWARD_LOWEST: 0.5,
    Work.HEAD: 0.1,
    Work.HEAD_FREE: 0.05,
    Work.ENCODE: 0.02,
    Work.DECODE: 0.02,
}
_ONCE = {Work.UPDATE: 0.03, Work.UPDATE_HEAD: 0.03, Work.HAND_OVER: 0.1}
ROWS, TOKENS, HIDDEN = 8, 64, 384


def model(num_blocks: int) -> ModelFacts:
    """MiniLM's sizes with any number of blocks."""
    return dataclasses.replace(MINILM, num_blocks=num_blocks, head_class_bytes=1540)


def device(
    name: str,
    *,
    num_blocks: int,
    block_s: float = 0.018,
    memory_bytes: int = 8192 * MIB,
    rows: int = 100,
    tokens: float = 0.0,
    overhead_s: float = 0.0,
) -> NodeFacts:
    """A node whose works take fixed ratios of the forward of a block, plus a constant per action."""
    times = []
    for work, ratio in _RATIOS.items():
        for part in (1, 2):
            seconds = ratio * block_s * part / 2 + overhead_s
            times.append(_point(work, ROWS * part // 2, TOKENS, seconds))
    times += [_point(work, 0, 0, ratio * block_s) for work, ratio in _ONCE.items()]
    return NodeFacts(
        node=name,
        train_rows=rows,
        eval_rows=0,
        labels=("neg", "pos") if rows else (),
        eval_labels=(),
        memory_bytes=memory_bytes,
        threads=1,
        device="cpu",
        block_forward_s=block_s,
        block_graph_s=1.1 * block_s,
        block_backward_s=1.2 * block_s,
        activation_token_bytes=40_000,
        model=model(num_blocks),
        train_tokens=tokens,
        work_times=tuple(times),
    )


def _point(work: Work, rows: int, tokens: int, seconds: float) -> WorkTime:
    return WorkTime(work=work, rows=rows, tokens=tokens, median_s=seconds, low_s=seconds, high_s=seconds, samples=5)


def class_ring(
    rng: random.Random, kinds: Sequence[str], *, num_blocks: int, owners: int = 0, with_links: bool = True
) -> Profile:
    """Devices of these classes, each some tenths faster or slower than its class says."""
    nodes, ends = [], {}
    for index, kind in enumerate(kinds):
        block_s, rate, latency_s, memory_bytes = CLASSES[kind]
        name = f"n{index:02d}-{kind}"
        nodes.append(
            device(
                name,
                num_blocks=num_blocks,
                block_s=block_s * rng.uniform(0.75, 1.35),
                memory_bytes=round(memory_bytes * rng.uniform(0.8, 1.2)),
                rows=100 if not owners or index < owners else 0,
                tokens=rng.uniform(32, 64),
                overhead_s=0.0005,
            )
        )
        ends[name] = (rate * rng.uniform(0.7, 1.3), latency_s * rng.uniform(0.7, 1.3))
    return Profile(nodes=tuple(nodes), links=_links(rng, ends) if with_links else ())


def _links(rng: random.Random, ends: dict[str, tuple[float, float]]) -> tuple[LinkFacts, ...]:
    return tuple(
        LinkFacts(
            source=source,
            target=target,
            rate_bytes_per_s=min(ends[source][0], ends[target][0]) * rng.uniform(0.8, 1.0),
            latency_s=max(ends[source][1], ends[target][1]),
        )
        for source in ends
        for target in ends
        if source != target
    )


def random_kinds(rng: random.Random, num_nodes: int) -> list[str]:
    """Any mixture of classes."""
    return [rng.choice(sorted(CLASSES)) for _ in range(num_nodes)]


def draft_for(
    profile: Profile,
    *,
    num_steps: int = 700,
    every_steps: int = 40,
    microbatches: int = 4,
    batch_size: int = 16,
    method: str = "ringada",
    private_blocks: int = 0,
) -> Draft:
    """The run of a job, which nobody carries out yet."""
    course = Course(
        method=make_method(method, every_steps=every_steps),
        num_blocks=profile.nodes[0].model.num_blocks,
        owners=tuple(Owner(node=node.node, train_rows=node.train_rows) for node in profile.nodes if node.train_rows),
        num_steps=num_steps,
        local_iterations=10,
        batch_size=batch_size,
        microbatches=microbatches,
        max_length=TOKENS,
        hidden_size=HIDDEN,
        labels=("neg", "pos"),
        frozen_blocks=private_blocks,
    )
    return Draft(course=course, private_blocks=private_blocks)


def random_counts(rng: random.Random, num_blocks: int, num_hosts: int) -> tuple[int, ...]:
    """Blocks of each host, at least one."""
    cuts = sorted(rng.sample(range(1, num_blocks), num_hosts - 1))
    return tuple(stop - start for start, stop in zip([0, *cuts], [*cuts, num_blocks], strict=True))
