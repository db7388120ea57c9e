"""Which slices fit: the affine sums are those of ``node_memory``."""

from __future__ import annotations

import dataclasses
import random

import pytest

from coordinator.planner.draft import Draft
from coordinator.planner.fitting.memory_caps import MemoryCaps
from ringtune.schedule.operations.choice import BlockCapacity, Choice
from ringtune.schedule.placement import Slice
from tests.support.planner_rings import class_ring, draft_for, random_counts, random_kinds
from tests.support.plans import random_operations


@pytest.mark.parametrize("seed", range(12))
def test_memory_caps_equal_node_memory_for_every_slice(seed: int) -> None:
    """For any ring, role, depth, method and number of private blocks the bytes are those of the whole plan."""
    rng = random.Random(seed)
    num_nodes = rng.randint(2, 5)
    num_blocks = rng.randint(max(3, num_nodes), 9)
    profile = class_ring(rng, random_kinds(rng, num_nodes), num_blocks=num_blocks, owners=rng.randint(1, num_nodes))
    private = rng.choice([0, 0, 1])
    draft = draft_for(
        profile,
        microbatches=rng.choice([1, 4]),
        num_steps=rng.choice([40, 100, 700]),
        every_steps=rng.choice([10, 40]),
        private_blocks=private,
        method=rng.choice(["ringada", "ringada", "all", "pipeadapter"]),
    )
    facts = {
        name: dataclasses.replace(node, activation_token_bytes=rng.randint(1, 10**7))
        for name, node in profile.by_name.items()
    }
    caps = MemoryCaps(draft, facts, optimizer="adamw", dtype="float32")
    for _ in range(30):
        hosts = rng.sample(sorted(facts), rng.randint(1, min(num_nodes, num_blocks - private)))
        counts = random_counts(rng, num_blocks - private, len(hosts))
        slices, at = [], private
        for name, count in zip(hosts, counts, strict=True):
            slices.append(Slice(node=name, start=at, stop=at + count))
            at += count
        plan = draft.placed(slices)
        for above, piece in zip(reversed(range(len(slices))), slices, strict=True):
            wanted = caps.estimate(plan, piece.node).total_bytes
            assert caps.needed_bytes(piece.node, piece.start, piece.stop, above) == wanted


@pytest.mark.parametrize("kind", ["table", "random", "two-stage"])
@pytest.mark.parametrize("seed", range(4))
def test_memory_caps_with_operations_are_never_too_small(seed: int, kind: str) -> None:
    """Before a ring is chosen any slice may be passed by, so that more may wait; graphs count as in the whole plan."""
    rng = random.Random(seed)
    profile = class_ring(rng, ["laptop", "jetson", "pi"], num_blocks=6, owners=2)
    draft = with_operations(draft_for(profile, microbatches=4, method="all"), rng, kind)
    caps = MemoryCaps(draft, profile.by_name, optimizer="adamw", dtype="float32")
    for _ in range(10):
        hosts = rng.sample(sorted(profile.by_name), rng.randint(1, 3))
        counts = random_counts(rng, 6, len(hosts))
        stops = [sum(counts[: at + 1]) for at in range(len(counts))]
        slices = [
            Slice(node=name, start=stop - count, stop=stop)
            for name, count, stop in zip(hosts, counts, stops, strict=True)
        ]
        plan = draft.placed(slices)
        for above, piece in zip(reversed(range(len(slices))), slices, strict=True):
            wanted = caps.estimate(plan, piece.node)
            found = caps.estimate_of(piece.node, piece.start, piece.stop, above)
            assert found.total_bytes >= wanted.total_bytes
            assert found.parts()["activations"] == wanted.parts()["activations"]


def test_memory_caps_let_a_node_host_more_where_tables_leave_graphs_out() -> None:
    """Four blocks of which half is passed by need less than three whole ones; with scores they need more than four."""
    rng = random.Random(0)
    profile = class_ring(rng, ["laptop", "laptop"], num_blocks=6, owners=1)
    draft = draft_for(profile, microbatches=4, method="all")
    facts = {name: dataclasses.replace(node, activation_token_bytes=100_000) for name, node in profile.by_name.items()}

    def needed(which: Draft, blocks: int) -> int:
        caps = MemoryCaps(which, facts, optimizer="adamw", dtype="float32")
        return caps.needed_bytes(sorted(facts)[1], 6 - blocks, 6, 0)

    half, scored = (with_operations(draft, rng, kind) for kind in ("random", "two-stage"))
    assert needed(half, 4) < needed(draft, 3) < needed(draft, 4) < needed(scored, 4)


def with_operations(draft: Draft, rng: random.Random, kind: str) -> Draft:
    """The draft with a table, or with a choice of half of the micro-batches for each block."""
    course = draft.course
    if kind == "table":
        table = random_operations(rng, course, codes="123", subnets=2)
        return dataclasses.replace(draft, course=dataclasses.replace(course, operations=table))
    capacity = BlockCapacity(full=course.batch_size, forward_only=0.0, forward=1.0, backward=1.0)
    choice = Choice(policy=kind, subnets=1, capacities=(capacity,))
    return dataclasses.replace(draft, course=dataclasses.replace(course, choice=choice))


def test_memory_caps_know_an_owner_without_room_for_its_head() -> None:
    """An owner that hosts nothing still needs embedding and head; another node needs nothing then."""
    profile = class_ring(random.Random(0), ["laptop", "pi"], num_blocks=4, owners=1)
    small = {name: dataclasses.replace(node, memory_bytes=1000) for name, node in profile.by_name.items()}
    caps = MemoryCaps(draft_for(profile), small, optimizer="adamw", dtype="float32")
    assert [caps.fits_empty(name) for name in sorted(small)] == [False, True]
