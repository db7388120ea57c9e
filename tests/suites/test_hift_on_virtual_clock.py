"""Gradients of HiFT's embedding and head: each is sent to every other owner, and a lost one is named.

Orders, versions and what waits are those of any plan: ``test_any_plan_on_virtual_clock``.
"""

from __future__ import annotations

from collections import Counter

import pytest

from ringtune.schedule.actions import Payload
from ringtune.schedule.methods import Hift
from ringtune.schedule.turns import StepKind, items, turn_sequence
from ringtune.schedule.units import EMBEDDING, Units
from ringtune.schedule.versions import trained
from sim.ring import Message, VirtualRing
from tests.features.plans import KINDS, AnyRun
from tests.support.plans import make_plan

HIFT = next(kind for kind in KINDS if kind.name == "hift")


def test_hift_sends_each_gradient_of_a_unit_once_to_every_other_owner() -> None:
    """Over links that the plan has; no head is handed over."""
    for seed in range(6):
        one = AnyRun(HIFT, seed)
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

    def lost(message: Message) -> bool:
        return message.payload == Payload.UNIT_GRAD

    result = VirtualRing(plan, wait_s=50.0, drop=lost).run()
    assert result.finish is not None and result.finish.error == "DeadlineError"
    assert "the gradient of the head of step 0 (train), from node a" in result.finish.message
