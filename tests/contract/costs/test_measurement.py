"""Tests of ``ringtune.costs.measurement``: rehearsal, measuring, equal copies."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from ringtune.costs.measurement import (
    SKIPPED_ITEMS,
    Size,
    hidden_bytes,
    link_rounds,
    numeric_class,
    refuse_differing_copies,
    rehearsal_of,
    rehearsal_steps,
    rehearsed,
    timed_sizes,
)
from ringtune.costs.profile import NodeFacts, Work, WorkTable
from ringtune.errors import PlanError
from ringtune.job.job import Job, Model, Privacy, Train, Unfreeze, parse_job
from ringtune.schedule.methods import Everything, Hift, Method, method_names
from ringtune.schedule.plan import Plan
from ringtune.schedule.versions import depth
from tests.support.cases import cases
from tests.support.fake_agents import MODEL
from tests.support.moves import slices_of
from tests.support.plans import changed, make_plan
from tests.support.profiles import node, profile_of

PLAN = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b", "c"], num_blocks=4)


def slower(node: NodeFacts, ratio: float) -> NodeFacts:
    """A node whose blocks take longer."""
    points = tuple(
        dataclasses.replace(point, median_s=point.median_s * ratio, high_s=point.high_s * ratio)
        if point.work == Work.FORWARD
        else point
        for point in node.work_times
    )
    return dataclasses.replace(node, work_times=points)


def forward_s(node: NodeFacts) -> float:
    """Seconds of a forward of 32 padded tokens."""
    return WorkTable(node.work_times, where=node.node).seconds(Work.FORWARD, 32)


@cases(("num_blocks", "private_blocks"), [(1, 0), (6, 0), (24, 0), (6, 2), (6, 5)])
def test_rehearsal_sees_every_depth(num_blocks: int, private_blocks: int) -> None:
    """The head alone, each depth, and all blocks that may train have steps that count, before the rehearsal is stopped.

    Private blocks never train.
    """
    job = Job(
        model=Model(path="m"), train=Train(rounds=50), unfreeze=Unfreeze(at="auto"),
        privacy=Privacy(private_blocks=private_blocks),
    )  # fmt: skip
    short = rehearsal_of(job, num_blocks)
    assert short.unfreeze is not None and short.train.max_steps is not None and isinstance(short.unfreeze.at, tuple)
    course = make_plan(
        [("a", private_blocks, num_blocks)], ["a"], num_blocks=num_blocks, num_steps=short.train.max_steps,
        unfreeze="at", unfreeze_at=short.unfreeze.at, private_blocks=private_blocks,
    ).course  # fmt: skip
    steps = rehearsal_steps(job, num_blocks)
    seen, most = [depth(course, step) for step in range(SKIPPED_ITEMS, steps)], num_blocks - private_blocks
    assert set(seen) == set(range(1, most + 1))
    assert seen.count(1) >= 6 and seen.count(most) >= 14
    assert short.train.max_steps > steps, "it is stopped before it evaluates"


@cases("method", method_names())
def test_rehearsal_saves_and_evaluates_nothing(method: str) -> None:
    """Whatever the job says of checkpoints and evaluations; the work itself is that of the job."""
    train = {"method": method, "eval_every": 3, "checkpoint_every": 5, "local_iterations": 2}
    train |= {"keep_best": True, "patience_evals": 2}
    job = Job.from_tables({"model": {"path": "m"}, "train": train, "audit": {}})
    short = rehearsal_of(job, 6)
    assert (short.train.eval_every, short.train.checkpoint_every, short.train.local_iterations) == (0, 0, 2)
    kept = ("method", "optimizer", "batch_size", "microbatches", "max_length", "dropout")
    assert all(getattr(short.train, name) == getattr(job.train, name) for name in kept)


def test_rehearsed_corrects_nodes_that_hosted_nothing_as_the_others() -> None:
    """Two nodes took twice and three times as long as measured; the third, which had no part, is between them."""
    before = profile_of(PLAN)
    a, b, c = before.nodes
    after = dataclasses.replace(before, nodes=(slower(a, 2.0), slower(b, 3.0), c))
    found = rehearsed(before, after)
    assert found.nodes[:2] == after.nodes[:2]
    assert forward_s(found.nodes[2]) == pytest.approx(2.5 * forward_s(c))
    assert found.nodes[2].block_forward_s == pytest.approx(2.5 * c.block_forward_s)


JOB = parse_job('[model]\npath = "m"\n', source="test").with_overrides(
    {"train.batch_size": 10, "train.microbatches": 4, "train.max_length": 64, "wire.dtype": "bfloat16"}
)


def test_timed_sizes_halve_the_length_or_for_images_the_rows() -> None:
    """Two sizes where there can be two."""
    assert timed_sizes(JOB) == (Size(3, 64), Size(3, 32))
    assert timed_sizes(JOB, fixed_tokens=50) == (Size(3, 50), Size(1, 50))
    assert timed_sizes(JOB.with_overrides({"train.batch_size": 4}), fixed_tokens=50) == (Size(1, 50),)
    assert timed_sizes(JOB.with_overrides({"train.max_length": 3})) == (Size(3, 3), Size(3, 1))  # a job's shortest


@cases(("dtype", "token_bytes"), [("float32", 33), ("bfloat16", 17), ("int8", 13)])
def test_hidden_bytes_count_elements_scales_and_mask(dtype: str, token_bytes: int) -> None:
    """Of 3 rows of 64 tokens of width 8."""
    model = dataclasses.replace(MODEL, hidden_size=8, num_heads=1)
    assert hidden_bytes(JOB.with_overrides({"wire.dtype": dtype}), model) == 3 * 64 * token_bytes


@cases("count", range(10))
@cases("num_machines", [1, 3, 100])
def test_link_rounds_have_every_pair_once_and_nobody_twice(count: int, num_machines: int) -> None:
    """Whatever the number of nodes and machines; on machines of their own it takes as few rounds as can be."""
    nodes = [f"node-{index}" for index in range(count)]
    machines = {node: f"machine-{index % num_machines}" for index, node in enumerate(nodes)}
    rounds = link_rounds(nodes, machines)
    pairs = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert sorted(map(sorted, pairs)) == sorted(map(sorted, map(set, itertools.combinations(nodes, 2))))
    for found in rounds:
        assert found
        busy = [name for pair in found for name in (*pair, *{machines[node] for node in pair})]
        assert len(busy) == len(set(busy))
    if num_machines == 100:
        assert len(rounds) == (count - 1 + count % 2 if count > 1 else 0)


GPU, BOARD = "cuda NVIDIA T4 sm_75, torch 2.11.0+cu130", "cpu aarch64 NEON, torch 2.11.0"
RING = make_plan((("a", 0, 2), ("b", 2, 4)), ("a", "b"), microbatches=2)
STAGE = changed(RING, slices=slices_of((("a", 0, 4, 1), ("b", 0, 4, 1))))


def facts_of(plan: Plan, **classes: str) -> dict[str, NodeFacts]:
    """Facts of a plan's nodes, each of a class."""
    return {name: dataclasses.replace(node(plan, name), numerics=classes[name]) for name in plan.nodes}


@cases(
    ("plan", "method", "says"),
    [(RING, Everything(), ""), (RING, Hift(), "embedding and head"), (STAGE, Everything(), "blocks [0, 4)")],
)
@cases("second", [GPU, BOARD, ""])
def test_only_copies_need_one_class(plan: Plan, method: Method, says: str, second: str) -> None:
    """HiFT's owners and hosts of one stage: unlike ones are refused with both classes; a mixed ring is none of it."""
    plan = changed(plan, method=method)
    facts = facts_of(plan, a=GPU, b=second)
    if not says or second == GPU:
        refuse_differing_copies(plan, facts)
        return
    with pytest.raises(PlanError) as caught:
        refuse_differing_copies(plan, facts)
    for part in (f"a ({GPU})", f"b ({second or 'cpu'})", f"copies of {says}", "--device cpu"):
        assert part in str(caught.value)


def test_instructions_for_bfloat16_count_where_products_are_rounded() -> None:
    """A processor without them is of the same class for products in float32, as is a profile of before."""
    words = ("cpu x86_64 AVX512 amx_bf16 avx512_bf16, torch 2.13.0", "cpu x86_64 AVX512, torch 2.13.0")
    facts = facts_of(STAGE, a=words[0], b=words[1])
    refuse_differing_copies(STAGE, facts)
    with pytest.raises(PlanError, match="amx_bf16 avx512_bf16, torch"):
        refuse_differing_copies(changed(STAGE, compute="bfloat16"), facts)


def test_node_that_tells_no_class_has_that_of_its_device() -> None:
    """Profiles of earlier versions have none: all processors are taken for alike, as they were."""
    facts = facts_of(STAGE, a="", b="")
    assert {numeric_class(one, STAGE.course) for one in facts.values()} == {"cpu"}
    refuse_differing_copies(STAGE, facts)
