"""The digest and the written form of a plan: equal where the plan is, of any shape and version."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import pytest

from ringtune.errors import PlanError
from ringtune.files.digests import json_digest
from ringtune.schedule.course import Course
from ringtune.schedule.extent import LeftOut, Owner
from ringtune.schedule.frozen_weights import FROZEN_DTYPES, FrozenWeights
from ringtune.schedule.helping.helpers import Helper
from ringtune.schedule.helping.offload import Offload
from ringtune.schedule.methods import Everything, Hift, PipeAdapter, RingAda
from ringtune.schedule.methods.patience import Patience
from ringtune.schedule.operations.choice import BlockCapacity, Choice
from ringtune.schedule.operations.table import BatchOperations, Operations
from ringtune.schedule.passage import PrefixCache
from ringtune.schedule.placement import Placement, Slice
from ringtune.schedule.plan import Plan
from ringtune.schedule.saving import Velora
from ringtune.schedule.units import Range
from tests.support.plans import changed, make_plan, random_plan

SLICES = [("a", 0, 2), ("b", 2, 4)]


def test_plan_digest_is_that_of_the_written_form() -> None:
    """A plan keeps its digest through JSON text."""
    plan = make_plan(SLICES, ["c", "a"], private_blocks=0)
    text = json.dumps(plan.to_json())
    assert Plan.from_json(json.loads(text)) == plan
    assert Plan.from_json(json.loads(text)).digest == plan.digest
    assert len(plan.digest) == 64


@pytest.mark.parametrize("seed", range(40))
def test_plan_of_any_shape_survives_json(seed: int) -> None:
    """Whatever the shape of the run, reading what was written gives an equal plan."""
    plan = random_plan(random.Random(seed), with_operations=seed % 2 > 0)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


OPERATIONS = Operations(batches=(BatchOperations(owner="a", batch_id=0, rows=("1131", "1211")),))
CHOICE = Choice(
    policy="two-stage",
    subnets=2,
    capacities=(BlockCapacity(full=3.0, forward_only=0.8, forward=0.4, backward=0.6),),
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
    "left_out": (LeftOut(owner=Owner(node="z", train_rows=4), at=1, turns=2),),
    "private_blocks": 1,
    "credits": 3,
    "placement_number": 1,
    "first_turn": 2,
    "velora": Velora(blocks=(Range(1, 3),), layers=("down",)),
    "recompute": (Range(1, 3),),
    "state_on_disk": True,
    "copies": True,
    "helpers": (Helper(node="z", start=0, stop=2),),
    "offload": Offload(blocks=(Range(0, 2),), interval=2),
    "head_tokens": 1,
    "trims": True,
    "cache": PrefixCache(),
}
FITTING: dict[str, Any] = {
    "offload": {"helpers": (Helper(node="z", start=0, stop=2),)},
    "num_blocks": {"slices": (Slice(node="a", start=0, stop=2), Slice(node="b", start=2, stop=5))},
    "private_blocks": {
        "slices": (Slice(node="a", start=1, stop=2), Slice(node="b", start=2, stop=4)),
        "frozen_blocks": 1,
    },
}
"""What has to change with a field."""


def _fields(*classes: Any) -> list[tuple[str, str]]:
    return [(cls.__name__, field.name) for cls in classes for field in dataclasses.fields(cls) if field.compare]


@pytest.mark.parametrize(("part", "name"), _fields(Course, Placement))
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
    with pytest.raises(PlanError, match=r"frozen\.dtype = 'int4' is not one of bfloat16, int8"):
        Course.from_json({**course.to_json(), "frozen": {"dtype": "int4"}})


def test_plan_of_a_version_without_a_field_keeps_its_digest() -> None:
    """What came later is left out where it says nothing: a plan that was written before reads, with its digest."""
    plan = make_plan(SLICES, ["a", "b"])
    written = plan.to_json()
    assert not {"operations", "velora", "offload"} & written["course"].keys()
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
