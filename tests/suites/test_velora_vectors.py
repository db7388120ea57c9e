"""VeLoRA's vectors: each graph has the one that it was made with, and a shard has those of its layers.

That a ring trains what the paper's formulas train is among the laws.
"""

from __future__ import annotations

import pytest

from ringtune.errors import IntegrityError
from ringtune.run_control import events as rd
from ringtune.schedule.saved_activations import INITS
from tests.features.feature import carry_out
from tests.features.models import own_weights
from tests.support.hand_ring import HandRing
from tests.support.literal_velora import every_layer
from tests.support.plans import changed
from tests.support.resumed import same_bits


@pytest.mark.promise("5 timing changes nothing")
@pytest.mark.parametrize("init", INITS)
@pytest.mark.sampled(1)
def test_velora_with_micro_batches_in_flight_equals_one_after_the_other(init: str) -> None:
    """A graph keeps the vector that it was made with, whatever comes before its backward."""
    feature = own_weights("velora", "bert", microbatches=4, num_steps=4, checkpoint_every=0)
    plan, case = changed(feature.plan_on("two"), velora=every_layer("bert", init=init)), feature.case
    hands = [
        HandRing(plan, case.job, case.folder / "model", case.datasets(), interleave=interleave)
        for interleave in (False, True)
    ]
    found = [hand.train().tensors() for hand in hands]
    assert same_bits(*found)
    assert same_bits(carry_out(feature, plan, 5).tensors, found[0])


def test_velora_in_a_shard_is_checked() -> None:
    """A shard without vectors is of another course: it is refused, and nothing is changed."""
    feature = own_weights("velora", "bert", num_steps=4, checkpoint_every=2)
    plan = feature.plan_on("two")
    run = carry_out(feature, plan)
    saved = run.logged(rd.LogCheckpoint)[0]
    with pytest.raises(IntegrityError, match="the shard has VeLoRA's vectors of other layers than this node's"):
        carry_out(feature, changed(plan, velora=every_layer("bert")), saved=saved, shards=run.notes.shards[saved.step])
