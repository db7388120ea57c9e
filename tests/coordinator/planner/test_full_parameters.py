"""Plans of HiFT: slices on one, two and four nodes, what fits only with state on disk, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

import pytest

from coordinator.api.prediction_text import prediction_lines
from coordinator.planner.draft import Draft
from coordinator.planner.judge import simulated_job_s
from coordinator.planner.make_plan import keep_plan, make_plan, plan_memory
from coordinator.planner.memory import MemoryCaps
from coordinator.planner.planned import Planned
from coordinator.planner.replan import placed_without
from coordinator.planner.ring_costs import ring_costs
from coordinator.planner.search import plan_of
from coordinator.planner.step_time import Ring, job_s
from ringtune.costs.action_costs import CourseCosts
from ringtune.costs.memory_sizes import MemorySettings
from ringtune.costs.profile import NodeFacts, Profile, Work
from ringtune.errors import CapacityError, JobError, PlanError, StorageError
from ringtune.job.job import Job, parse_job
from ringtune.schedule.actions import Payload
from ringtune.schedule.methods import Hift
from ringtune.schedule.plan import Plan
from ringtune.techniques.offload import helpers_by_host
from sim.prediction import predict
from tests.coordinator.planner.test_helpers import PAIRS, job_of, of_users
from tests.support.planner_rings import CLASSES, MIB, QUICK, class_ring, device, draft_for
from tests.support.recorded_ring import RecordedRing

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


@functools.lru_cache(maxsize=64)
def made(job: Job, *nodes: NodeFacts) -> Planned:
    """What is decided of a job for these nodes; once."""
    return make_plan(job, {node.node: node for node in nodes}, effort=QUICK)


def planned(job: Job, *nodes: NodeFacts) -> Plan:
    """The plan of a job for these nodes."""
    return made(job, *nodes).plan


def test_plan_of_hift_shares_the_blocks_of_alike_nodes_out() -> None:
    """Every node hosts; all own data; the method and the place of its state are the job's."""
    plan = planned(wanted(hift__state="disk", hift__group_size=2), *(board(name, num_blocks=6) for name in "abcd"))
    assert [piece.num_blocks for piece in plan.placement.slices] == [2, 2, 1, 1]
    assert plan.course.method == Hift(group_size=2)
    assert plan.placement.state_on_disk
    assert not planned(wanted(), board("a")).placement.state_on_disk


def test_plan_of_hift_that_stays_in_its_warm_up_is_refused() -> None:
    """12 blocks, embedding and head are 14 units: 14 steps are one sweep, and the second sweep learns something."""
    job = wanted(train__warmup_steps=1)
    with pytest.raises(JobError, match=r"train.warmup_steps = 1 counts sweeps .* 14 steps are within the first sweep"):
        planned(job.with_overrides({"train.max_steps": 14}), board("a"))
    assert planned(job.with_overrides({"train.max_steps": 15}), board("a")).course.num_steps == 15
    assert planned(wanted(train__max_steps=14), board("a")).course.num_steps == 14
    job = wanted(train__method="all", train__warmup_steps=31)
    with pytest.raises(JobError, match=r"train\.warmup_steps is 31, the run has 30 steps"):
        planned(job.with_overrides({"train.max_steps": 30}), board("a"))


def test_plan_of_hift_that_fits_no_node_is_refused_with_both_numbers() -> None:
    """One board is too small, alone; four of them are not."""
    job = wanted(train__optimizer="adamw")
    need = made(job, board("a", num_blocks=6)).memory["a"].total_bytes
    small = round(0.8 * need)
    with pytest.raises(CapacityError, match=r"node a needs .*MiB.* but has .*MiB"):
        planned(job, board("a", num_blocks=6, memory_bytes=small))
    rows = {"a": 100, "b": 0, "c": 0, "d": 0}
    four = made(job, *(board(name, num_blocks=6, memory_bytes=small, rows=rows[name]) for name in rows))
    assert all(estimate.total_bytes <= small for estimate in four.memory.values())


def test_plan_of_hift_with_state_on_disk_fits_where_state_in_memory_does_not() -> None:
    """A board that has all blocks needs half as much for gradients and state: those of the embedding."""
    in_memory = made(wanted(), board("a")).memory["a"].parts()["optimizer"]
    on_disk = made(wanted(hift__state="disk"), board("a")).memory["a"]
    assert on_disk.parts()["optimizer"] < 0.52 * in_memory
    small = board("a", memory_bytes=on_disk.total_bytes)
    assert planned(wanted(hift__state="disk"), small).placement.state_on_disk
    with pytest.raises(CapacityError):
        planned(wanted(), small)


def test_plan_of_hift_has_room_for_one_item_between_two_hosts() -> None:
    """A forward sees all updates before, so more hidden states could only wait; with adapters there may be 8."""
    nodes = [board(name, num_blocks=4) for name in "ab"]
    found = [planned(wanted(train__microbatches=count), *nodes).placement.credits for count in (1, 4)]
    assert found == [2, 4]
    # Embedding, head and their state take most of an owner; a node without data takes more blocks
    need = made(wanted(), board("a"), board("b", rows=0)).memory["a"].total_bytes
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


def test_formula_of_hift_is_near_the_simulated_run() -> None:
    """A step of a sweep takes what its group lets it: the mean is within a quarter of the simulator's."""
    for seed, group_size in [(0, 1), (1, 3), (2, 1), (3, 3)]:
        rng = random.Random(seed)
        profile = ring_of(rng, [rng.choice(sorted(CLASSES)) for _ in range(3)], owners=1)
        draft = draft_of(profile, group_size=group_size)
        costs = ring_costs(draft, profile)
        ring = Ring(nodes=(0, 1, 2), counts=(2, 2, 2))
        plan = plan_of(draft, costs, ring)
        simulated = predict(plan, profile).train_s
        assert job_s(costs, ring) == pytest.approx(simulated, rel=0.25)
        judged = simulated_job_s(plan, profile, costs, ring, max_actions=10**6)
        assert judged == pytest.approx(simulated, rel=0.1)


def test_prediction_of_hift_counts_the_bytes_of_unit_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two owners: over each link between them go the gradients of embedding and head of the other's steps."""
    profile = ring_of(random.Random(1), ["laptop", "laptop"], owners=2)
    draft = draft_of(profile)
    plan = plan_of(draft, ring_costs(draft, profile), Ring(nodes=(0, 1), counts=(3, 3)))
    ring = RecordedRing(plan)
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


def test_plan_whose_gradient_no_link_takes_is_refused() -> None:
    """A tied table of 1.5 GiB: two owners can't send it to each other, also by a plan that was made before."""
    table: dict[str, Any] = {"embedding_train_bytes": 3 << 29, "token_table_bytes": 3 << 29, "is_tied": True}
    nodes = [board(name, memory_bytes=1 << 40) for name in "ab"]
    large = [dataclasses.replace(node, model=dataclasses.replace(node.model, **table)) for node in nodes]
    with pytest.raises(PlanError, match=r"gradient of the embedding.* has up to 1,536 MiB, .* at most 1,024 MiB"):
        planned(wanted(), *large)
    with pytest.raises(PlanError, match="gradient of the embedding"):
        keep_plan(wanted(), planned(wanted(), *nodes), {node.node: node for node in large})
    assert planned(wanted(), large[0], dataclasses.replace(large[1], train_rows=0, eval_rows=0))


def test_prediction_of_hift_has_a_line_for_each_group() -> None:
    """Steps are told apart by the units that they train: embedding and head would both be depth 0."""
    profile = ring_of(random.Random(1), ["laptop", "laptop"], owners=2)
    draft = draft_of(profile)
    plan = plan_of(draft, ring_costs(draft, profile), Ring(nodes=(0, 1), counts=(3, 3)))
    found = predict(plan, profile)
    names = ["embedding", *(f"block {block}" for block in range(6)), "head"]
    assert [each.trains for each in found.depths] == names
    assert sum(each.steps for each in found.depths) == plan.course.num_steps
    assert sum(each.wall_s for each in found.depths) == pytest.approx(found.train_s)
    assert found.depths[0].step_s > found.depths[-1].step_s
    lines = prediction_lines(plan, found)
    assert [line.split("  ")[0] for line in lines[lines.index("") :] if line.startswith(("trains", "embedding"))] == [
        "trains",
        "embedding",
    ]


def test_refusal_of_hift_names_what_helps() -> None:
    """No other node can keep an owner's embedding; an optimizer with less state, or a roomier owner helps."""
    small = board("a", memory_bytes=100 * MIB)
    with pytest.raises(CapacityError, match=r"for embedding and head but .*'adafactor' or 'sgd'") as refused:
        planned(wanted(), small)
    assert "add a node" not in str(refused.value)
    with pytest.raises(CapacityError, match=r"or let a node with more memory own its rows$"):
        planned(wanted(train__optimizer="sgd"), small)
    # State on disk and smaller groups each make room; with less memory only what still fits is named
    job = wanted(hift__group_size=8, train__checkpoint_every=0)
    most = made(job, board("a", num_blocks=6)).memory["a"].total_bytes
    ones = job.with_overrides({"hift.group_size": 1})
    least = made(ones, board("a", num_blocks=6)).memory["a"].total_bytes
    with pytest.raises(CapacityError, match=r"hift\.group_size = 1 would fit; or lower train\.batch_size"):
        planned(job, board("a", num_blocks=6, memory_bytes=(least + most) // 2))
    with pytest.raises(CapacityError, match=r"hift\.state = 'disk' would fit; or lower train\.batch_size"):
        planned(ones, board("a", num_blocks=6, memory_bytes=least - 20 * MIB))
    with pytest.raises(CapacityError) as refused:
        planned(job, board("a", num_blocks=6, memory_bytes=50 * MIB))
    assert "would fit" not in str(refused.value)


BLOCK = 2 * 7_097_856
COPIES = 2 * (47_677_440 + 591_360 + 2 * 1540)


def test_plan_of_state_without_room_on_the_disk_is_refused_with_both_numbers() -> None:
    """Twelve blocks and the copies need 255 MiB; the message has the node and what can be done."""
    node = board("a")
    job = wanted(hift__state="disk", train__checkpoint_every=0)
    enough = 12 * BLOCK + COPIES
    assert made(job, dataclasses.replace(node, state_free_bytes=enough)).plan
    with pytest.raises(StorageError) as refused:
        made(job, dataclasses.replace(node, state_free_bytes=200 * MIB))
    with pytest.raises(StorageError):
        made(job, dataclasses.replace(node, state_free_bytes=enough - 1))
    assert str(refused.value) == (
        "node a needs 255 MiB in its folder for state for blocks [0, 12) (255 MiB of optimizer state) but "
        "200 MiB are free there; make room, or start it with --state on another disk, or set hift.state = 'memory'"
    )
    assert made(wanted(train__checkpoint_every=0), dataclasses.replace(node, state_free_bytes=0)).plan


def test_plan_of_checkpoints_without_room_on_the_disk_is_refused() -> None:
    """State fits, three checkpoints beside it do not: to do without them is named, state in memory would not help."""
    node = dataclasses.replace(board("a"), state_free_bytes=300 * MIB)
    job = wanted(hift__state="disk", train__checkpoint_every=10)
    message = r"for embedding and head \(92\.1 MiB of optimizer state and 414 MiB of checkpoints\) but 300 MiB are free"
    with pytest.raises(StorageError, match=message) as refused:
        made(job, node)
    assert "checkpoint_every = 0" in str(refused.value)
    assert "hift.state = 'memory'" not in str(refused.value)
    # Its checkpoints lie on the disk already
    plan = made(job, board("a")).plan
    keep_plan(job, plan, {"a": dataclasses.replace(board("a"), state_free_bytes=12 * BLOCK + COPIES)})
    with pytest.raises(StorageError, match=r"node a needs 255 MiB .* but 100 MiB are free"):
        keep_plan(job, plan, {"a": dataclasses.replace(board("a"), state_free_bytes=100 * MIB)})


def test_plan_of_merged_adapters_without_room_on_the_disk_is_refused() -> None:
    """Their host keeps them in a file; beside the matrices they take no disk."""
    linear: dict[str, Any] = {"adapter__config": "linear", "train__checkpoint_every": 0}

    def planned(*, merged: bool, free_bytes: int) -> Plan:
        job = job_of(users="joint", mode={"a": "b"}, offload__merged=merged, **linear)
        nodes = of_users("a", "b", state_free_bytes=free_bytes)
        return make_plan(job, nodes).plan

    plan = planned(merged=True, free_bytes=1 << 40)
    needed = PAIRS.adapter_block_bytes * plan.slice_of("a").num_blocks
    assert needed and helpers_by_host(planned(merged=True, free_bytes=needed)) == {"a": "b"}
    assert helpers_by_host(planned(merged=False, free_bytes=0)) == {"a": "b"}
    with pytest.raises(
        StorageError, match=r"of merged adapters\) but .* are free there; .* set offload\.merged = false"
    ):
        keep_plan(
            job_of(users="joint", mode={"a": "b"}, offload__merged=True, **linear),
            plan,
            of_users("a", "b", state_free_bytes=needed - 1),
        )


def test_plan_of_helpers_without_room_for_their_checkpoints_is_refused() -> None:
    """A matrix of each user's own with moments is no small file; whoever helps, no disk has room."""
    rows: list[Any] = ["auto", {"a": "b"}]
    for mode in rows:
        job = job_of(mode=mode, adapter__config="linear", train__checkpoint_every=1)
        with pytest.raises(StorageError, match=r"of checkpoints\) but .* are free there"):
            make_plan(job, of_users("a", "b", state_free_bytes=10))


def test_plan_gives_a_node_with_a_small_disk_fewer_blocks() -> None:
    """It is as fast as the other, but has room for the state of three blocks only."""
    small = dataclasses.replace(board("b", rows=0), state_free_bytes=3 * BLOCK)
    plan = made(wanted(hift__state="disk", train__checkpoint_every=0), board("a"), small).plan
    assert plan.slice_of("b").num_blocks <= 3
    assert made(wanted(train__checkpoint_every=0), board("a"), small).plan.slice_of("b").num_blocks > 3


def test_copies_of_checkpoints_are_placed_by_the_room_of_the_disks() -> None:
    """The even ring has more copies than b has room for: b hosts nothing, and the others still share the blocks out."""
    job = wanted(train__checkpoint_every=10, recovery__copies="next")
    nodes = {name: board(name) for name in "abc"}
    even = made(job, *nodes.values()).plan
    caps = MemoryCaps(dataclasses.replace(Draft.of(even), settings=MemorySettings.of_job(job)), nodes)
    room_bytes = caps.disk_of(even, "b").total_bytes - 1
    small = made(job, nodes["a"], dataclasses.replace(nodes["b"], state_free_bytes=room_bytes), nodes["c"]).plan
    assert [piece.num_blocks for piece in even.placement.hosts] == [4, 4, 4]
    assert [(piece.node, piece.num_blocks) for piece in small.placement.hosts] == [("a", 6), ("c", 6)]


def test_placement_of_a_run_that_has_begun_needs_no_room_for_its_checkpoints() -> None:
    """They may be on the disks already; state that is on the disk only while the run trains has to fit in any case."""
    job = wanted(hift__state="disk", train__checkpoint_every=10)
    nodes = {name: board(name, rows=rows) for name, rows in (("a", 100), ("b", 100), ("c", 0))}
    plan = made(job, *nodes.values()).plan
    caps = MemoryCaps(dataclasses.replace(Draft.of(plan), settings=MemorySettings.of_job(job)), nodes)
    state_bytes = caps.disk_of(plan, "a").parts()["optimizer state"] + 4 * BLOCK

    def placed(free_bytes: int, *, goes_on: bool) -> list[str]:
        tight = tuple(dataclasses.replace(node, state_free_bytes=free_bytes) for node in nodes.values())
        found = placed_without(plan, job, Profile(nodes=tight, links=()), {"c"}, QUICK, goes_on=goes_on)
        return [piece.node for piece in found.hosts]

    assert placed(state_bytes, goes_on=True) == ["a", "b"]
    alone = placed_without(plan, job, Profile(nodes=tuple(nodes.values()), links=()), {"c"}, QUICK)
    after, here = plan.extended(alone, 1), {name: nodes[name] for name in "ab"}
    assert plan_memory(job, after, here) == plan_memory(job, after.parts[-1], here), (
        "c, of the first placement, is gone"
    )
    for free_bytes, goes_on in [(state_bytes, False), (BLOCK, True)]:
        with pytest.raises((CapacityError, StorageError)):
            placed(free_bytes, goes_on=goes_on)


def test_placement_after_an_early_loss_has_room_for_best_results() -> None:
    """The node with the small disk gets as many blocks as it has room for; the other one gets the rest."""
    job = wanted(train__keep_best="loss", train__eval_every=5, train__checkpoint_every=0)
    nodes = {name: board(name, rows=100 if name == "a" else 0) for name in "abc"}
    plan = made(job, *nodes.values()).plan
    for room, kept in ((3, 3), (12, 7)):
        tight = dataclasses.replace(nodes["b"], state_free_bytes=room * BLOCK // 2)
        living = Profile(nodes=(nodes["a"], tight, nodes["c"]), links=())
        found = placed_without(plan, job, living, {"c"}, QUICK)
        assert {piece.node: piece.num_blocks for piece in found.hosts} == {"a": 12 - kept, "b": kept}


def test_nodes_that_share_a_disk_share_its_room() -> None:
    """Each alone would fit; together they do not, and the refusal has both numbers. On two disks they fit."""
    job = wanted(hift__state="disk", train__checkpoint_every=0)

    def nodes(free_bytes: int, disks: str = "xx") -> dict[str, NodeFacts]:
        found = zip("ab", disks, strict=True)
        return {
            name: dataclasses.replace(board(name, num_blocks=4), state_free_bytes=free_bytes, state_disk=disk)
            for name, disk in found
        }

    assert made(job, *nodes(4 * BLOCK + 2 * COPIES).values()).plan.slice_of("b").num_blocks
    with pytest.raises(StorageError, match=r"a, b share a disk and together need 238 MiB .* but 230 MiB") as refused:
        made(job, *nodes(230 * MIB).values())
    assert str(refused.value).endswith("or set hift.state = 'memory'")
    for apart in ("xy", [""] * 2):
        assert made(job, *nodes(230 * MIB, apart).values()).plan  # type: ignore[arg-type]
