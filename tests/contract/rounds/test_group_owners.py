"""Turns and sweeps that keep step: who never trains which group, and which turns mix them."""

from __future__ import annotations

import pytest

from ringtune.rounds.group_owners import lone_groups, mixing_iterations
from ringtune.schedule.course import Course
from ringtune.schedule.methods import Everything, Hift
from tests.support.plans import changed, make_plan


def course(local_iterations: int, owners: tuple[str, ...] = ("a", "b"), group_size: int = 1) -> Course:
    """Four blocks, so six units."""
    method = Hift(group_size=group_size)
    return make_plan([("a", 0, 4)], owners, num_steps=60, local_iterations=local_iterations, method=method).course


def test_owners_whose_turns_keep_step_with_the_sweep_train_some_groups_only() -> None:
    """Six groups, two owners with turns of three steps: each has its own half for ever."""
    assert lone_groups(course(3)) == {"a": (0, 1, 2), "b": (3, 4, 5)}
    assert mixing_iterations(course(3)) == 4
    assert lone_groups(course(1)) == {"a": (0, 2, 4), "b": (1, 3, 5)}


@pytest.mark.parametrize("local_iterations", [2, 4, 5, 7])
def test_owners_whose_turns_do_not_keep_step_train_all_groups(local_iterations: int) -> None:
    """After some sweeps every group has met every owner."""
    assert lone_groups(course(local_iterations)) == {}


def test_one_owner_and_one_group_are_never_apart() -> None:
    """Nothing can keep step with itself."""
    assert lone_groups(course(3, ("a",))) == {}
    assert lone_groups(course(3, group_size=6)) == {}
    assert lone_groups(changed(make_plan([("a", 0, 4)], ["a", "b"]), method=Everything()).course) == {}
