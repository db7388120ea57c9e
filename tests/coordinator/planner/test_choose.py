"""The planner's decisions from a profile: search, reasons, limits, even slices of alike nodes, and refusals."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from coordinator.cli.plan import plan as plan_command
from coordinator.planner.explain import explain, explanation_text
from coordinator.planner.limits import Effort, PlanningClock, microbatch_choices, wire_choices
from coordinator.planner.local_search import Budget, LocalResult, every_ring, num_rings, search_local
from coordinator.planner.make_plan import check_inputs, make_plan
from coordinator.planner.memory import MemoryCaps
from coordinator.planner.planned import Planned
from coordinator.planner.ring_costs import RingCosts, ring_costs, with_mean_owner
from coordinator.planner.search import split_blocks, with_saving
from coordinator.planner.step_time import Ring, job_s
from ringtune.costs.links import with_assumed
from ringtune.costs.profile import LinkFacts, Profile, TimedShape
from ringtune.errors import DeadlineError, InterruptedRunError, InvalidInputError, PlanError, UsageError
from ringtune.job.job import Job, parse_job
from ringtune.schedule.placement import Slice
from ringtune.schedule.plan import Plan
from ringtune.techniques.activation_checkpointing import AUTO, SavingPolicy
from sim.prediction import predict
from tests.support.planner_rings import MIB, QUICK, TOKENS, class_ring, device, draft_for, random_kinds
from tests.support.plans import changed, random_operations

app = typer.Typer()
app.command()(plan_command)

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


def test_choice_takes_the_microbatches_and_the_wire_type_that_are_faster() -> None:
    """More micro-batches fill a ring of equal nodes without links better than one."""
    nodes = tuple(device(name, num_blocks=8, tokens=TOKENS, rows=100 if name == "a" else 0) for name in "abcd")
    one = planned(wanted(train__microbatches=1), Profile(nodes=nodes)).choice
    best = planned(wanted(train__microbatches=1), Profile(nodes=nodes), microbatches=(1, 2, 4, 8))
    assert best.plan.course.microbatches > 1
    assert best.choice is not None and one is not None
    assert best.choice.best.job_s < one.best.job_s
    # If it may, it halves the bytes
    profile = ring()
    slow = tuple(dataclasses.replace(link, rate_bytes_per_s=link.rate_bytes_per_s / 4) for link in profile.links)
    profile = dataclasses.replace(profile, links=slow)
    assert planned(wanted(), profile, wire_dtypes=("float32", "bfloat16")).plan.course.wire_dtype == "bfloat16"


def test_choice_among_alike_nodes_tries_every_number_of_microbatches_in_even_slices() -> None:
    """Six alike nodes, six blocks: with 2 and 3 to choose from, it is the even plan of 3, and no slower than that."""
    for method in ["ringada", "pipeadapter"]:
        names = "abcdef"
        nodes = tuple(device(name, num_blocks=6, tokens=TOKENS, rows=100 if name == "a" else 0) for name in names)
        job, profile = wanted(train__method=method, train__batch_size=12), Profile(nodes=nodes)
        both, three = (planned(job, profile, microbatches=numbers) for numbers in ((2, 3), (3,)))
        assert both.choice is not None and both.choice.even
        assert [(piece.node, piece.num_blocks) for piece in both.plan.placement.slices] == [(name, 1) for name in names]
        assert both.plan == three.plan


def test_explanation_names_nodes_depths_total_and_second() -> None:
    """Every node has blocks or a reason, every depth its steps, and the second plan is another one."""
    made = planned(wanted(), ring())
    why = explain(made, relative=False)
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


def test_explanation_of_nodes_without_room_and_of_even_slices() -> None:
    """A node that can't host one block is left out for its memory, with both numbers."""
    profile = ring(owners=1)
    small = tuple(
        dataclasses.replace(node, memory_bytes=MIB) if node.node == "n02-jetson" else node for node in profile.nodes
    )
    made = planned(wanted(), Profile(nodes=small, links=profile.links))
    reasons = {node.node: node.reason for node in explain(made, relative=False).nodes}
    assert reasons["n02-jetson"].startswith("no room: one block needs ")
    assert reasons["n02-jetson"].endswith(" it has 1.0 MiB")
    # Alike nodes get even slices unless another ring is much faster; one that is a little faster says so
    made = planned(wanted(), ring())
    why = explain(made, relative=True)
    assert why.second is not None
    second = dataclasses.replace(why.second, job_s=0.95 * why.job_s, simulated_s=None)
    text = "\n".join(explanation_text(dataclasses.replace(why, even=True, simulated_s=None, second=second)))
    assert "not much faster, so not taken: " in text
    assert "second best" not in text


def test_inputs_with_holes_or_of_another_model_are_refused() -> None:
    """Where links count, each has to be there; the error names it."""
    profile = ring()
    with pytest.raises(PlanError, match="lacks link n00-laptop -> n01-pi"):
        planned(wanted(), Profile(nodes=profile.nodes, links=profile.links[1:]))
    # Two models in a profile, and timings of another length
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


def test_alike_nodes_keep_their_slices_though_one_was_held_up_while_it_measured() -> None:
    """Of two on one machine, with so little work that 0.1 s of each action besides it would decide."""
    nodes = {
        name: dataclasses.replace(
            device(name, num_blocks=8, tokens=TOKENS, rows=rows).at_pace(0.05), has_messages=False, handling_s=1e-4
        )
        for name, rows in (("a", 40), ("b", 0))
    }
    links = with_assumed("ab", {"a": "x", "b": "x"}, ())
    slices = set[tuple[Slice, ...]]()
    for handling_s in ({}, {"a": 0.1}, {"b": 0.1}):
        measured = {
            name: dataclasses.replace(facts, handling_s=handling_s.get(name, facts.handling_s))
            for name, facts in nodes.items()
        }
        slices.add(make_plan(wanted(), measured, links=links, effort=QUICK).plan.placement.slices)
    assert len(slices) == 1


def ticking(step_s: float) -> Effort:
    """An effort of 60 s whose clock goes on by ``step_s`` each time it is read."""
    ticks = itertools.count()
    return dataclasses.replace(QUICK, now_s=lambda: step_s * next(ticks))


def planned_within(effort: Effort, **options: tuple[int, ...]) -> Planned:
    """The plan of the job for four devices."""
    profile = ring()
    return make_plan(wanted(), profile.by_name, links=profile.links, effort=effort, **options)  # type: ignore[arg-type]


def test_plan_that_is_cut_is_the_best_found_and_says_so() -> None:
    """Whenever the clock ends: the plan is whole, fits, and is marked, in words and in the explanation."""
    rows: list[tuple[float, tuple[int, ...]]] = [(61.0, ()), (20.0, (1, 2, 4)), (5.0, ())]
    for step_s, microbatches in rows:
        made = planned_within(ticking(step_s), microbatches=microbatches)
        assert made.choice is not None and made.choice.cut_after_s == 60.0
        assert "planning was cut after 60 s (runtime.plan_s)" in made.note
        why = explain(made, relative=False)
        assert why.cut_after_s == 60.0
        assert any("cut after 60 s" in line for line in explanation_text(why))


def test_clock_of_a_part_cuts_the_whole() -> None:
    """A part has its share of the time that is left; nobody waits for a cancelled one."""
    now = [0.0]
    whole = PlanningClock(10.0, now_s=lambda: now[0])
    part = whole.part(0.5)
    now[0] = 4.0
    assert not part.is_over() and not whole.was_cut
    now[0] = 5.0
    assert part.is_over() and whole.was_cut and not whole.is_over()
    with pytest.raises(InterruptedRunError):
        PlanningClock(10.0, is_cancelled=lambda: True).is_over()
    # Without a ring when the time is over nothing is known about memory: the error names the clock
    profile = ring()
    tight = {
        name: dataclasses.replace(node, memory_bytes=90 * MIB, train_rows=0) for name, node in profile.by_name.items()
    }
    tight |= {name: dataclasses.replace(tight[name], memory_bytes=200 * MIB, train_rows=9) for name in ["n01-pi"]}
    with pytest.raises(DeadlineError, match=r"within 60 s; raise runtime\.plan_s"):
        make_plan(wanted(), tight, links=profile.links, effort=ticking(61.0))


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
        draft = dataclasses.replace(draft, saving=SavingPolicy(AUTO))
        small = (dataclasses.replace(node, memory_bytes=rng.randint(100, 300) * MIB) for node in profile.nodes)
        profile = dataclasses.replace(profile, nodes=tuple(small))
    caps = MemoryCaps(draft, profile.by_name)
    costs = with_saving(ring_costs(draft, profile), caps)
    most = [rng.randint(0, num_blocks) if rng.random() < 0.5 else num_blocks for _ in range(num_nodes)]

    def fits(node: int, start: int, stop: int, above: int) -> bool:
        return stop - start <= most[node] and not caps.lacking(costs.names[node], start, stop, above)

    return costs, fits


def local(costs: RingCosts, fits: Fits, *, evaluations: int, seed: int = 0) -> LocalResult:
    """A local search without a clock."""
    budget = Budget(evaluations=evaluations, seconds=1.0, now_s=lambda: 0.0)
    return search_local(costs, lambda *slice_: 0 if fits(*slice_) else 1, budget, seed=seed)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.sampled(4)
def test_local_search_finds_the_best_of_all_rings(seed: int) -> None:
    """Where there are more rings than evaluations, it climbs to the best of all, or both find that nothing fits."""
    rng = random.Random(seed)
    costs, fits = random_instance(rng, *rng.choice([(4, 8), (5, 6), (5, 7)]))
    found = local(costs, fits, evaluations=700)
    assert not found.is_complete
    assert found.pool[0][0] == pytest.approx(best_of_all(costs, fits), rel=1e-9)
    if found.ring is not None:
        assert job_s(costs, found.ring) == pytest.approx(found.pool[0][0], rel=1e-9)


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
    assert found.pool[0][0] == pytest.approx(best_of_all(costs, fits), rel=1e-9)
    assert len({frozenset(ring.nodes) for _, ring in found.pool}) == len(found.pool)


def test_local_search_takes_equal_nodes_in_the_order_of_their_names() -> None:
    """Of rings that take as long, the one whose nodes are first is taken."""
    nodes = tuple(device(f"n{index}", num_blocks=4, tokens=64) for index in range(4))
    costs = ring_costs(draft_for(Profile(nodes=nodes)), Profile(nodes=nodes))
    found = local(costs, lambda *_: True, evaluations=1000)
    assert found.ring is not None and found.is_complete
    assert found.ring.nodes == tuple(range(len(found.ring.nodes)))
    # Where every node has room for a fifth of the blocks only, it gets there by what is lacking
    nodes = tuple(device(f"n{index:02d}", num_blocks=10, memory_bytes=MIB, tokens=64) for index in range(8))
    costs = ring_costs(draft_for(Profile(nodes=nodes)), Profile(nodes=nodes))
    found = local(costs, lambda node, start, stop, above: stop - start <= 2, evaluations=1000)
    assert found.ring is not None
    assert max(found.ring.counts) <= 2


def test_local_search_depends_on_its_seed_and_its_clock_only() -> None:
    """Twice the same search, twice the same ring and pool."""
    rng = random.Random(9)
    profile = class_ring(rng, random_kinds(rng, 20), num_blocks=32)
    costs = with_mean_owner(ring_costs(draft_for(profile), profile))
    assert local(costs, lambda *_: True, evaluations=800) == local(costs, lambda *_: True, evaluations=800)
    # The injected clock ends it; what was found by then counts
    ticks = itertools.count()
    budget = Budget(evaluations=10**9, seconds=5.0, now_s=lambda: float(next(ticks)))
    found = search_local(costs, lambda *_: 0, budget)
    assert found.ring is not None
    assert found.evaluations <= 8 * 64


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
