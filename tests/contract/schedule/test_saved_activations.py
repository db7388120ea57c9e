"""What VeLoRA's record and ranges of blocks refuse, and that they survive JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from ringtune.errors import PlanError
from ringtune.schedule.plan import Plan
from ringtune.schedule.saved_activations import Velora, num_subtokens, subtoken_size
from ringtune.schedule.units import Range
from tests.support.cases import cases
from tests.support.plans import changed, make_plan

DOWN = Velora(blocks=(Range(0, 1), Range(2, 4)), layers=("down",))


def test_velora_and_recompute_survive_json() -> None:
    """A plan with both reads as it was written."""
    plan = changed(make_plan([("a", 0, 4)], ["a"]), velora=DOWN, recompute=(Range(0, 1), Range(3, 4)))
    written = json.loads(json.dumps(plan.to_json()))
    assert Plan.from_json(written) == plan
    assert written["course"]["velora"]["blocks"] == [[0, 1], [2, 4]]
    assert written["placements"][0]["recompute"] == [[0, 1], [3, 4]]


@cases(
    ("values", "problem"),
    [
        ({"layers": ("dwon",)}, "velora.layers has 'dwon'; did you mean 'down'?"),
        ({"layers": ()}, "velora.layers is empty; name some of query, key"),
        ({"layers": ("down", "down")}, "velora.layers names a layer twice: down, down"),
        ({"layers": ("value", "down")}, "velora.layers has value without query, key: the three read one tensor"),
        ({"layers": ("gate",)}, "velora.layers has gate without up"),
        ({"blocks": ()}, "velora.blocks is empty"),
        ({"blocks": (Range(2, 2),)}, r"velora.blocks has \[2, 2\); ranges are not empty, ascending and apart"),
        ({"blocks": (Range(0, 2), Range(1, 3))}, r"velora.blocks has \[1, 3\); ranges are .* apart, from 2 on"),
    ],
)
def test_velora_refuses_what_it_can_not_be(values: dict[str, Any], problem: str) -> None:
    """One line names the value and what it has to be."""
    with pytest.raises(PlanError, match=problem):
        dataclasses.replace(DOWN, **values)


def test_course_refuses_a_velora_that_does_not_fit() -> None:
    """Blocks that there are not, and more parts than values are named with both numbers."""
    plan = make_plan([("a", 0, 4)], ["a"])
    with pytest.raises(PlanError, match=r"velora.blocks has \[3, 5\), but there are 4 blocks"):
        changed(plan, velora=dataclasses.replace(DOWN, blocks=(Range(3, 5),)))
    width = plan.course.hidden_size
    with pytest.raises(PlanError, match=f"velora.parts is {width + 1}, but a token has {width} values"):
        changed(plan, velora=dataclasses.replace(DOWN, parts=width + 1))


def test_placement_refuses_to_recompute_what_it_does_not_have() -> None:
    """A range has to be of blocks that there are."""
    plan = make_plan([("a", 0, 4)], ["a"])
    with pytest.raises(PlanError, match=r"recompute has \[2, 6\), but there are 4 blocks"):
        changed(plan, recompute=(Range(2, 6),))
    with pytest.raises(PlanError, match=r"recompute has \[1, 2\); ranges are"):
        changed(plan, recompute=(Range(0, 2), Range(1, 2)))


@cases(
    ("inputs", "parts", "size", "count"),
    [(768, 32, 24, 32), (100, 32, 4, 25), (95, 32, 3, 32), (90, 32, 3, 30), (32, 32, 1, 32), (7, 1, 7, 1)],
)
def test_subtokens_cover_all_inputs(inputs: int, parts: int, size: int, count: int) -> None:
    """The last sub-token may have zeros behind its values, but none is empty."""
    assert (subtoken_size(inputs, parts), num_subtokens(inputs, parts)) == (size, count)
    assert (count - 1) * size < inputs <= count * size
