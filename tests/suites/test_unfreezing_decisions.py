"""A run that decides by its losses when blocks begin to train can be repeated bit for bit with what it decided.

That it equals one process with these steps, in any timing and after a resume, is among the laws.
"""

from __future__ import annotations

import pytest

from ringtune.run_control import events as rd
from ringtune.schedule.course import HelperSettings
from ringtune.schedule.methods import RingAda
from ringtune.techniques.offload import helped
from tests.features.feature import Feature, carry_out, run_of
from tests.features.methods import UNFREEZING, decided
from tests.support.plans import changed
from tests.support.resumed import same_bits

BY_LOSSES = [feature for feature in UNFREEZING if "by-losses" in feature.name]


@pytest.mark.parametrize("feature", BY_LOSSES, ids=lambda feature: feature.name)
@pytest.mark.sampled(1)
def test_decided_steps_that_are_given_train_the_same_bits(feature: Feature) -> None:
    """The form ``at`` with those steps gives the very weights."""
    run = run_of(feature, "three")
    settled = changed(run.plan, method=RingAda(every_steps=0, at=decided(run)))
    assert same_bits(carry_out(feature, settled, 2).tensors, run.tensors)


@pytest.mark.thorough
def test_decided_steps_with_helpers_are_repeated_and_go_on_bit_for_bit() -> None:
    """Blocks begin to train within intervals, and hosts do not wait: versions count what the run has decided."""
    changes = {**BY_LOSSES[1].changes, "microbatches": 8, "adapter": "lora[r=4]", "num_steps": 17}
    feature = Feature(name="unfreezing/helped", changes=changes)
    manner = HelperSettings(interval=3, overlap=True)
    plan = helped(BY_LOSSES[1].plan(feature.case, feature.splits["three"]), {"a": "z", "c": "a"}, manner)
    run = carry_out(feature, plan)
    assert decided(run)
    settled = changed(plan, method=RingAda(every_steps=0, at=decided(run)))
    assert same_bits(carry_out(feature, settled, 1).tensors, run.tensors)
    saved = run.logged(rd.LogCheckpoint)[0]
    rest = carry_out(feature, plan, 2, saved=saved, shards=run.notes.shards[saved.step])
    assert same_bits(rest.tensors, run.tensors)
