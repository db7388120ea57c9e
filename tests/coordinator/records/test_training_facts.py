"""What is told of the rows of a run that left an owner out."""

from __future__ import annotations

import dataclasses

from coordinator.records.training_facts import training_facts
from ringtune.schedule.whose_rows.leaving_out import without_owner
from tests.support.plans import make_plan


def test_owner_that_is_left_out_is_told_with_its_turns_and_compared_with_nobody() -> None:
    """Its rows count among all; that others had more turns is no advice to change the job."""
    course = make_plan([("a", 0, 4)], ["a", "b", "c"], num_steps=60, local_iterations=2).course
    found = training_facts(without_owner(course, "b", 4))
    assert found["left_out"] == ["b"]
    assert found["rows"] == 30 and found["rounds"] == 10
    assert {name: own["steps"] for name, own in found["owners"].items()} == {"a": 20, "c": 20, "b": 2}
    assert found["steps"] == 42
    assert "b is lost, and its rows are left out after 1 of its turns" in found["notes"]
    assert not any("times as often" in note for note in found["notes"])
    assert training_facts(course)["left_out"] == []
    by_rows = dataclasses.replace(course, turns="rows")
    assert training_facts(without_owner(by_rows, "b", 4))["steps"] == 42
