"""Which slices fit: the affine sums are those of ``node_memory``."""

from __future__ import annotations

import dataclasses
import random

import pytest

from coordinator.planner.memory_caps import MemoryCaps
from ringtune.schedule.placement import Slice
from tests.support.planner_rings import class_ring, draft_for, random_counts, random_kinds


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


def test_memory_caps_know_an_owner_without_room_for_its_head() -> None:
    """An owner that hosts nothing still needs embedding and head; another node needs nothing then."""
    profile = class_ring(random.Random(0), ["laptop", "pi"], num_blocks=4, owners=1)
    small = {name: dataclasses.replace(node, memory_bytes=1000) for name, node in profile.by_name.items()}
    caps = MemoryCaps(draft_for(profile), small, optimizer="adamw", dtype="float32")
    assert [caps.fits_empty(name) for name in sorted(small)] == [False, True]
