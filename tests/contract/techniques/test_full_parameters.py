"""Tests of ``ringtune.techniques.full_parameters``: hift settings, group owners."""

from __future__ import annotations

import pytest

from ringtune.errors import JobError
from ringtune.job.job import Job, parse_job
from ringtune.schedule.course import Course
from ringtune.schedule.methods import Everything, Hift
from ringtune.techniques.full_parameters import HiftSettings, check_group, lone_groups, mixing_iterations
from tests.support.cases import cases
from tests.support.plans import changed, make_plan

TEXT = "[model]\npath = 'm'\n[train]\nmethod = 'hift'\nseed = 7\n"


@cases(("state", "drops"), [("memory", False), ("disk", False), ("drop", True)])
def test_the_method_knows_of_the_state_only_whether_it_is_dropped(state: str, drops: bool) -> None:
    """Memory and disk train the same, so both make one and the same course."""
    job = parse_job(f"{TEXT}[hift]\nstate = '{state}'", source="job.toml")
    assert job.method == Hift(drops_state=drops)


def test_the_method_has_the_seed_of_a_random_order_only() -> None:
    """The orders that are not random train the same with every seed, so their courses are equal."""
    assert parse_job(f"{TEXT}[hift]\norder = 'random'", source="job.toml").method == Hift(order="random", seed=7)
    assert parse_job(f"{TEXT}[hift]\norder = 'top2down'", source="job.toml").method == Hift(order="top2down")


def test_units_that_are_always_active_have_one_order() -> None:
    """The list is a set: another order of its words is the same method."""
    job = parse_job(f"{TEXT}[hift]\nalways_active = ['head', 'embedding']", source="job.toml")
    assert job.method == Hift(always_active=("embedding", "head"))


def test_overrides_change_to_hift_and_back() -> None:
    """A default adapter makes way for the weights themselves, and comes back; the section goes with its method."""
    plain = Job.from_tables({"model": {"path": "m"}})
    changed = plain.with_overrides({"train.method": "hift", "hift.group_size": 3})
    assert (changed.adapter.config, changed.method) == ("full", Hift(group_size=3))
    back = changed.with_overrides({"train.method": "ringada"})
    assert (back.adapter.config, back.hift) == ("seq_bn", None)
    assert changed.with_overrides({"train.seed": 1}).adapter.config == "full"


def test_hift_group_has_at_most_the_units_that_take_turns() -> None:
    """Four blocks, embedding and head are six units; one that is always active takes no turn."""
    check_group(None, 4)
    check_group(HiftSettings(group_size=6), 4)
    check_group(HiftSettings(group_size=5, always_active=("head",)), 4)
    for settings, units in ((HiftSettings(group_size=7), 6), (HiftSettings(group_size=6, always_active=("head",)), 5)):
        with pytest.raises(JobError, match=f"hift.group_size is {settings.group_size}, but {units} units"):
            check_group(settings, 4)


def course(local_iterations: int, owners: tuple[str, ...] = ("a", "b"), group_size: int = 1) -> Course:
    """Four blocks, so six units."""
    method = Hift(group_size=group_size)
    return make_plan([("a", 0, 4)], owners, num_steps=60, local_iterations=local_iterations, method=method).course


def test_owners_whose_turns_keep_step_with_the_sweep_train_some_groups_only() -> None:
    """Six groups, two owners with turns of three steps: each has its own half for ever."""
    assert lone_groups(course(3)) == {"a": (0, 1, 2), "b": (3, 4, 5)}
    assert mixing_iterations(course(3)) == 4
    assert lone_groups(course(1)) == {"a": (0, 2, 4), "b": (1, 3, 5)}


@cases("local_iterations", [2, 4, 5, 7])
def test_owners_whose_turns_do_not_keep_step_train_all_groups(local_iterations: int) -> None:
    """After some sweeps every group has met every owner."""
    assert lone_groups(course(local_iterations)) == {}


def test_one_owner_and_one_group_are_never_apart() -> None:
    """Nothing can keep step with itself."""
    assert lone_groups(course(3, ("a",))) == {}
    assert lone_groups(course(3, group_size=6)) == {}
    assert lone_groups(changed(make_plan([("a", 0, 4)], ["a", "b"]), method=Everything()).course) == {}
