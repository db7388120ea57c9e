"""Tests of ``sim.ring``: ring interrupted, rest."""

from __future__ import annotations

import itertools

import pytest

from ringtune.costs.action_costs import IdleGain
from ringtune.schedule.actions import TensorKey
from sim.links import MessageCost
from tests.support.cases import cases
from tests.support.plans import make_plan
from tests.support.recorded_ring import Delays, RecordedRing


class Busy(Delays):
    """Messages take no time on their way, but processor seconds at both ends."""

    def __init__(self, source_s: float, target_s: float, *, delays_s: tuple[float, float] = (0.0, 0.0)) -> None:
        super().__init__()
        self._taken_s = (source_s, target_s)
        self._delays_s = delays_s

    def send(self, key: TensorKey, source: str, target: str, now_s: float) -> tuple[float, MessageCost | None]:
        """The same cost for every message."""
        return super().send(key, source, target, now_s)[0], MessageCost(*self._taken_s, *self._delays_s)


def wall_s(microbatches: int, source_s: float, target_s: float, *, batch_size: int = 4) -> float:
    """Two steps on two hosts, where every action takes a second; the owner hosts nothing."""
    plan = make_plan(
        [("a", 0, 2), ("b", 2, 4)],
        ["c"],
        num_steps=2,
        local_iterations=2,
        microbatches=microbatches,
        batch_size=batch_size,
        method="all",
        eval_rows=0,
    )
    return RecordedRing(plan, transport=Busy(source_s, target_s)).run().wall_s


def test_ring_that_waits_receives_for_free() -> None:
    """With one micro-batch every receiver is idle: it was receiving while the message was on its way."""
    assert wall_s(1, 0.0, 0.5) == wall_s(1, 0.0, 0.0)


def test_ring_that_computes_while_it_receives_is_slowed() -> None:
    """With several micro-batches a message arrives while its receiver computes: that action ends later."""
    plain = wall_s(4, 0.0, 0.0)
    assert plain < wall_s(4, 0.0, 0.25) <= plain * 1.25 * 2


def test_ring_that_sends_begins_its_next_action_later() -> None:
    """A sender that goes on at once pays for sending; the more messages, the more."""
    assert wall_s(4, 0.0, 0.0) < wall_s(4, 0.125, 0.0) < wall_s(4, 0.25, 0.0)


@cases(("source_s", "target_s"), [(0.0, 0.0), (0.25, 0.0), (0.0, 0.25), (0.5, 0.5)])
def test_ring_counts_what_was_taken_as_busy(source_s: float, target_s: float) -> None:
    """A node's actions never overlap, and each takes its second at least."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"], num_steps=6, microbatches=4, eval_rows=0)
    result = RecordedRing(plan, transport=Busy(source_s, target_s)).run()
    assert result.finish is not None and not result.finish.error
    for spans in result.spans.values():
        for before, after in itertools.pairwise(spans):
            assert before.end_s <= after.start_s
        assert all(span.end_s - span.start_s >= 1.0 for span in spans)


@cases(
    ("delays_s", "later_s"),
    # the sender of a gradient goes on with its update, twice on the way down: of the head, and of the upper slice
    [((0.25, 0.0), 0.5), ((0.0, 0.25), 0.0), ((0.5, 0.5), 1.0)],
)
def test_ring_gets_messages_late_only_while_it_computes(delays_s: tuple[float, float], later_s: float) -> None:
    """With one micro-batch receivers are idle; senders are not where an update follows."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["c"], num_steps=1, microbatches=1, method="all", eval_rows=0)
    ring = RecordedRing(plan, transport=Busy(0.0, 0.0, delays_s=delays_s)).run()
    assert ring.wall_s == RecordedRing(plan).run().wall_s + later_s


PLAN = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_steps=4)


def lengths(idle_gain: IdleGain, node: str) -> list[float]:
    """Seconds of a node's actions of 1 s each; a message takes 1 s."""
    ring = RecordedRing(PLAN, message_s=lambda source, target, payload: 1.0, idle_gain=lambda name: idle_gain)
    return [round(span.end_s - span.start_s, 6) for span in ring.run().spans[node]]


def test_action_after_idle_time_is_shorter_and_one_after_another_is_not() -> None:
    """Idle time of a second is worth the most that there is, 0.3 s; without any an action takes its second."""
    found = lengths(IdleGain(0.3, 0.4), "b")
    assert min(found) == 0.7 and max(found) == 1.0
    assert set(lengths(IdleGain(0.0, 1.0), "b")) == {1.0}


def test_action_keeps_the_share_that_computing_at_full_speed_takes() -> None:
    """At 0.9 of a core an action of 1 s can't take less than 0.9 s, and keeps the idle time that is left."""
    assert min(lengths(IdleGain(5.0, 0.9), "b")) == pytest.approx(0.9)
