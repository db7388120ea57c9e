"""A run that chooses its table at its start equals one whose plan has that table, which masks are tested against.

That any split, timing and resumption chooses the same tables is among the laws.
"""

from __future__ import annotations

import dataclasses

from ringtune.run_control import events as rd
from ringtune.schedule.operation_tables import Score
from ringtune.schedule.turns import StepKind
from tests.features.feature import carry_out
from tests.features.operations import CHOICES
from tests.support.choosing import make_choice
from tests.support.plans import changed
from tests.support.resumed import same_bits


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
