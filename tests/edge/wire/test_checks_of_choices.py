"""Frames of a run that chooses its operations: what any table may bring is admitted until the table is known."""

from __future__ import annotations

import dataclasses
import random

import pytest

from edge.wire.checks import FrameCheck
from edge.wire.known_turns import KnownTurns
from ringtune.errors import FrameError
from ringtune.schedule.actions import Op, Payload, TensorKey
from ringtune.schedule.lowering import legs, possible_arrivals
from ringtune.schedule.operations.table import BatchOperations, Operations
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.turns import StartPoint, StepKind, Turn, items, turn_sequence
from ringtune.v1 import ring_pb2
from tests.support.choosing import make_choice, table_of
from tests.support.plans import changed, make_plan, random_operations, random_plan
from tests.support.wire_parts import expectation, plan, tensor_header


def _choosing(seed: int) -> Plan:
    """A run that chooses its operations, of any shape."""
    rng = random.Random(seed)
    return changed(random_plan(rng), choice=make_choice(subnets=rng.choice([1, 2]), refresh_steps=rng.choice([0, 2])))


def _received(of: Plan, turn: Turn, node: str) -> set[tuple[str, int, str]]:
    """(source, boundary, payload) of all that comes to a node in a turn."""
    return {
        (leg.peer, leg.start, leg.payload)
        for item in items(of.course, turn)
        for found in legs(of.decided(turn.unfreeze_at, turn.operations), item, node)
        for leg in found
        if leg.op is Op.RECEIVE
    }


@pytest.mark.parametrize("seed", range(20))
def test_possible_arrivals_are_those_of_every_table(seed: int) -> None:
    """Whatever is chosen, nothing else comes; and of many tables some bring each of them that the method allows."""
    of = _choosing(seed)
    for turn in turn_sequence(of.course):
        if turn.kind is not StepKind.TRAIN:
            continue
        for node in of.nodes:
            possible = possible_arrivals(of.soonest(), turn.owner, node)
            for table in range(4):
                decided = dataclasses.replace(turn, operations=table_of(of.course, table))
                assert _received(of, decided, node) <= possible


def test_checks_admit_what_any_table_brings_before_the_grant_and_only_its_own_after() -> None:
    """A peer that heard first may pass this node's predecessor by; once the table is known, only that counts."""
    of = changed(plan(), choice=make_choice(subnets=1))
    sent = list(turn_sequence(of.course))
    first = next(turn for turn in sent if turn.kind is StepKind.TRAIN)
    owner, hosts = first.owner, [piece.node for piece in of.placement.hosts]
    node, before = hosts[-1], hosts[-2]
    course = of.course
    skipped = "3" * of.slice_of(node).start + "1" * (course.num_blocks - of.slice_of(node).start)
    rows = (skipped,) * course.microbatches
    batches = tuple(BatchOperations(owner=owner, batch_id=at, rows=rows) for at in range(2))
    table = Operations(batches=batches)
    boundary = of.slice_of(node).start

    def header(source: str) -> ring_pb2.FrameHeader:
        return tensor_header(of, source, TensorKey(Payload.HIDDEN, first.first_seq, 0, boundary), 2)

    for source in {owner, before} - {node}:
        FrameCheck(expectation(of, node), source).admit(header(source))
    turns = KnownTurns(of, StartPoint.of(of.course))
    for turn in sent[: first.index + 1]:
        turns.granted(dataclasses.replace(turn, operations=table if turn is first else None))
    FrameCheck(expectation(of, node), owner, turns).admit(header(owner))
    with pytest.raises(FrameError, match="not foreseen"):
        FrameCheck(expectation(of, node), before, turns).admit(header(before))


def test_checks_know_turns_ahead_through_scores() -> None:
    """From the grant of any turn on, a node knows its own next turn, whatever scores and evaluations come between."""
    of = changed(plan(eval_every=2, num_steps=24), choice=make_choice(subnets=1, refresh_steps=2))
    sent = list(turn_sequence(of.course))
    for node in [owner.node for owner in of.course.owners]:
        turns = KnownTurns(of, StartPoint.of(of.course))
        for turn in sent:
            own = next((later for later in sent[turn.index + 1 :] if later.owner == node), None)
            turns.granted(turn)
            assert own is None or turns.by_index(own.index) is not None


@pytest.mark.promise("7 bounded memory")
def test_checks_keep_nothing_of_rows_that_have_passed() -> None:
    """Other operations for every micro-batch of a long run: what a link keeps does not grow with them."""
    of = make_plan([("a", 0, 6), ("b", 6, 12)], ["c"], method="all", num_blocks=12, train_rows=1600, num_steps=400)
    of = changed(of, operations=random_operations(random.Random(0), of.course))
    turns = KnownTurns(of, StartPoint.of(of.course))
    check = FrameCheck(expectation(of, "b"), "a", turns)
    for turn in turn_sequence(of.course):
        turns.granted(turn)
        for item in items(of.course, turn) if turn.kind is StepKind.TRAIN else ():
            for micro, found in enumerate(legs(of, item, "b")):
                for leg in found:
                    if leg.op is Op.RECEIVE and leg.peer == "a" and leg.payload == Payload.HIDDEN:
                        key = TensorKey(Payload.HIDDEN, item.seq, micro, leg.start)
                        check.admit(tensor_header(of, "a", key, 2))
                        check.credit_returned(leg.start, 1)
    kept = [len(value) for value in vars(check).values() if isinstance(value, dict)]
    assert sum(kept) < 300
