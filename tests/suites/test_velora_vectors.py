"""VeLoRA's vectors: each graph has the one that it was made with, and a shard has those of its layers.

That a ring trains what the paper's formulas train is among the laws.
"""

from __future__ import annotations

from typing import Any

import pytest

from ringtune.errors import IntegrityError
from ringtune.run_control import events as rd
from ringtune.schedule.saved_activations import INITS
from tests.features.feature import Feature, carry_out, planned
from tests.features.memory import literally
from tests.features.models import of_family, own_weights
from tests.support.hand_ring import HandRing
from tests.support.literal_velora import every_layer
from tests.support.plans import changed
from tests.support.torch_ring import distance, same_bits


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


def test_random_vectors_do_not_know_that_rows_are_packed() -> None:
    """The reference trains on each row of a sequence alone; vectors that are means would know its padding."""
    layers = every_layer("llama", parts=5, init="random")
    values: dict[str, Any] = {"adapter": "full", "packing": True, "max_length": 40, "owners": ("a", "b")}
    arguments = of_family("velora/packed", "llama", "causal-lm", **values)
    feature = Feature(**arguments, plan=planned(velora=layers), reference=literally)
    run = carry_out(feature, feature.plan_on(feature.split))
    assert distance(run.tensors, literally(feature.case, run).tensors) <= feature.bound
