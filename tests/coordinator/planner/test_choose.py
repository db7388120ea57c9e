"""The planner's decisions from a profile, its reasons, and what it refuses."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from coordinator.cli.plan import app
from coordinator.planner.explain import explain, explanation_text
from coordinator.planner.limits import microbatch_choices, wire_choices
from coordinator.planner.make_plan import check_inputs, make_plan
from coordinator.planner.planned import Planned
from ringtune.costs.profile import LinkFacts, Profile, TimedShape
from ringtune.errors import InvalidInputError, PlanError, UsageError
from ringtune.job.job import Job, parse_job
from ringtune.schedule.plan import Plan
from sim.prediction import predict
from tests.support.planner_rings import MIB, QUICK, TOKENS, class_ring, device
from tests.support.plans import changed

JOB = f"""
[model]
path = "there-is-no-model"
[data]
labels = ["neg", "pos"]
[train]
batch_size = 16
microbatches = 4
max_length = {TOKENS}
max_steps = 80
[unfreeze]
every_steps = 10
[placement]
replicas = "never"
"""
KINDS = ("laptop", "pi", "jetson", "laptop")


def wanted(**changes: object) -> Job:
    """The job; keys with ``__`` for the dot."""
    method = changes.get("train__method", "ringada")
    text = JOB if method == "ringada" else JOB.replace("[unfreeze]\nevery_steps = 10\n", "")
    return parse_job(text, source="test").with_overrides(
        {key.replace("__", "."): value for key, value in changes.items()}
    )


def ring(seed: int = 0, kinds: tuple[str, ...] = KINDS, *, num_blocks: int = 8, **options: Any) -> Profile:
    """Four devices with links, 8 blocks."""
    return class_ring(random.Random(seed), kinds, num_blocks=num_blocks, **options)


@functools.lru_cache(maxsize=16)
def planned(job: Job, profile: Profile, **options: Any) -> Planned:
    """What the planner decides, without a clock; once."""
    return make_plan(job, profile.by_name, links=profile.links, effort=QUICK, **options)


def test_choice_tells_how_many_layouts_were_searched() -> None:
    """Every ring of three nodes and three blocks once for each of two numbers of micro-batches; the clock has stood."""
    profile = class_ring(random.Random(0), KINDS[:3], num_blocks=3)
    job = wanted()
    found = make_plan(job, profile.by_name, links=profile.links, effort=QUICK, microbatches=(2, 4))
    rings = 3 + 6 * 2 + 6
    assert (found.num_searched, found.search_s) == (2 * rings, 0.0)
    line = dataclasses.replace(found, search_s=1.84).effort_line
    assert line == "searched 42 layouts in 1.8 s"
    assert dataclasses.replace(found, num_searched=0).effort_line == ""


@pytest.mark.promise("7 bounded memory")
def test_choice_never_exceeds_a_budget() -> None:
    """With room for little more than two blocks each, the plan fits every node after rounding."""
    rng, roomy = random.Random(1), ring(1, ("laptop", "jetson", "laptop", "jetson", "laptop"))
    nodes = tuple(dataclasses.replace(node, memory_bytes=round(rng.uniform(219, 269) * MIB)) for node in roomy.nodes)
    made = planned(wanted(), Profile(nodes=nodes, links=roomy.links))
    budgets = {node.node: node.memory_bytes for node in nodes}
    assert all(needed <= budgets[name] for name, needed in made.memory_bytes.items())
    assert len(made.plan.placement.slices) >= 3


def test_choice_leaves_a_slow_node_out_and_beats_even_slices_on_the_simulator() -> None:
    """A Pi that is some twenty times slower hosts nothing, it has its turns all the same; half as long as even slices.

    With ``single`` one node hosts all.
    """
    profile = ring()
    made = planned(wanted(), profile).plan
    assert "n01-pi" not in {piece.node for piece in made.placement.slices}
    assert made.owner("n01-pi") is not None
    assert len(planned(wanted(train__method="single"), profile).plan.placement.slices) == 1
    names = [node.node for node in profile.nodes]
    even = changed(made, slices=[(name, 2 * index, 2 * index + 2) for index, name in enumerate(names)])
    assert predict(made, profile).train_s < 0.5 * predict(even, profile).train_s


def test_choice_takes_the_number_of_microbatches_that_the_simulator_prefers() -> None:
    """More micro-batches fill a ring of equal nodes without links better than one."""
    nodes = tuple(device(name, num_blocks=8, tokens=TOKENS, rows=100 if name == "a" else 0) for name in "abcd")
    one = planned(wanted(train__microbatches=1), Profile(nodes=nodes)).choice
    best = planned(wanted(train__microbatches=1), Profile(nodes=nodes), microbatches=(1, 2, 4, 8))
    assert best.plan.course.microbatches > 1
    assert best.choice is not None and one is not None
    assert best.choice.best.job_s < one.best.job_s


@pytest.mark.parametrize("method", ["ringada", "pipeadapter"])
def test_choice_among_alike_nodes_tries_every_number_of_microbatches_in_even_slices(method: str) -> None:
    """Six alike nodes, six blocks: with 2 and 3 to choose from, it is the even plan of 3, and no slower than that."""
    names = "abcdef"
    nodes = tuple(device(name, num_blocks=6, tokens=TOKENS, rows=100 if name == "a" else 0) for name in names)
    job, profile = wanted(train__method=method, train__batch_size=12), Profile(nodes=nodes)
    both, three = (planned(job, profile, microbatches=numbers) for numbers in ((2, 3), (3,)))
    assert both.choice is not None and both.choice.even
    assert [(piece.node, piece.num_blocks) for piece in both.plan.placement.slices] == [(name, 1) for name in names]
    assert both.plan == three.plan


def test_choice_takes_the_smaller_wire_type_where_links_are_slow() -> None:
    """If it may, it halves the bytes."""
    profile = ring()
    slow = tuple(dataclasses.replace(link, rate_bytes_per_s=link.rate_bytes_per_s / 4) for link in profile.links)
    profile = dataclasses.replace(profile, links=slow)
    assert planned(wanted(), profile, wire_dtypes=("float32", "bfloat16")).plan.course.wire_dtype == "bfloat16"


def test_explanation_names_nodes_depths_total_and_second() -> None:
    """Every node has blocks or a reason, every depth its steps, and the second plan is another one."""
    made = planned(wanted(), ring())
    assert made.choice is not None
    why = explain(made.choice, relative=False)
    assert [node.node for node in why.nodes][: len(made.plan.placement.slices)] == [
        piece.node for piece in made.plan.placement.slices
    ]
    reasons = {node.node: node.reason for node in why.nodes}
    assert "longer with it" in reasons["n01-pi"]
    assert sum(each.steps for each in why.depths) == 80
    assert sum(each.steps * each.step_s for each in why.depths) == pytest.approx(why.job_s)
    assert why.second is not None
    assert why.second.slices != tuple((piece.node, piece.start, piece.stop) for piece in made.plan.placement.slices)
    text = "\n".join(explanation_text(why))
    assert "second best: " in text and "depth 8: 10 steps" in text
    assert json.loads(json.dumps(why.to_json()))["initiators"] == [owner.node for owner in made.plan.course.owners]


def test_explanation_of_even_slices_calls_no_faster_plan_the_second_best() -> None:
    """Alike nodes get even slices unless another ring is much faster; one that is a little faster says so."""
    made = planned(wanted(), ring())
    assert made.choice is not None
    why = explain(made.choice, relative=True)
    assert why.second is not None
    second = dataclasses.replace(why.second, job_s=0.95 * why.job_s, simulated_s=None)
    text = "\n".join(explanation_text(dataclasses.replace(why, even=True, simulated_s=None, second=second)))
    assert "not much faster, so not taken: " in text
    assert "second best" not in text


def test_explanation_of_a_node_without_room_has_both_numbers() -> None:
    """A node that can't host one block is left out for its memory."""
    profile = ring(owners=1)
    small = tuple(
        dataclasses.replace(node, memory_bytes=MIB) if node.node == "n02-jetson" else node for node in profile.nodes
    )
    made = planned(wanted(), Profile(nodes=small, links=profile.links))
    assert made.choice is not None
    reasons = {node.node: node.reason for node in explain(made.choice, relative=False).nodes}
    assert reasons["n02-jetson"].startswith("no room: one block needs ")
    assert reasons["n02-jetson"].endswith(" it has 1.0 MiB")


def test_choice_refuses_a_missing_link() -> None:
    """Where links count, each has to be there; the error names it."""
    profile = ring()
    with pytest.raises(PlanError, match="lacks link n00-laptop -> n01-pi"):
        planned(wanted(), Profile(nodes=profile.nodes, links=profile.links[1:]))


def test_inputs_of_another_model_or_shape_are_refused() -> None:
    """Two models in a profile, and timings of another length."""
    nodes = list(ring().nodes)
    other = dataclasses.replace(nodes[1], model=dataclasses.replace(nodes[1].model, digest="cd" * 32))
    with pytest.raises(InvalidInputError, match="different models"):
        check_inputs(wanted(), Profile(nodes=(nodes[0], other)))
    long = dataclasses.replace(nodes[1], shape=TimedShape(rows=8, tokens=128))
    with pytest.raises(PlanError, match=r"node n01-pi was profiled with tokens 128, the job has 64"):
        check_inputs(wanted(), Profile(nodes=(nodes[0], long)))
    with pytest.raises(InvalidInputError, match="rate_bytes_per_s is nan"):
        LinkFacts(source="a", target="b", rate_bytes_per_s=float("nan"), latency_s=0.0)


def test_options_name_what_they_refuse() -> None:
    """Numbers within the batch, known types; auto is every power of two that fits."""
    assert microbatch_choices("auto", 6) == (1, 2, 4)
    assert microbatch_choices("4,1,4", 16) == (1, 4)
    assert microbatch_choices("", 16) == ()
    assert wire_choices("float32, int8") == ("float32", "int8")
    for text in ("x", "0", "17", "1,"):
        with pytest.raises(UsageError, match="--microbatches"):
            microbatch_choices(text, 16)
    with pytest.raises(UsageError, match="--wire 'half'"):
        wire_choices("half")


def run(tmp_path: Path, profile: Any, *options: str) -> Result:
    """``ringtune plan JOB --profile FILE``."""
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    return CliRunner().invoke(
        app, [str(tmp_path / "job.toml"), "--profile", str(tmp_path / "profile.json"), *options], catch_exceptions=True
    )


def test_command_plans_from_a_profile_and_explains(tmp_path: Path) -> None:
    """Text for people, which begins with what was chosen; one JSON line whose plan reads back, with the reasons."""
    two = ring(kinds=KINDS[:2], num_blocks=3).to_json()
    text = run(tmp_path, two, "--explain", "--table", "--microbatches", "1", "--wire", "bfloat16").stdout
    assert "in 1 micro-batch, bfloat16 on the wire" in text.splitlines()[0]
    assert "measured nodes" in text and "second best" in text and "actions from step 0" in text
    value = json.loads(run(tmp_path, two, "--explain", "--json").stdout)
    assert Plan.from_json(value["plan"]).course.num_blocks == 3
    assert value["explanation"]["depths"][0]["steps"] == 10
    assert value["explanation"]["nodes"][0]["budget_bytes"] > 0


def test_command_refuses_options_that_contradict(tmp_path: Path) -> None:
    """A profile says which nodes there are; a coordinator decides by itself. A profile without a node is none."""
    assert "the profile has no node" in str(run(tmp_path, {**ring().to_json(), "nodes": [], "links": []}).exception)
    assert isinstance(run(tmp_path, ring().to_json(), "--nodes", "2").exception, UsageError)
    assert isinstance(run(tmp_path, ring().to_json(), "--coordinator", "127.0.0.1:1").exception, UsageError)


def test_alike_nodes_share_what_only_some_of_them_measured() -> None:
    """Of equal machines only owners time embedding and head; their plan is even all the same."""
    owner = device("b", num_blocks=8, tokens=TOKENS)
    others = []
    for name in "ac":
        node = device(name, num_blocks=8, tokens=TOKENS, rows=0)
        times = tuple(point for point in node.work_times if point.work not in ("embed", "head", "head_free"))
        others.append(dataclasses.replace(node, work_times=times))
    made = planned(wanted(), Profile(nodes=(others[0], owner, others[1])))
    assert [(piece.node, piece.num_blocks) for piece in made.plan.placement.slices] == [("a", 3), ("b", 3), ("c", 2)]
