"""Stages with several hosts: which host takes which micro-batch, what is refused, and what a plan file says."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ringtune.errors import IntegrityError, PlanError
from ringtune.schedule.methods import Hift, PipeAdapter
from ringtune.schedule.placement import Helper, Placement, Slice
from ringtune.schedule.plan import Plan
from ringtune.schedule.saved_activations import Velora
from ringtune.schedule.stages import hosts_of_lane, lane_of, lanes, num_assigned, num_lanes_of, replicas
from ringtune.schedule.turns import turn_sequence
from ringtune.schedule.units import Range
from ringtune.techniques.replicas import CopyComparison, CopyDigest, compared_at
from tests.support.cases import cases
from tests.support.plans import changed, make_plan


def slices(*pieces: tuple[str, int, int, int]) -> tuple[Slice, ...]:
    """Slices from (node, start, stop, share)."""
    return tuple(Slice(node=node, start=start, stop=stop, share=share) for node, start, stop, share in pieces)


TWO_STAGES = slices(("a", 0, 2, 2), ("b", 0, 2, 1), ("c", 2, 4, 1), ("d", 2, 4, 1))


def plan_of(pieces: tuple[Slice, ...] = TWO_STAGES, **changes: Any) -> Plan:
    """Four blocks, six micro-batches, everything trains."""
    values = {"microbatches": 6, "batch_size": 6, "method": "all", **changes}
    return changed(make_plan([("a", 0, 4)], ["o"], **values), slices=pieces)


def test_dealing_is_that_of_the_docstring() -> None:
    """Shares 2 and 1 below, 1 and 1 above: six micro-batches until it repeats, four lanes."""
    placement = Placement(slices=TWO_STAGES)
    ways = ["".join(piece.node for piece in hosts_of_lane(placement, lane_of(placement, micro))) for micro in range(7)]
    assert ways == ["ac", "bd", "ac", "ad", "bc", "ad", "ac"]
    assert [lane_of(placement, micro) for micro in range(7)] == [0, 1, 0, 3, 4, 3, 0]
    assert (num_lanes_of(placement), lanes(placement)) == (6, (0, 1, 3, 4))
    assert [num_assigned(placement, node, 6) for node in "abcd"] == [4, 2, 3, 3]
    assert replicas(placement, "d") == ("c", "d") and replicas(placement, "o") == ()


def test_placement_without_replicas_has_one_lane_and_its_old_form() -> None:
    """Plans of versions before read back, with equal digests: a share of 1 is not written."""
    placement = Placement(slices=slices(("a", 0, 2, 1), ("b", 2, 4, 1)))
    assert (num_lanes_of(placement), placement.has_replicas) == (1, False)
    assert placement.to_json()["slices"] == [{"node": "a", "start": 0, "stop": 2}, {"node": "b", "start": 2, "stop": 4}]
    assert Placement.from_json(placement.to_json()) == placement


def test_plan_with_replicas_reads_back() -> None:
    """With the shares, and another digest for others."""
    plan = plan_of()
    assert Plan.from_json(plan.to_json()) == plan
    other = plan_of((dataclasses.replace(TWO_STAGES[0], share=3), *TWO_STAGES[1:]))
    assert other.digest != plan.digest


@cases(
    ("pieces", "said"),
    [
        (slices(("a", 0, 2, 1), ("b", 1, 4, 1)), "overlap before block 1 of node b"),
        (slices(("a", 0, 2, 1), ("b", 0, 1, 1), ("c", 2, 4, 1)), "overlap before block 0 of node b"),
        (slices(("a", 0, 2, 1), ("b", 2, 4, 1), ("c", 0, 2, 1)), "overlap before block 0 of node c"),
        (slices(("a", 0, 2, 1), ("a", 0, 2, 1), ("b", 2, 4, 1)), "every slice needs a node of its own"),
        (slices(("a", 0, 4, 0), ("b", 0, 4, 1)), "the share of node a is 0, it has to be at least 1"),
        (slices(("a", 0, 2, 1), ("b", 3, 4, 1)), "gap before block 3"),
        (slices(("a", 0, 2, 1), ("b", 0, 2, 1)), r"blocks \[2, 4\) have no host"),
        (slices(("a", 0, 4, 4000), ("b", 0, 4, 999)), "repeat themselves after 4999 micro-batches"),
    ],
)
def test_stages_that_are_none_are_refused(pieces: tuple[Slice, ...], said: str) -> None:
    """Stages without hosts, replicas of other blocks, and shares that never repeat are named."""
    with pytest.raises(PlanError, match=said):
        plan_of(pieces)


@cases(
    ("changes", "said"),
    [
        ({"method": Hift()}, "hift trains all parameters"),
        ({"method": PipeAdapter()}, "pipeadapter keeps several versions"),
        ({"helpers": (Helper(node="z", start=0, stop=2),)}, "helpers fit adapters of one host"),
        ({"velora": Velora(blocks=(Range(0, 4),), layers=("adapter_down",), parts=4)}, "velora projects on vectors"),
    ],
)
def test_courses_that_have_no_replicas_name_their_reason(changes: dict[str, Any], said: str) -> None:
    """With the hosts and blocks, and what can be done."""
    with pytest.raises(
        PlanError, match=rf"nodes a, b host the same blocks \[0, 2\), but {said}.*give each other blocks"
    ):
        changed(plan_of(), **changes)


def test_digests_of_replicas_are_compared_at_the_end_of_each_turn() -> None:
    """Equal ones pass, other ones name the hosts and the step, and a host that owes none may give none."""
    plan = plan_of(num_steps=4, local_iterations=2, eval_rows=0)
    first = next(iter(turn_sequence(plan.course)))
    assert [compared_at(plan, first, node) for node in "oabcd"] == [{}, {0: 1}, {0: 1}, {2: 1}, {2: 1}]
    for digest_of_d, ends in (("same", True), ("other", False)):
        comparison = CopyComparison(plan)
        comparison.note("o", first, ())
        for node, unit in (("a", 0), ("b", 0), ("c", 2)):
            comparison.note(node, first, (CopyDigest(unit, "same"),))
        if ends:
            comparison.note("d", first, (CopyDigest(2, digest_of_d),))
            continue
        with pytest.raises(IntegrityError, match=r"blocks from 2 on differ after step 2 \(c: same; d: oth"):
            comparison.note("d", first, (CopyDigest(2, digest_of_d),))
