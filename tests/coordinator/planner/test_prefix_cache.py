"""The planner's part in the prefix cache: where it saves work and there is room, else without and with the reason."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from coordinator.planner.given_plan import GivenPlan, accept_plan
from coordinator.planner.make_plan import keep_plan, make_plan
from coordinator.planner.planned import Planned
from ringtune.costs.profile import NodeFacts
from ringtune.errors import PlanError, StorageError
from ringtune.job.job import Job, parse_job
from ringtune.schedule.placement import ActivationCacheSettings
from ringtune.schedule.plan import Plan
from ringtune.techniques.activation_cache import cache_lines, max_kept_bytes
from tests.support.planner_rings import MIB, QUICK, device


def wanted(changes: Mapping[str, Any] = MappingProxyType({})) -> Job:
    """Twelve blocks, of which the upper two train, two owners of 320 rows, two passes; with a cache."""
    values = {"cache.prefix": "auto", "train.epochs": 2, "train.checkpoint_every": 0}
    return parse_job('[model]\npath = "models/x"\n', source="test").with_overrides({**values, **changes})


def facts(**changes: Any) -> dict[str, NodeFacts]:
    """Two boards that own rows."""
    return {name: dataclasses.replace(device(name, num_blocks=12, rows=320), **changes) for name in ("a", "b")}


def planned(changes: Mapping[str, Any] = MappingProxyType({}), nodes: dict[str, NodeFacts] | None = None) -> Planned:
    """Plan without links, so that slices are even."""
    return make_plan(wanted(changes), nodes or facts(), effort=QUICK)


def test_plan_has_the_cache_that_the_job_asks_for_and_says_what_it_costs() -> None:
    """Limit and type are the placement's; of one node nothing leaves it."""
    found = planned({"cache.max_bytes": 512 * MIB, "cache.dtype": "bfloat16"})
    assert found.plan.placement.cache == ActivationCacheSettings(max_bytes=512 * MIB, dtype="bfloat16")
    assert "hidden states of others' rows on their disks" in found.note and "bfloat16 rounds them" in found.note
    (line,) = cache_lines(found.plan)
    assert "kept at b: " in line and "of the forwards of blocks" in line
    assert planned(nodes={"a": facts()["a"]}).note == ""
    exact = planned({"model.dtype": "float64"}).plan.placement.cache
    assert exact is not None and exact.dtype == "float64", "the very numbers are kept too"
    without = planned({"cache.prefix": "off"})
    assert (without.plan.placement.cache, without.note, cache_lines(without.plan)) == (None, "", [])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"train.epochs": 1}, "no batch comes again"),
        ({"train.method": "all"}, "no batch comes again"),
        ({"cache.max_bytes": 1000}, "raise cache.max_bytes"),
        ({"operations.policy": "two-stage", "operations.compute": 0.5}, "operation tables"),
    ],
)
def test_plan_goes_without_a_cache_where_it_would_save_nothing(changes: dict[str, Any], reason: str) -> None:
    """The note has the reason."""
    found = planned(changes)
    assert found.plan.placement.cache is None
    assert found.note.startswith("hidden states are not kept: ") and reason in found.note


def test_plan_goes_without_a_cache_where_a_disk_has_no_room() -> None:
    """With one byte less than everything takes the plan has none; a plan that has one is refused on such a disk."""
    whole = planned()
    needed = max_kept_bytes(whole.plan.course, whole.plan.placement, "a")
    assert planned(nodes=facts(state_free_bytes=needed)).plan == whole.plan
    short = facts(state_free_bytes=needed - 1)
    found = planned(nodes=short)
    assert found.plan.placement.cache is None and "of hidden states) but" in found.note
    with pytest.raises(StorageError, match=r"of hidden states\) but .* lower cache\.max_bytes"):
        keep_plan(wanted(), whole.plan, short)


def test_plan_file_has_the_cache_and_old_ones_have_none() -> None:
    """What is written is read; a plan without has its old digest."""
    plan = planned().plan
    value = plan.to_json()
    assert Plan.from_json(value) == plan
    assert value["placements"][0]["cache"] == {"max_bytes": 1 << 30, "dtype": "float32"}
    assert "cache" not in planned({"cache.prefix": "off"}).plan.to_json()["placements"][0]
    bad = {**plan.placement.to_json(), "cache": {"dtype": "int8"}}
    with pytest.raises(PlanError, match="dtype = 'int8'"):
        type(plan.placement).from_json(bad)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"cache.prefix": "off"}, "the job says cache.prefix = 'off'"),
        ({"cache.dtype": "bfloat16"}, "1,024 MiB of float32 at most; the job says 1,024 MiB of bfloat16 at most"),
        ({"cache.max_bytes": 1 << 20}, "the job says 1.0 MiB of float32 at most"),
    ],
)
def test_given_plan_keeps_nothing_that_the_job_does_not_ask_for(changes: dict[str, Any], says: str) -> None:
    """Hosts have hidden states of others' rows only where the job says so, and no more of them."""
    given = GivenPlan(plan=planned().plan)
    assert accept_plan(given, wanted(), facts()).plan == given.plan
    with pytest.raises(PlanError, match=re.escape(says)):
        accept_plan(given, wanted(changes), facts())
