"""Predictions: nothing is lost or counted twice, and small rings add up by hand."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from ringtune.costs.memory.estimate import node_memory
from ringtune.costs.profile import NodeFacts, Profile
from ringtune.costs.times.moves import BASE_S
from ringtune.costs.work_times import Work
from ringtune.errors import PlanError
from ringtune.models.adapters.kept_inputs import KeptInput
from ringtune.schedule.actions import Op
from ringtune.schedule.changing_hands.placements import why_it_stays
from ringtune.schedule.methods import Everything
from ringtune.schedule.placement import Placement
from ringtune.schedule.plan import Plan
from ringtune.schedule.saving import Velora, merged
from ringtune.schedule.turns.turns import StartPoint, StepKind, turn_sequence
from ringtune.schedule.turns.versions import depth
from ringtune.schedule.units import Range
from sim.limits import memory_bounds
from sim.prediction import Prediction, predict
from tests.support.moves import moving, moving_at_random
from tests.support.plans import changed, make_plan, random_plan, two_nodes
from tests.support.profiles import TIMES, all_pairs, profile_of, random_profile

SEEDS = range(25)


def drawn_plan(rng: random.Random) -> Plan:
    """Any plan; half of those that may move do, to any stages of several hosts among them."""
    plan = random_plan(rng)
    return plan if why_it_stays(plan.course, plan.placements) or rng.random() < 0.5 else moving_at_random(rng, plan)


def drawn(seed: int, *, keep_spans: bool = False) -> tuple[Plan, Prediction]:
    """Any plan on any nodes."""
    rng = random.Random(seed)
    plan = drawn_plan(rng)
    return plan, predict(plan, random_profile(plan, rng), keep_spans=keep_spans)


# ---- conservation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_prediction_busy_and_idle_make_the_wall_time(seed: int) -> None:
    """Each node's actions add up to its busy seconds, never overlap, and the last one ends the run."""
    plan, found = drawn(seed, keep_spans=True)
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


@pytest.mark.parametrize("seed", SEEDS)
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
@pytest.mark.parametrize("seed", SEEDS)
def test_prediction_memory_stays_below_the_planners_bound(seed: int) -> None:
    """For any plan, speeds and links no node holds more than the planner counts."""
    rng = random.Random(seed)
    plan = drawn_plan(rng)
    profile = random_profile(plan, rng)
    for optimizer in ("adamw", "sgd"):
        for node in predict(plan, profile, optimizer=optimizer).nodes:
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
@pytest.mark.parametrize("seed", SEEDS)
def test_prediction_memory_stays_below_the_bound_where_blocks_save_activations(seed: int) -> None:
    """Whichever blocks run again or keep projections; they never need more than without."""
    rng = random.Random(seed)
    bare = random_plan(rng, with_operations=seed % 3 == 0)
    profile = with_kept_inputs(random_profile(bare, rng))
    plan = saving(bare, rng)
    peaks = {node.node: node.peak_memory_bytes for node in predict(bare, profile).nodes}
    for node in predict(plan, profile).nodes:
        facts = profile.by_name[node.node]
        bound = memory_bounds(plan, profile, optimizer="adamw", dtype="float32")[node.node]
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


@pytest.mark.parametrize("seed", range(10))
def test_prediction_repeats_itself(seed: int) -> None:
    """The same question has the same answer in every digit."""
    assert drawn(seed, keep_spans=True) == drawn(seed, keep_spans=True)


# ---- by hand -----------------------------------------------------------------------------------------

E, F, G, LOW = (TIMES[work] for work in (Work.EMBED, Work.FORWARD, Work.GRAPH, Work.GRAPH_LOWEST))
B, B_LOW, H = (TIMES[work] for work in (Work.BACKWARD, Work.BACKWARD_LOWEST, Work.HEAD))
U, U_HEAD = TIMES[Work.UPDATE], TIMES[Work.UPDATE_HEAD]


def test_prediction_of_one_step_is_the_way_there_and_back() -> None:
    """One micro-batch is at one place at a time; a updates its block and, while b works backward, the head."""
    found = predict(two_nodes(), profile_of(two_nodes()))
    assert found.wall_s == E + LOW + G + H + B + B_LOW + U
    assert {node.node: node.busy_s for node in found.nodes} == {"a": E + LOW + H + B_LOW + U + U_HEAD, "b": G + B + U}


def test_prediction_of_a_block_that_runs_again_takes_one_forward_more() -> None:
    """It is done before its backward."""
    plan = two_nodes()
    again = changed(plan, recompute=(Range(1, 2),))
    assert predict(again, profile_of(plan)).wall_s == E + LOW + G + H + (G + B) + B_LOW + U


@pytest.mark.parametrize("num_steps", [2, 3, 7])
def test_prediction_of_more_steps_hides_only_the_embedding(num_steps: int) -> None:
    """A step waits for the updates of the one before; its batch is embedded while a waits for b."""
    plan = two_nodes(num_steps=num_steps, credits_per_channel=1)
    found = predict(plan, profile_of(plan))
    assert found.wall_s == E + num_steps * (LOW + G + H + B + B_LOW + U)
    assert found.num_actions == num_steps * len("EFFHBBUUU")


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


def test_prediction_adds_every_message_of_one_step() -> None:
    """Two hidden states up, one back to the head, gradients the same way: latency and bytes over rate each."""
    plan = two_nodes()
    times = {**TIMES, Work.ENCODE: 0.125, Work.DECODE: 0.0625}
    found = predict(plan, profile_of(plan, times=times, links=all_pairs("ab", 1e4, 0.5)))
    size = plan.course.batch_size * plan.course.max_length
    with_mask, without = size * (4 * plan.course.hidden_size + 1), size * 4 * plan.course.hidden_size
    on_wire_s = (with_mask + 3 * without) / 1e4
    assert found.wall_s == pytest.approx(E + LOW + G + H + B + B_LOW + U + on_wire_s + 4 * (0.5 + 0.125 + 0.0625))


@pytest.mark.parametrize(
    ("wire_dtype", "item_bytes"), [("float32", 4), ("float64", 8), ("bfloat16", 2), ("float16", 2)]
)
@pytest.mark.parametrize("num_steps", [1, 6])
def test_prediction_bytes_are_counted_by_hand(wire_dtype: str, item_bytes: int, num_steps: int) -> None:
    """Two links, each with a hidden state up and a gradient down of every micro-batch."""
    plan = two_nodes(wire_dtype=wire_dtype, num_steps=num_steps, microbatches=2)
    found = predict(plan, profile_of(plan))
    size = num_steps * plan.course.batch_size * plan.course.max_length
    tensor = size * plan.course.hidden_size * item_bytes
    assert {(link.source, link.target): link.sent_bytes for link in found.links} == {
        ("a", "b"): tensor + size + tensor,
        ("b", "a"): tensor + tensor,
    }


def test_prediction_bytes_of_int8_have_a_scale_for_each_token() -> None:
    """A byte for each number and four for each row of them."""
    plan = two_nodes(wire_dtype="int8")
    found = predict(plan, profile_of(plan))
    tokens = plan.course.batch_size * plan.course.max_length
    tensor = tokens * (plan.course.hidden_size + 4)
    assert [link.sent_bytes for link in found.links] == [tensor + tokens + tensor, 2 * tensor]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_prediction_counts_heads_with_their_moments(optimizer: str) -> None:
    """At each hand-over the head goes to the next owner, with two moments under AdamW."""
    plan = make_plan(
        [("a", 0, 2)], ["a", "b"], num_blocks=2, num_steps=4, local_iterations=1, eval_rows=0, method="all"
    )
    profile = profile_of(plan)
    found = predict(plan, profile, optimizer=optimizer)
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
def test_prediction_is_no_faster_with_a_slower_node(seed: int) -> None:
    """Everything trains and one micro-batch is at one place: more seconds anywhere are never fewer in the end."""
    rng = random.Random(seed)
    drawn_plan = random_plan(rng)
    plan = changed(drawn_plan, method=Everything(), microbatches=1, num_steps=min(drawn_plan.course.num_steps, 6))
    profile = random_profile(plan, rng)
    slow = rng.choice(plan.nodes)
    slower = dataclasses.replace(
        profile,
        nodes=tuple(
            dataclasses.replace(
                node,
                work_times=tuple(
                    dataclasses.replace(time, median_s=2 * time.median_s, high_s=2 * time.high_s)
                    for time in node.work_times
                ),
            )
            if node.node == slow
            else node
            for node in profile.nodes
        ),
    )
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
    _, found = drawn(1, keep_spans=True)
    value = found.to_json()
    assert "spans" not in value
    assert set(value) == {field.name for field in dataclasses.fields(found)} - {"spans"}
