"""The lowering of items as whole tables: who does what, in which order, with whom."""

from __future__ import annotations

import random

import pytest

from ringtune.schedule.actions import Action, Leg, Op, Payload
from ringtune.schedule.lowering import (
    Segment,
    item_updates,
    links,
    lower,
    lowest_and_pattern,
    lowest_units,
    neighbours,
    route,
    way,
)
from ringtune.schedule.methods import RingAda
from ringtune.schedule.operation_tables import BatchOperations, Operations
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Item, StartPoint, StepKind
from ringtune.schedule.versions import trained
from tests.support.cases import cases
from tests.support.plans import changed, make_plan, random_plan, train_items

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


@pytest.mark.promise("3 frozen means free")
def test_lower_stops_backward_at_lowest_unfrozen_block() -> None:
    """No node below the lowest unfrozen block gets a gradient: the table in the module's docstring."""
    assert _table(make_plan(AB, ["c"]), "c", StepKind.TRAIN, 0) == {
        "a": "<h0@c f[0,1) f[1,2) >h2@b",
        "b": "<h2@a f[2,3) F[3,4) >h4@c <g4@c B[3,4) U[3,4)",
        "c": "E >h0@a <h4@b H >g4@b U[4,5)",
    }


def test_lower_merges_private_blocks_with_the_owners_own_slice() -> None:
    """Private blocks below the owner's slice form one stretch with it."""
    plan = make_plan([("a", 1, 2), ("b", 2, 4)], ["a"], private_blocks=1)
    assert route(plan, "a") == (Segment("a", 0, 2), Segment("b", 2, 4))
    assert _table(plan, "a", StepKind.TRAIN, 0) == {
        "a": "E f[0,1) f[1,2) >h2@b <h4@b H >g4@b U[4,5)",
        "b": "<h2@a f[2,3) F[3,4) >h4@a <g4@a B[3,4) U[3,4)",
    }


@cases("seed", range(50))
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


def _with_rows(*rows: str) -> Plan:
    """One owner with one batch, whose micro-batches have these operations."""
    plan = make_plan(AB, ["c"], method="all", train_rows=4, microbatches=len(rows))
    return changed(plan, operations=Operations(batches=(BatchOperations(owner="c", batch_id=0, rows=rows),)))


def test_lower_of_a_pattern_holds_for_train_items_alone() -> None:
    """Evaluations run every block; scores need the gradients of every block."""
    plan, plain = _with_rows("3333"), make_plan(AB, ["c"], method="all", train_rows=4, microbatches=1)
    assert _table(plan, "c", StepKind.TRAIN, 0)["c"] == "E H U[4,5)"
    for kind in (StepKind.EVALUATE, StepKind.SCORE):
        assert _table(plan, "c", kind, 0) == _table(plain, "c", kind, 0)


def test_lowest_units_are_those_of_each_micro_batch() -> None:
    """The lowest full block among the trained ones; the head if there is none."""
    plan = _with_rows("1131", "2211", "3333", "3311")
    item = train_items(plan)[0]
    assert lowest_units(plan.course, item) == (0, 2, 4, 2)
    shallow = changed(plan, method=RingAda(every_steps=99))
    assert lowest_units(shallow.course, item) == (3, 3, 4, 3)


@cases("seed", range(25))
def test_lower_of_any_pattern_is_one_path_through_what_it_does_not_skip(seed: int) -> None:
    """For any plan and table: what keeps a graph is full and trained or above; gradients go there and nowhere else."""
    plan = random_plan(random.Random(seed), with_operations=True)
    course, allowed = plan.course, links(plan)
    for item in train_items(plan):
        for micro, lowest in enumerate(lowest_units(course, item)):
            table = way(plan, item, micro)
            found = [(node, leg) for node, parts in table.items() for leg in parts]
            sent = sorted((leg.payload, leg.start, node, leg.peer) for node, leg in found if leg.op is Op.SEND)
            received = sorted((leg.payload, leg.start, leg.peer, node) for node, leg in found if leg.op is Op.RECEIVE)
            assert sent == received
            assert {(source, target) for _, _, source, target in sent} <= allowed
            codes = lowest_and_pattern(course, item, micro)[1] or "1" * course.num_blocks
            if not table:
                blocks = trained(course, item.kind, item.step).blocks
                assert blocks and {codes[block] for block in blocks} == {"3"}
                continue
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


def test_links_of_a_plan_are_made_once() -> None:
    """Each node of a large ring asks for them, and for its neighbours."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"])
    assert links(plan) is links(plan) and neighbours(plan, "a") == {"b"}
