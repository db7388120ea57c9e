"""Profiles for tests: simple times that can be added up by hand, and any number drawn from a seed; sizes of models."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Mapping
from typing import Any, Final

from ringtune.costs.profile import (
    PART_OF,
    WHOLE_WORKS,
    LinkFacts,
    ModelFacts,
    NodeFacts,
    Profile,
    TimedShape,
    Work,
    WorkTime,
)
from ringtune.schedule.plan import Plan

TIMES = {
    Work.EMBED: 1.0,
    Work.FORWARD: 2.0,
    Work.GRAPH: 4.0,
    Work.GRAPH_LOWEST: 3.0,
    Work.BACKWARD: 5.0,
    Work.BACKWARD_LOWEST: 3.5,
    Work.HEAD: 2.5,
    Work.HEAD_FREE: 1.5,
    Work.UPDATE: 0.5,
    Work.UPDATE_HEAD: 0.25,
    Work.ENCODE: 0.0,
    Work.DECODE: 0.0,
    Work.HAND_OVER: 0.0,
    Work.SAVE: 0.75,
}
"""Seconds whatever the size of the micro-batch."""


def point(work: Work, seconds: float, *, rows: int = 0, tokens: int = 0) -> WorkTime:
    """A timing without spread."""
    return WorkTime(work=work, rows=rows, tokens=tokens, median_s=seconds, low_s=seconds, high_s=seconds, samples=3)


def part(work: Work, seconds: float, *, share: float, rows: int = 0, tokens: int = 0) -> WorkTime:
    """A timing of a whole block's work with a share of the subnets."""
    return dataclasses.replace(point(work, seconds, rows=rows, tokens=tokens), work=PART_OF[work], share=share)


def model_of(plan: Plan) -> ModelFacts:
    """A small model that the plan fits."""
    return ModelFacts(
        model_type="bert",
        num_blocks=plan.course.num_blocks,
        hidden_size=plan.course.hidden_size,
        intermediate_size=4 * plan.course.hidden_size,
        num_heads=4,
        vocab_size=100,
        block_bytes=50_000,
        embedding_bytes=9_000,
        head_bytes=4_000,
        adapter_block_bytes=3_000,
        digest="d" * 64,
        head_class_bytes=100,
    )


def node(plan: Plan, name: str, *, times: Mapping[Work, float] = TIMES, tokens: float = 0.0) -> NodeFacts:
    """A node with constant times, and the rows that the plan says."""
    owner = plan.owner(name)
    return NodeFacts(
        node=name,
        train_rows=owner.train_rows if owner else 0,
        eval_rows=owner.eval_rows if owner else 0,
        labels=plan.course.labels if owner else (),
        eval_labels=plan.course.labels if owner else (),
        memory_bytes=10**9,
        threads=1,
        device="cpu",
        block_forward_s=times[Work.FORWARD],
        block_graph_s=times[Work.GRAPH],
        block_backward_s=times[Work.BACKWARD],
        activation_token_bytes=20_000,
        model=model_of(plan),
        train_tokens=tokens,
        eval_tokens=tokens,
        shape=TimedShape(
            task="sequence-classification",
            adapter="seq_bn",
            rows=plan.course.microbatch_sizes()[0],
            tokens=plan.course.max_length,
            dtype="float32",
            wire_dtype=plan.course.wire_dtype,
            optimizer="adamw",
        ),
        work_times=tuple(point(work, seconds) for work, seconds in times.items()),
    )


def profile_of(
    plan: Plan,
    *,
    times: Mapping[Work, float] = TIMES,
    links: Mapping[tuple[str, str], tuple[float, float]] | None = None,
    more: Iterable[str] = (),
) -> Profile:
    """A profile of the plan's nodes."""
    names = sorted({*plan.nodes, *more})
    return Profile(
        nodes=tuple(node(plan, name, times=times) for name in names),
        links=tuple(
            LinkFacts(source=source, target=target, rate_bytes_per_s=rate, latency_s=latency_s)
            for (source, target), (rate, latency_s) in (links or {}).items()
        ),
    )


def all_pairs(names: Iterable[str], rate: float, latency_s: float) -> dict[tuple[str, str], tuple[float, float]]:
    """Equal links between all nodes."""
    found = sorted(names)
    return {(one, other): (rate, latency_s) for one in found for other in found if one != other}


def random_profile(plan: Plan, rng: random.Random) -> Profile:
    """Any speeds, sizes, links, and lengths of rows; budgets without limit."""
    nodes = []
    for name in sorted(plan.nodes):
        speed = rng.choice([0.01, 1.0, 10.0])
        times = {work: speed * rng.random() for work in WHOLE_WORKS}
        found = node(plan, name, times=times, tokens=rng.choice([0.0, 5.5, 16.0]))
        sizes = ((plan.course.microbatch_sizes()[0], plan.course.max_length), (1, max(1, plan.course.max_length // 2)))
        points = tuple(
            point(work, seconds * rows * tokens, rows=rows, tokens=tokens)
            for work, seconds in times.items()
            for rows, tokens in sizes
        )
        nodes.append(dataclasses.replace(found, work_times=points))
    pairs = [(one, other) for one in plan.nodes for other in plan.nodes if one != other]
    links = tuple(
        LinkFacts(
            source=one, target=other, rate_bytes_per_s=rng.choice([1e3, 1e5, 1e9]), latency_s=rng.choice([0.0, 0.1, 5])
        )
        for one, other in (pairs if rng.random() < 0.7 else [])
    )
    return Profile(nodes=tuple(nodes), links=links)


MINILM: Final = ModelFacts(
    model_type="bert",
    num_blocks=6,
    hidden_size=384,
    intermediate_size=1536,
    num_heads=12,
    vocab_size=30522,
    block_bytes=7_097_856,
    embedding_bytes=48_265_728,
    head_bytes=591_360,
    adapter_block_bytes=75_360,
    digest="ab" * 32,
)
_SMALL: Final = ModelFacts(
    model_type="bert",
    num_blocks=4,
    hidden_size=32,
    intermediate_size=128,
    num_heads=4,
    vocab_size=100,
    block_bytes=1000,
    embedding_bytes=5000,
    head_bytes=300,
    adapter_block_bytes=10,
    digest="d",
    head_class_bytes=50,
)
WEIGHTLESS: Final = ModelFacts(
    model_type="bert",
    num_blocks=1,
    hidden_size=1,
    intermediate_size=1,
    num_heads=1,
    vocab_size=1,
    block_bytes=1,
    embedding_bytes=0,
    head_bytes=0,
    adapter_block_bytes=0,
    digest="",
)
"""A model whose weights take nothing: what is left of a node's memory is activations and buffers."""
ROUND: Final = ModelFacts(
    model_type="bert",
    num_blocks=4,
    hidden_size=2,
    intermediate_size=8,
    num_heads=1,
    vocab_size=100,
    block_bytes=0,
    embedding_bytes=0,
    head_bytes=3_000,
    adapter_block_bytes=10_000,
    digest="",
    embedding_train_bytes=60_000,
    token_table_bytes=50_000,
)
"""A model all of whose parameters train, in round numbers."""


def small_model(**changes: Any) -> ModelFacts:
    """A model of four blocks, with other values where they are given."""
    return dataclasses.replace(_SMALL, **changes)
