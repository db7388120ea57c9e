"""What ``memory.activations`` of a job makes of its plan, what is said about it, and which given plans it refuses."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

from coordinator.planner.explain import explain, explanation_text
from coordinator.planner.given_plan import GivenPlan, accept_plan
from coordinator.planner.make_plan import make_plan
from coordinator.planner.memory import KEEPS_ALL, extra_share
from coordinator.planner.planned import Planned
from coordinator.screen.plan_text import plan_text
from ringtune.costs.profile import NodeFacts
from ringtune.errors import CapacityError, JobError, PlanError
from ringtune.job.job import Job
from ringtune.models.kept_inputs import KeptInput
from ringtune.schedule.units import Range
from tests.support import fake_agents
from tests.support.fake_agents import facts, job

ALL = (Range(0, 4),)
MODEL = dataclasses.replace(fake_agents.MODEL, hidden_size=64, intermediate_size=128)
TRAINED = (
    KeptInput(layers=("query", "key", "value"), width=MODEL.hidden_size),
    KeptInput(layers=("up",), width=MODEL.hidden_size),
    KeptInput(layers=("down",), width=MODEL.intermediate_size),
)
FULL = {"adapter__config": "full", "train__method": "all"}


def two(memory_bytes: int = 10**9, **changes: Any) -> dict[str, NodeFacts]:
    """Two nodes with so much memory, whose blocks' own weights train."""
    changes = {"activation_token_bytes": 2500, **changes}
    model = dataclasses.replace(MODEL, kept_inputs=TRAINED)
    return {name: dataclasses.replace(facts(name), memory_bytes=memory_bytes, model=model, **changes) for name in "ab"}


def planned(activations: str, memory_bytes: int = 10**9, **keys: Any) -> Planned:
    """The plan of a job with this policy."""
    return make_plan(wanted(activations, **keys), two(memory_bytes))


def wanted(activations: str, **keys: Any) -> Job:
    """A job with this policy that trains own weights."""
    return job(memory__activations=activations, **{**FULL, **keys})


@functools.cache
def needed() -> int:
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
    return round(0.97 * needed())


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


def test_private_blocks_and_evaluations_keep_nothing() -> None:
    """Blocks that never train have no policy; neither has a run without steps."""
    plan = planned("both", privacy__private_blocks=1).plan
    assert plan.placement.recompute == (Range(1, 4),)
    assert plan.course.velora is not None
    assert plan.course.velora.blocks == (Range(1, 4),)
    alone = make_plan(wanted("both"), two(), evaluation_only=True).plan
    assert (alone.placement.recompute, alone.course.velora) == ((), None)


def test_auto_saves_only_as_much_as_it_has_to() -> None:
    """With room everything is kept; with less some blocks run again, or have projections where [velora] allows it."""
    enough = needed()
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
    enough = needed()
    with pytest.raises(CapacityError, match=r"; memory.activations = 'auto' would fit; or lower train.batch_size"):
        planned("none", too_little())
    with pytest.raises(CapacityError, match=r"; lower train.batch_size") as caught:
        planned("none", enough // 3)
    assert "would fit" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"velora__layers": ["gate"]},
            "velora.layers has 'gate', which does not train in this model with adapter",
        ),
        (
            {"velora__parts": 99999},
            f"velora.parts is 99999, but an input of query, key, value, down has {MODEL.hidden_size}",
        ),
    ],
)
def test_velora_that_does_not_fit_the_model_is_refused(keys: dict[str, Any], message: str) -> None:
    """Layers that the model lacks, and more parts than an input has values."""
    with pytest.raises(JobError) as caught:
        planned("velora", **keys)
    assert message in str(caught.value)


def test_velora_leaves_layers_alone_whose_input_stays_anyway() -> None:
    """Behind ReLU the input of ``down`` is kept: the defaults leave it out, and who names it is told why."""
    behind_relu = (*TRAINED[:-1], dataclasses.replace(TRAINED[-1], always_kept=True))
    nodes = {
        name: dataclasses.replace(node, model=dataclasses.replace(node.model, kept_inputs=behind_relu))
        for name, node in two().items()
    }
    velora = make_plan(wanted("velora"), nodes).plan.course.velora
    assert velora is not None
    assert velora.layers == ("query", "key", "value")
    with pytest.raises(JobError, match="has 'down', but this model's activation function keeps the input"):
        make_plan(wanted("velora", velora__layers=["down"]), nodes)


def test_explanation_says_both_numbers_and_what_else_would_save() -> None:
    """What a slice needs so, and what it would need; projections that would do; and what dropout costs."""
    made = planned("auto", too_little())
    assert made.choice is not None
    found = explain(made.choice, relative=True, dropout=0.1)
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


def test_slice_that_never_trains_takes_no_longer() -> None:
    """A run too short to unfreeze it keeps nothing there, so there is nothing to compare with."""
    assert extra_share(KEEPS_ALL, Range(2, 2), two()["a"]) == 0.0


def test_explanation_is_silent_where_nothing_was_asked_for() -> None:
    """Everything is kept, and there is no dropout."""
    made = planned("none")
    assert made.choice is not None
    assert explain(made.choice, relative=True).activations is None


def test_given_plan_has_the_policy_of_its_job() -> None:
    """``auto`` takes any blocks that run again; all other words say which."""
    plan = planned("recompute").plan
    assert accept_plan(GivenPlan(plan=plan), wanted("recompute"), two()).plan == plan
    assert accept_plan(GivenPlan(plan=plan), wanted("auto"), two()).plan == plan
    with pytest.raises(PlanError, match="the plan has the policy 'recompute' for activations at node a, the job says"):
        accept_plan(GivenPlan(plan=plan), wanted("none"), two())
    with pytest.raises(PlanError, match="the plan has the policy 'none' for activations at node a"):
        accept_plan(GivenPlan(plan=planned("none").plan), wanted("recompute"), two())


def test_given_plan_has_the_velora_of_its_job() -> None:
    """Its layers and parts, and only where the job allows it."""
    plan = planned("velora").plan
    assert accept_plan(GivenPlan(plan=plan), wanted("velora"), two()).plan == plan
    for other, keys, has in (
        ("none", {}, "the plan has VeLoRA"),
        ("auto", {}, "the plan has VeLoRA"),
        ("velora", {"velora__parts": 2}, "the plan has other settings of VeLoRA"),
    ):
        with pytest.raises(PlanError, match=has):
            accept_plan(GivenPlan(plan=plan), wanted(other, **keys), two())
    with pytest.raises(PlanError, match="the plan has no VeLoRA"):
        accept_plan(GivenPlan(plan=planned("none").plan), wanted("velora"), two())
