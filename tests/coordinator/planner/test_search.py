"""Search for the best ring, with trying everything as the oracle, and even slices of nodes that are alike."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.planner.local_search import Budget, LocalResult, every_ring, num_rings, search_local
from coordinator.planner.memory import MemoryCaps
from coordinator.planner.ring_costs import RingCosts, ring_costs, with_mean_owner
from coordinator.planner.search import split_blocks, with_saving
from coordinator.planner.step_time import Ring, job_s
from ringtune.costs.profile import Profile
from ringtune.techniques.activation_checkpointing import AUTO
from tests.support.planner_rings import MIB, class_ring, device, draft_for, random_kinds
from tests.support.plans import random_operations

Fits = Callable[[int, int, int, int], bool]


def best_of_all(costs: RingCosts, fits: Fits) -> float:
    """Seconds of the best of all rings, by trying each; infinite if none fits."""

    def is_held(ring: Ring) -> bool:
        stops = [costs.first + stop for stop in itertools.accumulate(ring.counts)]
        above = reversed(range(len(ring.nodes)))
        return all(
            fits(node, stop - count, stop, hosts)
            for node, count, stop, hosts in zip(ring.nodes, ring.counts, stops, above, strict=True)
        )

    rings = filter(is_held, every_ring(costs.num_nodes, costs.stop - costs.first, costs.num_nodes))
    return min((job_s(costs, ring) for ring in rings), default=float("inf"))


def random_instance(rng: random.Random, num_nodes: int, num_blocks: int) -> tuple[RingCosts, Fits]:
    """Unequal nodes, links, owners, methods, operation tables and memory, which often is short.

    In some of them slices run blocks again where they would not fit otherwise.
    """
    profile = class_ring(
        rng,
        random_kinds(rng, num_nodes),
        num_blocks=num_blocks,
        owners=rng.choice([0, 1, 2]),
        with_links=rng.random() < 0.7,
    )
    draft = draft_for(
        profile,
        microbatches=rng.choice([1, 4, 8]),
        num_steps=rng.choice([100, 700]),
        method=rng.choice(["ringada", "ringada", "ringada", "all", "pipeadapter"]),
        private_blocks=rng.choice([0, 0, 0, 1]),
    )
    kind = rng.choice(["", "", "operations", "activations"])
    if kind == "operations":
        operations = random_operations(rng, draft.course, codes="1333")
        draft = dataclasses.replace(draft, course=dataclasses.replace(draft.course, operations=operations))
    if kind == "activations":
        draft = dataclasses.replace(draft, activations=AUTO)
        small = (dataclasses.replace(node, memory_bytes=rng.randint(100, 300) * MIB) for node in profile.nodes)
        profile = dataclasses.replace(profile, nodes=tuple(small))
    caps = MemoryCaps(draft, profile.by_name, optimizer="adamw", dtype="float32")
    costs = with_saving(ring_costs(draft, profile, optimizer="adamw"), caps)
    most = [rng.randint(0, num_blocks) if rng.random() < 0.5 else num_blocks for _ in range(num_nodes)]

    def fits(node: int, start: int, stop: int, above: int) -> bool:
        return stop - start <= most[node] and caps.fits(costs.names[node], start, stop, above)

    return costs, fits


def local(costs: RingCosts, fits: Fits, *, evaluations: int, seed: int = 0) -> LocalResult:
    """A local search without a clock."""
    budget = Budget(evaluations=evaluations, seconds=1.0, now_s=lambda: 0.0)
    return search_local(costs, lambda *slice_: 0 if fits(*slice_) else 1, budget, seed=seed)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.sampled(5)
def test_local_search_finds_the_best_of_all_rings(seed: int) -> None:
    """Where there are more rings than evaluations, it climbs to the best of all, or both find that nothing fits."""
    rng = random.Random(seed)
    costs, fits = random_instance(rng, *rng.choice([(4, 8), (5, 6)]))
    found = local(costs, fits, evaluations=700)
    assert not found.is_complete
    assert found.value_s == pytest.approx(best_of_all(costs, fits), rel=1e-9)
    if found.ring is not None:
        assert job_s(costs, found.ring) == pytest.approx(found.value_s, rel=1e-9)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.sampled(4)
def test_local_search_of_few_rings_tries_each_once(seed: int) -> None:
    """Where there are no more rings than evaluations, the best of all is found, and none is looked at twice."""
    rng = random.Random(300 + seed)
    num_nodes, num_blocks = rng.randint(1, 3), rng.randint(2, 8)
    costs, fits = random_instance(rng, num_nodes, num_blocks)
    most = costs.stop - costs.first
    found = local(costs, fits, evaluations=1000)
    every = list(every_ring(num_nodes, most, num_nodes))
    assert found.is_complete
    assert found.evaluations == len(set(every)) == len(every) == num_rings(num_nodes, most, num_nodes)
    assert found.value_s == pytest.approx(best_of_all(costs, fits), rel=1e-9)
    assert len({frozenset(ring.nodes) for _, ring in found.pool}) == len(found.pool)


def test_local_search_takes_equal_nodes_in_the_order_of_their_names() -> None:
    """Of rings that take as long, the one whose nodes are first is taken."""
    nodes = tuple(device(f"n{index}", num_blocks=4, tokens=64) for index in range(4))
    costs = ring_costs(draft_for(Profile(nodes=nodes)), Profile(nodes=nodes), optimizer="adamw")
    found = local(costs, lambda *_: True, evaluations=1000)
    assert found.ring is not None and found.is_complete
    assert found.ring.nodes == tuple(range(len(found.ring.nodes)))


def test_local_search_depends_on_its_seed_only() -> None:
    """Twice the same search, twice the same ring and pool."""
    rng = random.Random(9)
    profile = class_ring(rng, random_kinds(rng, 20), num_blocks=32)
    costs = with_mean_owner(ring_costs(draft_for(profile), profile, optimizer="adamw"))
    assert local(costs, lambda *_: True, evaluations=800) == local(costs, lambda *_: True, evaluations=800)


def test_local_search_stops_at_its_clock() -> None:
    """The injected clock ends it; what was found by then counts."""
    rng = random.Random(9)
    profile = class_ring(rng, random_kinds(rng, 20), num_blocks=32)
    costs = with_mean_owner(ring_costs(draft_for(profile), profile, optimizer="adamw"))
    ticks = itertools.count()
    budget = Budget(evaluations=10**9, seconds=5.0, now_s=lambda: float(next(ticks)))
    found = search_local(costs, lambda *_: 0, budget)
    assert found.ring is not None
    assert found.evaluations <= 8 * 64


def test_local_search_begins_with_rings_that_do_not_fit() -> None:
    """Where every node has room for a fifth of the blocks only, it gets there by what is lacking."""
    nodes = tuple(device(f"n{index:02d}", num_blocks=10, memory_bytes=MIB, tokens=64) for index in range(8))
    costs = ring_costs(draft_for(Profile(nodes=nodes)), Profile(nodes=nodes), optimizer="adamw")
    found = local(costs, lambda node, start, stop, above: stop - start <= 2, evaluations=1000)
    assert found.ring is not None
    assert max(found.ring.counts) <= 2


@pytest.mark.parametrize(
    ("costs", "blocks", "counts"),
    [
        ([1.0], 12, (12,)),
        ([1.0, 1.0, 1.0, 1.0], 6, (2, 2, 1, 1)),
        ([1.0, 2.0], 12, (8, 4)),
        ([2.0, 1.0, 1.0], 10, (2, 4, 4)),
        ([1.0, 1.0, 1.0], 2, (1, 1, 0)),
        ([1.0, 100.0], 6, (6, 0)),
    ],
)
def test_split_is_proportional_to_speed(costs: list[float], blocks: int, counts: tuple[int, ...]) -> None:
    """Twice as fast means twice as many blocks; what is left over goes to the lower blocks."""
    assert split_blocks(costs, start=0, stop=blocks) == counts


def test_split_ignores_noise_and_begins_behind_private_blocks_where_there_is_room() -> None:
    """A tenth is noise. Who has room for one block gets one, however fast it is; where nothing fits there is no split.

    An owner without room for its head hosts nothing.
    """
    assert split_blocks([1.0, 1.1, 0.95, 1.05], start=0, stop=12) == (3, 3, 3, 3)
    assert split_blocks([1.0, 1.0], start=2, stop=6) == (2, 2)
    rooms: list[tuple[Callable[[int, int], int], tuple[int, ...] | None]] = [
        (lambda index, first: first + (6 if index else 1), (1, 5)),
        (lambda index, first: first + 2, None),
        (lambda index, first: 6 if index else -1, None),
    ]
    for longest, counts in rooms:
        assert split_blocks([1.0, 1.0], start=0, stop=6, longest=longest) == counts


@settings(max_examples=30, deadline=None)
@given(
    costs=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    blocks=st.integers(1, 7),
    room=st.lists(st.integers(0, 7), min_size=4, max_size=4),
)
def test_split_is_as_good_as_trying_everything(costs: list[int], blocks: int, room: list[int]) -> None:
    """The slowest slice is within the tolerance of the best of all splits, and a split is found if there is one."""
    found = split_blocks(costs, start=0, stop=blocks, longest=lambda index, first: first + room[index])
    everything = [
        counts
        for counts in itertools.product(*(range(room[index] + 1) for index in range(len(costs))))
        if sum(counts) == blocks
    ]
    if not everything:
        assert found is None
        return
    assert found in everything
    slowest = [max(cost * count for cost, count in zip(costs, counts, strict=True)) for counts in everything]
    assert max(cost * count for cost, count in zip(costs, found, strict=True)) <= min(slowest) * 1.15 + 1e-9
