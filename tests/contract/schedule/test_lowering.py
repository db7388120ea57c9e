"""What trains when, which version a forward must see, and the lowering as whole tables."""

from __future__ import annotations

import random

import pytest

from ringtune.schedule.actions import Action, Leg, Op, Payload
from ringtune.schedule.lowering import (
    Segment,
    item_updates,
    legs,
    links,
    lower,
    lowest_and_pattern,
    lowest_units,
    num_microbatches,
    route,
    way,
)
from ringtune.schedule.methods import RingAda
from ringtune.schedule.operations import BatchOperations, Operations
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Item, StartPoint, StepKind, items, turn_sequence
from ringtune.schedule.versions import (
    awaited_forward,
    depth,
    forward_version,
    in_flight,
    is_stale,
    may_be_stale,
    trained,
    unfreezing_steps,
    weight_version,
)
from tests.support.plans import changed, make_plan, random_plan

AB = [("a", 0, 2), ("b", 2, 4)]


def _word(leg: Leg | Action) -> str:
    if leg.op in (Op.SEND, Op.RECEIVE):
        return f"{leg.op}{leg.payload}{leg.start}@{leg.peer}"
    return f"{leg.op}" if leg.op in (Op.EMBED, Op.HEAD) else f"{leg.op}[{leg.start},{leg.stop})"


def _table(plan: Plan, owner: str, kind: StepKind, step: int, *, batch: int = 0) -> dict[str, str]:
    """The way of the first micro-batch as words, with the updates of a training item at the end."""
    item = Item(seq=0, kind=kind, step=step, owner=owner, batch=batch, rows=plan.course.batch_size, turn=0)
    words = {node: [_word(leg) for leg in parts] for node, parts in way(plan, item, 0).items()}
    for node in plan.nodes:
        words.setdefault(node, []).extend(_word(update) for update in item_updates(plan, item, node))
    return {node: " ".join(parts) for node, parts in words.items()}


def _lowest(plan: Plan, step: int) -> int:
    return trained(plan.course, StepKind.TRAIN, step).lowest


def _first_trained_step(plan: Plan, block: int) -> int | None:
    steps = range(plan.course.num_steps + 99)
    return next((step for step in steps if block in trained(plan.course, StepKind.TRAIN, step)), None)


# ---- what trains when ----------------------------------------------------------------------------


def test_depth_grows_by_one_block_every_k_steps() -> None:
    """RingAda starts with the top block and stops at the lowest."""
    plan = make_plan(AB, ["a"], every_steps=3, num_steps=20)
    assert [depth(plan.course, step) for step in range(13)] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 4]
    assert [_lowest(plan, step) for step in (0, 3, 6, 9, 99)] == [3, 2, 1, 0, 0]


def test_depth_grows_at_the_given_steps() -> None:
    """One more block at each of the steps, and none after the last one."""
    plan = make_plan(AB, ["a"], unfreeze="at", unfreeze_at=(2, 5))
    assert [depth(plan.course, step) for step in range(8)] == [1, 1, 2, 2, 2, 3, 3, 3]
    assert [_first_trained_step(plan, block) for block in (3, 2, 1, 0)] == [0, 2, 5, None]
    assert depth(make_plan(AB, ["a"], unfreeze="at").course, 99) == 1


def test_depth_before_the_first_step_is_nothing() -> None:
    """A run of no steps, which only evaluates, trains nothing in whatever form the steps were given."""
    forms = [{}, {"unfreeze": "at", "unfreeze_at": (2,)}, {"unfreeze": "auto"}]
    assert [depth(make_plan(AB, ["a"], **form).course, -1) for form in forms] == [0, 0, 0]  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["all", "single", "pipeadapter"])
def test_depth_of_the_other_methods_has_nothing_to_unfreeze(method: str) -> None:
    """Everything trains from step 0 and the run has nothing to decide."""
    course = make_plan([("a", 0, 4)], ["a"], method=method).course
    assert (depth(course, 0), course.decides, unfreezing_steps(course)) == (4, False, ())


def test_unfreezing_steps_are_those_within_the_run() -> None:
    """What a report says, in a form that another run can be given; the last one may have no block left."""
    assert unfreezing_steps(make_plan(AB, ["a"], every_steps=3, num_steps=20).course) == (3, 6, 9)
    assert unfreezing_steps(make_plan(AB, ["a"], every_steps=3, num_steps=6).course) == (3,)
    assert unfreezing_steps(make_plan(AB, ["a"], unfreeze="at", unfreeze_at=(2, 7), num_steps=7).course) == (2,)
    assert unfreezing_steps(make_plan([("a", 2, 4)], ["a"], private_blocks=2, every_steps=1).course) == (1,)


@pytest.mark.parametrize("seed", range(20))
def test_every_steps_is_the_same_schedule_as_its_steps(seed: int) -> None:
    """The first form is a short way to write the second one."""
    plan = random_plan(random.Random(seed))
    steps = unfreezing_steps(plan.course)
    is_ringada = isinstance(plan.course.method, RingAda)
    other = changed(plan, method=RingAda(every_steps=0, at=steps)) if is_ringada else plan
    assert is_ringada or not steps
    blocks = range(plan.course.num_blocks + 1)
    for step in range(plan.course.num_steps):
        assert depth(plan.course, step) == depth(other.course, step)
        assert [weight_version(plan.course, block, step) for block in blocks] == [
            weight_version(other.course, block, step) for block in blocks
        ]


def test_depth_stops_above_private_blocks() -> None:
    """Private blocks stay frozen, whatever the method."""
    slices = [("a", 1, 2), ("b", 2, 4)]
    ringada = make_plan(slices, ["a"], every_steps=1, private_blocks=1)
    assert [depth(ringada.course, step) for step in range(5)] == [1, 2, 3, 3, 3]
    assert depth(make_plan(slices, ["a"], method="all", private_blocks=1).course, 0) == 3


@pytest.mark.parametrize("method", ["all", "single"])
def test_depth_of_the_other_methods_is_everything(method: str) -> None:
    """Without unfreezing every block trains from step 0."""
    plan = make_plan([("a", 0, 4)], ["a"], method=method)
    assert (depth(plan.course, 0), _lowest(plan, 0)) == (4, 0)


def test_weight_version_counts_the_updates_of_a_block() -> None:
    """A block that joins at step s has had step - s updates; the head is updated in every step."""
    plan = make_plan(AB, ["a"], every_steps=2)
    versions = {block: [weight_version(plan.course, block, step) for step in range(8)] for block in range(5)}
    assert versions == {
        0: [0, 0, 0, 0, 0, 0, 0, 1],
        1: [0, 0, 0, 0, 0, 1, 2, 3],
        2: [0, 0, 0, 1, 2, 3, 4, 5],
        3: [0, 1, 2, 3, 4, 5, 6, 7],
        4: [0, 1, 2, 3, 4, 5, 6, 7],
    }


def test_weight_version_counts_from_the_step_at_which_a_block_joins() -> None:
    """Steps given by hand: block 2 joins at 1, block 1 at 4, block 0 never."""
    plan = make_plan(AB, ["a"], unfreeze="at", unfreeze_at=(1, 4))
    assert {block: [weight_version(plan.course, block, step) for step in range(7)] for block in range(4)} == {
        0: [0, 0, 0, 0, 0, 0, 0],
        1: [0, 0, 0, 0, 0, 1, 2],
        2: [0, 0, 1, 2, 3, 4, 5],
        3: [0, 1, 2, 3, 4, 5, 6],
    }


def test_weight_version_of_a_private_block_is_always_zero() -> None:
    """A block that never trains never changes."""
    plan = make_plan([("a", 2, 4)], ["c"], private_blocks=2, every_steps=1, num_steps=50)
    assert _first_trained_step(plan, 1) is None
    assert [weight_version(plan.course, block, 49) for block in range(5)] == [0, 0, 48, 49, 49]


def _train_items(plan: Plan) -> list[Item]:
    return [
        item for turn in turn_sequence(plan.course) if turn.kind is StepKind.TRAIN for item in items(plan.course, turn)
    ]


@pytest.mark.promise("2 right version")
def test_forward_version_of_pipeadapter_lags_by_what_is_in_flight() -> None:
    """Three hosts, turns of 5 and 3 steps: the lowest lags by up to 2 steps, the top and the head never."""
    slices = [("a", 0, 1), ("b", 1, 1), ("c", 1, 3), ("d", 3, 4)]
    plan = make_plan(slices, ["a"], method="pipeadapter", num_steps=8, local_iterations=5)
    versions = {block: [forward_version(plan.course, block, item) for item in _train_items(plan)] for block in range(5)}
    assert versions == {
        0: [0, 0, 0, 1, 2, 5, 5, 5],
        1: [0, 0, 1, 2, 3, 5, 5, 6],
        2: [0, 0, 1, 2, 3, 5, 5, 6],
        3: [0, 1, 2, 3, 4, 5, 6, 7],
        4: [0, 1, 2, 3, 4, 5, 6, 7],
    }
    awaited = {block: [awaited_forward(plan.course, block, item) for item in _train_items(plan)] for block in (0, 1, 3)}
    assert awaited == {0: [2, 3, 4, 4, 4, 7, 7, 7], 1: [1, 2, 3, 4, 4, 6, 7, 7], 3: [0, 1, 2, 3, 4, 5, 6, 7]}
    assert [in_flight(plan.course, block) for block in range(5)] == [3, 2, 2, 1, 1]


def test_forward_version_of_pipeadapter_is_flushed_for_evaluations_and_checkpoints() -> None:
    """What comes between turns sees every update; private blocks never change."""
    slices = [("a", 1, 2), ("b", 2, 4)]
    plan = make_plan(
        slices, ["c"], method="pipeadapter", num_steps=3, local_iterations=3, private_blocks=1, checkpoint_every=1
    )
    between = [
        item
        for turn in turn_sequence(plan.course)
        for item in items(plan.course, turn)
        if turn.kind is not StepKind.TRAIN
    ]
    assert {item.kind for item in between} == {StepKind.CHECKPOINT, StepKind.EVALUATE}
    for item in between:
        assert [forward_version(plan.course, block, item) for block in range(5)] == [0, 3, 3, 3, 3]


@pytest.mark.promise("2 right version")
@pytest.mark.parametrize("seed", range(40))
def test_forward_version_of_the_other_methods_is_every_update(seed: int) -> None:
    """Without staleness nothing waits for a later forward, and at most one item is in flight."""
    plan = random_plan(random.Random(seed))
    if plan.course.method.name == "pipeadapter":
        plan = changed(plan, local_iterations=1)
    assert not is_stale(plan.course) and not may_be_stale(plan.course)
    for item in _train_items(plan):
        for block in range(plan.course.num_blocks + 1):
            assert forward_version(plan.course, block, item) == weight_version(plan.course, block, item.step)
            assert (in_flight(plan.course, block), awaited_forward(plan.course, block, item)) == (1, item.step)


@pytest.mark.parametrize("seed", range(60))
def test_weight_version_is_the_number_of_past_updates(seed: int) -> None:
    """For any plan the closed form equals counting the updates that the lowering hands out."""
    plan = random_plan(random.Random(seed))
    counted = dict.fromkeys(range(plan.course.num_blocks + 1), 0)
    for turn in turn_sequence(plan.course):
        for item in items(plan.course, turn):
            assert {block: weight_version(plan.course, block, item.step) for block in counted} == counted
            for node in plan.nodes:
                updates = [action for action in item_updates(plan, item, node) if action.op is Op.UPDATE]
                for update in updates:
                    for block in range(update.start, update.stop):
                        counted[block] += 1


@pytest.mark.parametrize(
    ("kind", "units"),
    [
        (StepKind.TRAIN, [3, 4]),
        (StepKind.EVALUATE, []),
        (StepKind.CHECKPOINT, []),
        (StepKind.SCORE, [0, 1, 2, 3, 4]),
        (StepKind.MEASURE, [3, 4]),
    ],
)
def test_trained_units_depend_on_the_kind(kind: StepKind, units: list[int]) -> None:
    """Evaluation keeps no graph; scoring keeps all of it; the rest as deep as the step trains."""
    found = trained(make_plan(AB, ["a"]).course, kind, 0)
    assert list(found) == units
    assert found.lowest == (units[0] if units else 5)


# ---- the lowering --------------------------------------------------------------------------------


@pytest.mark.promise("3 frozen means free")
def test_lower_stops_backward_at_lowest_unfrozen_block() -> None:
    """No node below the lowest unfrozen block gets a gradient: the table in the module's docstring."""
    assert _table(make_plan(AB, ["c"]), "c", StepKind.TRAIN, 0) == {
        "a": "<h0@c f[0,1) f[1,2) >h2@b",
        "b": "<h2@a f[2,3) F[3,4) >h4@c <g4@c B[3,4) U[3,4)",
        "c": "E >h0@a <h4@b H >g4@b U[4,5)",
    }


def test_lower_passes_gradients_to_the_slice_that_holds_the_lowest() -> None:
    """Two steps later block 2 trains, then block 1: the gradient crosses to node a and stops at its block."""
    plan = make_plan(AB, ["c"], every_steps=2)
    assert _table(plan, "c", StepKind.TRAIN, 2) == {
        "a": "<h0@c f[0,1) f[1,2) >h2@b",
        "b": "<h2@a F[2,4) >h4@c <g4@c B[2,4) U[2,4)",
        "c": "E >h0@a <h4@b H >g4@b U[4,5)",
    }
    assert _table(plan, "c", StepKind.TRAIN, 4) == {
        "a": "<h0@c f[0,1) F[1,2) >h2@b <g2@b B[1,2) U[1,2)",
        "b": "<h2@a F[2,4) >h4@c <g4@c B[2,4) >g2@a U[2,4)",
        "c": "E >h0@a <h4@b H >g4@b U[4,5)",
    }


def test_lower_of_evaluation_has_no_graph_and_no_gradient() -> None:
    """Evaluation: frozen forwards block by block, then the head."""
    assert _table(make_plan(AB, ["c"]), "c", StepKind.EVALUATE, 6) == {
        "a": "<h0@c f[0,1) f[1,2) >h2@b",
        "b": "<h2@a f[2,3) f[3,4) >h4@c",
        "c": "E >h0@a <h4@b H",
    }


def test_lower_of_scoring_goes_all_the_way_without_update() -> None:
    """Scores need the gradients of every block, and change nothing."""
    assert _table(make_plan(AB, ["c"]), "c", StepKind.SCORE, 0) == {
        "a": "<h0@c F[0,2) >h2@b <g2@b B[0,2)",
        "b": "<h2@a F[2,4) >h4@c <g4@c B[2,4) >g2@a",
        "c": "E >h0@a <h4@b H >g4@b",
    }


def test_lower_sends_nothing_to_itself_when_the_owner_hosts_the_bottom() -> None:
    """The owner's own slice needs no message from its embedding."""
    assert _table(make_plan(AB, ["a"]), "a", StepKind.TRAIN, 0) == {
        "a": "E f[0,1) f[1,2) >h2@b <h4@b H >g4@b U[4,5)",
        "b": "<h2@a f[2,3) F[3,4) >h4@a <g4@a B[3,4) U[3,4)",
    }


def test_lower_sends_nothing_to_itself_when_the_owner_hosts_the_top() -> None:
    """The owner of the top slice runs head and backward in one stretch."""
    assert _table(make_plan(AB, ["b"]), "b", StepKind.TRAIN, 0) == {
        "a": "<h0@b f[0,1) f[1,2) >h2@b",
        "b": "E >h0@a <h2@a f[2,3) F[3,4) H B[3,4) U[3,4) U[4,5)",
    }


def test_lower_on_one_node_is_plain_training() -> None:
    """Method single: no message at all."""
    plan = make_plan([("a", 0, 4)], ["a"], method="single")
    assert _table(plan, "a", StepKind.TRAIN, 0) == {"a": "E F[0,4) H B[0,4) U[0,4) U[4,5)"}
    assert links(plan) == frozenset()


def test_lower_skips_empty_slices() -> None:
    """A node without blocks is not on the way."""
    plan = make_plan([("a", 0, 2), ("x", 2, 2), ("b", 2, 4)], ["a"])
    assert _table(plan, "a", StepKind.TRAIN, 0) == {
        "a": "E f[0,1) f[1,2) >h2@b <h4@b H >g4@b U[4,5)",
        "b": "<h2@a f[2,3) F[3,4) >h4@a <g4@a B[3,4) U[3,4)",
        "x": "",
    }


def test_lower_runs_private_blocks_at_the_owner() -> None:
    """The first thing that leaves an owner has passed its private blocks; nothing comes back below them."""
    plan = make_plan([("a", 1, 2), ("b", 2, 4)], ["c"], private_blocks=1, every_steps=1)
    assert _table(plan, "c", StepKind.TRAIN, 5) == {
        "a": "<h1@c F[1,2) >h2@b <g2@b B[1,2) U[1,2)",
        "b": "<h2@a F[2,4) >h4@c <g4@c B[2,4) >g2@a U[2,4)",
        "c": "E f[0,1) >h1@a <h4@b H >g4@b U[4,5)",
    }


def test_lower_merges_private_blocks_with_the_owners_own_slice() -> None:
    """Private blocks below the owner's slice form one stretch with it."""
    plan = make_plan([("a", 1, 2), ("b", 2, 4)], ["a"], private_blocks=1)
    assert route(plan, "a") == (Segment("a", 0, 2), Segment("b", 2, 4))
    assert _table(plan, "a", StepKind.TRAIN, 0) == {
        "a": "E f[0,1) f[1,2) >h2@b <h4@b H >g4@b U[4,5)",
        "b": "<h2@a f[2,3) F[3,4) >h4@a <g4@a B[3,4) U[3,4)",
    }


def test_lower_visits_an_owner_twice_when_its_slice_is_above_another() -> None:
    """Private blocks first, another node, then the owner's own slice."""
    plan = make_plan([("a", 1, 2), ("b", 2, 4)], ["b"], private_blocks=1, method="all")
    assert _table(plan, "b", StepKind.TRAIN, 0) == {
        "a": "<h1@b F[1,2) >h2@b <g2@b B[1,2) U[1,2)",
        "b": "E f[0,1) >h1@a <h2@a F[2,4) H B[2,4) >g2@a U[2,4) U[4,5)",
    }


@pytest.mark.parametrize("seed", range(100))
def test_lower_of_any_plan_is_one_path_through_the_model(seed: int) -> None:
    """For any plan: sends meet receives, forwards cover all blocks once, backwards what kept a graph."""
    rng = random.Random(seed)
    plan = random_plan(rng)
    kind = rng.choice(list(StepKind))
    step = rng.randrange(plan.course.num_steps)
    owner = rng.choice(plan.course.owners).node
    lowest = trained(plan.course, kind, step).lowest
    table = lower(plan, owner, lowest, "")
    found = [(node, leg) for node, parts in table.items() for leg in parts]
    sent = sorted((leg.payload, leg.start, node, leg.peer) for node, leg in found if leg.op is Op.SEND)
    received = sorted((leg.payload, leg.start, leg.peer, node) for node, leg in found if leg.op is Op.RECEIVE)
    assert sent == received
    assert all(source != target for _, _, source, target in sent)
    assert {(source, target) for _, _, source, target in sent} <= links(plan)

    def blocks(*ops: Op) -> list[int]:
        return sorted(block for _, leg in found if leg.op in ops for block in range(leg.start, leg.stop))

    assert blocks(Op.FORWARD, Op.FORWARD_FREE) == list(range(plan.course.num_blocks))
    assert blocks(Op.FORWARD) == blocks(Op.BACKWARD) == list(range(lowest, plan.course.num_blocks))
    assert [node for node, leg in found if leg.op in (Op.EMBED, Op.HEAD)] == [owner, owner]
    lowest_gradient = min((boundary for payload, boundary, _, _ in sent if payload == Payload.GRAD), default=None)
    assert lowest_gradient is None or lowest_gradient > lowest
    for node, leg in found:
        if leg.op is Op.FORWARD_FREE and leg.start < plan.placement.private_blocks:
            assert node == owner


# ---- operation tables ------------------------------------------------------------------------------


def _with_rows(*rows: str) -> Plan:
    """One owner with one batch, whose micro-batches have these operations."""
    plan = make_plan(AB, ["c"], method="all", train_rows=4, microbatches=len(rows))
    return changed(plan, operations=Operations(batches=(BatchOperations(owner="c", batch_id=0, rows=rows),)))


def test_lower_of_a_pattern_stops_gradients_at_the_lowest_full_block() -> None:
    """The tables of the module's docstring, and a block that is run without a graph."""
    assert _table(_with_rows("1131"), "c", StepKind.TRAIN, 0) == {
        "a": "<h0@c F[0,2) >h2@b <g2@b B[0,2) U[0,2)",
        "b": "<h2@a S[2,3) F[3,4) >h4@c <g4@c B[3,4) >g2@a U[2,4)",
        "c": "E >h0@a <h4@b H >g4@b U[4,5)",
    }
    assert _table(_with_rows("3311"), "c", StepKind.TRAIN, 0) == {
        "a": "U[0,2)",
        "b": "<h2@c F[2,4) >h4@c <g4@c B[2,4) U[2,4)",
        "c": "E >h2@b <h4@b H >g4@b U[4,5)",
    }
    assert _table(_with_rows("1222"), "c", StepKind.TRAIN, 0) == {
        "a": "<h0@c F[0,1) f[1,2) >h2@b <g2@c B[0,1) U[0,2)",
        "b": "<h2@a f[2,3) f[3,4) >h4@c U[2,4)",
        "c": "E >h0@a <h4@b H >g2@a U[4,5)",
    }


def test_lower_of_a_pattern_holds_for_train_items_alone() -> None:
    """Evaluations run every block; scores need the gradients of every block."""
    plan, plain = _with_rows("3333"), make_plan(AB, ["c"], method="all", train_rows=4, microbatches=1)
    assert _table(plan, "c", StepKind.TRAIN, 0)["c"] == "E H U[4,5)"
    for kind in (StepKind.EVALUATE, StepKind.SCORE, StepKind.MEASURE):
        assert _table(plan, "c", kind, 0) == _table(plain, "c", kind, 0)


def test_lowest_units_are_those_of_each_micro_batch() -> None:
    """The lowest full block among the trained ones; the head if there is none."""
    plan = _with_rows("1131", "2211", "3333", "3311")
    item = _train_items(plan)[0]
    assert lowest_units(plan.course, item) == (0, 2, 4, 2)
    shallow = changed(plan, method=RingAda(every_steps=99))
    assert lowest_units(shallow.course, item) == (3, 3, 4, 3)


@pytest.mark.parametrize("seed", range(60))
def test_lower_of_any_pattern_is_one_path_through_what_it_does_not_skip(seed: int) -> None:
    """For any plan and table: what keeps a graph is full and trained or above; gradients go there and nowhere else."""
    plan = random_plan(random.Random(seed), with_operations=True)
    course, allowed = plan.course, links(plan)
    for item in _train_items(plan):
        for micro, lowest in enumerate(lowest_units(course, item)):
            table = way(plan, item, micro)
            found = [(node, leg) for node, parts in table.items() for leg in parts]
            sent = sorted((leg.payload, leg.start, node, leg.peer) for node, leg in found if leg.op is Op.SEND)
            received = sorted((leg.payload, leg.start, leg.peer, node) for node, leg in found if leg.op is Op.RECEIVE)
            assert sent == received
            assert {(source, target) for _, _, source, target in sent} <= allowed
            codes = lowest_and_pattern(course, item, micro)[1] or "1" * course.num_blocks
            ran = {
                op: sorted(block for _, leg in found if leg.op is op for block in range(leg.start, leg.stop))
                for op in (Op.FORWARD, Op.FORWARD_FREE, Op.BACKWARD, Op.SKIP)
            }
            graphs = [block for block, code in enumerate(codes) if code == "1" and block >= lowest]
            assert ran[Op.FORWARD] == ran[Op.BACKWARD] == graphs
            assert sorted(ran[Op.FORWARD] + ran[Op.FORWARD_FREE]) == [i for i, code in enumerate(codes) if code != "3"]
            assert set(ran[Op.SKIP]) <= {block for block, code in enumerate(codes) if code == "3"}
            reached = {target for payload, _, _, target in sent if payload == Payload.GRAD}
            assert reached <= {node for node, leg in found if leg.op is Op.BACKWARD}


# ---- items ---------------------------------------------------------------------------------------


def test_legs_of_a_node_off_the_way_are_empty() -> None:
    """A node that hosts nothing and does not own the item has nothing to do, for any micro-batch."""
    plan = make_plan(AB, ["c", "d"])
    item = Item(seq=0, kind=StepKind.TRAIN, step=0, owner="c", batch=0, rows=4, turn=0)
    assert legs(plan, item, "d") == ((), ())
    assert item_updates(plan, item, "d") == ()
    assert [parts[0] for parts in legs(plan, item, "c")] == [Leg(Op.EMBED, -1, 0)] * 2


def test_item_updates_are_bound_to_the_item() -> None:
    """An update belongs to the whole item: micro is -1, and the head's range is [N, N + 1)."""
    plan = make_plan(AB, ["b"])
    item = Item(seq=5, kind=StepKind.TRAIN, step=2, owner="b", batch=0, rows=4, turn=0)
    assert item_updates(plan, item, "b") == (
        Action(Op.UPDATE, 5, -1, 2, 4),
        Action(Op.UPDATE, 5, -1, 4, 5),
    )


def test_leg_bind_keeps_everything_and_adds_item_and_microbatch() -> None:
    """A bound leg is the action of one micro-batch."""
    leg = Leg(Op.SEND, 2, 0, "b", Payload.HIDDEN)
    assert leg.bind(7, 1) == Action(Op.SEND, 7, 1, 2, 0, "b", Payload.HIDDEN)


def test_num_microbatches_of_a_short_evaluation_batch() -> None:
    """A batch with fewer rows than micro-batches has as many as rows."""
    plan = make_plan(AB, ["a"], batch_size=8, microbatches=4)
    counts = [
        num_microbatches(
            plan.course, Item(seq=0, kind=StepKind.EVALUATE, step=0, owner="a", batch=0, rows=rows, turn=0)
        )
        for rows in (8, 5, 3, 1)
    ]
    assert counts == [4, 4, 3, 1]


def test_links_join_neighbours_owners_and_ends() -> None:
    """Tensors go between neighbours and between owner and both ends; heads between owners; nothing else."""
    plan = make_plan([("a", 0, 1), ("b", 1, 3), ("d", 3, 4)], ["c", "b"])
    both = {("a", "b"), ("b", "d"), ("c", "a"), ("c", "d"), ("c", "b")}
    assert links(plan) == both | {(target, source) for source, target in both}


def test_links_of_many_owners_are_few() -> None:
    """Of 128 owners each has a link to and from the hosts at both ends and the owners beside it, not to everyone."""
    owners = [f"node-{index}" for index in range(128)]
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], owners, num_steps=2560, local_iterations=10)
    found = links(plan)
    assert len(found) == 2 + 128 * 4 + 128
    for owner in owners:
        assert len([pair for pair in found if pair[0] == owner]) <= 2 + 1


def test_links_of_a_run_that_goes_on_know_who_has_the_head() -> None:
    """A run that was stopped while it evaluated: its head goes from that owner to the next one to train."""
    plan = make_plan([("a", 0, 4)], list("cdef"), num_steps=40, local_iterations=2)
    start = StartPoint.of(plan.course, step=4, holder="c")
    assert ("c", "e") not in links(plan)
    assert ("c", "e") in links(plan, start)
