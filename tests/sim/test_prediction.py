"""Tests of ``sim.prediction``: prediction, operations, prediction replay, prefix cache."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from typing import Any

import pytest

from ringtune.costs.action_costs import BASE_S
from ringtune.costs.memory_estimate import node_memory
from ringtune.costs.memory_sizes import MemorySettings, tables_bytes
from ringtune.costs.profile import NodeFacts, Profile, Work
from ringtune.errors import PlanError
from ringtune.models.kept_inputs import KeptInput
from ringtune.schedule.actions import Action, Op
from ringtune.schedule.methods import Everything
from ringtune.schedule.migration import stay_reason, with_owner, without_owner
from ringtune.schedule.operation_tables import BatchOperations, BlockCapacity, Choice, Operations, share
from ringtune.schedule.placement import ActivationCacheSettings, Placement
from ringtune.schedule.plan import Plan
from ringtune.schedule.saved_activations import Velora, merged
from ringtune.schedule.turns import StartPoint, StepKind, turn_sequence
from ringtune.schedule.units import EMBEDDING, Range
from ringtune.schedule.versions import depth
from ringtune.techniques.activation_cache import expected_cache_use
from ringtune.techniques.operations import expected_table
from sim.prediction import Prediction, memory_bounds, predict
from tests.support.cases import cases
from tests.support.moves import moving, moving_at_random
from tests.support.plans import changed, make_plan, random_operations, random_plan, two_nodes
from tests.support.profiles import TIMES, all_pairs, part, profile_of, random_profile

SEEDS = range(10)


def drawn_plan(rng: random.Random) -> Plan:
    """Any plan; half of those that may move do, to any stages of several hosts among them."""
    plan = random_plan(rng)
    return plan if stay_reason(plan.course) or rng.random() < 0.5 else moving_at_random(rng, plan)


@functools.cache
def drawn(seed: int) -> tuple[Plan, Prediction]:
    """Any plan on any nodes, with what every action took."""
    rng = random.Random(seed)
    plan = drawn_plan(rng)
    return plan, predict(plan, random_profile(plan, rng), keep_spans=True)


# ---- conservation ----------------------------------------------------------------------------------


@cases("seed", SEEDS)
def test_prediction_busy_and_idle_make_the_wall_time(seed: int) -> None:
    """Each node's actions add up to its busy seconds, never overlap, and the last one ends the run."""
    plan, found = drawn(seed)
    compute = [span for span in found.spans if span[1].op not in (Op.SEND, Op.RECEIVE)]
    assert len(compute) == found.num_actions == sum(node.actions for node in found.nodes)
    assert max(end_s for _, _, _, end_s in compute) == found.wall_s
    for node in found.nodes:
        mine = sorted((start_s, end_s) for name, _, start_s, end_s in compute if name == node.node)
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(mine))
        assert node.busy_s == pytest.approx(sum(end_s - start_s for start_s, end_s in mine))
        assert node.busy_s == pytest.approx(sum(node.busy_by_op_s.values()))
        assert node.busy_s + node.idle_share * found.wall_s == pytest.approx(found.wall_s)
        assert 0 <= node.busy_share <= 1 + 1e-9
    assert [node.node for node in found.nodes] == list(plan.nodes)


@cases("seed", SEEDS)
def test_prediction_depths_make_the_training_time(seed: int) -> None:
    """Every step is counted at its depth; steps and the rest make the whole."""
    plan, found = drawn(seed)
    steps = [depth(plan.course, step) for step in range(plan.course.num_steps)]
    assert {each.depth: each.steps for each in found.depths} == {d: steps.count(d) for d in set(steps)}
    assert sum(each.wall_s for each in found.depths) == pytest.approx(found.train_s)
    assert all(each.step_s * each.steps == pytest.approx(each.wall_s) for each in found.depths)
    assert found.train_s + found.moves_s + found.evaluation_s == pytest.approx(found.wall_s)
    assert found.evaluation_s >= -1e-9 * found.wall_s
    slices = [dict.fromkeys((piece.node, piece.text) for piece in one.hosts) for one in plan.placements]
    assert found.moves_s >= BASE_S * sum(one != other for one, other in itertools.pairwise(slices))


def test_prediction_of_a_run_that_moves_is_that_of_its_placements() -> None:
    """Steps take on each placement what they take there without a move; links carry what both carry; a move is told."""
    bare = make_plan(
        [("a", 0, 2), ("b", 2, 4)], ["a"], num_blocks=4, num_steps=8, local_iterations=2, method="all", eval_rows=0
    )
    plan = moving(bare, (2, [("b", 0, 3), ("c", 3, 4, 1)]))
    profile = profile_of(plan, links=all_pairs(plan.nodes, 1e6, 0.01))
    found = predict(plan, profile, move_s=7.0)
    alone = [predict(Plan(bare.course, (part,)), profile) for part in parts_alone(plan)]
    assert [each.steps for each in found.depths] == [8]
    assert found.moves_s == pytest.approx(7.0)
    assert found.train_s + found.evaluation_s == pytest.approx(found.wall_s - 7.0)
    assert found.wall_s == pytest.approx(7.0 + sum(each.wall_s for each in alone) / 2, rel=0.02)
    assert [node.blocks for node in found.nodes] == ["[0, 2) then none", "[2, 4) then [0, 3)", "none then [3, 4)"]
    sent = [{(link.source, link.target): link.sent_bytes for link in each.links} for each in (found, *alone)]
    assert all(num_bytes == (sent[1].get(pair, 0) + sent[2].get(pair, 0)) / 2 for pair, num_bytes in sent[0].items())


def test_prediction_goes_on_in_the_placement_that_holds_there() -> None:
    """A run that is resumed after its only move is one on the last placement; before it, it moves."""
    bare = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_blocks=4, num_steps=8, local_iterations=2, method="all")
    plan = moving(bare, (2, [("b", 0, 4)]))
    profile = profile_of(plan, links=all_pairs(plan.nodes, 1e6, 0.01))
    starts = [
        StartPoint.of(plan.course, step=step, placement_number=placement_number)
        for step, placement_number in ((2, 0), (4, 1))
    ]
    before, after = (predict(plan, profile, start=start) for start in starts)
    last = Plan(bare.course, (parts_alone(plan)[1],))
    assert after.wall_s == predict(last, profile, start=StartPoint.of(last.course, step=4)).wall_s
    assert (before.moves_s > 0, after.moves_s) == (True, 0.0)


def parts_alone(plan: Plan) -> list[Placement]:
    """The placements of a plan, each as the only one of a run."""
    return [dataclasses.replace(one, placement_number=0, first_turn=0) for one in plan.placements]


@pytest.mark.promise("7 bounded memory")
@cases("seed", SEEDS)
def test_prediction_memory_stays_below_the_planners_bound(seed: int) -> None:
    """For any plan, speeds and links no node holds more than the planner counts."""
    rng = random.Random(seed)
    plan = drawn_plan(rng)
    profile = random_profile(plan, rng)
    for optimizer in ("adamw", "sgd"):
        for node in predict(plan, profile, MemorySettings(optimizer)).nodes:
            bounds = [node_memory_of(part, node.node, profile, optimizer) for part in plan.parts]
            assert 0 < node.peak_memory_bytes <= max(bounds) or not max(bounds)
            assert node.needed_bytes >= max(bounds)


def node_memory_of(part: Plan, name: str, profile: Profile, optimizer: str) -> int:
    """What the planner counts for a node in one placement."""
    facts = profile.by_name[name]
    if name not in part.nodes:
        return 0
    return node_memory(
        part, name, facts.model, optimizer=optimizer, activation_token_bytes=facts.activation_token_bytes
    ).total_bytes


@pytest.mark.promise("7 bounded memory")
@cases("seed", SEEDS)
def test_prediction_memory_stays_below_the_bound_where_blocks_save_activations(seed: int) -> None:
    """Whichever blocks run again or keep projections; they never need more than without."""
    rng = random.Random(seed)
    bare = random_plan(rng, with_operations=seed % 3 == 0)
    profile = with_kept_inputs(random_profile(bare, rng))
    plan = saving(bare, rng)
    peaks = {node.node: node.peak_memory_bytes for node in predict(bare, profile).nodes}
    for node in predict(plan, profile).nodes:
        facts = profile.by_name[node.node]
        bound = memory_bounds(plan, profile, MemorySettings())[node.node]
        assert 0 < node.peak_memory_bytes <= bound.total_bytes or not bound.total_bytes
        one_graph = facts.activation_token_bytes * plan.course.microbatch_sizes()[0] * plan.course.max_length
        assert node.peak_memory_bytes <= peaks[node.node] + one_graph


def with_kept_inputs(profile: Profile) -> Profile:
    """The profile with a model whose blocks keep inputs for linear layers."""

    def changed_node(facts: NodeFacts) -> NodeFacts:
        width = min(facts.model.hidden_size, int(facts.activation_token_bytes / 4))
        inputs = (KeptInput(layers=("down",), width=width),) if width else ()
        lowest = facts.activation_token_bytes / 3
        model = dataclasses.replace(facts.model, kept_inputs=inputs)
        return dataclasses.replace(facts, model=model, lowest_token_bytes=lowest)

    return dataclasses.replace(profile, nodes=tuple(map(changed_node, profile.nodes)))


def saving(plan: Plan, rng: random.Random) -> Plan:
    """The plan with random blocks that run again, and where it has whole subnets random ones with projections."""
    first, last = plan.placement.private_blocks, plan.course.num_blocks
    again, projected = (
        merged(Range(block, block + 1) for block in range(first, last) if rng.random() < 0.5) for _ in range(2)
    )
    velora = Velora(blocks=projected, layers=("down",), parts=2) if projected and plan.course.subnets == 1 else None
    return changed(plan, recompute=again, velora=velora)


@cases("seed", range(3))
def test_prediction_repeats_itself(seed: int) -> None:
    """The same question has the same answer in every digit, and spans are nothing but kept."""
    plan, found = drawn(seed)
    assert drawn.__wrapped__(seed) == (plan, found)
    rng = random.Random(seed)
    drawn_plan(rng)
    assert predict(plan, random_profile(plan, rng)) == dataclasses.replace(found, spans=())


# ---- by hand -----------------------------------------------------------------------------------------

E, F, G, LOW = (TIMES[work] for work in (Work.EMBED, Work.FORWARD, Work.GRAPH, Work.GRAPH_LOWEST))
B, B_LOW, H = (TIMES[work] for work in (Work.BACKWARD, Work.BACKWARD_LOWEST, Work.HEAD))
U, U_HEAD = TIMES[Work.UPDATE], TIMES[Work.UPDATE_HEAD]


def test_prediction_of_a_block_that_runs_again_takes_one_forward_more() -> None:
    """It is done before its backward."""
    plan = two_nodes()
    again = changed(plan, recompute=(Range(1, 2),))
    assert predict(again, profile_of(plan)).wall_s == E + LOW + G + H + (G + B) + B_LOW + U


@cases("num_steps", [1, 2, 3, 7])
def test_prediction_of_steps_is_the_way_there_and_back_with_one_embedding(num_steps: int) -> None:
    """A step waits for the updates of the one before; its batch is embedded while a waits for b.

    One micro-batch is at one place at a time; a updates its block and, while b works backward, the head.
    """
    plan = two_nodes(num_steps=num_steps, credits_per_channel=1)
    found = predict(plan, profile_of(plan))
    assert found.wall_s == E + num_steps * (LOW + G + H + B + B_LOW + U)
    assert found.num_actions == num_steps * len("EFFHBBUUU")
    busy_s = {"a": E + LOW + H + B_LOW + U + U_HEAD, "b": G + B + U}
    assert {node.node: node.busy_s for node in found.nodes} == {name: num_steps * own for name, own in busy_s.items()}


def test_prediction_of_two_micro_batches_is_the_table_drawn_by_hand() -> None:
    """The whole run, a column for each second; E takes 1, F 4, H 2, B 4 and on a 3, updates 1.

    ::

        a  E0 F0 F0 F0 F0 E1 F1 F1 F1 F1 H0 H0 .  .  H1 H1 U  .  B0 B0 B0 .  B1 B1 B1 U
        b  .  .  .  .  .  F0 F0 F0 F0 .  F1 F1 F1 F1 B0 B0 B0 B0 B1 B1 B1 B1 U
    """
    times = {
        **TIMES,
        Work.EMBED: 1.0,
        Work.GRAPH: 4.0,
        Work.GRAPH_LOWEST: 4.0,
        Work.HEAD: 2.0,
        Work.BACKWARD: 4.0,
        Work.BACKWARD_LOWEST: 3.0,
        Work.UPDATE: 1.0,
        Work.UPDATE_HEAD: 1.0,
    }
    plan = two_nodes(microbatches=2)
    found = predict(plan, profile_of(plan, times=times), keep_spans=True)
    starts = {(node, action.op, action.micro, action.start): start_s for node, action, start_s, _ in found.spans}
    assert found.wall_s == 26
    assert starts["a", Op.HEAD, 0, plan.course.head] == 10
    assert starts["b", Op.BACKWARD, 0, 1] == 14
    assert starts["a", Op.UPDATE, -1, plan.course.head] == 16
    assert starts["b", Op.UPDATE, -1, 1] == 22
    assert starts["a", Op.UPDATE, -1, 0] == 25


def test_prediction_of_frozen_blocks_runs_ahead() -> None:
    """RingAda at depth 1: a's frozen forwards of later steps hide in b's time; b's way there and back does not."""
    plan = two_nodes(method="ringada", num_steps=3, every_steps=10, local_iterations=3, credits_per_channel=1)
    found = predict(plan, profile_of(plan))
    assert found.wall_s == E + F + 3 * (LOW + H + B_LOW + U)
    assert {node.node: node.busy_s for node in found.nodes} == {
        "a": 3 * (E + F + H + U_HEAD),
        "b": 3 * (LOW + B_LOW + U),
    }


def test_prediction_of_one_node_is_the_sum_of_its_actions() -> None:
    """Alone nobody waits: no idle time, no bytes."""
    plan = make_plan([("a", 0, 2)], ["a"], num_blocks=2, num_steps=4, microbatches=1, eval_rows=0, method="all")
    found = predict(plan, profile_of(plan))
    assert found.wall_s == 4 * (E + LOW + G + H + B + B_LOW + 2 * U + U_HEAD)
    assert (found.bubble_share, found.links) == (0.0, ())
    tenths = {work: seconds / 10 for work, seconds in TIMES.items()}  # whose sum, rounded, is above the wall time
    assert predict(plan, profile_of(plan, times=tenths)).bubble_share == 0.0


def test_prediction_adds_every_message_of_one_step() -> None:
    """Two hidden states up, one back to the head, gradients the same way: latency and bytes over rate each."""
    plan = two_nodes()
    times = {**TIMES, Work.ENCODE: 0.125, Work.DECODE: 0.0625}
    found = predict(plan, profile_of(plan, times=times, links=all_pairs("ab", 1e4, 0.5)))
    size = plan.course.batch_size * plan.course.max_length
    with_mask, without = size * (4 * plan.course.hidden_size + 1), size * 4 * plan.course.hidden_size
    on_wire_s = (with_mask + 3 * without) / 1e4
    assert found.wall_s == pytest.approx(E + LOW + G + H + B + B_LOW + U + on_wire_s + 4 * (0.5 + 0.125 + 0.0625))


@cases(
    ("wire_dtype", "item_bytes", "scale_bytes"),
    [("float32", 4, 0), ("float64", 8, 0), ("bfloat16", 2, 0), ("float16", 2, 0), ("int8", 1, 4)],
)
@cases("num_steps", [1, 6])
def test_prediction_bytes_are_counted_by_hand(
    wire_dtype: str, item_bytes: int, scale_bytes: int, num_steps: int
) -> None:
    """Two links, each with a hidden state up and a gradient down of every micro-batch; int8 has a scale a token."""
    plan = two_nodes(wire_dtype=wire_dtype, num_steps=num_steps, microbatches=2)
    found = predict(plan, profile_of(plan))
    size = num_steps * plan.course.batch_size * plan.course.max_length
    tensor = size * (plan.course.hidden_size * item_bytes + scale_bytes)
    assert {(link.source, link.target): link.sent_bytes for link in found.links} == {
        ("a", "b"): tensor + size + tensor,
        ("b", "a"): tensor + tensor,
    }


@cases("optimizer", ["adamw", "sgd"])
def test_prediction_counts_heads_with_their_moments(optimizer: str) -> None:
    """At each hand-over the head goes to the next owner, with two moments under AdamW."""
    plan = make_plan(
        [("a", 0, 2)], ["a", "b"], num_blocks=2, num_steps=4, local_iterations=1, eval_rows=0, method="all"
    )
    profile = profile_of(plan)
    found = predict(plan, profile, MemorySettings(optimizer))
    head = (profile.nodes[0].model.head_bytes + 2 * 100) * (3 if optimizer == "adamw" else 1)
    owners = [turn.owner for turn in turn_sequence(plan.course) if turn.kind is StepKind.TRAIN]
    assert owners == ["a", "b", "a", "b"]
    size = plan.course.batch_size * plan.course.max_length
    hidden, back = 2 * size * (4 * plan.course.hidden_size + 1), 2 * size * 4 * plan.course.hidden_size
    # b embeds for a and gets the top's hidden state back; then its gradient goes to a
    sent = {(link.source, link.target): link.sent_bytes for link in found.links}
    assert sent == {("a", "b"): 2 * head + back, ("b", "a"): head + hidden + back}


def test_prediction_of_no_steps_is_an_evaluation() -> None:
    """A plan of no steps has no depth and no training time."""
    plan = two_nodes(num_steps=0, eval_rows=8)
    found = predict(plan, profile_of(plan))
    assert (found.depths, found.train_s, found.num_steps) == ((), 0, 0)
    assert found.wall_s == found.evaluation_s > 0


def test_prediction_of_a_resumed_run_has_the_steps_that_are_left() -> None:
    """From a turn boundary on, with that depth."""
    plan = two_nodes(method="ringada", num_steps=8, every_steps=4, local_iterations=2)
    found = predict(plan, profile_of(plan), start=StartPoint.of(plan.course, step=6))
    assert [(each.depth, each.steps) for each in found.depths] == [(2, 2)]


# ---- what may never happen ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.sampled(4)
def test_prediction_is_no_faster_with_a_slower_node(seed: int) -> None:
    """Everything trains and one micro-batch is at one place: more seconds anywhere are never fewer in the end."""
    rng = random.Random(seed)
    drawn_plan = random_plan(rng)
    plan = changed(drawn_plan, method=Everything(), microbatches=1, num_steps=min(drawn_plan.course.num_steps, 6))
    profile = random_profile(plan, rng)
    slow = rng.choice(plan.nodes)
    nodes = tuple(node.at_pace(2.0) if node.node == slow else node for node in profile.nodes)
    slower = dataclasses.replace(profile, nodes=nodes)
    assert predict(plan, slower).wall_s >= predict(plan, profile).wall_s - 1e-9


def test_prediction_needs_every_node() -> None:
    """A node without figures is named."""
    plan = two_nodes()
    profile = profile_of(plan)
    with pytest.raises(PlanError, match="lacks node b"):
        predict(plan, dataclasses.replace(profile, nodes=profile.nodes[:1]))


def test_prediction_needs_every_link_that_carries_something() -> None:
    """With some links measured a missing one is a hole in the profile, not a link without cost."""
    plan = two_nodes()
    with pytest.raises(PlanError, match="lacks link b -> a"):
        predict(plan, profile_of(plan, links={("a", "b"): (1e6, 0.0)}))


def test_prediction_json_has_no_spans_and_reads_as_json() -> None:
    """The JSON form is small, whatever was kept."""
    _, found = drawn(1)
    value = found.to_json()
    assert "spans" not in value
    assert set(value) == {field.name for field in dataclasses.fields(found)} - {"spans"}


ENDS_S = TIMES[Work.EMBED] + TIMES[Work.HEAD]
HALF = {Work.FORWARD: 1.2, Work.GRAPH: 2.4, Work.GRAPH_LOWEST: 1.9, Work.BACKWARD: 2.8, Work.BACKWARD_LOWEST: 3.5}


def one_step(rows: tuple[str, ...], *, subnets: int, owner: str = "o", method: str = "all") -> Plan:
    """One step of an owner that hosts nothing, on two hosts of two blocks each."""
    plan = make_plan(
        [("a", 0, 2), ("b", 2, 4)],
        [owner],
        num_steps=1,
        local_iterations=1,
        microbatches=len(rows),
        train_rows=4,
        eval_rows=0,
        method=method,
    )
    batches = (BatchOperations(owner=owner, batch_id=0, rows=rows),)
    return changed(plan, operations=Operations(batches=batches, subnets=subnets))


def profile(plan: Plan, *, parts: bool = True) -> Profile:
    """Nodes with the times of whole and half blocks, without links."""
    found = profile_of(plan)
    more = tuple(part(work, seconds, share=0.5) for work, seconds in HALF.items()) if parts else ()
    nodes = (dataclasses.replace(facts, work_times=facts.work_times + more) for facts in found.nodes)
    return Profile(nodes=tuple(nodes))


def busy(found: Prediction, node: str) -> float:
    """Seconds that a node computes."""
    return next(each.busy_s for each in found.nodes if each.node == node)


def test_all_full_tables_take_what_a_run_without_tables_takes() -> None:
    """The same time, the same actions, the same bytes, and the same memory but that of the table."""
    plan = one_step(("1111" * 2,) * 2, subnets=2)
    found, without = (predict(each, profile(plan)) for each in (plan, changed(plan, operations=None)))
    nodes = [
        dataclasses.replace(
            node, needed_bytes=other.needed_bytes, peak_memory_bytes=node.peak_memory_bytes - tables_bytes(plan.course)
        )
        for node, other in zip(found.nodes, without.nodes, strict=True)
    ]
    assert dataclasses.replace(found, nodes=tuple(nodes)) == without


def test_one_micro_batch_takes_the_sum_of_its_parts() -> None:
    """Blocks: half full; one full, one forward-only; all forward-only; passed by."""
    plan = one_step(("13122233",), subnets=2)
    found = predict(plan, profile(plan))
    a_s = (1.9 + 3.5) + (2.4 + 0.8) + 2.8  # block 0 is the lowest: its backward takes 3.5 s whatever is active
    b_s = 2.0
    assert busy(found, "a") == pytest.approx(a_s + 2 * TIMES[Work.UPDATE])
    assert busy(found, "b") == pytest.approx(b_s + 2 * TIMES[Work.UPDATE])
    assert found.wall_s == pytest.approx(ENDS_S + a_s + b_s + 2 * TIMES[Work.UPDATE])


def test_a_profile_without_parts_takes_blocks_in_proportion() -> None:
    """Half of every block's subnets are half of its time."""
    plan = one_step(("13" * 4,), subnets=2)
    found = predict(plan, profile(plan, parts=False))
    above = TIMES[Work.GRAPH] + TIMES[Work.BACKWARD]
    lowest = TIMES[Work.GRAPH_LOWEST] + TIMES[Work.BACKWARD_LOWEST]
    assert found.wall_s == pytest.approx(ENDS_S + (3 * above + lowest) / 2 + 2 * TIMES[Work.UPDATE])


def test_a_slice_that_is_passed_by_takes_no_time_and_no_bytes() -> None:
    """Its predecessor sends straight to its successor; only its update is left."""
    plan = one_step(("33331111",), subnets=2)
    links = all_pairs(plan.nodes, 1e6, 0.0)
    timed = profile_of(plan, links=links)
    found = predict(plan, timed)
    assert busy(found, "a") == pytest.approx(2 * TIMES[Work.UPDATE])
    sent = {(link.source, link.target): link.sent_bytes for link in found.links}
    assert set(sent) == {("o", "b"), ("b", "o")}
    full = predict(changed(plan, operations=None), timed)
    hidden, grad = 64 * (32 * 4 + 1), 64 * 32 * 4  # a hidden state that enters a block has its mask
    assert sent == {("o", "b"): hidden + grad, ("b", "o"): grad}
    assert sum(link.sent_bytes for link in full.links) == sum(sent.values()) + hidden + grad


@cases("seed", range(4))
def test_less_work_never_takes_longer(seed: int) -> None:
    """Random tables are busy for less than all-full ones, at every node."""
    rng = random.Random(seed)
    plan = make_plan([("a", 0, 2), ("b", 2, 3), ("c", 3, 4)], ["a", "b"], microbatches=4, num_steps=12)
    table = random_operations(rng, plan.course, subnets=4)
    full, less = (predict(each, profile(plan)) for each in (plan, changed(plan, operations=table)))
    for node in plan.nodes:
        assert busy(less, node) < busy(full, node)
    assert sum(each.busy_by_op_s.get(str(Op.UPDATE), 0.0) for each in less.nodes) > 0


# ---- runs that choose -------------------------------------------------------------------------------


def choosing(policy: str, *, full: float, refresh_steps: int = 0, num_steps: int = 4) -> Plan:
    """Two hosts, an owner of two batches in two micro-batches of two rows, and a capacity of ``full`` rows a batch."""
    plan = make_plan(
        [("a", 0, 2), ("b", 2, 4)], ["o"], num_steps=num_steps, local_iterations=2, microbatches=2, train_rows=8,
        eval_rows=0, method="all",
    )  # fmt: skip
    capacity = BlockCapacity(full=2 * full, forward_only=0.0, forward=1.0, backward=1.0)
    choice = Choice(
        policy=policy, subnets=2, capacities=(capacity,), refresh_steps=refresh_steps, backward_score="fisher"
    )
    return changed(plan, choice=choice)


def test_a_run_that_chooses_takes_its_scores_and_then_its_table() -> None:
    """Every batch is scored once, with the gradients of frozen weights; then half of each block is computed."""
    plan = choosing("two-stage", full=2)
    found = predict(plan, profile(plan, parts=False))
    table = expected_table(plan.course)
    assert {share(row, "1") for entry in table.batches for row in entry.rows} == {0.5}
    score_s = 2 * (TIMES[Work.GRAPH] + TIMES[Work.BACKWARD] + TIMES[Work.FORWARD])
    by_op = {node.node: node.busy_by_op_s for node in found.nodes}
    steps = 4 * 2 * 2 / 2  # steps, micro-batches, blocks, of which half is computed
    assert sum(by_op["b"].get(op, 0.0) for op in "FB") == pytest.approx(
        2 * 2 * score_s + steps * (TIMES[Work.GRAPH] + TIMES[Work.BACKWARD])
    )
    assert by_op["o"]["H"] == (2 + 4) * 2 * TIMES[Work.HEAD]
    without = predict(choosing("random", full=2), profile(plan, parts=False))
    assert found.wall_s - without.wall_s > 2 * 2 * score_s
    assert found.evaluation_s > 2 * score_s and without.evaluation_s < score_s


def test_steps_after_scores_take_what_their_table_takes() -> None:
    """The last backward of a scoring is no part of the first step; it once made the steps of short runs too long."""
    plan = choosing("two-stage", full=2)
    static = changed(plan, choice=None, operations=expected_table(plan.course))
    found, wanted = (predict(each, profile(plan)) for each in (plan, static))
    assert found.train_s == pytest.approx(wanted.train_s)
    assert found.depths[0].step_s == pytest.approx(wanted.depths[0].step_s)
    assert found.evaluation_s > wanted.evaluation_s + 1


def test_standard_and_random_gather_no_scores() -> None:
    """All-full tables that a run chooses take what no tables take; a random one takes half of the blocks."""
    plan = choosing("standard", full=4)
    assert predict(plan, profile(plan)).wall_s == predict(changed(plan, choice=None), profile(plan)).wall_s
    half = choosing("random", full=2)
    assert predict(half, profile(half)).wall_s < 0.85 * predict(plan, profile(plan)).wall_s


def test_scores_that_are_refreshed_take_their_time_again() -> None:
    """Once a turn of two steps: two scorings in a run of four steps."""
    once, twice = (choosing("two-stage", full=2, refresh_steps=every) for every in (0, 2))
    found = [predict(plan, profile(plan)).evaluation_s for plan in (once, twice)]
    assert found[1] == pytest.approx(2 * found[0], rel=0.05)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.sampled(4)
def test_prediction_replays_a_run_exactly(seed: int) -> None:
    """With the spans of a run in which every action took another time, the replay ends at its very end."""
    rng = random.Random(seed)
    plan = random_plan(rng)
    profile = random_profile(plan, rng)
    jitter = predict(plan, profile, samples=pools(plan, rng), keep_spans=True, seed=seed)
    samples = [(node, action, end_s - start_s) for node, action, start_s, end_s in jitter.spans]
    again = predict(plan, profile, samples=samples, same_run=True)
    assert again.wall_s == pytest.approx(jitter.wall_s, rel=1e-9)
    busy_s = [node.busy_s for node in again.nodes]
    assert busy_s == pytest.approx([node.busy_s for node in jitter.nodes])
    assert busy_s != pytest.approx([node.busy_s for node in predict(plan, profile).nodes], rel=1e-3)


def pools(plan: Plan, rng: random.Random) -> list[tuple[str, Action, float]]:
    """Samples of every kind of work at every node, a straggler among them."""
    ops = (Op.EMBED, Op.FORWARD_FREE, Op.FORWARD, Op.HEAD, Op.BACKWARD, Op.UPDATE)
    units = {Op.EMBED: EMBEDDING, Op.HEAD: plan.course.head}
    kinds = itertools.product(plan.nodes, (0, 1), ops, range(4))
    return [
        (node, Action(op, seq, 0, unit, unit + 1), rng.choice([0.5, 1.0, 30.0]) * rng.random())
        for node, seq, op, _ in kinds
        for unit in [units.get(op, 0)]
    ]


@cases("seed", range(3))
def test_prediction_replays_what_messages_took_from_computing_once(seed: int) -> None:
    """On nodes of one core messages slow actions down; recorded actions have that in them, so it is not added again."""
    rng = random.Random(seed)
    plan = random_plan(rng)
    free = random_profile(plan, rng)
    crowded = dataclasses.replace(
        free,
        nodes=tuple(dataclasses.replace(node, cpu_cores=1.0) for node in free.nodes),
        links=tuple(
            dataclasses.replace(link, send_cpu_s_per_byte=1e-4, receive_cpu_s_per_byte=2e-4) for link in free.links
        ),
    )
    slow = predict(plan, crowded, keep_spans=True)
    samples = [(node, action, end_s - start_s) for node, action, start_s, end_s in slow.spans]
    again = predict(plan, crowded, samples=samples, same_run=True)
    assert again.wall_s == pytest.approx(slow.wall_s, rel=1e-9)
    if slow.links:
        assert sum(node.busy_s for node in slow.nodes) > sum(node.busy_s for node in predict(plan, free).nodes)


def test_prediction_replays_a_straggler() -> None:
    """One slow backward of a recording delays the replay by just that."""
    plan = two_nodes(num_steps=3)
    profile = profile_of(plan)
    plain = predict(plan, profile, keep_spans=True)
    samples = [(node, action, end_s - start_s) for node, action, start_s, end_s in plain.spans]
    slow = next(i for i, (_, action, _) in enumerate(samples) if action.op is Op.BACKWARD and action.seq == 1)
    node, action, seconds = samples[slow]
    samples[slow] = (node, action, seconds + 100)
    assert predict(plan, profile, samples=samples, same_run=True).wall_s == plain.wall_s + 100


AB = [("a", 0, 6), ("b", 6, 12)]


def plan_of() -> Plan:
    """Twelve blocks, one of which trains; 40 batches, each three times; one micro-batch a batch."""
    return make_plan(
        AB, ["a"], num_blocks=12, num_steps=120, local_iterations=10, every_steps=1000, microbatches=1, train_rows=160
    )


def predicted(plan: Plan, **times: float) -> Prediction:
    """With the times of each work, whatever the size."""
    each = {**TIMES, **{Work(name): seconds for name, seconds in times.items()}}
    return predict(plan, profile_of(plan, times=each))


def test_prediction_leaves_out_what_a_cache_spares() -> None:
    """Batches that enter at block 11 are not embedded, and pass no frozen block; the rest takes what it took."""
    plan = plan_of()
    cached = changed(plan, cache=ActivationCacheSettings())
    expected = expected_cache_use(cached)
    enters = expected.entering
    assert (expected.items, expected.blocks) == (121, enters * 11)
    assert 60 < enters <= 80 and 30 < expected.kept["b"] <= 40  # some come again before they may be read
    without, found = predicted(plan), predicted(cached)
    spared = {entry.node: entry.busy_s - other.busy_s for entry, other in zip(without.nodes, found.nodes, strict=True)}
    assert spared["a"] == pytest.approx(enters * (TIMES[Work.EMBED] + 6 * TIMES[Work.FORWARD]))
    assert spared["b"] == pytest.approx(enters * 5 * TIMES[Work.FORWARD])
    assert found.wall_s < 0.75 * without.wall_s


def test_prediction_counts_the_reading_as_decoding_and_the_keeping_as_encoding() -> None:
    """Both as they were measured."""
    cached = changed(plan_of(), cache=ActivationCacheSettings())
    expected = expected_cache_use(cached)
    found = {entry.node: entry.busy_by_op_s for entry in predicted(cached, decode=0.25, encode=0.5).nodes}
    assert found["b"][str(Op.READ)] == pytest.approx(expected.entering * 0.25)
    assert found["b"][str(Op.KEEP)] == pytest.approx(expected.kept["b"] * 0.5)
    assert str(Op.READ) not in found["a"]


@pytest.mark.parametrize("unfreeze", ["auto", None])
def test_prediction_of_a_run_that_lost_an_owner_or_took_it_back_has_its_steps(unfreeze: str | None) -> None:
    """From the beginning with the owners that are there at the end; from where it changed with their very turns."""
    slices = [("a", 0, 2), ("c", 2, 5)]
    decides: dict[str, Any] = {"unfreeze": unfreeze, "patience_steps": 2} if unfreeze else {}
    plan = make_plan(slices, ["a", "b", "c"], num_blocks=5, num_steps=60, local_iterations=2, **decides)
    lost = without_owner(plan.course, "b", 6)
    back = with_owner(lost, "b", 12, 60)
    for course, names in ((lost, {"a", "c"}), (back, {"a", "b", "c"})):
        after = Plan(course, plan.placements)
        profile = profile_of(after, links=all_pairs(after.nodes, 1e5, 0.01))
        assert predict(after, profile).num_steps == course.num_steps
        assert {node.node for node in predict(after, profile).nodes if node.busy_s} == names
    if unfreeze is None:
        found = predict(after, profile, start=StartPoint.of(course, step=24))
        assert sum(each.steps for each in found.depths) == course.num_steps - 24
