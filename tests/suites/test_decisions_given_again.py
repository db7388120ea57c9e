"""A run that decides something by its losses or scores is repeated bit for bit by a plan with what it decided.

That any split, timing and resumption decides the same, and trains what one process does, is among the laws.
"""

from __future__ import annotations

import dataclasses

import pytest

from ringtune.run_control import events as rd
from ringtune.schedule.course import HelperSettings
from ringtune.schedule.methods import RingAda
from ringtune.schedule.operation_tables import Score
from ringtune.schedule.turns import StepKind
from ringtune.techniques.offload import helped
from tests.features.feature import Feature, carry_out
from tests.features.methods import UNFREEZING, decided
from tests.features.operations import CHOICES
from tests.support.choosing import make_choice
from tests.support.plans import changed
from tests.support.torch_ring import same_bits

BY_LOSSES = [feature for feature in UNFREEZING if "by-losses" in feature.name]


def test_choice_of_once_trains_what_its_table_does_in_a_plan() -> None:
    """Of real scores, which a turn of their own gathers."""
    feature = CHOICES[0]
    once = make_choice(subnets=2, backward_score=Score.TAYLOR.value)
    chosen = carry_out(feature, changed(feature.plan_on("two"), choice=once))
    (table,) = chosen.logged(rd.LogOperations)
    assert StepKind.SCORE in {entry.turn.kind for entry in chosen.logged(rd.LogTurn)}
    fixed = dataclasses.replace(feature, ring=lambda plan, carrier: {})
    plan = changed(feature.plan_on("two"), choice=None, operations=table.operations)
    assert same_bits(carry_out(fixed, plan).tensors, chosen.tensors)


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
