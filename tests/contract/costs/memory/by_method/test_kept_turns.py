"""What nodes keep of the ends of turns, against sums written out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from ringtune.costs.memory.estimate import node_memory
from ringtune.schedule.changing_hands.copy_holders import copied_from, copy_holder
from ringtune.schedule.plan import Plan
from tests.support.model_facts import small_model
from tests.support.moves import slices_of
from tests.support.plans import changed, make_plan

MODEL = small_model()
FILES = 4  # three turns, and one that is being made or is coming
BLOCK, HEAD = 3 * 10, 3 * (300 + 2 * 50)  # weights and two moments


def kept(plan: Plan, node: str) -> int:
    """Bytes."""
    return node_memory(plan, node, MODEL, optimizer="adamw", activation_token_bytes=7).parts()["kept"]


def ring(**more: object) -> Plan:
    """Three hosts of which a owns rows; the lowest block does not train in so few steps."""
    plan = make_plan(
        [("a", 0, 1), ("b", 1, 3), ("c", 3, 4)],
        ["a"],
        **{"num_steps": 6, "every_steps": 2, **more},  # type: ignore[arg-type]
    )
    return changed(plan, copies=True)


def test_hosts_keep_what_they_train_and_copies_of_the_host_before_them() -> None:
    """Block 0 does not train, and a keeps its head."""
    plan = ring()
    assert kept(plan, "a") == FILES * (0 + 1) * BLOCK + FILES * HEAD
    assert kept(plan, "b") == FILES * (2 + 0) * BLOCK
    assert kept(plan, "c") == FILES * (1 + 2) * BLOCK


@pytest.mark.parametrize("changes", [{"copies": False}, {"num_steps": 0}])
def test_nothing_is_kept_without_copies_or_without_steps(changes: dict[str, object]) -> None:
    """Neither own turns nor copies."""
    plan = changed(ring(), **changes)
    assert [kept(plan, node) for node in "abc"] == [0, 0, 0]


def test_replicas_are_copies_of_one_another() -> None:
    """Nobody keeps b for d; a has c's."""
    plan = changed(ring(), slices=slices_of((("a", 0, 1), ("b", 1, 3, 1), ("d", 1, 3, 1), ("c", 3, 4))))
    assert [copy_holder(plan.placement, node) for node in "abcd"] == ["b", "", "a", ""]
    assert copied_from(plan.placement, "a") == ("c",)
    assert kept(plan, "d") == FILES * 2 * BLOCK


def test_host_of_all_blocks_has_nobody_to_keep_a_copy() -> None:
    """It keeps its own turns."""
    plan = changed(ring(every_steps=1), slices=slices_of((("b", 0, 4),)))
    assert kept(plan, "b") == FILES * 4 * BLOCK
    assert kept(plan, "a") == FILES * HEAD


def test_frozen_placement_is_the_same_without_copies() -> None:
    """The flag is the only difference, and it is in the file of the plan."""
    plan = ring()
    assert Plan.from_json(plan.to_json()) == plan
    without = changed(plan, copies=False)
    assert "copies" not in without.placement.to_json()
    assert dataclasses.replace(without.placement, copies=True) == plan.placement
