"""What boards keep: copies of what others train, and hidden states; without room none, and the reason is told."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from coordinator.planner.draft import Draft
from coordinator.planner.explain import explain
from coordinator.planner.given_plan import GivenPlan, accept_plan
from coordinator.planner.make_plan import job_draft, keep_plan, make_plan
from coordinator.planner.memory import MemoryCaps
from coordinator.planner.planned import Planned, copies_line
from ringtune.costs.profile import LinkFacts, NodeFacts
from ringtune.errors import CapacityError, JobError, PlanError, StorageError
from ringtune.job.job import Job, parse_job
from ringtune.schedule.migration import copy_holders
from ringtune.schedule.placement import ActivationCacheSettings, Rack
from ringtune.techniques.activation_cache import cache_lines, max_kept_bytes
from ringtune.techniques.audit import AGAIN
from tests.support.planner_rings import MIB, QUICK, device


def wanted(**changes: Any) -> Job:
    """Twelve blocks that train by and by."""
    values = {name.replace("__", "."): value for name, value in changes.items()}
    values = {"train.checkpoint_every": 0, "train.max_steps": 480, **values}
    return parse_job('[model]\npath = "models/x"\n', source="test").with_overrides(values)


def facts(**changes: Any) -> dict[str, NodeFacts]:
    """Two boards, of which one owns rows."""
    found = {"a": device("a", num_blocks=12, rows=320), "b": device("b", num_blocks=12)}
    return {name: dataclasses.replace(node, **changes) for name, node in found.items()}


def planned(copies: str | int, nodes: dict[str, NodeFacts] | None = None, **changes: Any) -> Planned:
    """Plan without links, so that slices are even."""
    return make_plan(wanted(recovery__copies=copies, **changes), nodes or facts(), effort=QUICK)


def test_audited_plan_has_copies_and_room_for_the_work_that_is_repeated() -> None:
    """Two hosts of six blocks each: weights of the other one's, and sums and states of two turns."""
    found, without = planned("auto", audit__share=0.02), planned("next")
    assert found.plan.to_json() == without.plan.to_json() and found.plan.goes_back
    for node in "ab":
        more = {(term.part, term.what): term.total_bytes for term in found.memory[node].terms}
        before = {(term.part, term.what): term.total_bytes for term in without.memory[node].terms}
        assert more.items() >= before.items()
        assert more["weights", AGAIN] == before["weights", "frozen block"]
        sums = next(size for (_, what), size in more.items() if what == "sums of gradients of a block")
        assert sums == 2 * 10 * 4 * before["adapters", "adapter of a block"]  # turns, items, micro-batches
        tensor = more["buffers", "tensors of drawn micro-batches"] // (2 * 4)  # turns, in and out of blocks and owner
        own = sum(
            size for (_, what), size in more.items() if what == "tensors between own blocks and embedding or head"
        )
        assert own == 10 * 4 * {"a": tensor, "b": 2 * tensor // found.plan.course.max_length}[node]  # one token a row
    few = facts(memory_bytes=max(without.memory_bytes.values()))
    with pytest.raises(CapacityError):
        planned("auto", few, audit__share=0.02)


def test_audited_plan_has_room_for_the_work_of_helpers_that_is_repeated() -> None:
    """Two hosts fit each other's six blocks: what they hold of one another, states and sums of two turns."""
    values: dict[str, Any] = {"offload__mode": {"a": "b", "b": "a"}}
    found, without = planned("next", **values, audit__share=0.02), planned("next", **values)
    assert found.plan.to_json() == without.plan.to_json() and len(found.plan.placement.helpers) == 12
    for node in "ab":
        more = {(term.part, term.what): term for term in found.memory[node].terms}
        before = {(term.part, term.what): term.total_bytes for term in without.memory[node].terms}
        assert {what: term.total_bytes for what, term in more.items()}.items() >= before.items()
        for what, number in (
            ("states of a block that is fitted in two turns", 21 * 6),
            ("adapter that is held of a helper in two turns", 21 * 12),
            ("sums of gradients of a block that is fitted", 2 * 10 * 4 * 6),  # turns, items, micro-batches
        ):
            assert more["buffers", what].number == number, what
        assert more["adapters", "adapter of a helper, whose work is repeated"].number == 6
        assert ("buffers", "sums of gradients of a block") not in more


def test_numbered_copies_are_planned_on_other_racks_or_it_is_said() -> None:
    """Three boards: with two of them in one rack there is no place for two copies apart; memory counts both copies."""
    nodes = {**facts(), "c": device("c", num_blocks=12)}
    one, two = planned(1, nodes), planned(2, nodes)
    assert (one.plan.placement.num_copies, two.plan.placement.num_copies, two.note) == (1, 2, "")
    assert one.plan.placement.slices == two.plan.placement.slices and one.memory_bytes["b"] < two.memory_bytes["b"]
    nodes = {name: dataclasses.replace(node, rack="left" if name in "ab" else "") for name, node in nodes.items()}
    near = planned(2, nodes)
    assert near.plan.placement.racks == (Rack("a", "left"), Rack("b", "left"))
    assert "what node a, b, c trains has no 2 copies on racks of their own" in near.note
    with pytest.raises(JobError, match=r"recovery\.copies is 0, it has to be at least 1; or give 'none'"):
        wanted(recovery__copies=0)


@pytest.mark.parametrize("copies", ["next", "auto"])
def test_the_one_copy_is_on_another_rack_where_that_has_room(copies: str) -> None:
    """Two of three nodes share a machine: the third one keeps both copies; else the next host does."""

    def on(*racks: str, **changes: Any) -> dict[str, NodeFacts]:
        names = zip("abc", racks, strict=True)
        found = {name: dataclasses.replace(device(name, num_blocks=12, rows=32), rack=rack) for name, rack in names}
        return {**found, "c": dataclasses.replace(found["c"], **changes)}

    apart, near = planned(copies, on("x", "y", "z")), planned(copies, on("x", "x", "z"))
    assert [copy_holders(near.plan.placement, name) for name in "abc"] == [("c",), ("c",), ("a",)]
    for found in (apart, planned(copies, on("x", "x", "x"))):
        assert "racks" not in found.plan.placement.to_json() and found.plan.placement.copies
    full = on("x", "x", "z", memory_bytes=apart.memory_bytes["c"])
    given = accept_plan(GivenPlan(plan=apart.plan), wanted(recovery__copies=copies), full)
    assert given.plan == apart.plan and given.memory_bytes == apart.memory_bytes
    given = accept_plan(GivenPlan(plan=apart.plan), wanted(recovery__copies=copies), on("x", "x", "z"))
    assert given.plan.placement.racks == near.plan.placement.racks


def test_plan_has_copies_and_says_their_bytes() -> None:
    """They are in the memory that the plan reserves."""
    found, without = planned("auto"), planned("none")
    assert found.plan.placement.copies and not without.plan.placement.copies
    assert found.plan.placement.slices == without.plan.placement.slices
    assert all(found.memory_bytes[node] > without.memory_bytes[node] for node in "ab")
    (line,) = copies_line(found.plan, found.memory)
    assert "to continue without a lost one: a " in line and ", b " in line
    why = explain(found, relative=True)
    assert {node.node: node.needed_bytes for node in why.nodes} == found.memory_bytes
    assert (copies_line(without.plan, without.memory), without.note) == ([], "")


def test_plan_goes_without_copies_where_there_is_no_room_and_says_so() -> None:
    """Who insists on them gets a plan that takes less otherwise; one that is given is refused with both numbers."""
    least = max(planned("none").memory_bytes.values())
    found = planned("auto", facts(memory_bytes=least))
    assert not found.plan.placement.copies
    assert "no copies of trained blocks are kept" in found.note and "a turn at most: node" in found.note
    other = planned("next", facts(memory_bytes=least))
    assert other.plan.placement.copies and other.plan.placement.credits < found.plan.placement.credits
    with pytest.raises(CapacityError, match=r"node \w needs .* but has"):
        accept_plan(GivenPlan(plan=found.plan), wanted(recovery__copies="next"), facts(memory_bytes=least))


def test_method_that_trains_all_parameters_copies_its_checkpoints() -> None:
    """On the disks, so that memory stays as it is; ``auto`` goes without where there is no room."""
    small = {name: device(name, num_blocks=3, rows=320) for name in "ab"}
    full: dict[str, Any] = {"train__method": "hift", "train__checkpoint_every": 100}
    none = planned("auto", small, train__method="hift")
    assert not none.plan.placement.copies
    assert "no copies of checkpoints are kept, " in none.note and "checkpoint_every = 0, so there are none" in none.note
    with pytest.raises(PlanError, match=r"checkpoint_every = 0, so there are none; set recovery.copies = 'none'"):
        planned("next", small, train__method="hift")
    bare = planned("none", small, **full)
    assert not bare.plan.placement.copies and bare.note == ""
    copying = planned("next", small, **full)
    assert copying.plan.placement.copies and not copying.plan.goes_back
    assert copying.memory_bytes == bare.memory_bytes and copies_line(copying.plan, copying.memory) == []
    assert "at most, to the disk of the next host, so that the run can go back there" in copying.note
    assert (planned("auto", small, **full).plan, planned("auto", small, **full).note) == (copying.plan, copying.note)
    caps = MemoryCaps(Draft.of(bare.plan), small)
    room = {name: caps.disk_of(bare.plan, name).total_bytes for name in small}
    tight = {name: dataclasses.replace(one, state_free_bytes=room[name]) for name, one in small.items()}
    with pytest.raises(StorageError, match="are free there"):
        planned("next", tight, **full)
    full_disks = planned("auto", tight, **full)
    assert full_disks.plan == bare.plan and "are free there" in full_disks.note
    assert "the run can be resumed from checkpoints on the disks" in full_disks.note
    links = [LinkFacts(source=one, target=other, rate_bytes_per_s=1e9, latency_s=0.0) for one, other in ("ab", "ba")]
    job = wanted(recovery__copies="next", **full)
    told = re.search(r"blocks, ([\d.]+) KiB at most, .* in ([\d.]+) ms,", make_plan(job, small, links=links).note)
    assert told is not None and float(told[2]) == pytest.approx(float(told[1]) * 1024 / 1e6, rel=0.02)
    # There is nothing to say
    found = planned("auto", {"a": facts()["a"]})
    assert not found.plan.placement.copies and found.note == ""


def test_owner_without_blocks_is_searched_for_without_copies_of_others() -> None:
    """A host may have to copy all blocks but its own; whoever hosts nothing keeps its head alone."""
    job, nodes = wanted(recovery__copies="next"), facts()
    draft = job_draft(job, list(nodes.values()), nodes["a"].model)

    def kept(start: int, stop: int) -> int:
        caps = MemoryCaps(draft, nodes)
        return caps.estimate_of("a", start, stop, 0).parts()["kept"]

    assert 0 < kept(12, 12) < kept(11, 12) == kept(6, 12)


def test_given_plan_gets_the_copies_that_the_job_says() -> None:
    """No result depends on them."""
    for says, has, gets in [("next", "none", True), ("none", "next", False)]:
        given = GivenPlan(plan=planned(has).plan)
        found = accept_plan(given, wanted(recovery__copies=says), facts())
        assert found.plan.placement.copies is gets
        assert found.memory_bytes == planned(says).memory_bytes


def caching(changes: Mapping[str, Any] = MappingProxyType({})) -> Job:
    """Twelve blocks, of which the upper two train, two owners of 320 rows, two passes; with a cache."""
    values = {"cache.prefix": "auto", "train.epochs": 2, "train.checkpoint_every": 0}
    return parse_job('[model]\npath = "models/x"\n', source="test").with_overrides({**values, **changes})


def cache_facts(**changes: Any) -> dict[str, NodeFacts]:
    """Two boards that own rows."""
    return {name: dataclasses.replace(device(name, num_blocks=12, rows=320), **changes) for name in ("a", "b")}


def with_cache(changes: Mapping[str, Any] = MappingProxyType({}), nodes: dict[str, NodeFacts] | None = None) -> Planned:
    """Plan without links, so that slices are even."""
    return make_plan(caching(changes), nodes or cache_facts(), effort=QUICK)


def test_plan_has_the_cache_that_the_job_asks_for_and_says_what_it_costs() -> None:
    """Limit and type are the placement's; of one node nothing leaves it."""
    found = with_cache({"cache.max_bytes": 512 * MIB, "cache.dtype": "bfloat16"})
    assert found.plan.placement.cache == ActivationCacheSettings(max_bytes=512 * MIB, dtype="bfloat16")
    assert "hidden states of others' rows on their disks" in found.note and "bfloat16 rounds them" in found.note
    (line,) = cache_lines(found.plan)
    assert "kept at b: " in line and "of the forwards of blocks" in line
    assert with_cache(nodes={"a": cache_facts()["a"]}).note == ""
    exact = with_cache({"model.dtype": "float64"}).plan.placement.cache
    assert exact is not None and exact.dtype == "float64", "the very numbers are kept too"
    without = with_cache({"cache.prefix": "off"})
    assert (without.plan.placement.cache, without.note, cache_lines(without.plan)) == (None, "", [])


def test_plan_goes_without_a_cache_where_it_would_save_nothing() -> None:
    """The note has the reason."""
    rows: list[tuple[dict[str, Any], str]] = [
        ({"train.epochs": 1}, "no batch comes again"),
        ({"train.method": "all"}, "no batch comes again"),
        ({"cache.max_bytes": 1000}, "raise cache.max_bytes"),
        ({"operations.policy": "two-stage", "operations.compute": 0.5}, "operation tables"),
    ]
    for changes, reason in rows:
        found = with_cache(changes)
        assert found.plan.placement.cache is None
        assert found.note.startswith("hidden states are not kept: ") and reason in found.note


def test_plan_goes_without_a_cache_where_a_disk_has_no_room() -> None:
    """With one byte less than everything takes the plan has none; a plan that has one is refused on such a disk."""
    whole = with_cache()
    needed = max_kept_bytes(whole.plan.course, whole.plan.placement, "a")
    assert with_cache(nodes=cache_facts(state_free_bytes=needed)).plan == whole.plan
    short = cache_facts(state_free_bytes=needed - 1)
    found = with_cache(nodes=short)
    assert found.plan.placement.cache is None and "of hidden states) but" in found.note
    with pytest.raises(StorageError, match=r"of hidden states\) but .* lower cache\.max_bytes"):
        keep_plan(caching(), whole.plan, short)


def test_given_plan_keeps_nothing_that_the_job_does_not_ask_for() -> None:
    """Hosts have hidden states of others' rows only where the job says so, and no more of them."""
    rows: list[tuple[dict[str, Any], str]] = [
        ({"cache.prefix": "off"}, "the job says cache.prefix = 'off'"),
        ({"cache.dtype": "bfloat16"}, "1,024 MiB of float32 at most; the job says 1,024 MiB of bfloat16 at most"),
        ({"cache.max_bytes": 1 << 20}, "the job says 1.0 MiB of float32 at most"),
    ]
    for changes, says in rows:
        given = GivenPlan(plan=with_cache().plan)
        assert accept_plan(given, caching(), cache_facts()).plan == given.plan
        with pytest.raises(PlanError, match=re.escape(says)):
            accept_plan(given, caching(changes), cache_facts())
