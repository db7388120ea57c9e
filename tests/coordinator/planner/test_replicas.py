"""Stages with several hosts, slices that follow the unfreezing schedule, and other placements in mid run."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from typing import Any

import pytest

from coordinator.planner import phases, replan
from coordinator.planner.draft import drafts_of
from coordinator.planner.explain import explain, explanation_text
from coordinator.planner.given_plan import GivenPlan, accept_plan
from coordinator.planner.judge import simulated_steps_s
from coordinator.planner.make_plan import job_draft, make_plan, plan_memory, refuse_if_full
from coordinator.planner.planned import Planned, measured_time
from coordinator.planner.replan import _of_the_rest, placed_without, replanned
from coordinator.planner.replicas import neighbours, ranked_layouts, slices_of_layout
from coordinator.planner.ring_costs import ring_costs
from coordinator.planner.step_time import layout_step_s, shares_of
from ringtune.costs import action_costs
from ringtune.costs import links as blobs
from ringtune.costs.memory_estimate import moving_memory, refuse_full_moves
from ringtune.costs.profile import LinkFacts, NodeFacts, Profile
from ringtune.errors import CapacityError, PlanError
from ringtune.job.job import Job, parse_job
from ringtune.schedule.course import Offload
from ringtune.schedule.migration import stay_reason
from ringtune.schedule.placement import Placement, Slice
from ringtune.schedule.plan import Plan
from ringtune.schedule.saved_activations import Velora
from ringtune.schedule.units import Range
from ringtune.techniques.offload import check_plan, helpers_by_host
from tests.support.moves import moving, slices_of
from tests.support.planner_rings import MIB, QUICK, device
from tests.support.plans import changed
from tests.support.profiles import small_model


@pytest.fixture(autouse=True)
def short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search few rings for each stretch of the steps: boards are few, and so are blocks."""
    monkeypatch.setattr(phases, "_EVALUATIONS", 300)


JOB = """
[model]
path = "model"
[train]
method = "ringada"
batch_size = 32
microbatches = 4
max_length = 64
max_steps = 40
local_iterations = 10
[unfreeze]
every_steps = 10
"""


def job_of(**changes: object) -> Job:
    """40 steps of four micro-batches, one more block every ten steps."""
    return parse_job(JOB, source="test").with_overrides(
        {name.replace("__", "."): value for name, value in changes.items()}
    )


def boards(
    speeds: tuple[float, ...], *, rate: float = 125e6, num_blocks: int = 4, **changes: Any
) -> tuple[dict[str, NodeFacts], Any]:
    """Boards with one block's forward in 18 ms over their speed, and links of 1 Gbit/s; the first has all rows."""
    found = {}
    for at, speed in enumerate(speeds):
        name = f"n{at}"
        one = device(name, num_blocks=num_blocks, block_s=0.018 / speed, rows=0 if at else 640, **changes)
        found[name] = one
    links = tuple(
        LinkFacts(source=source, target=target, rate_bytes_per_s=rate, latency_s=0.001)
        for source in found
        for target in found
        if source != target
    )
    return found, links


@functools.lru_cache(maxsize=16)
def planned(job: Job, speeds: tuple[float, ...], **changes: Any) -> Planned:
    """Plan a job for such boards; once."""
    facts, links = boards(speeds, **changes)
    return make_plan(job, facts, links=links, effort=QUICK)


def test_replicas_are_taken_where_boards_hold_the_model() -> None:
    """Four equal boards with room for all blocks: the ring of single hosts fills and drains, four replicas do not."""
    found = planned(job_of(), (1, 1, 1, 1))
    assert found.replicas is not None and found.replicas.is_taken and found.profile is not None
    assert found.plan.placement.has_replicas
    assert found.choice is not None
    ring_s, best_s = found.replicas.ring_s, found.replicas.best_s
    assert best_s is not None and best_s <= 0.98 * ring_s
    again_s = simulated_steps_s(found.plan, found.profile, found.choice.costs)
    assert again_s == pytest.approx(best_s)
    text = "\n".join(explanation_text(explain(found, relative=False)))
    assert "n3" in text and "by the simulator" in text and "one host for each block: " in text


@pytest.mark.thorough
def test_free_number_of_microbatches_is_chosen_as_the_option_would() -> None:
    """``train.microbatches = "auto"`` looks at every power of two; without links there is nothing to choose by."""
    job = job_of(train__microbatches="auto", train__batch_size=8)
    facts, links = boards((1, 1, 1, 1))
    free = make_plan(job, facts, links=links)
    asked = make_plan(job_of(train__batch_size=8), facts, links=links, microbatches=(1, 2, 4, 8))
    assert free.plan == asked.plan
    assert make_plan(job, facts).plan.course.microbatches == 4


def test_replicas_are_not_taken_over_slow_links() -> None:
    """Gradients of adapters and hidden states at 1 MB/s take longer than the ring's filling and draining.

    Nor where a step has one micro-batch; the explanation says why each block has one host.
    """
    found = planned(job_of(), (1, 1), rate=1e6)
    assert found.replicas is not None and not found.replicas.is_taken
    assert not found.plan.placement.has_replicas
    for changes, reason in (
        ({"train__method": "pipeadapter"}, "several versions of weights"),
        ({"train__microbatches": 1}, "one micro-batch"),
        ({"memory__activations": "auto"}, "memory.activations"),
    ):
        found = planned(job_of(**changes), (1, 1))
        assert found.replicas is not None and reason in found.replicas.why_not
        assert found.replicas.lines(str) == [f"  each block has one host: {found.replicas.why_not}"]


def test_faster_hosts_take_more_micro_batches() -> None:
    """A board of three times the speed takes three of four micro-batches; shares are dealt until the last is done."""
    assert shares_of([1.0, 3.0], 4) == (3, 1)
    assert shares_of([1.0, 2.0], 6) == (4, 2)
    assert shares_of([1.0, 1.0, 1.0], 4) == (2, 1, 1)
    found = planned(job_of(), (3, 1))
    stages = [stage for stage in found.plan.placement.stages if len(stage) > 1]
    assert all({piece.node: piece.share for piece in stage} == {"n0": 3, "n1": 1} for stage in stages)


def test_layouts_have_replicas_and_cover_all_blocks() -> None:
    """Each layout is a valid placement in which some stage has several hosts; alike nodes count once."""
    found = planned(job_of(), (1, 1, 1, 1))
    assert found.choice is not None
    costs = found.choice.costs
    layouts = [layout for _, layout in ranked_layouts(costs, lambda nodes, blocks: 0.001 * len(nodes))]
    assert len({tuple((len(stage.nodes), stage.count) for stage in layout) for layout in layouts}) == len(layouts)
    for layout in layouts:
        placed = found.choice.best.draft.placed(slices_of_layout(costs, layout))
        assert placed.placement.has_replicas
    first, last = layouts[0], layouts[-1]
    depth = costs.depths[-1]
    assert layout_step_s(costs, first, depth, lambda *_: 0.0) < layout_step_s(costs, last, depth, lambda *_: 0.0)
    # Each has all blocks and hosts, and is one block or one exchange of two stages away
    layout = next(one for _, one in ranked_layouts(costs, lambda *_: 0.0) if len(one) == 2)
    lower, upper = layout
    beside = list(neighbours(layout))
    assert (upper, lower) in beside
    cuts = {(first.count, second.count) for first, second in beside if first.nodes == lower.nodes}
    assert cuts == {(lower.count + more, upper.count - more) for more in (1, -1)}


@pytest.mark.thorough
def test_gradients_that_no_link_takes_are_not_sent_between_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts share no more blocks than a message has room for, four here; nothing is refused for it."""
    facts, links = boards((1, 1, 1, 1), num_blocks=12)
    usual = make_plan(job_of(train__max_steps=120), facts, links=links).plan.placement
    assert [len(stage) * stage[0].num_blocks for stage in usual.stages] == [4 * 12]
    monkeypatch.setattr(blobs, "MAX_BLOB_BYTES", 4 * facts["n0"].model.adapter_block_bytes)
    found = make_plan(job_of(train__max_steps=120), facts, links=links).plan.placement
    assert all(len(stage) == 1 or stage[0].num_blocks <= 4 for stage in found.stages)


@pytest.mark.parametrize("small", ["n1", "n2", "n3"])
@pytest.mark.sampled(1)
def test_small_board_among_equally_fast_ones_does_not_stand_for_them(small: str) -> None:
    """Whichever of the boards has little memory, the others share blocks, and what is said of memory is true."""
    facts, links = boards((1, 1, 1, 1), num_blocks=6)
    facts[small] = dataclasses.replace(facts[small], memory_bytes=60 * MIB)
    found = make_plan(job_of(train__microbatches=6, train__batch_size=36), facts, links=links, effort=QUICK)
    assert found.replicas is not None and found.replicas.is_taken
    stages = found.plan.placement.stages
    assert max(len(stage) for stage in stages) == 3
    assert found.memory_bytes.get(small, 0) <= 60 * MIB


GPU, BOARD = "cuda NVIDIA T4 sm_75, torch 2.11.0+cu130", "cpu aarch64 NEON, torch 2.11.0"


def test_hosts_of_a_stage_are_of_one_numeric_class() -> None:
    """Copies have to be equal in every bit: a laptop with a GPU stands alone, two of them may be replicas."""
    rows: list[tuple[float, ...]] = [(1, 1, 1, 1), (4, 4, 1, 1, 1, 1, 1, 1)]
    for speeds in rows:
        facts, links = boards(speeds)
        profile = Profile(nodes=tuple(facts.values()), links=links)
        draft = job_draft(job_of(), profile.nodes, profile.nodes[0].model)
        costs = ring_costs(draft, profile)
        for rare in (1, 2):
            classes = [GPU] * rare + [BOARD] * (len(speeds) - rare)
            layouts = [one for _, one in ranked_layouts(costs, lambda *_: 0.0, classes=classes)]
            stages = [{classes[node] for node in stage.nodes} for layout in layouts for stage in layout]
            assert all(len(stage) == 1 for stage in stages)
            shared = [stage.nodes for layout in layouts for stage in layout if len(stage.nodes) > 1]
            assert {classes[node] for nodes in shared for node in nodes} == ({GPU, BOARD} if rare > 1 else {BOARD})


def test_replicas_on_unlike_nodes_are_neither_planned_nor_accepted() -> None:
    """The planner says why, with each node's class; a plan that was made before names nodes, blocks and remedies."""
    facts, links = boards((1, 1))
    plan = planned(job_of(), (1, 1)).plan
    assert plan.placement.has_replicas
    unlike = {name: dataclasses.replace(one, numerics=GPU if name == "n0" else BOARD) for name, one in facts.items()}
    found = make_plan(job_of(), unlike, links=links, effort=QUICK)
    assert found.replicas is not None and not found.plan.placement.has_replicas
    assert f"n0: {GPU}; n1: {BOARD}" in found.replicas.why_not
    with pytest.raises(PlanError) as caught:
        refuse_if_full(job_of(), plan, unlike)
    for part in (f"n0 ({GPU})", f"n1 ({BOARD})", "blocks [0, 4)", "--device cpu", "placement.replicas = 'never'"):
        assert part in str(caught.value)


def slowed(profile: Profile, node: str, factor: float) -> Profile:
    """The profile with one node whose work takes so many times as long."""
    nodes = tuple(facts.at_pace(factor) if facts.node == node else facts for facts in profile.nodes)
    return dataclasses.replace(profile, nodes=nodes)


def case(*, num_blocks: int = 4, **changes: object) -> tuple[Job, Plan, Profile]:
    """A job on three equal boards, as it was planned."""
    job = job_of(train__microbatches=8, train__max_steps=120, **changes)
    found = planned(job, (1, 1, 1), num_blocks=num_blocks)
    assert found.profile is not None
    return job, found.plan, found.profile


@pytest.mark.parametrize("replicas", ["auto", "never"])
@pytest.mark.sampled(1)
def test_slow_board_gets_less_to_do(replicas: str) -> None:
    """At a quarter of its speed it takes fewer micro-batches or blocks; gain and cost of the move are told."""
    job, plan, profile = case(placement__replicas=replicas)
    slow = plan.placement.hosts[-1].node
    found = replanned(plan, job, slowed(profile, slow, 4.0), step=30, move_s=1.5, effort=QUICK)
    assert found is not None and found.moves_s < 0.9 * found.stays_s
    assert found.cost_s >= 1.5 and found.is_worth_it
    assert found.line().startswith(found.text) and "gains" in found.line() and "costs" in found.line()

    def load(one: Plan) -> float:
        stage = next(stage for stage in one.placement.stages if slow in [piece.node for piece in stage])
        own = next(piece for piece in stage if piece.node == slow)
        return own.num_blocks * own.share / sum(piece.share for piece in stage)

    after = Plan(plan.course, (dataclasses.replace(found.placement, placement_number=0, first_turn=0),))
    hosts = [piece.node for piece in after.placement.hosts]
    assert slow not in hosts or load(after) < load(plan)


def test_run_whose_helpers_are_gone_looks_for_rings_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its course still has them, and no stage of several hosts would be taken."""
    job, plan, profile = case(placement__replicas="auto")
    course = dataclasses.replace(plan.course, offload=Offload(blocks=(Range(2, 4),)))
    ring = slices_of((("n0", 0, 2), ("n1", 2, 3), ("n2", 3, 4)))
    part = Plan(course, (dataclasses.replace(plan.placement, slices=ring),))
    judged: list[Placement] = []
    monkeypatch.setattr(replan, "_fits", lambda part, other, job, profile: judged.append(other))
    assert replanned(part, job, slowed(profile, "n2", 4.0), step=30, move_s=1.5, effort=QUICK) is None
    assert judged and all(len(stage) == 1 for one in judged for stage in one.stages)


def test_link_that_became_slow_is_gone_around() -> None:
    """Messages between two hosts take thirty times as long now: the next ring sends nothing over that link, or less."""
    job, plan, profile = case(placement__replicas="never")
    first, second = (piece.node for piece in plan.placement.hosts[:2])
    links = tuple(
        dataclasses.replace(link, rate_bytes_per_s=link.rate_bytes_per_s / 30)
        if (link.source, link.target) in ((first, second), (second, first))
        else link
        for link in profile.links
    )
    slow = dataclasses.replace(profile, links=links)
    found = replanned(plan, job, slow, step=30, move_s=1.5, effort=QUICK)
    assert found is not None and found.is_worth_it
    after = [piece.node for piece in found.placement.hosts]
    assert (first, second) not in itertools.pairwise(after)
    assert (second, first) not in itertools.pairwise(after)


def test_placement_is_the_best_for_the_steps_that_are_left_and_not_for_all() -> None:
    """The last steps train most blocks; the best ring for all steps takes a tenth longer for them."""
    job = job_of(
        train__microbatches=8,
        train__max_steps=240,
        train__dropout=0.1,  # so that the last block takes as long as any
        unfreeze__every_steps=20,
        placement__replicas="never",
    )
    made = planned(job, (1.0, 1.0, 0.5, 0.3), num_blocks=12)
    assert made.profile is not None
    slow = slowed(made.profile, "n3", 2.0)
    found = replanned(made.plan, job, slow, step=180, move_s=1.5, effort=QUICK)
    for_all = make_plan(job, slow.by_name, links=slow.links, effort=QUICK).plan
    costs = _of_the_rest(ring_costs(drafts_of(for_all, job)[0], slow), for_all.course, 180)
    assert found is not None
    assert found.moves_s < 0.95 * simulated_steps_s(for_all, slow, costs)


@pytest.mark.thorough
def test_hosts_keep_hidden_states_in_another_placement_too() -> None:
    """The cache is of the job; a move only empties it."""
    job, plan, profile = case(num_blocks=12, cache__prefix="auto")
    slow = slowed(profile, plan.placement.hosts[-1].node, 2.0)
    found = replanned(plan, job, slow, step=30, move_s=1.5, effort=QUICK)
    assert plan.placement.cache is not None
    assert found is not None and found.placement.cache == plan.placement.cache


@pytest.mark.thorough
def test_run_whose_blocks_run_again_finds_another_placement_too() -> None:
    """The same blocks run again there; also where a board is lost whose blocks no others could keep everything of."""
    job, plan, profile = case(num_blocks=12, memory__activations="recompute")
    slow = next(piece.node for piece in plan.placement.hosts if plan.owner(piece.node) is None)
    found = replanned(plan, job, slowed(profile, slow, 2.0), step=30, move_s=1.5, effort=QUICK)
    assert plan.placement.recompute and found is not None and found.is_worth_it
    assert found.placement.recompute == plan.placement.recompute
    tight = dataclasses.replace(
        profile, nodes=tuple(dataclasses.replace(node, memory_bytes=160 * MIB) for node in profile.nodes)
    )
    placed = placed_without(plan, job, tight, {slow}, QUICK)
    assert placed.recompute == plan.placement.recompute and slow not in [piece.node for piece in placed.slices]
    kept = dataclasses.replace(plan.placement, recompute=())
    with pytest.raises(CapacityError, match=r"no ring of .* has memory for the model"):
        placed_without(Plan.of(plan.course, kept), job, tight, {slow}, QUICK)


OF_THE_COURSE: dict[str, dict[str, object]] = {
    "velora": {"placement__replicas": "never"},
    "scores": {"operations__policy": "two-stage", "operations__compute": 0.6, "operations__refresh_rounds": 2},
    "slices": {
        "operations__policy": "joint",
        "operations__compute": 0.6,
        "operations__balance": True,
        "operations__by_slice": True,
    },
}


@pytest.mark.parametrize("way", OF_THE_COURSE)
@pytest.mark.sampled(1)
def test_what_belongs_to_the_course_stays_where_its_hosts_change(way: str) -> None:
    """A slow board gets less to do and a lost one nothing; the plan of the run goes on with copies, and is the same."""
    job, plan, profile = case(num_blocks=12, recovery__copies="next", **OF_THE_COURSE[way])
    if plan.course.choice is None:
        plan = changed(plan, velora=Velora(blocks=(Range(0, 12),), layers=("adapter_down",)))
    assert plan.placement.copies and not stay_reason(plan.course)
    slow = next(piece.node for piece in plan.placement.hosts if plan.owner(piece.node) is None)
    found = replanned(plan, job, slowed(profile, slow, 4.0), step=30, move_s=1.5, effort=QUICK)
    assert found is not None and found.is_worth_it and not found.placement.has_replicas

    def blocks(placement: Placement) -> int:
        return sum(piece.num_blocks for piece in placement.hosts if piece.node == slow)

    assert blocks(found.placement) < blocks(plan.placement)
    after = plan.extended(placed_without(plan, job, profile, {slow}, QUICK), first_turn=3)
    assert after.course == plan.course and not blocks(after.placements[-1])


@pytest.mark.thorough
def test_boards_as_planned_gain_nothing_by_a_move() -> None:
    """The best other placement is not worth its cost."""
    job, plan, profile = case()
    found = replanned(plan, job, profile, step=30, move_s=5.0, effort=QUICK)
    assert found is None or not found.is_worth_it


@pytest.mark.thorough
def test_few_steps_that_are_left_are_not_worth_a_move() -> None:
    """With one turn left the pause costs more; with none there is nothing to look for."""
    job, plan, profile = case()
    slow = slowed(profile, plan.placement.hosts[-1].node, 2.0)
    found = replanned(plan, job, slow, step=110, move_s=60.0, effort=QUICK)
    assert found is not None and not found.is_worth_it
    assert replanned(plan, job, slow, step=120, move_s=1.0, effort=QUICK) is None


def test_placement_that_does_not_fit_is_not_offered() -> None:
    """Nodes without a byte to spare stay where they are."""
    job, plan, profile = case(placement__replicas="never")
    slow = slowed(profile, plan.placement.hosts[-1].node, 2.0)
    full = dataclasses.replace(
        slow, nodes=tuple(dataclasses.replace(node, memory_bytes=1 << 20) for node in slow.nodes)
    )
    assert replanned(plan, job, full, step=30, move_s=1.0, effort=QUICK) is None


@pytest.mark.thorough
def test_placement_for_what_the_losses_have_decided_leaves_room_for_what_they_may_decide() -> None:
    """Where losses decide, times are those of the blocks that train now, memory is that of all that could train."""
    job, _, profile = case()
    auto = job.with_overrides({"unfreeze.at": "auto"})
    plan = make_plan(auto, profile.by_name, links=profile.links).plan
    slow = slowed(profile, plan.placement.hosts[-1].node, 2.0)
    found = replanned(plan, auto, slow, step=30, move_s=1.5, effort=QUICK, unfreeze_at=(20,))
    assert found is not None and found.moves_s < found.stays_s
    later = plan.extended(found.placement, 3)
    memory = refuse_if_full(auto, later, slow.by_name).memory
    assert all(memory[node].total_bytes <= slow.by_name[node].memory_bytes for node in memory)


UNEVEN = (1.0, 0.5, 0.3)
LONG: dict[str, Any] = {
    "train__max_steps": 600,
    "unfreeze__every_steps": 150,
    "train__microbatches": 8,
    "placement__replicas": "never",
}


def following(speeds: tuple[float, ...] = UNEVEN, **changes: Any) -> Planned:
    """Plan 600 steps that may follow the schedule."""
    return planned(job_of(**{**LONG, "placement__follow": "auto", **changes}), speeds)


def test_slices_follow_the_schedule_where_boards_differ() -> None:
    """A slow board hosts frozen blocks at first; all placements fit, and the time is that of steps and moves."""
    found = following()
    reason, plan = found.phases, found.plan
    assert reason is not None and reason.is_taken and plan.moves and found.profile is not None
    assert [phase.first_step for phase in reason.phases] == [
        one.first_turn * plan.course.local_iterations for one in plan.placements
    ]
    assert reason.moving_s <= 0.98 * reason.fixed_s
    assert reason.fixed_s - reason.moving_s == pytest.approx(
        sum(phase.gain_s - phase.move_s for phase in reason.phases)
    )
    facts, _ = boards(UNEVEN)
    assert all(found.memory[node].total_bytes <= facts[node].memory_bytes for node in plan.nodes)
    time = measured_time(found, found.profile, "adamw")
    assert time is not None and time.steps_s == reason.moving_s
    stays = planned(job_of(**LONG), UNEVEN)
    assert stays.phases is None and not stays.plan.moves, "by default a plan has one placement"


def test_slices_that_follow_the_schedule_leave_room_for_an_audit() -> None:
    """The fastest placements need 403 MiB with the work that is repeated; with less, others are taken that fit."""
    job = job_of(**LONG, placement__follow="auto", audit__share=0.1)
    roomy, tight = (planned.__wrapped__(job, UNEVEN, memory_bytes=size << 20) for size in (4096, 380))
    needs = [max(one.total_bytes for one in found.memory.values()) >> 20 for found in (roomy, tight)]
    assert roomy.plan.moves and tight.plan.moves
    assert needs[1] < 380 < needs[0]


def test_slices_that_follow_the_schedule_take_their_helpers_along() -> None:
    """Each host that the job names has its helper in each placement; an interval fixes the blocks that helpers fit."""
    job = job_of(**LONG, placement__follow="auto", offload__mode={"n1": "n0", "n2": "n0"})
    found = planned.__wrapped__(job, UNEVEN)
    assert found.phases is not None and found.phases.is_taken and found.plan.moves
    for part in found.plan.parts:
        assert part.placement.helpers and helpers_by_host(part).keys() <= {"n1", "n2"}
    check_plan(job, found.plan, small_model(pair_token_bytes=1))
    fixed = planned.__wrapped__(job.with_overrides({"offload.interval": 2}), UNEVEN).plan
    helped = [[block for one in part.placement.helpers for block in range(one.start, one.stop)] for part in fixed.parts]
    assert helped and all(blocks == helped[0] for blocks in helped)


def test_slices_stay_where_moves_take_longer_than_they_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a minute for each move all steps are done on one placement."""
    monkeypatch.setattr(action_costs, "BASE_S", 60.0)
    found = planned.__wrapped__(job_of(**LONG, placement__follow="auto"), UNEVEN)
    assert found.phases is not None and not found.phases.is_taken and not found.plan.moves
    assert found.phases.moving_s == found.phases.fixed_s


def best_way(seed: int) -> None:
    """Compare the best way with every way through the stretches."""
    rng = random.Random(seed)
    starts = [phases._TurnsOfDepth(depth, depth, 10 * depth, rng.randint(1, 20)) for depth in range(4)]
    plans = [object() for _ in range(3)]
    step_s: dict[Any, dict[int, float]] = {plan: {depth: rng.random() for depth in range(4)} for plan in plans}
    costs = {(one, other): rng.choice([0.5, 3.0]) if one is not other else 0.0 for one in plans for other in plans}

    def total(way: tuple[Any, ...]) -> float:
        steps = sum(stretch.steps * step_s[one][stretch.depth] for one, stretch in zip(way, starts, strict=True))
        return float(steps + sum(costs[one, other] for one, other in itertools.pairwise(way)))

    seconds, way = phases._best_way(step_s, starts, costs)  # type: ignore[arg-type]
    assert seconds == pytest.approx(total(tuple(way)))
    assert seconds == pytest.approx(min(map(total, itertools.product(plans, repeat=len(starts)))))


def test_best_way_is_the_best_of_all_ways() -> None:
    """Whatever stretches, steps and moves take."""
    for seed in range(20):
        best_way(seed)


def own_weights() -> Job:
    """The blocks' own weights train, so that what was trained is as large as the blocks."""
    return job_of(adapter__config="full", placement__replicas="never", train__max_steps=120)


def facts_of(job: Job) -> dict[str, NodeFacts]:
    """Two boards without limits."""
    found, _ = boards((1, 1), num_blocks=12)
    return found


def moving_plan(job: Job) -> Plan:
    """Half of the blocks each, then the other half each, from turn 4 on."""
    plan = make_plan(job, facts_of(job)).plan
    first = tuple(Slice(node=node, start=start, stop=stop) for node, start, stop in (("n0", 0, 6), ("n1", 6, 12)))
    plan = Plan.of(plan.course, dataclasses.replace(plan.placement, slices=first))
    return moving(plan, (4, (("n1", 0, 6), ("n0", 6, 12))))


def test_needs_of_a_plan_are_those_of_its_fullest_placement() -> None:
    """A node is told the most that it holds in any of them."""
    job = own_weights()
    plan, facts = moving_plan(job), facts_of(job)
    first, second = (plan_memory(job, part, facts) for part in plan.parts)
    for node, found in plan_memory(job, plan, facts).items():
        assert found.total_bytes == max(first[node].total_bytes, second[node].total_bytes)
    assert accept_plan(GivenPlan(plan=plan), job, facts).memory_bytes == {
        node: found.total_bytes for node, found in plan_memory(job, plan, facts).items()
    }


def test_move_needs_room_for_the_next_slice_and_what_was_trained() -> None:
    """Activations are not there then; the node that has no room is named with the move and both numbers."""
    job = own_weights()
    plan, facts = moving_plan(job), facts_of(job)
    before, after = (plan_memory(job, part, facts) for part in plan.parts)
    while_moving = moving_memory((plan.placements[0], plan.placements[1]), before, after)["n1"]
    parts, old, new = while_moving.parts(), before["n1"].parts(), after["n1"].parts()
    assert parts["activations"] == parts["buffers"] == 0
    # all six blocks of its next slice are new to it: they come from the other node, beside its own six
    assert parts["adapters"] == old["adapters"] + 2 * new["adapters"] and parts["weights"] == new["weights"]
    facts["n1"] = dataclasses.replace(facts["n1"], memory_bytes=while_moving.total_bytes)
    refuse_full_moves(plan, (before, after), facts)
    facts["n1"] = dataclasses.replace(facts["n1"], memory_bytes=while_moving.total_bytes - 1)
    with pytest.raises(CapacityError, match=r"node n1 needs .* to move to placement 1 but has"):
        refuse_full_moves(plan, (before, after), facts)


def test_move_needs_room_for_what_others_send_only_where_blocks_are_new() -> None:
    """Two of the eight blocks of one node come from the other one, which gets none."""
    job = own_weights()
    facts = facts_of(job)
    plan = moving(Plan.of(moving_plan(job).course, moving_plan(job).placement), (4, (("n0", 0, 4), ("n1", 4, 12))))
    before, after = (plan_memory(job, part, facts) for part in plan.parts)
    needs = moving_memory((plan.placements[0], plan.placements[1]), before, after)
    coming = {
        node: sum(term.total_bytes for term in one.terms if term.part == "adapters" and "others send" in term.what)
        for node, one in needs.items()
    }
    assert coming["n0"] == 0
    assert coming["n1"] == pytest.approx(after["n1"].parts()["adapters"] / 4, abs=10)


def test_part_of_a_plan_is_not_given_as_a_plan() -> None:
    """It lacks its beginning."""
    job = own_weights()
    with pytest.raises(PlanError, match="the plan begins with placement 1: it is a part of a plan; give the whole one"):
        accept_plan(GivenPlan(plan=moving_plan(job).at(1)), job, facts_of(job))
    # With 12 turns there is no turn 12
    plan = moving_plan(job)
    late = dataclasses.replace(plan.placements[1], first_turn=12)
    message = "placement 1 of the plan holds from turn 12 on, which is step 120, but the run has 120; leave it out"
    with pytest.raises(PlanError, match=message):
        accept_plan(GivenPlan(plan=Plan(plan.course, (plan.placement, late))), job, facts_of(job))
