"""What is measured for a job, and who is measured with whom."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from ringtune.costs.measured.measuring import Size, hidden_bytes, job_shape, link_rounds, timed_sizes
from ringtune.costs.profile import TimedShape
from ringtune.jobs.job import parse_job
from tests.support.fake_agents import MODEL

JOB = parse_job('[model]\npath = "m"\n', source="test").with_overrides(
    {"train.batch_size": 10, "train.microbatches": 4, "train.max_length": 64, "wire.dtype": "bfloat16"}
)


def test_job_shape_has_what_changes_the_timings() -> None:
    """The largest micro-batch of 10 rows in 4 parts has 3."""
    assert job_shape(JOB) == TimedShape(
        rows=3,
        tokens=64,
        task="sequence-classification",
        adapter="seq_bn",
        dtype="float32",
        wire_dtype="bfloat16",
        optimizer="adamw",
        dropout=0.0,
    )


def test_job_shape_of_images_has_the_tokens_of_an_image() -> None:
    """What a job says about the longest text changes nothing for images."""
    lengths = [JOB.with_overrides({"train.max_length": length}) for length in (3, 64, 128)]
    assert {job_shape(job, fixed_tokens=50).tokens for job in lengths} == {50}
    images = dataclasses.replace(MODEL, fixed_tokens=50, hidden_size=8, num_heads=1)
    assert {hidden_bytes(job, images) for job in lengths} == {3 * 50 * 17}


def test_timed_sizes_halve_the_length_or_for_images_the_rows() -> None:
    """Two sizes where there can be two."""
    assert timed_sizes(JOB) == (Size(3, 64), Size(3, 32))
    assert timed_sizes(JOB, fixed_tokens=50) == (Size(3, 50), Size(1, 50))
    assert timed_sizes(JOB.with_overrides({"train.batch_size": 4}), fixed_tokens=50) == (Size(1, 50),)
    assert timed_sizes(JOB.with_overrides({"train.max_length": 3})) == (Size(3, 3), Size(3, 1))  # a job's shortest


@pytest.mark.parametrize(("dtype", "token_bytes"), [("float32", 33), ("bfloat16", 17), ("int8", 13)])
def test_hidden_bytes_count_elements_scales_and_mask(dtype: str, token_bytes: int) -> None:
    """Of 3 rows of 64 tokens of width 8."""
    model = dataclasses.replace(MODEL, hidden_size=8, num_heads=1)
    assert hidden_bytes(JOB.with_overrides({"wire.dtype": dtype}), model) == 3 * 64 * token_bytes


@pytest.mark.parametrize("count", range(10))
@pytest.mark.parametrize("num_machines", [1, 3, 100])
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
