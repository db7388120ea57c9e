"""Disks that are too small for the optimizer state and checkpoints of a run: other slices, or a refusal."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from coordinator.planner.make_plan import keep_plan, make_plan
from ringtune.costs.profile import NodeFacts
from ringtune.errors import StorageError
from ringtune.schedule.plan import Plan
from ringtune.techniques.offload import helpers_by_host
from tests.coordinator.planner.test_full_parameters import board, made, wanted
from tests.coordinator.planner.test_helper_needed import job_of, of_users
from tests.coordinator.planner.test_helpers import PAIRS
from tests.support.planner_rings import MIB

BLOCK = 2 * 7_097_856
COPIES = 2 * (47_677_440 + 591_360 + 2 * 1540)


def test_plan_of_state_without_room_on_the_disk_is_refused_with_both_numbers() -> None:
    """Twelve blocks and the copies need 255 MiB; the message has the node and what can be done."""
    node = board("a")
    job = wanted(hift__state="disk", train__checkpoint_every=0)
    enough = 12 * BLOCK + COPIES
    assert made(job, dataclasses.replace(node, state_free_bytes=enough)).plan
    with pytest.raises(StorageError) as refused:
        made(job, dataclasses.replace(node, state_free_bytes=200 * MIB))
    with pytest.raises(StorageError):
        made(job, dataclasses.replace(node, state_free_bytes=enough - 1))
    assert str(refused.value) == (
        "node a needs 255 MiB in its folder for state for blocks [0, 12) (255 MiB of optimizer state) but "
        "200 MiB are free there; make room, or start it with --state on another disk, or set hift.state = 'memory'"
    )
    assert made(wanted(train__checkpoint_every=0), dataclasses.replace(node, state_free_bytes=0)).plan


def test_plan_of_checkpoints_without_room_on_the_disk_is_refused() -> None:
    """State fits, three checkpoints beside it do not: to do without them is named, state in memory would not help."""
    node = dataclasses.replace(board("a"), state_free_bytes=300 * MIB)
    job = wanted(hift__state="disk", train__checkpoint_every=10)
    message = r"for embedding and head \(92\.1 MiB of optimizer state and 414 MiB of checkpoints\) but 300 MiB are free"
    with pytest.raises(StorageError, match=message) as refused:
        made(job, node)
    assert "checkpoint_every = 0" in str(refused.value)
    assert "hift.state = 'memory'" not in str(refused.value)


def test_plan_of_merged_adapters_without_room_on_the_disk_is_refused() -> None:
    """Their host keeps them in a file; beside the matrices they take no disk."""
    linear: dict[str, Any] = {"adapter__config": "linear", "train__checkpoint_every": 0}

    def planned(*, merged: bool, free_bytes: int) -> Plan:
        job = job_of(users="joint", mode={"a": "b"}, offload__merged=merged, **linear)
        nodes = of_users("a", "b", state_free_bytes=free_bytes)
        return make_plan(job, nodes).plan

    plan = planned(merged=True, free_bytes=1 << 40)
    needed = PAIRS.adapter_block_bytes * plan.slice_of("a").num_blocks
    assert needed and helpers_by_host(planned(merged=True, free_bytes=needed)) == {"a": "b"}
    assert helpers_by_host(planned(merged=False, free_bytes=0)) == {"a": "b"}
    with pytest.raises(
        StorageError, match=r"of merged adapters\) but .* are free there; .* set offload\.merged = false"
    ):
        keep_plan(
            job_of(users="joint", mode={"a": "b"}, offload__merged=True, **linear),
            plan,
            of_users("a", "b", state_free_bytes=needed - 1),
        )


@pytest.mark.parametrize("mode", ["auto", {"a": "b"}])
def test_plan_of_helpers_without_room_for_their_checkpoints_is_refused(mode: Any) -> None:
    """A matrix of each user's own with moments is no small file; whoever helps, no disk has room."""
    job = job_of(mode=mode, adapter__config="linear", train__checkpoint_every=1)
    with pytest.raises(StorageError, match=r"of checkpoints\) but .* are free there"):
        make_plan(job, of_users("a", "b", state_free_bytes=10))


def test_plan_gives_a_node_with_a_small_disk_fewer_blocks() -> None:
    """It is as fast as the other, but has room for the state of three blocks only."""
    small = dataclasses.replace(board("b", rows=0), state_free_bytes=3 * BLOCK)
    plan = made(wanted(hift__state="disk", train__checkpoint_every=0), board("a"), small).plan
    assert plan.slice_of("b").num_blocks <= 3
    assert made(wanted(train__checkpoint_every=0), board("a"), small).plan.slice_of("b").num_blocks > 3


def test_run_that_goes_on_needs_room_for_state_only() -> None:
    """Its checkpoints lie on the disk already."""
    job = wanted(hift__state="disk", train__checkpoint_every=10)
    plan = made(job, board("a")).plan
    keep_plan(job, plan, {"a": dataclasses.replace(board("a"), state_free_bytes=12 * BLOCK + COPIES)})
    with pytest.raises(StorageError, match=r"node a needs 255 MiB .* but 100 MiB are free"):
        keep_plan(job, plan, {"a": dataclasses.replace(board("a"), state_free_bytes=100 * MIB)})


def test_nodes_that_share_a_disk_share_its_room() -> None:
    """Each alone would fit; together they do not, and the refusal has both numbers. On two disks they fit."""
    job = wanted(hift__state="disk", train__checkpoint_every=0)

    def nodes(free_bytes: int, disks: str = "xx") -> dict[str, NodeFacts]:
        found = zip("ab", disks, strict=True)
        return {
            name: dataclasses.replace(board(name), state_free_bytes=free_bytes, state_disk=disk) for name, disk in found
        }

    assert made(job, *nodes(12 * BLOCK + 2 * COPIES).values()).plan.slice_of("b").num_blocks
    with pytest.raises(StorageError, match=r"a, b share a disk and together need 347 MiB .* but 330 MiB") as refused:
        made(job, *nodes(330 * MIB).values())
    assert str(refused.value).endswith("or set hift.state = 'memory'")
    for apart in ("xy", [""] * 2):
        assert made(job, *nodes(330 * MIB, apart).values()).plan  # type: ignore[arg-type]
