"""Tests of ``ringtune.costs.action_costs``: seconds, operation shares."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ringtune.costs.action_costs import CourseCosts, NodeWork, all_full, done_of, total
from ringtune.costs.profile import LinkFacts, Profile, Work
from ringtune.schedule.actions import Action, Op, Payload
from ringtune.schedule.operation_tables import BatchOperations, Operations
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Item, StepKind, items, turn_sequence
from tests.support.cases import cases
from tests.support.plans import make_plan
from tests.support.profiles import TIMES, profile_of

PLAN = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"])
CODEC = {**TIMES, Work.ENCODE: 0.25, Work.DECODE: 0.5}


def costs(*, cpu_cores: float, threads: int = 1, has_messages: bool = False) -> CourseCosts:
    """Two nodes; a byte takes 2 ms of the sender's processor and 3 ms of the receiver's."""
    profile = profile_of(PLAN, times=CODEC)
    nodes = tuple(
        dataclasses.replace(node, cpu_cores=cpu_cores, threads=threads, has_messages=has_messages)
        for node in profile.nodes
    )
    links = tuple(
        LinkFacts(
            source=source,
            target=target,
            rate_bytes_per_s=1e6,
            latency_s=0.0,
            send_cpu_s_per_byte=0.002,
            receive_cpu_s_per_byte=0.003,
        )
        for source, target in (("a", "b"), ("b", "a"))
    )
    return CourseCosts(PLAN.course, Profile(nodes=nodes, links=links))


@cases(
    ("cpu_cores", "threads", "share"),
    [(2.0, 1, 0.0), (4.0, 2, 0.0), (1.0, 1, 1.0), (1.5, 1, 0.5), (4.0, 4, 1.0), (0.5, 1, 1.0), (0.0, 1, 0.0)],
)
def test_costs_of_messages_are_taken_from_computing_where_no_core_is_free(
    cpu_cores: float, threads: int, share: float
) -> None:
    """A core beside the computing threads takes them; with a quota of half a core they take twice as long."""
    taken = costs(cpu_cores=cpu_cores, threads=threads).taken_s("a", "b", Payload.HIDDEN, 100.0, 4.0)
    expected = (0.25 + 0.2 / cpu_cores, 0.5 + 0.3 / cpu_cores) if share else (0.0, 0.0)
    assert taken == pytest.approx((share * expected[0], share * expected[1]))


def test_costs_of_messages_are_in_recorded_times_already() -> None:
    """What a run recorded is not counted twice. A head has no codec: its time is part of the actions around it."""
    assert costs(cpu_cores=1.0).taken_s("a", "b", Payload.HEAD, 100.0, 0.0) == pytest.approx((0.2, 0.3))
    assert costs(cpu_cores=0.5, has_messages=True).taken_s("a", "b", Payload.HIDDEN, 100.0, 4.0) == (0.0, 0.0)


def test_costs_of_messages_are_those_of_a_ring_in_which_all_compute() -> None:
    """Where it was measured what a byte takes from computing, the processor seconds of a quiet link do not count."""
    found = _with(message_s_per_byte=0.01).taken_s("a", "b", Payload.HIDDEN, 100.0, 4.0)
    assert found == pytest.approx((1.0 + 0.25, 1.0 + 0.5))
    assert _with(message_s_per_byte=0.01, has_messages=True).taken_s("a", "b", Payload.HIDDEN, 100.0, 4.0) == (0.0, 0.0)


def test_idle_time_is_worth_something_at_a_quota_that_computing_uses_up() -> None:
    """At half a core an action takes half its time at least; recorded times have their idle time in them."""
    assert _with(rested_s=0.3).idle_gain("a") == (0.3, 0.5)
    assert _with(rested_s=0.3, cpu_cores=2.0).idle_gain("a") == (0.0, 1.0)
    assert _with(rested_s=0.3, has_messages=True).idle_gain("a") == (0.0, 1.0)


def test_an_action_takes_its_work_and_what_surrounds_it() -> None:
    """An update of 0.5 s with 0.1 s around it; recorded times have that in them."""
    update = Action(Op.UPDATE, 0, -1, 0, 1)

    def seconds(**changes: Any) -> float:
        return _with(**changes).action_s("a", update, size=0.0, lowest=0, kind=StepKind.TRAIN)

    alone_s = seconds()
    assert seconds(handling_s=0.1) == pytest.approx(alone_s + 0.1)
    assert seconds(handling_s=0.1, has_messages=True) == alone_s


def _with(**changes: Any) -> CourseCosts:
    """Two nodes with half a core each, and these changes."""
    profile = profile_of(PLAN, times=CODEC)
    values = {"cpu_cores": 0.5, "threads": 1, **changes}
    return CourseCosts(PLAN.course, Profile(nodes=tuple(dataclasses.replace(node, **values) for node in profile.nodes)))


def test_costs_of_messages_to_the_head_are_of_the_tokens_that_it_reads() -> None:
    """A batch of rows of eight tokens in two micro-batches: of each row one token goes to the head and back."""
    course = dataclasses.replace(PLAN.course, head_tokens=1)
    some = CourseCosts(course, profile_of(PLAN, times=CODEC))
    rows = course.microbatch_sizes()[0]
    size, token = 8.0 * rows, some.tensor_bytes(Payload.GRAD, 1, 1.0)
    assert some.message_bytes(Payload.GRAD, course.head, size) == rows * token
    assert some.message_bytes(Payload.GRAD, 2, size) == size * token
    assert some.message_bytes(Payload.HIDDEN, course.head, size) == rows * token
    whole = CourseCosts(PLAN.course, profile_of(PLAN, times=CODEC))
    assert whole.message_bytes(Payload.HIDDEN, course.head, size) == size * token


def test_costs_of_messages_follow_the_width_of_their_boundary() -> None:
    """Values of four bytes, and a byte of mask for each token that enters a block."""
    course = dataclasses.replace(PLAN.course, entering=(20, 18, 18, 14, 8), returning=(8, 8, 12, 12, 8))
    some = CourseCosts(course, profile_of(PLAN, times=CODEC))
    assert [some.message_bytes(Payload.HIDDEN, at, 10.0) for at in range(5)] == [810, 730, 730, 570, 320]
    assert [some.message_bytes(Payload.GRAD, at, 10.0) for at in range(5)] == [320, 320, 480, 480, 320]


def test_costs_of_the_last_block_are_of_the_tokens_that_the_head_reads() -> None:
    """Of width d and inner width f: 2 d^2 for keys and values of all tokens, the rest of one of eight."""
    course = dataclasses.replace(PLAN.course, head_tokens=1, trims=True)
    profile = profile_of(PLAN, times=CODEC)
    some, whole = CourseCosts(course, profile), CourseCosts(PLAN.course, profile)
    model, head = profile.nodes[0].model, course.head
    size = 8.0 * course.microbatch_sizes()[0]
    width, inner = model.hidden_size, model.intermediate_size
    rest = 2 * width * width + 2 * width * inner + 2 * 8 * width
    left = (2 * width * width + rest / 8) / (2 * width * width + rest)
    for op, lowest in ((Op.FORWARD_FREE, head), (Op.FORWARD, 0), (Op.BACKWARD, 0), (Op.BACKWARD, head - 1)):

        def seconds(costs: CourseCosts, start: int, stop: int, op: Op = op, lowest: int = lowest) -> float:
            kind = StepKind.TRAIN
            return costs.nodes["a"].seconds(op, start, stop, size=size, lowest=lowest, kind=kind)

        one_s = seconds(whole, head - 1, head)
        assert seconds(some, head - 1, head) == pytest.approx(left * one_s)
        usual_s = seconds(whole, head - 2, head) if op is Op.FORWARD_FREE else None
        if usual_s is not None:
            assert seconds(some, head - 2, head) == pytest.approx(usual_s - (1 - left) * one_s)
        assert seconds(some, head - 2, head - 1) == seconds(whole, head - 2, head - 1)


SLICES = [("a", 0, 2), ("b", 2, 4)]


def planned(*rows: str, subnets: int = 1, method: str = "all") -> tuple[Plan, Item]:
    """A plan whose batches all have these operations, and its first item: four rows of owner a."""
    batches = tuple(BatchOperations(owner="a", batch_id=at, rows=rows) for at in range(3))
    plan = make_plan(
        SLICES,
        ["a"],
        method=method,
        train_rows=12,
        microbatches=2,
        operations=Operations(batches=batches, subnets=subnets),
    )
    turn = next(turn for turn in turn_sequence(plan.course) if turn.kind.has_update)
    return plan, items(plan.course, turn)[0]


def test_operations_are_counted_by_node_in_rows_of_blocks() -> None:
    """Two rows a micro-batch: node b is passed by for the second one, and node a runs a block without a graph."""
    plan, item = planned("1111", "2133")
    done = done_of(plan, item)
    assert done["a"] == NodeWork(full=6, forward_only=2, sent_bytes=done["a"].sent_bytes)
    assert done["b"] == NodeWork(full=4, skipped=4, sent_bytes=done["b"].sent_bytes)
    assert done["b"].shares() == {"full": 0.5, "forward_only": 0.0, "skipped": 0.5}


def test_operations_of_subnets_count_as_parts_of_a_block() -> None:
    """In ``1132`` half of a block is full."""
    plan, item = planned("1132" * 4, "3333" * 4, subnets=4)
    both = total(done_of(plan, item).values())
    assert (both.full, both.forward_only, both.skipped) == (4, 2, 2 + 8)
    assert both.paper_compute == pytest.approx(4 + 0.4 * 2)
    assert both.paper_sent == pytest.approx(4 + 0.5 * 2)


def test_full_is_forward_only_where_a_block_does_not_train() -> None:
    """RingAda's first step trains the top block alone; a micro-batch that passes it by does nothing anywhere."""
    plan, item = planned("1111", "1113", method="ringada")
    done = done_of(plan, item)
    assert (done["a"].full, done["a"].forward_only, done["a"].skipped) == (0, 4, 4)
    assert (done["b"].full, done["b"].forward_only, done["b"].skipped) == (2, 2, 4)


def test_seconds_and_bytes_follow_the_profile() -> None:
    """Half of the micro-batches are half of the work; a message has its mean length."""
    plan, item = planned("1111", "3333")
    costs = CourseCosts(all_full(plan).course, profile_of(plan))
    table, full = (total(done_of(each, item, costs).values()) for each in (plan, all_full(plan)))
    assert table.work_s == pytest.approx(full.work_s / 2)
    assert 0 < table.sent_bytes == pytest.approx(full.sent_bytes / 2)
