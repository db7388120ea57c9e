"""Every code of a table of subnets counts, a table of all full ones changes nothing, and what can't be run is refused.

That a ring with tables of subnets trains what masks train is among the laws.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from ringtune.errors import JobError, PlanError
from ringtune.schedule.operation_tables import FORWARD_ONLY, FULL, SHORTCUT
from tests.features.feature import Feature, carry_out, each_technique
from tests.features.operations import SUBNETS, subnets, with_codes
from tests.support.torch_ring import make_carrier, same_bits

OF_LORA = [feature for feature in SUBNETS if feature.name.startswith("subnets/lora-")]


def with_table(feature: Feature, case: Any) -> Feature:
    """The feature with the table of a case."""
    changes = {**feature.changes, "operations": case.operations, "trims": False, "num_steps": 2}
    return dataclasses.replace(feature, changes=changes)


@each_technique(OF_LORA)
def test_all_full_tables_change_no_bit(feature: Feature) -> None:
    """The result is that of a run without tables, bit for bit."""
    full = with_codes(with_codes(feature.case, FORWARD_ONLY, FULL), SHORTCUT, FULL)
    runs = [with_table(feature, case) for case in (full, dataclasses.replace(full, operations=None))]
    first, other = (carry_out(one, one.plan_on(feature.split)).tensors for one in runs)
    assert same_bits(first, other)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"adapter": "ia3"}, "adapter.config 'ia3' can't be run by head groups"),
        ({"adapter": "dora"}, "DoRA"),
    ],
)
def test_node_refuses_what_heads_can_not_be_left_out_of(changes: dict[str, Any], problem: str) -> None:
    """The node says so as it builds its blocks; with whole blocks as subnets it would train."""
    case = subnets("/refused", "bert", 4, **{"adapter": "seq_bn", **changes}).case
    with pytest.raises(JobError, match=re.escape(problem)):
        make_carrier(case, case.plan((("a", 0, 4),)))
    whole = subnets("/whole", "bert", 1, **{"adapter": "seq_bn", **changes}, dtype="float32").case
    make_carrier(whole, whole.plan((("a", 0, 4),)))


def test_node_refuses_subnets_that_do_not_divide_its_heads() -> None:
    """A table for another model: three subnets of four heads."""
    case = subnets("/refused", "bert", 3, "seq_bn").case
    with pytest.raises(PlanError, match="3 subnets do not divide 4 key/value heads"):
        make_carrier(case, case.plan((("a", 0, 4),)))
