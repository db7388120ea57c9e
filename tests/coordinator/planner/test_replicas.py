"""Stages with several hosts: which are looked at, when one is taken, and what is said of it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

from coordinator.planner import replicas
from coordinator.planner.draft import job_draft
from coordinator.planner.explain import explain, explanation_text
from coordinator.planner.judge import simulated_steps_s
from coordinator.planner.make_plan import make_plan, refuse_if_full
from coordinator.planner.planned import Planned
from coordinator.planner.replicas import neighbours, ranked_layouts, replicas_lines, shares_of, slices_of_layout, step_s
from coordinator.planner.ring_costs import ring_costs
from ringtune.costs import links as blobs
from ringtune.costs.profile import LinkFacts, NodeFacts, Profile
from ringtune.errors import PlanError
from ringtune.job.job import Job, parse_job
from ringtune.schedule.plan import Plan
from tests.support.planner_rings import MIB, QUICK, device

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
    again_s = simulated_steps_s(found.plan, found.profile, found.choice.costs, optimizer="adamw")
    assert again_s == pytest.approx(best_s)
    text = "\n".join(explanation_text(explain(found.choice, relative=False, plan=found.plan, replicas=found.replicas)))
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


def test_replicas_are_not_taken_where_the_job_says_never() -> None:
    """Each block has one host then, and nothing is said of replicas."""
    found = planned(job_of(placement__replicas="never"), (1, 1, 1, 1))
    assert found.replicas is None and not found.plan.placement.has_replicas


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
        assert replicas_lines(found.replicas, str) == [f"  each block has one host: {found.replicas.why_not}"]


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
    assert step_s(costs, first, depth, lambda *_: 0.0) < step_s(costs, last, depth, lambda *_: 0.0)


def test_layouts_beside_one_have_other_cuts_or_another_order() -> None:
    """Each has all blocks and hosts, and is one block or one exchange of two stages away."""
    found = planned(job_of(), (1, 1, 1, 1))
    assert found.choice is not None
    costs = found.choice.costs
    layout = next(one for _, one in ranked_layouts(costs, lambda *_: 0.0) if len(one) == 2)
    lower, upper = layout
    beside = list(neighbours(layout))
    assert (upper, lower) in beside
    cuts = {(first.count, second.count) for first, second in beside if first.nodes == lower.nodes}
    assert cuts == {(lower.count + more, upper.count - more) for more in (1, -1)}


def test_judged_layouts_are_of_every_number_of_stages_and_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """The formula compares few stages with many badly, so the simulator sees the best of each; none twice.

    The few that it judges well are the best of all.
    """
    few = planned(job_of(), (1, 1, 1, 1)).replicas
    monkeypatch.setattr(replicas, "_FINALISTS", 100)
    found = planned.__wrapped__(job_of(), (1, 1, 1, 1)).replicas
    assert few is not None and found is not None
    texts = [text for text, _ in found.judged]
    assert len(set(texts)) == len(texts) == found.num_rough == few.num_rough > len(few.judged)
    assert {text.count(";") for text in texts} == {0, 1, 2}
    assert few.judged[0] == found.judged[0]


def test_explanation_tells_of_a_few_layouts() -> None:
    """The others are counted."""
    found = planned(job_of(), (1, 1, 1, 1))
    assert found.replicas is not None
    lines = replicas_lines(found.replicas, "{:.1f} s".format)
    assert [line.split(":")[0].strip() for line in lines[:3]] == ["all steps", "second best", "other"]
    assert sum("one host for each block: " in line for line in lines) == 1
    assert lines[-1] == f"  {found.replicas.num_rough - len(found.replicas.judged)} more were simulated"


@pytest.mark.thorough
def test_gradients_that_no_link_takes_are_not_sent_between_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts share no more blocks than a message has room for, four here; nothing is refused for it."""
    facts, links = boards((1, 1, 1, 1), num_blocks=12)
    usual = make_plan(job_of(), facts, links=links).plan.placement
    assert [len(stage) * stage[0].num_blocks for stage in usual.stages] == [4 * 12]
    monkeypatch.setattr(blobs, "MAX_BLOB_BYTES", 4 * facts["n0"].model.adapter_block_bytes)
    found = make_plan(job_of(), facts, links=links).plan.placement
    assert all(len(stage) == 1 or stage[0].num_blocks <= 4 for stage in found.stages)


@pytest.mark.thorough
def test_explanation_has_the_number_of_micro_batches_that_is_carried_out() -> None:
    """The best ring may have another number than the stages that are taken."""
    ring = planned(job_of(), (1, 1, 1, 1))
    free = planned(job_of(train__microbatches="auto"), (1, 1, 1, 1))
    assert free.choice is not None and ring.choice is not None and free.replicas is not None
    stages = Plan(dataclasses.replace(free.plan.course, microbatches=16), free.plan.placements)
    told = explain(ring.choice, relative=False, plan=stages, replicas=free.replicas)
    assert free.replicas.is_taken and told.microbatches == 16


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


@pytest.mark.parametrize("speeds", [(1, 1, 1, 1), (4, 4, 1, 1, 1, 1, 1, 1)])
def test_hosts_of_a_stage_are_of_one_numeric_class(speeds: tuple[float, ...]) -> None:
    """Copies have to be equal in every bit: a laptop with a GPU stands alone, two of them may be replicas."""
    facts, links = boards(speeds)
    profile = Profile(nodes=tuple(facts.values()), links=links)
    draft = job_draft(job_of(), profile.nodes, profile.nodes[0].model)
    costs = ring_costs(draft, profile, optimizer="adamw")
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
