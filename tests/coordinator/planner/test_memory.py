"""Memory of slices: which fit, how a slice saves activations, and what ``memory.activations`` makes of a plan."""

from __future__ import annotations

import dataclasses
import functools
import operator
import random
from typing import Any

import pytest

from coordinator.planner.draft import Draft
from coordinator.planner.explain import explain, explanation_text
from coordinator.planner.given_plan import GivenPlan, accept_plan
from coordinator.planner.judge import plan_job_s, simulated_step_s
from coordinator.planner.make_plan import make_plan
from coordinator.planner.memory import MemoryCaps
from coordinator.planner.planned import Planned
from coordinator.planner.ring_costs import RingCosts, ring_costs
from coordinator.planner.search import plan_of, with_saving
from coordinator.planner.step_time import Ring, job_s, step_times
from coordinator.screen.plan_text import plan_text
from ringtune.costs.profile import NodeFacts, Profile
from ringtune.errors import CapacityError, JobError, PlanError
from ringtune.job.job import Job
from ringtune.models.kept_inputs import KeptInput
from ringtune.schedule.operation_tables import BlockCapacity, Choice
from ringtune.schedule.placement import Slice
from ringtune.schedule.saved_activations import Velora
from ringtune.schedule.units import Range, Units
from ringtune.techniques.activation_checkpointing import (
    AUTO,
    KEEPS_ALL,
    SavingPolicy,
    SliceSaving,
    slice_saving,
)
from tests.support import fake_agents
from tests.support.fake_agents import facts, job
from tests.support.planner_rings import class_ring, device, draft_for, random_counts, random_kinds
from tests.support.plans import random_operations


def test_memory_caps_equal_node_memory_for_every_slice() -> None:
    """For any ring, role, depth, method and number of private blocks the bytes are those of the whole plan."""
    for seed in range(8):
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
        caps = MemoryCaps(draft, facts)
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


def test_memory_caps_with_operations_are_never_too_small() -> None:
    """Before a ring is chosen any slice may be passed by, so that more may wait; graphs count as in the whole plan."""
    for seed, kind in list(enumerate(["table", "random", "two-stage"] * 2)):
        rng = random.Random(seed)
        profile = class_ring(rng, ["laptop", "jetson", "pi"], num_blocks=6, owners=2)
        draft = with_operations(draft_for(profile, microbatches=4, method="all"), rng, kind)
        caps = MemoryCaps(draft, profile.by_name)
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
    caps = MemoryCaps(draft_for(profile), small)
    assert [caps.fits_empty(name) for name in sorted(small)] == [False, True]


KEPT = Range(2, 8)
ROOMY = dataclasses.replace(device("a", num_blocks=8), memory_bytes=1000)
INPUTS = (KeptInput(layers=("query", "key", "value"), width=384), KeptInput(layers=("down",), width=1536))


def needs(saving: SliceSaving) -> int:
    """A hundred bytes for each block that keeps its graph, 80 with projections, ten for one that runs again."""
    graph = 80 if saving.is_projected else 100
    again = saving.recomputed
    return (6 - again) * graph + 10 * again + (graph if again else 0)


def chosen(memory_bytes: int, *, may_project: bool = False) -> SliceSaving:
    """What ``auto`` does with so much memory."""
    facts = dataclasses.replace(ROOMY, memory_bytes=memory_bytes)
    return slice_saving(AUTO, KEPT, needs, facts, may_project=may_project)


def test_auto_takes_the_cheapest_way_that_fits() -> None:
    """Everything, then projections where they may be, then as few of the lowest blocks as needed run again."""
    rows: list[tuple[int, bool, SliceSaving]] = [
        (600, True, KEEPS_ALL),
        (599, False, SliceSaving(2, 4)),
        (520, False, SliceSaving(2, 4)),
        (519, False, SliceSaving(2, 5)),
        (430, False, SliceSaving(2, 5)),
        (599, True, SliceSaving(2, 2, is_projected=True)),
        (479, True, SliceSaving(2, 4, is_projected=True)),
        (160, False, SliceSaving(2, 8)),
        (150, True, SliceSaving(2, 8, is_projected=True)),
    ]
    for memory_bytes, may_project, wanted in rows:
        found = chosen(memory_bytes, may_project=may_project)
        assert found == wanted
        assert needs(found) <= memory_bytes


def test_auto_passes_over_the_lowest_block_where_that_keeps_little() -> None:
    """It keeps 17 of a hundred bytes: run again it frees 7, for a whole forward; one block less runs again without."""

    def least(saving: SliceSaving) -> int:
        lowest_too = saving.recomputed > 0 and saving.start == KEPT.start
        return needs(saving) - (0 if lowest_too else 83)

    facts = dataclasses.replace(ROOMY, memory_bytes=427)
    assert slice_saving(AUTO, KEPT, least, facts) == SliceSaving(2, 6)
    found = slice_saving(AUTO, KEPT, least, facts, first_is_small=True)
    assert found == SliceSaving(3, 6)
    assert least(found) <= 427
    assert slice_saving(AUTO, KEPT, needs, facts, first_is_small=True) == SliceSaving(2, 6)
    # So that a refusal names the least that the slice needs
    assert chosen(99, may_project=True) == SliceSaving(2, 8, is_projected=True)


# ---- in a ring -------------------------------------------------------------------------------------


def tight(profile: Profile, memory_bytes: int) -> Profile:
    """The ring with so much memory on every node, and a model whose blocks train themselves."""

    def changed(facts: NodeFacts) -> NodeFacts:
        model = dataclasses.replace(facts.model, kept_inputs=INPUTS)
        return dataclasses.replace(facts, memory_bytes=memory_bytes, model=model)

    return dataclasses.replace(profile, nodes=tuple(map(changed, profile.nodes)))


def needed(draft: Draft, profile: Profile, ring: Ring) -> int:
    """The most that a node of a ring needs where everything is kept."""
    costs, caps = tables(dataclasses.replace(draft, saving=SavingPolicy()), profile)
    plan = plan_of(caps.draft, costs, ring)
    return max(caps.estimate(plan, node).total_bytes for node in plan.nodes)


def auto(draft: Draft, *, may_project: bool = True) -> Draft:
    """The draft with ``auto``."""
    velora = Velora(blocks=(Range(0, draft.course.num_blocks),), layers=("query", "key", "value", "down"))
    return dataclasses.replace(draft, saving=SavingPolicy(AUTO, velora, may_project))


def tables(draft: Draft, profile: Profile) -> tuple[RingCosts, MemoryCaps]:
    """The tables and the memory of a draft."""
    caps = MemoryCaps(draft, profile.by_name)
    return with_saving(ring_costs(draft, profile), caps), caps


def test_a_node_hosts_more_blocks_where_they_may_run_again() -> None:
    """A model that fits no ring of two nodes with graphs fits one with ``auto``, and the plan says which blocks."""
    roomy = class_ring(random.Random(1), ["laptop", "laptop"], num_blocks=6, owners=1)
    draft, ring = draft_for(roomy, microbatches=8, method="all"), Ring(nodes=(0, 1), counts=(3, 3))
    has_bytes = round(0.7 * needed(draft, roomy, ring))
    profile = tight(roomy, has_bytes)
    without, with_auto = tables(draft, profile), tables(auto(draft, may_project=False), profile)
    plan = plan_of(with_auto[1].draft, with_auto[0], ring)
    assert plan.placement.recompute
    assert plan.course.velora is None
    for node in plan.nodes:
        assert with_auto[1].estimate(plan, node).total_bytes <= has_bytes
    bare = draft.placed(plan.placement.slices)
    assert any(without[1].estimate(bare, node).total_bytes > has_bytes for node in plan.nodes)


@pytest.mark.parametrize("seed", range(4))
def test_step_time_with_auto_is_near_the_simulated_one(seed: int) -> None:
    """Formula and virtual clock know the same of blocks that run again and of projections."""
    rng = random.Random(seed)
    roomy = class_ring(rng, ["laptop", "jetson"], num_blocks=6, owners=1)
    draft = auto(draft_for(roomy, microbatches=4), may_project=seed % 2 == 0)
    ring = Ring(nodes=tuple(rng.sample(range(2), 2)), counts=random_counts(rng, 6, 2))
    profile = tight(roomy, round(0.75 * needed(draft, roomy, ring)))
    costs, _ = tables(draft, profile)
    assert all(map(operator.lt, costs.projected_back_s, costs.backward_s))  # own weights: their gradients are shorter
    plan = plan_of(draft, costs, ring)
    assert plan.placement.recompute or plan.course.velora
    predicted = step_times(costs, ring)
    for depth in (2, 4, 6):
        owner = plan.course.owners[0].node
        found = simulated_step_s(plan, profile, Units.top(6, depth), optimizer="adamw", owner=owner)
        assert predicted[depth] == pytest.approx(found, rel=0.15)
    assert plan_job_s(plan, profile, optimizer="adamw") == pytest.approx(job_s(costs, ring))


ALL = (Range(0, 4),)
MODEL = dataclasses.replace(fake_agents.MODEL, hidden_size=64, intermediate_size=128)
TRAINED = (
    KeptInput(layers=("query", "key", "value"), width=MODEL.hidden_size),
    KeptInput(layers=("up",), width=MODEL.hidden_size),
    KeptInput(layers=("down",), width=MODEL.intermediate_size),
)
FULL = {"adapter__config": "full", "train__method": "all"}


def two_nodes(memory_bytes: int = 10**9, **changes: Any) -> dict[str, NodeFacts]:
    """Two nodes with so much memory, whose blocks' own weights train."""
    changes = {"activation_token_bytes": 2500, **changes}
    model = dataclasses.replace(MODEL, kept_inputs=TRAINED)
    return {name: dataclasses.replace(facts(name), memory_bytes=memory_bytes, model=model, **changes) for name in "ab"}


def keeping(*inputs: KeptInput) -> dict[str, NodeFacts]:
    """Two nodes whose blocks keep these inputs."""
    nodes = two_nodes()
    return {
        name: dataclasses.replace(node, model=dataclasses.replace(node.model, kept_inputs=inputs))
        for name, node in nodes.items()
    }


def planned(activations: str, memory_bytes: int = 10**9, **keys: Any) -> Planned:
    """The plan of a job with this policy."""
    return make_plan(job_with(activations, **keys), two_nodes(memory_bytes))


def job_with(activations: str, **keys: Any) -> Job:
    """A job with this policy that trains own weights."""
    return job(memory__activations=activations, **{**FULL, **keys})


@functools.cache
def kept_bytes() -> int:
    """Nearly the least with which everything can be kept: with one credit."""
    high = max(planned("none").memory_bytes.values())
    low = high // 4
    while high - low > high // 100:
        middle = (low + high) // 2
        try:
            planned("none", middle)
            high = middle
        except CapacityError:
            low = middle
    return high


def too_little() -> int:
    """So much less that something has to be saved, but not much."""
    return round(0.97 * kept_bytes())


def test_words_of_a_job_hold_for_all_blocks_that_train() -> None:
    """VeLoRA is part of the course, with all layers that read one tensor; recomputation is part of the placement."""
    found = {word: planned(word).plan for word in ("none", "velora", "recompute", "both", "auto")}
    again = {word: plan.placement.recompute for word, plan in found.items()}
    assert again == {"none": (), "velora": (), "recompute": ALL, "both": ALL, "auto": ()}
    courses = {word: plan.course.velora for word, plan in found.items()}
    assert courses["none"] == courses["recompute"] == courses["auto"] is None
    assert courses["velora"] == courses["both"]
    assert courses["velora"] is not None
    assert (courses["velora"].blocks, courses["velora"].layers) == (ALL, ("query", "key", "value", "down"))
    assert found["recompute"].course == found["none"].course
    # Blocks that never train have no policy; neither has a run without steps
    plan = planned("both", privacy__private_blocks=1).plan
    assert plan.placement.recompute == (Range(1, 4),)
    assert plan.course.velora is not None
    assert plan.course.velora.blocks == (Range(1, 4),)
    alone = make_plan(job_with("both"), two_nodes(), evaluation_only=True).plan
    assert (alone.placement.recompute, alone.course.velora) == ((), None)


def test_auto_saves_only_as_much_as_it_has_to() -> None:
    """With room everything is kept; with less some blocks run again, or have projections where [velora] allows it."""
    enough = kept_bytes()
    assert planned("auto", enough).plan == planned("none", enough).plan
    tight = planned("auto", too_little())
    assert tight.plan.placement.recompute
    assert tight.plan.course.velora is None
    assert max(tight.memory_bytes.values()) < enough
    allowed = planned("auto", too_little(), velora__parts=2)
    assert allowed.plan.course.velora is not None
    assert allowed.plan.placement.recompute == ()


def test_refusals_name_auto_where_it_would_fit() -> None:
    """And only there."""
    enough = kept_bytes()
    with pytest.raises(CapacityError, match=r"; memory.activations = 'auto' would fit; or lower train.batch_size"):
        planned("none", too_little())
    with pytest.raises(CapacityError, match=r"; lower train.batch_size") as caught:
        planned("none", enough // 3)
    assert "would fit" not in str(caught.value)


def test_velora_that_does_not_fit_the_model_is_refused() -> None:
    """Layers that the model lacks, and more parts than an input has values."""
    rows: list[tuple[dict[str, Any], str]] = [
        ({"velora__layers": ["gate"]}, "velora.layers has 'gate', which does not train in this model with adapter"),
        (
            {"velora__parts": 99999},
            f"velora.parts is 99999, but an input of query, key, value, down has {MODEL.hidden_size}",
        ),
    ]
    for keys, message in rows:
        with pytest.raises(JobError) as caught:
            planned("velora", **keys)
        assert message in str(caught.value)


def test_velora_leaves_layers_alone_whose_input_stays_anyway() -> None:
    """Behind ReLU the input of ``down`` is kept: the defaults leave it out, and who names it is told why."""
    nodes = keeping(*TRAINED[:-1], dataclasses.replace(TRAINED[-1], always_kept=True))
    velora = make_plan(job_with("velora"), nodes).plan.course.velora
    assert velora is not None
    assert velora.layers == ("query", "key", "value")
    with pytest.raises(JobError, match="has 'down', but this model's activation function keeps the input"):
        make_plan(job_with("velora", velora__layers=["down"]), nodes)


def test_velora_without_a_layer_is_left_out_and_told() -> None:
    """LoRA at queries and values only keeps one tensor for both; named layers are projected nevertheless."""
    lora = KeptInput(layers=("adapter_down:query", "adapter_down:value"), width=MODEL.hidden_size, readers=2, lora=2)
    job = job_with("both", adapter__config="lora")
    for nodes, said in (
        (keeping(lora), "velora.layers = ['adapter_down']"),
        (keeping(), "memory.activations = 'recompute'"),
    ):
        found = make_plan(job, nodes)
        assert (found.plan.course.velora, found.plan.placement.recompute) == (None, ALL)
        assert [note for note in found.left_out if "VeLoRA projects nothing" in note and said in note]
        assert accept_plan(GivenPlan(plan=found.plan), job, nodes).plan == found.plan
        assert not make_plan(job, nodes, evaluation_only=True).left_out
    found = make_plan(job_with("velora", adapter__config="lora", velora__layers=["adapter_down"]), keeping(lora))
    assert found.plan.course.velora is not None
    assert not found.left_out


def test_explanation_says_both_numbers_and_what_else_would_save() -> None:
    """What a slice needs so, and what it would need; projections that would do; and what dropout costs."""
    made = planned("auto", too_little())
    found = explain(made, relative=True, dropout=0.1)
    assert found.activations is not None
    saved = next(each for each in found.activations.slices if each.says)
    assert saved.needed_bytes <= too_little() < saved.keeping_bytes
    text = "\n".join(explanation_text(found))
    for part in (
        "memory.activations = 'auto':",
        "run again:",
        "which does not fit",
        "a section [velora] lets auto choose it",
        "VeLoRA keeps",
        "train.dropout = 0 would keep",
    ):
        assert part in text, part
    lines = plan_text(made.plan, made.memory, measured=False, num_steps=0)
    assert any("activations" in line and line.startswith("node") for line in lines)


def test_given_plan_has_the_policy_of_its_job() -> None:
    """``auto`` takes any blocks that run again; all other words say which."""
    plan = planned("recompute").plan
    assert accept_plan(GivenPlan(plan=plan), job_with("recompute"), two_nodes()).plan == plan
    assert accept_plan(GivenPlan(plan=plan), job_with("auto"), two_nodes()).plan == plan
    with pytest.raises(PlanError, match="the plan has the policy 'recompute' for activations at node a, the job says"):
        accept_plan(GivenPlan(plan=plan), job_with("none"), two_nodes())
    with pytest.raises(PlanError, match="the plan has the policy 'none' for activations at node a"):
        accept_plan(GivenPlan(plan=planned("none").plan), job_with("recompute"), two_nodes())


def test_given_plan_has_the_velora_of_its_job() -> None:
    """Its layers and parts, and only where the job allows it."""
    plan = planned("velora").plan
    assert accept_plan(GivenPlan(plan=plan), job_with("velora"), two_nodes()).plan == plan
    for other, keys, has in (
        ("none", {}, "the plan has VeLoRA"),
        ("auto", {}, "the plan has VeLoRA"),
        ("velora", {"velora__parts": 2}, "the plan has other settings of VeLoRA"),
    ):
        with pytest.raises(PlanError, match=has):
            accept_plan(GivenPlan(plan=plan), job_with(other, **keys), two_nodes())
    assert plan.course.velora is not None
    former = dataclasses.replace(plan, course=dataclasses.replace(
        plan.course, velora=dataclasses.replace(plan.course.velora, layers=("down",))
    ))  # fmt: skip
    with pytest.raises(PlanError, match=r"add --set 'velora\.layers=\[\"down\"\]', or plan anew"):
        accept_plan(GivenPlan(plan=former), job_with("velora"), two_nodes())
    with pytest.raises(PlanError, match="the plan has no VeLoRA"):
        accept_plan(GivenPlan(plan=planned("none").plan), job_with("velora"), two_nodes())
