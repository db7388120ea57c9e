"""The planner's part in copies: where the run may move and there is room, else without and with the reason."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from coordinator.planner.draft import job_draft
from coordinator.planner.explain import explain
from coordinator.planner.given_plan import GivenPlan, accept_plan
from coordinator.planner.make_plan import make_plan
from coordinator.planner.memory import MemoryCaps
from coordinator.planner.planned import Planned, copies_line
from ringtune.costs.profile import NodeFacts
from ringtune.errors import CapacityError, PlanError
from ringtune.job.job import Job, parse_job
from tests.support.planner_rings import QUICK, device


def wanted(**changes: Any) -> Job:
    """Twelve blocks that train by and by."""
    values = {name.replace("__", "."): value for name, value in changes.items()}
    values = {"train.checkpoint_every": 0, "train.max_steps": 480, **values}
    return parse_job('[model]\npath = "models/x"\n', source="test").with_overrides(values)


def facts(**changes: Any) -> dict[str, NodeFacts]:
    """Two boards, of which one owns rows."""
    found = {"a": device("a", num_blocks=12, rows=320), "b": device("b", num_blocks=12)}
    return {name: dataclasses.replace(node, **changes) for name, node in found.items()}


def planned(copies: str, nodes: dict[str, NodeFacts] | None = None, **changes: Any) -> Planned:
    """Plan without links, so that slices are even."""
    return make_plan(wanted(recovery__copies=copies, **changes), nodes or facts(), effort=QUICK)


def test_plan_has_copies_and_says_their_bytes() -> None:
    """They are in the memory that the plan reserves."""
    found, without = planned("auto"), planned("none")
    assert found.plan.placement.copies and not without.plan.placement.copies
    assert found.plan.placement.slices == without.plan.placement.slices
    assert all(found.memory_bytes[node] > without.memory_bytes[node] for node in "ab")
    (line,) = copies_line(found.plan, found.memory)
    assert "to go on without a lost one: a " in line and ", b " in line
    why = explain(found.choice, relative=True, plan=found.plan, profile=found.profile) if found.choice else None
    assert why is not None and {node.node: node.needed_bytes for node in why.nodes} == found.memory_bytes
    assert (copies_line(without.plan, without.memory), without.note) == ([], "")


def test_plan_goes_without_copies_where_there_is_no_room_and_says_so() -> None:
    """Who insists on them gets a plan that takes less otherwise; one that is given is refused with both numbers."""
    least = max(planned("none").memory_bytes.values())
    found = planned("auto", facts(memory_bytes=least))
    assert not found.plan.placement.copies
    assert "no copies are kept of what hosts train" in found.note and "a turn at most: node" in found.note
    other = planned("next", facts(memory_bytes=least))
    assert other.plan.placement.copies and other.plan.placement.credits < found.plan.placement.credits
    with pytest.raises(CapacityError, match=r"node \w needs .* but has"):
        accept_plan(GivenPlan(plan=found.plan), wanted(recovery__copies="next"), facts(memory_bytes=least))


def test_method_that_trains_all_parameters_keeps_no_copies_and_says_what_they_would_be() -> None:
    """Its checkpoints are on the disks."""
    found = planned("auto", train__method="hift")
    assert not found.plan.placement.copies
    assert "hift trains all parameters" in found.note and "checkpoints on the disks" in found.note
    with pytest.raises(PlanError, match=r"set recovery.copies = 'none'"):
        planned("next", train__method="hift")


def test_one_host_has_nobody_to_keep_copies() -> None:
    """There is nothing to say."""
    found = planned("auto", {"a": facts()["a"]})
    assert not found.plan.placement.copies and found.note == ""


def test_owner_without_blocks_is_searched_for_without_copies_of_others() -> None:
    """A host may have to copy all blocks but its own; whoever hosts nothing keeps its head alone."""
    job, nodes = wanted(recovery__copies="next"), facts()
    draft = job_draft(job, list(nodes.values()), nodes["a"].model)

    def kept(start: int, stop: int) -> int:
        caps = MemoryCaps(draft, nodes, optimizer="adamw", dtype="float32")
        return caps.estimate_of("a", start, stop, 0).parts()["kept"]

    assert 0 < kept(12, 12) < kept(11, 12) == kept(6, 12)


@pytest.mark.parametrize(("says", "has", "gets"), [("next", "none", True), ("none", "next", False)])
def test_given_plan_gets_the_copies_that_the_job_says(says: str, has: str, gets: bool) -> None:
    """No result depends on them."""
    given = GivenPlan(plan=planned(has).plan)
    found = accept_plan(given, wanted(recovery__copies=says), facts())
    assert found.plan.placement.copies is gets
    assert found.memory_bytes == planned(says).memory_bytes
