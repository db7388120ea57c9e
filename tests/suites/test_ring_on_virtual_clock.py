"""Single facts of the ring on a virtual clock; what holds for every plan is in ``test_any_plan_on_virtual_clock``."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from ringtune.schedule.actions import Action, Op, Payload
from ringtune.schedule.methods import Hift
from ringtune.schedule.placement import Slice
from ringtune.schedule.turns import StepKind, Turn, items, turn_sequence
from ringtune.schedule.units import EMBEDDING, Units
from ringtune.schedule.versions import trained
from tests.features.plans import AnyRun, PlanKind, hift_plan, run
from tests.support.plans import changed, make_plan
from tests.support.recorded_ring import RecordedRing, TimedMessage

FOUR_HOSTS = [("a", 0, 1), ("b", 1, 3), ("c", 3, 3), ("d", 3, 6)]


@pytest.mark.promise("6 every wait ends")
@pytest.mark.parametrize("payload", [Payload.HIDDEN, Payload.GRAD, Payload.HEAD])
def test_ring_lost_message_ends_in_an_error_that_names_it(payload: Payload) -> None:
    """If one message never arrives, the run fails by its deadline and says what was awaited from whom."""
    plan = make_plan(FOUR_HOSTS, ["a", "b"], num_blocks=6, num_steps=12)
    dropped: list[TimedMessage] = []

    def drop(message: TimedMessage) -> bool:
        if not dropped and message.payload == payload and message.sent_s > 10:
            dropped.append(message)
            return True
        return False

    ring = RecordedRing(plan, drop=drop, wait_s=100.0)
    result = ring.run()
    assert result.finish is not None and result.finish.error == "DeadlineError"
    assert "waited 100 s for" in result.finish.message and "from node" in result.finish.message
    word = {Payload.HIDDEN: "hidden state", Payload.GRAD: "gradient", Payload.HEAD: "head"}[payload]
    lost = ring.waiting_for(dropped[0].target)
    assert word in lost and f"from node {dropped[0].source}" in lost


def test_ring_owner_that_hosts_nothing_waits_as_long_as_the_turns_of_others_take() -> None:
    """A turn may take many times ``wait_s``; who has no part in it sees no progress and still must not give up."""
    hosts = [("a", 0, 2), ("b", 2, 4)]
    plan = make_plan(hosts, ["c", "d", "e"], num_steps=90, local_iterations=30, eval_rows=120, every_steps=20)
    ring = RecordedRing(plan, action_s=lambda node, action: 5.0, wait_s=100.0)
    result = ring.run()
    assert result.finish is not None
    assert (result.finish.error, result.finish.message) == ("", "")


def test_ring_frozen_hosts_run_ahead_of_the_initiator() -> None:
    """With one trainable block on the last of four equal hosts, steps overlap instead of adding up."""
    even = [("a", 0, 2), ("b", 2, 4), ("c", 4, 6), ("d", 6, 8)]
    plan = make_plan(
        even, ["owner"], num_blocks=8, num_steps=20, local_iterations=20, every_steps=1000, microbatches=1, eval_rows=0
    )

    def action_s(node: str, action: Action) -> float:
        if action.op in (Op.FORWARD, Op.FORWARD_FREE, Op.BACKWARD):
            return float(action.stop - action.start)
        return 0.0

    result = RecordedRing(plan, action_s=action_s).run()
    # one step alone takes 8 forwards and 1 backward; overlapped the busiest host (3 units) sets the pace
    assert result.wall_s == pytest.approx(9 + 19 * 3)


def test_ring_next_initiator_starts_before_the_turn_ends() -> None:
    """Frozen blocks work on the next initiator's first batch while the current one still trains."""
    plan = make_plan(FOUR_HOSTS, ["a", "d"], num_blocks=6, num_steps=8, local_iterations=4, every_steps=1000)
    result = RecordedRing(plan).run()
    turns: list[Turn] = list(turn_sequence(plan.course))
    end_of_first = max(s.end_s for s in result.spans["a"] if s.action.seq < turns[1].first_seq)
    starts = [s.start_s for s in result.spans["b"] if s.action.seq == turns[1].first_seq]
    assert min(starts) < end_of_first


def test_ring_evaluation_counts_every_owner_once_per_evaluation() -> None:
    """Each evaluation passes all evaluation batches of all owners."""
    plan = make_plan(FOUR_HOSTS, ["a", "b"], num_blocks=6, num_steps=8, eval_every=4, eval_rows=9, batch_size=4)
    result = RecordedRing(plan).run()
    logged = [entry for entry in result.logged if type(entry).__name__ == "LogEvaluation"]
    # 9 rows in batches of 4: micro-batches 2 + 2 + 1, each head counts 1 here; two owners
    assert [(entry.step, dict(entry.values)["count"]) for entry in logged] == [(4, 10.0), (8, 10.0)]
    assert sum(turn.kind is StepKind.EVALUATE for turn in turn_sequence(plan.course)) == 4


def test_hift_sends_each_gradient_of_a_unit_once_to_every_other_owner() -> None:
    """Over links that the plan has; no head is handed over."""
    for seed in range(6):
        one = AnyRun(PlanKind(name="hift", plan=hift_plan), seed)
        plan, result = one.plan, one.result
        others = len(plan.course.owners) - 1
        expected: Counter[tuple[int, int]] = Counter()
        for item in (item for turn in turn_sequence(plan.course) for item in items(plan.course, turn)):
            units = trained(plan.course, item.kind, item.step) if item.kind is StepKind.TRAIN else Units(0)
            expected += Counter({(item.seq, unit): others for unit in (EMBEDDING, plan.course.head) if unit in units})
        found = Counter((each.key.seq, each.key.boundary) for each in result.messages if each.payload == "u")
        assert found == expected, seed
        assert not any(each.payload == Payload.HEAD for each in result.messages)


@pytest.mark.promise("6 every wait ends")
def test_hift_a_gradient_that_never_comes_is_named() -> None:
    """A host that owns data too says which gradient it waits for, and from whom."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"], method=Hift(order="top2down"), num_steps=4)

    def lost(message: TimedMessage) -> bool:
        return message.payload == Payload.UNIT_GRAD

    result = RecordedRing(plan, wait_s=50.0, drop=lost).run()
    assert result.finish is not None and result.finish.error == "DeadlineError"
    assert "the gradient of the head of step 0 (train), from node a" in result.finish.message


def test_replicas_share_the_micro_batches_as_their_shares_say() -> None:
    """Shares 2 and 1 of six micro-batches are four and two; each host sends its gradients once a step."""
    plan = make_plan([("a", 0, 4)], ["c"], num_blocks=4, microbatches=6, batch_size=6, num_steps=4, method="all")
    plan = changed(plan, slices=(Slice(node="a", start=0, stop=4, share=2), Slice(node="b", start=0, stop=4)))
    result = run(plan, random.Random(0))
    forwards = {node: sum(one.op is Op.FORWARD for one in order) for node, order in result.order.items()}
    assert (forwards["a"], forwards["b"]) == (4 * 4, 4 * 2)
    sent = [one for order in result.order.values() for one in order if one.payload == Payload.REPLICA_GRAD]
    assert len(sent) == 4 * 2 * 2
