"""Formulas and probes see what operation tables leave of work and messages."""

from __future__ import annotations

import dataclasses
import random
import statistics

import pytest

from coordinator.planner.draft import Draft
from coordinator.planner.judge import simulated_job_s, simulated_step_s
from coordinator.planner.ring_costs import RingCosts, loads_of, ring_costs
from coordinator.planner.search import plan_of
from coordinator.planner.step_time import Ring, job_s, step_times
from ringtune.costs.profile import Profile
from ringtune.schedule.course import Course
from ringtune.schedule.operation_tables import BatchOperations, BlockCapacity, Choice, Operations, Policy
from ringtune.schedule.units import Units
from sim.prediction import predict
from tests.support.planner_rings import class_ring, device, draft_for, random_counts


def same_rows(course: Course, rows: tuple[str, ...], subnets: int = 1) -> Operations:
    """A table with the same rows for every batch of every owner."""
    entries = (
        BatchOperations(owner=owner.node, batch_id=index, rows=rows)
        for owner in course.owners
        for index in range(-(-owner.train_rows // course.batch_size))
    )
    return Operations(batches=tuple(entries), subnets=subnets)


def with_table(draft: Draft, rows: tuple[str, ...], subnets: int = 1) -> Draft:
    """The draft with these operations."""
    course = dataclasses.replace(draft.course, operations=same_rows(draft.course, rows, subnets))
    return dataclasses.replace(draft, course=course)


def with_choice(draft: Draft, full: float, forward_only: float, subnets: int = 1) -> Draft:
    """The draft whose run chooses tables: so many shares of the rows full and forward-only."""
    rows = draft.course.batch_size
    capacity = BlockCapacity(full=2 * full * rows, forward_only=forward_only * rows, forward=1.0, backward=1.0)
    choice = Choice(policy=Policy.TWO_STAGE.value, subnets=subnets, capacities=(capacity,))
    return dataclasses.replace(draft, course=dataclasses.replace(draft.course, choice=choice))


def few(num_blocks: int = 4, num_nodes: int = 2, **changes: object) -> tuple[Profile, Draft]:
    """Alike nodes without links, which train everything."""
    names = [f"n{index}" for index in range(num_nodes)]
    profile = Profile(nodes=tuple(device(name, num_blocks=num_blocks) for name in names))
    return profile, draft_for(profile, method="all", **changes)  # type: ignore[arg-type]


def test_loads_are_shares_of_patterns_weights_and_visits() -> None:
    """The example of the module: block 0 takes four times what block 1 does."""
    profile, draft = few(microbatches=2)
    table = with_table(draft, ("11133333", "11331111"), subnets=2)
    loads = loads_of(table.course, 0)
    assert loads is not None
    assert loads.patterns == pytest.approx({"": 0.5, "13": 0.125, "33": 0.375})
    costs = ring_costs(table, profile, optimizer="adamw")
    assert costs.weights == pytest.approx((0.0, 1.0 / 0.5625, 1.25 / 0.5625, 1.75 / 0.5625, 4.0))
    assert costs.weight(1, 4) == pytest.approx(4.0 - 1.0 / 0.5625)
    visits = [costs.visit(*blocks) for blocks in ((0, 2), (1, 2), (2, 4), (0, 4))]
    assert visits == pytest.approx([1.0, 0.5, 0.5, 1.0])


@pytest.mark.parametrize("subnets", [1, 3])
def test_all_full_tables_leave_the_costs_as_they_are(subnets: int) -> None:
    """No weights, no visits, the same times."""
    profile, draft = few()
    full = with_table(draft, ("1" * 4 * subnets,) * 4, subnets)
    assert loads_of(full.course, 0) is None
    assert ring_costs(full, profile, optimizer="adamw") == ring_costs(draft, profile, optimizer="adamw")
    standard = dataclasses.replace(with_choice(draft, 1.0, 0.0).course.choice, policy="standard")  # type: ignore[type-var]
    chosen = dataclasses.replace(draft, course=dataclasses.replace(draft.course, choice=standard))
    assert ring_costs(chosen, profile, optimizer="adamw") == ring_costs(draft, profile, optimizer="adamw")


def test_half_of_the_operations_are_half_of_the_block_times() -> None:
    """Two of four micro-batches full, two passed by, before any score is known."""
    profile, draft = few(microbatches=4)
    full, half = (ring_costs(each, profile, optimizer="adamw") for each in (draft, with_choice(draft, 0.5, 0.0)))
    for name in ("forward_s", "graph_s", "graph_lowest_s", "backward_s", "backward_lowest_s"):
        assert getattr(half, name) == pytest.approx([0.5 * value for value in getattr(full, name)])
    assert half.update_s == full.update_s
    assert half.owners[0].head_s == full.owners[0].head_s


def test_forward_only_takes_forwards() -> None:
    """Half of the micro-batches full, half forward-only: a backward half as often, a forward always."""
    profile, draft = few(microbatches=4)
    full, half = (ring_costs(each, profile, optimizer="adamw") for each in (draft, with_choice(draft, 0.5, 0.5)))
    assert half.backward_s == pytest.approx([0.5 * value for value in full.backward_s])
    assert half.forward_s == pytest.approx(full.forward_s)
    expected = [0.5 * (graph + free) for graph, free in zip(full.graph_s, full.forward_s, strict=True)]
    assert half.graph_s == pytest.approx(expected)


def test_one_node_takes_the_sum_of_its_work() -> None:
    """Alone nothing waits: with equal shares in all blocks the formula equals the simulator."""
    profile = Profile(nodes=(device("a", num_blocks=4, block_s=0.1, tokens=64),))
    draft = with_table(draft_for(profile, microbatches=2, method="all"), ("13121331", "31132121"), subnets=2)
    costs = ring_costs(draft, profile, optimizer="adamw")
    ring = Ring(nodes=(0,), counts=(4,))
    found = simulated_step_s(
        plan_of(draft, costs, ring), profile, Units.top(4, 4), optimizer="adamw", owner="a", burn_in=2, measured=4
    )
    assert step_times(costs, ring)[4] == pytest.approx(found, rel=0.03)


def random_case(rng: random.Random) -> tuple[Profile, Draft, RingCosts, Ring]:
    """A small ring with a table in which each subnet is full for 3 of 5 micro-batches."""
    num_nodes = rng.randint(1, 4)
    num_blocks = rng.randint(max(3, num_nodes), 8)
    kinds = [rng.choice(["laptop", "jetson"]) for _ in range(num_nodes)]
    profile = class_ring(rng, kinds, num_blocks=num_blocks, owners=1, with_links=rng.random() < 0.7)
    draft = draft_for(profile, microbatches=5, batch_size=20, method="all")
    draft = with_choice(draft, 0.6, rng.choice([0.0, 0.2]), subnets=rng.choice([1, 4, 6]))
    costs = ring_costs(draft, profile, optimizer="adamw")
    hosts = rng.sample(range(num_nodes), rng.randint(1, num_nodes))
    return profile, draft, costs, Ring(nodes=tuple(hosts), counts=random_counts(rng, num_blocks, len(hosts)))


def test_step_time_with_tables_is_near_the_simulated_steady_state() -> None:
    """Of 30 random rings at 60 % half are within 5 %, and nine of ten within 20 %: the simulator settles the rest."""
    rng, errors = random.Random(5), []
    for _ in range(30):
        profile, draft, costs, ring = random_case(rng)
        blocks = draft.course.num_blocks
        found = simulated_step_s(
            plan_of(draft, costs, ring), profile, Units.top(blocks, blocks), optimizer="adamw",
            owner=draft.course.owners[0].node, burn_in=4, measured=8,
        )  # fmt: skip
        errors.append(abs(step_times(costs, ring)[blocks] / found - 1))
    errors.sort()
    assert statistics.median(errors) < 0.05
    assert errors[26] < 0.20


def test_a_probe_runs_the_expected_table() -> None:
    """Before scores are known the virtual run has what the choice allows, and no scores of its own."""
    profile, draft = few(microbatches=5, batch_size=20, num_steps=40)
    ring = Ring(nodes=(0, 1), counts=(2, 2))
    seconds = []
    for each in (draft, with_choice(draft, 0.6, 0.0)):
        costs = ring_costs(each, profile, optimizer="adamw")
        plan = plan_of(each, costs, ring)
        found = simulated_job_s(plan, profile, costs, ring, optimizer="adamw", max_actions=60_000)
        assert found is not None
        seconds.append(found)
    assert 0.6 < seconds[1] / seconds[0] < 0.85


def test_slices_are_cut_by_what_blocks_really_do() -> None:
    """Of eight blocks the upper four do half as much: more of them are in the upper slice."""
    profile, draft = few(num_blocks=8, microbatches=2)
    table = with_table(draft, ("1111111113131313",) * 2, subnets=2)

    def counts(which: Draft) -> tuple[int, ...]:
        costs = ring_costs(which, profile, optimizer="adamw")
        rings = (Ring(nodes=(0, 1), counts=(low, 8 - low)) for low in range(2, 7))
        return min(rings, key=lambda ring: job_s(costs, ring)).counts

    assert counts(table)[0] < counts(draft)[0]


def test_passed_slices_cost_no_messages() -> None:
    """Where each of two slices is passed by for half of the micro-batches, so is half of what goes between them."""
    rng = random.Random(1)
    profile = class_ring(rng, ["laptop", "laptop"], num_blocks=4, owners=1)
    draft = draft_for(profile, microbatches=2, method="all", num_steps=40)
    rows = ("1133", "3311")
    costs = ring_costs(with_table(draft, rows), profile, optimizer="adamw")
    assert [costs.visit(0, 2), costs.visit(2, 4)] == pytest.approx([0.5, 0.5])
    ring = Ring(nodes=(1, 0), counts=(2, 2))
    plan = plan_of(with_table(draft, rows), costs, ring)
    less, full = predict(plan, profile), predict(plan_of(draft, costs, ring), profile)
    assert sum(link.sent_bytes for link in less.links) < 0.75 * sum(link.sent_bytes for link in full.links)
    assert step_times(costs, ring)[4] < 0.75 * step_times(ring_costs(draft, profile, optimizer="adamw"), ring)[4]
