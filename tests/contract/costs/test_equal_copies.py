"""Copies that have to be equal in every bit are only where the same kernels compute them."""

from __future__ import annotations

import dataclasses

import pytest

from ringtune.costs.equal_copies import numeric_class, refuse_unlike_copies
from ringtune.costs.profile import NodeFacts
from ringtune.errors import PlanError
from ringtune.schedule.methods import Everything, Hift, Method
from ringtune.schedule.plan import Plan
from tests.support.moves import slices_of
from tests.support.plans import changed, make_plan
from tests.support.profiles import node

GPU, BOARD = "cuda NVIDIA T4 sm_75, torch 2.11.0+cu130", "cpu aarch64 NEON, torch 2.11.0"
RING = make_plan((("a", 0, 2), ("b", 2, 4)), ("a", "b"), microbatches=2)
STAGE = changed(RING, slices=slices_of((("a", 0, 4, 1), ("b", 0, 4, 1))))


def facts_of(plan: Plan, **classes: str) -> dict[str, NodeFacts]:
    """Facts of a plan's nodes, each of a class."""
    return {name: dataclasses.replace(node(plan, name), numerics=classes[name]) for name in plan.nodes}


@pytest.mark.parametrize(
    ("plan", "method", "says"),
    [
        (RING, Everything(), ""),
        (RING, Hift(), "embedding and head"),
        (STAGE, Everything(), "blocks [0, 4)"),
    ],
)
@pytest.mark.parametrize("second", [GPU, BOARD, ""])
def test_only_copies_need_one_class(plan: Plan, method: Method, says: str, second: str) -> None:
    """HiFT's owners and hosts of one stage: unlike ones are refused with both classes; a mixed ring is none of it."""
    plan = changed(plan, method=method)
    facts = facts_of(plan, a=GPU, b=second)
    if not says or second == GPU:
        refuse_unlike_copies(plan, facts)
        return
    with pytest.raises(PlanError) as caught:
        refuse_unlike_copies(plan, facts)
    for part in (f"a ({GPU})", f"b ({second or 'cpu'})", f"copies of {says}", "--device cpu"):
        assert part in str(caught.value)


def test_node_that_tells_no_class_has_that_of_its_device() -> None:
    """Profiles of earlier versions have none: all processors are taken for alike, as they were."""
    facts = facts_of(STAGE, a="", b="")
    assert {numeric_class(one) for one in facts.values()} == {"cpu"}
    refuse_unlike_copies(STAGE, facts)
