"""Tests of ``ringtune.schedule.plan``: plan, plan digest."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtune.errors import PlanError
from ringtune.schedule.course import FROZEN_DTYPES, Course, FrozenWeights, Generation, Offload
from ringtune.schedule.methods import Everything, Hift, PipeAdapter, RingAda, method_class
from ringtune.schedule.methods.base import Patience
from ringtune.schedule.operation_tables import BatchOperations, BlockCapacity, Choice, Operations
from ringtune.schedule.placement import ActivationCacheSettings, Helper, Placement, Rack, Slice
from ringtune.schedule.plan import SCHEMA, Plan
from ringtune.schedule.run_shape import DroppedOwner, Owner
from ringtune.schedule.saved_activations import Velora
from ringtune.schedule.units import Range
from ringtune.storage.strict import json_digest
from tests.support.cases import cases
from tests.support.plans import changed, make_plan, random_plan

SLICES = [("a", 0, 2), ("b", 2, 4)]


def test_plan_nodes_are_hosts_in_ring_order_then_other_owners() -> None:
    """An owner that hosts nothing comes after the ring."""
    plan = make_plan([("b", 0, 2), ("a", 2, 4)], ["c", "a"])
    assert plan.nodes == ("b", "a", "c")


@given(batch=st.integers(1, 64), parts=st.integers(1, 64), rows=st.integers(1, 64))
def test_plan_microbatches_cover_every_batch(batch: int, parts: int, rows: int) -> None:
    """Sizes add up, differ by one at most, descend, and none is empty."""
    plan = make_plan(SLICES, ["a"], batch_size=batch, microbatches=min(parts, batch))
    rows = min(rows, batch)
    sizes = plan.course.microbatch_sizes(rows)
    assert sum(sizes) == rows
    assert min(sizes) >= max(1, max(sizes) - 1)
    assert list(sizes) == sorted(sizes, reverse=True)
    assert len(sizes) == min(plan.course.microbatches, rows)


@cases("changes", [{}, {"unfreeze": "at"}, {"unfreeze": "auto", "method": "all"}])
def test_plan_that_settles_unfreezing_refuses_decisions_of_a_turn(changes: dict[str, Any]) -> None:
    """A turn can't overrule the plan."""
    plan = make_plan(SLICES, ["a"], **changes)
    with pytest.raises(PlanError) as caught:
        plan.decided((4,))
    name = plan.course.method.name
    assert str(caught.value) == f"a turn says that more is trained from steps [4] on, but {name} decides nothing"


@cases(
    ("slices", "message"),
    [
        ([("a", 0, 2), ("b", 3, 4)], "gap before block 3 of node b: expected block 2"),
        ([("a", 0, 2), ("b", 1, 4)], "overlap before block 1 of node b: expected block 2"),
        ([("a", 1, 2), ("b", 2, 4)], "gap before block 1 of node a: expected block 0"),
        ([("a", 0, 2), ("b", 2, 3)], "blocks [3, 4) have no host"),
        ([("a", 0, 2), ("b", 2, 6)], "node b hosts [2, 6), the model has 4 blocks"),
        ([("a", 0, 2), ("b", 2, 1)], "node b has the reversed range [2, 1)"),
        ([("a", 0, 2), ("a", 2, 4)], "every slice needs a node of its own, with a name; these have ['a', 'a']"),
        ([], "blocks [0, 4) have no host"),
    ],
)
def test_plan_refuses_slices_that_do_not_cover_the_model(slices: list[tuple[str, int, int]], message: str) -> None:
    """Each block has one host, in ring order."""
    with pytest.raises(PlanError) as caught:
        make_plan(slices, ["a"])
    assert str(caught.value) == message


@cases(
    ("field", "value", "message"),
    [
        ("microbatches", 5, "5 micro-batches do not fit a batch of 4 rows"),
        ("frozen_blocks", 4, "frozen_blocks is 4, it has to be in [0, 4)"),
        ("owners", (), "owners have to be at least one, named and distinct, not []"),
        ("owners", (Owner(node="a", train_rows=0),), "owner a has no rows"),
        ("owners", (Owner(node="a", train_rows=1, eval_rows=-1),), "owner a has -1 evaluation rows"),
        ("owners", (Owner(node="a", train_rows=1), Owner(node="a", train_rows=2)), "distinct, not ['a', 'a']"),
        ("method", PipeAdapter(hosts_above=(1, 1)), "hosts_above of pipeadapter has [1, 1] for 4 blocks"),
        ("method", PipeAdapter(hosts_above=(1, 1, 1, 0)), "hosts_above of pipeadapter has [1, 1, 1, 0] for 4 blocks"),
    ],
)
def test_plan_refuses_values_out_of_range(field: str, value: object, message: str) -> None:
    """A plan that breaks a rule does not exist."""
    with pytest.raises(PlanError) as caught:
        changed(make_plan(SLICES, ["a"]), **{field: value})
    assert message in str(caught.value)


@cases(
    ("settings", "message"),
    [
        ({"every_steps": -1}, "every_steps is -1, it has to be at least 1"),
        ({"every_steps": 3, "at": (3,)}, "every_steps, at and auto each say when blocks are unfrozen; keep one"),
        ({"every_steps": 0, "at": (3,), "auto": Patience()}, "every_steps, at and auto each say"),
        ({"every_steps": 3, "auto": Patience()}, "every_steps, at and auto each say"),
    ],
)
def test_method_refuses_more_than_one_form(settings: dict[str, Any], message: str) -> None:
    """One of three forms says when blocks are unfrozen."""
    with pytest.raises(PlanError) as caught:
        RingAda(**settings)
    assert message in str(caught.value)


def test_method_that_there_is_not_is_refused() -> None:
    """All of them are named."""
    with pytest.raises(PlanError) as caught:
        method_class("magic")
    assert str(caught.value) == "method = 'magic' is not one of all, hift, pipeadapter, ringada, single"


def test_plan_refuses_private_blocks_that_train() -> None:
    """What each owner runs itself is the same for all owners to the end."""
    plan = make_plan([("a", 1, 4)], ["a"], private_blocks=1)
    with pytest.raises(PlanError, match="private_blocks is 1, but only the lowest 0 blocks never train"):
        changed(plan, private_blocks=1, frozen_blocks=0)


def test_plan_refuses_slices_of_another_ring_where_the_result_depends_on_it() -> None:
    """PipeAdapter's numbers of items in flight are those of its hosts: a slice has one."""
    plan = make_plan(SLICES, ["a"], method="pipeadapter")
    assert plan.course.method == PipeAdapter(hosts_above=(2, 2, 1, 1))
    pieces = (Slice(node="a", start=0, stop=3), Slice(node="b", start=3, stop=4))
    with pytest.raises(PlanError, match=r"the blocks \[0, 3\) of node a may have \[1, 2\] items in flight"):
        Plan(plan.course, (dataclasses.replace(plan.placement, slices=pieces),))
    assert Plan.of(plan.course, dataclasses.replace(plan.placement, slices=pieces)).course.method == PipeAdapter(
        hosts_above=(2, 2, 2, 1)
    )


@cases("steps", [(0,), (-1, 2), (2, 2), (3, 2)])
def test_plan_refuses_unfreezing_steps_out_of_order(steps: tuple[int, ...]) -> None:
    """The top block trains from step 0; each further one begins later than the one above it."""
    with pytest.raises(PlanError, match="above 0 and strictly increasing"):
        make_plan(SLICES, ["a"], unfreeze="at", unfreeze_at=steps)


def test_plan_refuses_more_unfreezing_steps_than_blocks() -> None:
    """A step at which nothing is left to unfreeze would be ignored; private blocks stay frozen."""
    make_plan(SLICES, ["a"], unfreeze="at", unfreeze_at=(1, 2, 3))
    with pytest.raises(PlanError, match="4 steps, but of 4 blocks no more than 3 can be, as the top one trains"):
        make_plan(SLICES, ["a"], unfreeze="at", unfreeze_at=(1, 2, 3, 4))
    with pytest.raises(PlanError, match="3 steps, but of 4 blocks, 1 of them frozen, no more than 2"):
        make_plan([("a", 1, 4)], ["a"], private_blocks=1, unfreeze="at", unfreeze_at=(1, 2, 3))


def _tamper(value: dict[str, Any], path: str, new: object) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(value))
    at: Any = copy
    *parents, last = path.split(".")
    for part in parents:
        at = at[int(part)] if isinstance(at, list) else at[part]
    at[last] = new
    return copy


@cases(
    ("path", "value", "message"),
    [
        ("course.seed", 7, "digest does not match"),
        ("course.owners.0.train_rows", 11, "digest does not match"),
        ("course.method.every_steps", 9, "digest does not match"),
        ("placements.0.credits", 5, "digest does not match"),
        ("digest", "0" * 64, "digest does not match"),
        ("course.digest", "0" * 64, "digest does not match"),
        ("placements.0.digest", "0" * 64, "digest does not match"),
        ("course.num_steps", "8", "num_steps has to be a whole number, but is the text '8'"),
        ("course.num_steps", 8.0, "num_steps has to be a whole number, but is the number 8.0"),
        ("course.labels", "ab", "labels has to be a list"),
        ("course.owners.0.rows", 3, "unknown key 'course.owners[0].rows'; did you mean 'eval_rows'?"),
        ("placements.0.slices.1.stop", None, "placements[0].slices[1].stop has to be a whole number, but is nothing"),
        ("course.num_step", 3, "unknown key 'course.num_step'; did you mean 'num_steps'?"),
        ("course.method", "ringada", "method has to be a table with a name"),
        ("course.method.name", "magic", "method = 'magic' is not one of"),
        ("course.method.every_step", 3, "unknown key 'method.every_step'; did you mean 'every_steps'?"),
        ("course.method.auto", "never", "method.auto has to be a table, but is the text 'never'"),
        ("course.operations", {"subnets": 1, "batches": 3}, "operations.batches has to be a list"),
        ("placements", 3, "the plan has no list of placements"),
        ("schema", 1, f"plan schema 1 is not {SCHEMA}; make it anew with 'ringtune plan'"),
    ],
)
def test_plan_that_was_tampered_with_is_refused(path: str, value: object, message: str) -> None:
    """Reading is strict, and the digest covers what reading cannot see."""
    written = make_plan(SLICES, ["a"]).to_json()
    with pytest.raises(PlanError) as caught:
        Plan.from_json(_tamper(written, path, value))
    assert message in str(caught.value)


@cases(
    "value",
    [
        [],
        "plan",
        None,
        {},
        {"schema": SCHEMA},
        {"schema": SCHEMA, "placements": []},
        {"schema": SCHEMA, "placements": [3], "course": 3},
        {"schema": [], "placements": [], "course": {}},
    ],
)
def test_plan_refuses_what_is_no_plan(value: Any) -> None:
    """Whatever arrives in place of a plan is an error of the tree."""
    with pytest.raises(PlanError):
        Plan.from_json(value)


@cases("seed", range(20))
def test_plan_of_any_shape_survives_json(seed: int) -> None:
    """Whatever the shape of the run, reading what was written gives an equal plan."""
    plan = random_plan(random.Random(seed), with_operations=seed % 2 > 0)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


OPERATIONS = Operations(batches=(BatchOperations(owner="a", batch_id=0, rows=("1131", "1211")),))
CHOICE = Choice(
    policy="two-stage", subnets=2, capacities=(BlockCapacity(full=3.0, forward_only=0.8, forward=0.4, backward=0.6),)
)
OTHER: dict[str, Any] = {
    "method": Everything(),
    "num_blocks": 5,
    "num_steps": 9,
    "local_iterations": 3,
    "batch_size": 5,
    "microbatches": 3,
    "max_length": 17,
    "hidden_size": 33,
    "eval_every": 1,
    "checkpoint_every": 1,
    "wire_dtype": "int8",
    "labels": ("neg",),
    "seed": 1,
    "frozen_blocks": 1,
    "operations": OPERATIONS,
    "choice": CHOICE,
    "frozen": FrozenWeights(dtype="int8"),
    "turns": "rows",
    "owners": (Owner(node="b", train_rows=10, eval_rows=3), Owner(node="a", train_rows=10, eval_rows=3)),
    "slices": (Slice(node="a", start=0, stop=1), Slice(node="b", start=1, stop=4)),
    "left_out": (DroppedOwner(owner=Owner(node="z", train_rows=4), at=1, turns=2),),
    "private_blocks": 1,
    "credits": 3,
    "placement_number": 1,
    "first_turn": 2,
    "velora": Velora(blocks=(Range(1, 3),), layers=("down",)),
    "recompute": (Range(1, 3),),
    "state_on_disk": True,
    "copies": True,
    "num_copies": 2,
    "racks": (Rack("a", "left"),),
    "helpers": (Helper(node="z", start=0, stop=2),),
    "offload": Offload(blocks=(Range(0, 2),), interval=2),
    "head_tokens": 1,
    "trims": True,
    "initial": "0" * 64,
    "packed": True,
    "generation": Generation(rows=1, max_new_tokens=2, at_once=1),
    "compute": "bfloat16",
    "invertible": True,
    "entering": (40, 38, 36, 34, 32),
    "returning": (33, 32, 32, 32, 32),
    "cache": ActivationCacheSettings(),
}
FITTING: dict[str, Any] = {
    "offload": {"helpers": (Helper(node="z", start=0, stop=2),)},
    "entering": {"returning": (32,) * 5},
    "returning": {"entering": (40,) * 5},
    "num_blocks": {"slices": (Slice(node="a", start=0, stop=2), Slice(node="b", start=2, stop=5))},
    "private_blocks": {
        "slices": (Slice(node="a", start=1, stop=2), Slice(node="b", start=2, stop=4)),
        "frozen_blocks": 1,
    },
}
"""What has to change with a field."""


def _fields(*classes: Any) -> list[tuple[str, str]]:
    return [(cls.__name__, field.name) for cls in classes for field in dataclasses.fields(cls) if field.compare]


@cases(("part", "name"), _fields(Course, Placement))
def test_plan_digest_changes_with_every_field(part: str, name: str) -> None:
    """Two parties with equal digests agree on everything; those of equal courses agree on the result."""
    plan = make_plan(SLICES, ["a", "b"])
    if name in ("placement_number", "first_turn"):  # one goes with the other
        assert dataclasses.replace(plan.placement, **{name: OTHER[name]}).digest != plan.placement.digest
        return
    if name == "private_blocks":
        plan = changed(plan, frozen_blocks=1)
    other = changed(plan, **{name: OTHER[name]}, **FITTING.get(name, {}))
    assert other.digest != plan.digest
    assert (other.course.digest != plan.course.digest) == (part == "Course")
    changes_placement = part == "Placement" or name in ("num_blocks", "offload")
    assert (other.placement.digest != plan.placement.digest) == changes_placement


METHODS = (
    RingAda(every_steps=2),
    RingAda(every_steps=3),
    RingAda(every_steps=0),
    RingAda(every_steps=0, at=(3,)),
    RingAda(every_steps=0, at=(4,)),
    RingAda(every_steps=0, auto=Patience()),
    RingAda(every_steps=0, auto=Patience(patience_steps=21)),
    RingAda(every_steps=0, auto=Patience(min_improvement=0.0)),
    Everything(),
    PipeAdapter(hosts_above=(2, 2, 1, 1)),
    PipeAdapter(hosts_above=(2, 2, 2, 2)),
    Hift(),
    Hift(group_size=2),
    Hift(order="top2down"),
    Hift(order="random"),
    Hift(order="random", seed=1),
    Hift(always_active=("head",)),
    Hift(drops_state=True),
)


def test_plan_digest_changes_with_every_setting_of_a_method() -> None:
    """Whatever decides what trains when is part of the course."""
    course = make_plan(SLICES, ["a", "b"]).course
    digests = {dataclasses.replace(course, method=method).digest for method in METHODS}
    assert len(digests) == len(METHODS)
    for method in METHODS:
        value = dataclasses.replace(course, method=method)
        assert Course.from_json(json.loads(json.dumps(value.to_json()))) == value


def test_course_says_how_frozen_weights_are_held() -> None:
    """Type and products are part of the result; without them a course is written as before; a wrong type is named."""
    course = make_plan(SLICES, ["a", "b"]).course
    ways = [None, *(FrozenWeights(dtype=dtype, native=native) for dtype in FROZEN_DTYPES for native in (False, True))]
    courses = [dataclasses.replace(course, frozen=frozen) for frozen in ways]
    assert len({each.digest for each in courses}) == len(ways)
    assert [Course.from_json(json.loads(json.dumps(each.to_json()))) for each in courses] == courses
    assert "frozen" not in course.to_json()
    with pytest.raises(PlanError, match=r"frozen\.dtype = 'int4' is not one of bfloat16, int8, nf4"):
        Course.from_json({**course.to_json(), "frozen": {"dtype": "int4"}})


def test_plan_of_a_version_without_a_field_keeps_its_digest() -> None:
    """What came later is left out where it says nothing: a plan that was written before reads, with its digest."""
    plan = make_plan(SLICES, ["a", "b"])
    written = plan.to_json()
    assert not {"operations", "velora", "offload", "packed", "generation"} & written["course"].keys()
    assert not {"recompute", "helpers"} & written["placements"][0].keys()
    fields = {name: value for name, value in written["course"].items() if name != "digest"}
    assert json_digest(fields) == plan.course.digest
    assert Plan.from_json(json.loads(json.dumps(written))) == plan
    assert "operations" in changed(plan, operations=OPERATIONS).to_json()["course"]


def test_placement_number_keeps_digest_and_wire_of_its_former_key() -> None:
    """Version 0.2.0 wrote ``epoch`` for it, to files and nodes; the digest is what it gave this placement."""
    whole = Placement(slices=(Slice(node="a", start=0, stop=4),))
    plan = make_plan(SLICES, ["a", "b"]).extended(whole, first_turn=1)
    assert plan.placements[1].digest == "f597b75deed467d4e881d07ed464bdc0d56e2c43abf6bd1362673db8eb70dc0a"
    sent, written = json.loads(plan.to_wire()), json.loads(json.dumps(plan.to_json()))
    assert [(one["epoch"], "placement_number" in one) for one in sent["placements"]] == [(0, False), (1, False)]
    assert [(one["placement_number"], "epoch" in one) for one in written["placements"]] == [(0, False), (1, False)]
    assert Plan.from_json(sent) == Plan.from_json(written) == plan
    with pytest.raises(PlanError, match=r"unknown key 'placement.epoch'"):
        Placement.from_json({**whole.to_json(), "epoch": 0})


def test_plan_of_another_schema_is_refused() -> None:
    """What to do is said; 0.1 wrote none."""
    with pytest.raises(PlanError) as caught:
        Plan.from_json({"method": "ringada", "num_blocks": 4, "phases": [{"slices": []}], "digest": "0" * 64})
    assert str(caught.value) == (
        "plan schema None is not 2; make it anew with 'ringtune plan', or use the version that wrote it"
    )
