"""Plans of HiFT: slices on one, two and four nodes, what fits only with state on disk, and what is refused."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from coordinator.planner.choose import plan_of
from coordinator.planner.draft import Draft
from coordinator.planner.make_plan import make_plan
from coordinator.planner.predict.judge import simulated_job_s
from coordinator.planner.predict.ring_costs import ring_costs
from coordinator.planner.predict.step_time import Ring, job_s
from ringtune.costs.profile import NodeFacts, Profile
from ringtune.costs.seconds import CourseCosts
from ringtune.costs.work_times import Work
from ringtune.errors import CapacityError
from ringtune.jobs.job import Job, parse_job
from ringtune.schedule.actions import Payload
from ringtune.schedule.methods import Hift
from ringtune.schedule.plan import Plan
from sim.prediction import predict
from sim.ring import VirtualRing
from tests.support.planner_rings import CLASSES, MIB, class_ring, device, draft_for

_SLOWER = {Work.BACKWARD: 1.8, Work.BACKWARD_LOWEST: 2.2, Work.UPDATE: 10.0}
"""How many times longer these works take than with adapters."""


def wanted(**changes: object) -> Job:
    """A job of HiFT; keys with ``__`` for the dot."""
    text = "[model]\npath = 'm'\n[train]\nmethod = 'hift'\nmax_length = 64\nmax_steps = 60\n"
    overrides = {key.replace("__", "."): value for key, value in changes.items()}
    return parse_job(text, source="test").with_overrides(overrides)


def board(name: str, *, num_blocks: int = 12, memory_bytes: int = 8192 * MIB, **changes: Any) -> NodeFacts:
    """A node that was measured with all parameters of a MiniLM training."""
    return full(device(name, num_blocks=num_blocks, memory_bytes=memory_bytes, **changes))


def full(node: NodeFacts) -> NodeFacts:
    """The node with a model whose parameters all train, and a backward with gradients of all weights."""
    model = dataclasses.replace(
        node.model, block_bytes=0, adapter_block_bytes=7_097_856, embedding_bytes=0,
        embedding_train_bytes=47_677_440, token_table_bytes=46_881_792,
    )  # fmt: skip
    times = tuple(
        dataclasses.replace(time, median_s=seconds, low_s=seconds, high_s=seconds)
        for time in node.work_times
        for seconds in [time.median_s * _SLOWER.get(Work(time.work), 1.0)]
    )
    shape = dataclasses.replace(node.shape, adapter="full")
    return dataclasses.replace(node, model=model, work_times=times, shape=shape)


def planned(job: Job, *nodes: NodeFacts) -> Plan:
    """The plan of a job for these nodes."""
    return make_plan(job, {node.node: node for node in nodes}).plan


@pytest.mark.parametrize("num_nodes", [1, 2, 4])
def test_plan_of_hift_shares_the_blocks_of_alike_nodes_out(num_nodes: int) -> None:
    """Every node hosts; all own data; the method and the place of its state are the job's."""
    nodes = [board(name) for name in "abcd"[:num_nodes]]
    plan = planned(wanted(hift__state="disk", hift__group_size=2), *nodes)
    counts = [piece.num_blocks for piece in plan.placement.slices]
    assert sum(counts) == 12 and min(counts) >= 12 // num_nodes - 1
    assert plan.course.method == Hift(group_size=2)
    assert plan.placement.state_on_disk
    assert not planned(wanted(), *nodes).placement.state_on_disk


def test_plan_of_hift_that_fits_no_node_is_refused_with_both_numbers() -> None:
    """One board is too small, alone; four of them are not."""
    job = wanted(train__optimizer="adamw")
    need = make_plan(job, {"a": board("a")}).memory["a"].total_bytes
    small = round(0.8 * need)
    with pytest.raises(CapacityError, match=r"node a needs .*MiB.* but has .*MiB"):
        planned(job, board("a", memory_bytes=small))
    four = make_plan(job, {name: board(name, memory_bytes=small, rows=100 if name == "a" else 0) for name in "abcd"})
    assert all(estimate.total_bytes <= small for estimate in four.memory.values())


def test_plan_of_hift_with_state_on_disk_fits_where_state_in_memory_does_not() -> None:
    """A board that has all blocks needs half as much for gradients and state: those of the embedding."""
    in_memory = make_plan(wanted(), {"a": board("a")}).memory["a"].parts()["optimizer"]
    on_disk = make_plan(wanted(hift__state="disk"), {"a": board("a")}).memory["a"]
    assert on_disk.parts()["optimizer"] < 0.52 * in_memory
    small = board("a", memory_bytes=on_disk.total_bytes)
    assert planned(wanted(hift__state="disk"), small).placement.state_on_disk
    with pytest.raises(CapacityError):
        planned(wanted(), small)


def test_plan_of_hift_keeps_blocks_from_an_owner_without_room_for_them() -> None:
    """Embedding, head and their state take most of an owner; a node without data takes more blocks."""
    need = make_plan(wanted(), {"a": board("a"), "b": board("b", rows=0)}).memory["a"].total_bytes
    plan = planned(wanted(), board("a", memory_bytes=need - 20 * MIB), board("b", rows=0))
    assert plan.slice_of("a").num_blocks < 6


def draft_of(profile: Profile, **settings: Any) -> Draft:
    """The draft of a job of HiFT."""
    draft = draft_for(profile, num_steps=60)
    return dataclasses.replace(draft, course=dataclasses.replace(draft.course, method=Hift(**settings)))


def ring_of(rng: random.Random, kinds: list[str], *, owners: int) -> Profile:
    """Devices of these classes that were measured with all parameters training."""
    profile = class_ring(rng, kinds, num_blocks=6, owners=owners)
    return dataclasses.replace(profile, nodes=tuple(map(full, profile.nodes)))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("group_size", [1, 3])
def test_formula_of_hift_is_near_the_simulated_run(seed: int, group_size: int) -> None:
    """A step of a sweep takes what its group lets it: the mean is within a quarter of the simulator's."""
    rng = random.Random(seed)
    profile = ring_of(rng, [rng.choice(sorted(CLASSES)) for _ in range(3)], owners=1)
    draft = draft_of(profile, group_size=group_size)
    costs = ring_costs(draft, profile, optimizer="adamw")
    ring = Ring(nodes=(0, 1, 2), counts=(2, 2, 2))
    plan = plan_of(draft, costs, ring)
    simulated = predict(plan, profile).train_s
    assert job_s(costs, ring) == pytest.approx(simulated, rel=0.25)
    judged = simulated_job_s(plan, profile, costs, ring, optimizer="adamw", most_actions=10**6)
    assert judged == pytest.approx(simulated, rel=0.1)


def test_prediction_of_hift_counts_the_bytes_of_unit_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two owners: over each link between them go the gradients of embedding and head of the other's steps."""
    profile = ring_of(random.Random(1), ["laptop", "laptop"], owners=2)
    draft = draft_of(profile)
    plan = plan_of(draft, ring_costs(draft, profile, optimizer="adamw"), Ring(nodes=(0, 1), counts=(3, 3)))
    ring = VirtualRing(plan)
    ring.run()
    units = [each for each in ring.result.messages if each.payload == Payload.UNIT_GRAD]
    sent = {(link.source, link.target): link.sent_bytes for link in predict(plan, profile).links}
    monkeypatch.setattr(CourseCosts, "unit_grad_bytes", lambda costs, unit: 0.0)
    without = {(link.source, link.target): link.sent_bytes for link in predict(plan, profile).links}
    head = profile.nodes[0].model.head_bytes + 2 * profile.nodes[0].model.head_class_bytes
    for pair, num_bytes in sent.items():
        of_link = [each.key.boundary for each in units if (each.source, each.target) == pair]
        rows = num_bytes - without[pair] - of_link.count(6) * head
        table = of_link.count(-1) * (47_677_440 - 46_881_792)
        tokens = (rows - table) / of_link.count(-1) / (46_881_792 / 30522 + 8)
        assert 16 * 32 <= tokens <= 16 * 64, "the padded tokens of a mean batch"
