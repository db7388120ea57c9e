"""How the hosts of a stage share its micro-batches; all else is a law: ``test_any_plan_on_virtual_clock``."""

from __future__ import annotations

import random

from ringtune.schedule.actions import Op, Payload
from ringtune.schedule.placement import Slice
from tests.features.plans import run
from tests.support.plans import changed, make_plan


def test_replicas_share_the_micro_batches_as_their_shares_say() -> None:
    """Shares 2 and 1 of six micro-batches are four and two; each host sends its gradients once a step."""
    plan = make_plan([("a", 0, 4)], ["c"], num_blocks=4, microbatches=6, batch_size=6, num_steps=4, method="all")
    plan = changed(plan, slices=(Slice(node="a", start=0, stop=4, share=2), Slice(node="b", start=0, stop=4)))
    result = run(plan, random.Random(0))
    forwards = {node: sum(one.op is Op.FORWARD for one in order) for node, order in result.order.items()}
    assert (forwards["a"], forwards["b"]) == (4 * 4, 4 * 2)
    sent = [one for order in result.order.values() for one in order if one.payload == Payload.REPLICA_GRAD]
    assert len(sent) == 4 * 2 * 2
