"""HiFT's groups, sweeps, counts of updates and learning rate, against the paper's queue written out."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from ringtune.errors import JobError, PlanError
from ringtune.schedule.course import Course
from ringtune.schedule.methods import Hift
from ringtune.schedule.run_shape import Extent, Owner
from ringtune.techniques.full_parameters import HiftSettings, check_group
from tests.support.cases import cases
from tests.support.fake_agents import job


def extent(num_blocks: int = 4, num_steps: int = 30) -> Extent:
    """A run of one owner."""
    return Extent(
        num_blocks=num_blocks, owners=(Owner(node="a", train_rows=8),), num_steps=num_steps, local_iterations=2
    )


def queue_of(method: Hift, num_blocks: int, num_steps: int) -> list[set[int]]:
    """The paper's queue: each step takes the group at its head and puts it at its tail."""
    always = {{"embedding": -1, "head": num_blocks}[name] for name in method.always_active}
    units = [unit for unit in range(-1, num_blocks + 1) if unit not in always]
    groups = []
    while units:
        groups.append(units[: method.group_size])
        units = units[method.group_size :]
    if method.order == "top2down":
        groups.reverse()
    queue = deque(groups)
    found = []
    for _ in range(num_steps):
        group = queue.popleft()
        queue.append(group)
        found.append(set(group) | always)
    return found


@cases("order", ["bottom2up", "top2down"])
@cases("always", [(), ("head",), ("embedding",), ("embedding", "head")])
@cases("group_size", [1, 2, 3, 4, 6, 9])
@cases("num_blocks", [1, 4, 5])
def test_a_step_trains_the_group_at_the_head_of_the_queue(
    num_blocks: int, group_size: int, always: tuple[str, ...], order: str
) -> None:
    """For sizes that divide the units and not; the number of groups is rounded up."""
    method, run = Hift(group_size=group_size, always_active=always, order=order), extent(num_blocks)
    expected = queue_of(method, num_blocks, run.num_steps)
    assert [set(method.trained(run, step)) for step in range(run.num_steps)] == expected
    assert len(method.groups(num_blocks)) == -(-(num_blocks + 2 - len(always)) // group_size)
    assert set(method.reach(run)) == set().union(*expected)


@cases("order", ["bottom2up", "top2down", "random"])
@cases("always", [(), ("head",), ("embedding", "head")])
@cases("group_size", [1, 2, 4])
def test_updates_are_the_steps_that_trained_the_unit(group_size: int, always: tuple[str, ...], order: str) -> None:
    """The closed form counts what the steps say, from before the first step on."""
    method, run = Hift(group_size=group_size, always_active=always, order=order, seed=3), extent()
    for unit in range(-1, 5):
        counts = [sum(unit in method.trained(run, before) for before in range(step)) for step in range(31)]
        assert [method.updates(run, unit, step) for step in range(31)] == counts
        assert method.updates(run, unit, -1) == 0


def test_a_random_order_is_shuffled_once_by_its_seed() -> None:
    """Every sweep has the same order, another seed another one; the groups themselves stay whole."""
    run = extent(num_blocks=10)
    orders = {seed: Hift(order="random", seed=seed, group_size=2).groups(10) for seed in range(8)}
    assert len(set(orders.values())) > 4
    for seed, groups in orders.items():
        method = Hift(order="random", seed=seed, group_size=2)
        assert sorted(tuple(group) for group in groups) == [(unit, unit + 1) for unit in range(-1, 10, 2)]
        assert [method.trained(run, step) for step in range(12)] == [*groups, *groups]


def test_the_learning_rate_advances_once_a_sweep() -> None:
    """Three groups and ten steps are four sweeps, the last one of a single step."""
    run, method = extent(num_blocks=4, num_steps=10), Hift(group_size=2)
    assert [method.rate_at(run, step) for step in range(10)] == [
        (0, 4), (0, 4), (0, 4), (1, 4), (1, 4), (1, 4), (2, 4), (2, 4), (2, 4), (3, 4)
    ]  # fmt: skip


def test_a_run_shorter_than_a_sweep_reaches_some_units_only() -> None:
    """What never trains needs no room for gradient and state."""
    assert set(Hift().reach(extent(num_steps=3))) == {-1, 0, 1}
    assert set(Hift(always_active=("head",)).reach(extent(num_steps=1))) == {-1, 4}


def course(**changes: Any) -> Course:
    """A course of HiFT with four blocks."""
    fields: dict[str, Any] = {
        "num_blocks": 4, "owners": (Owner(node="a", train_rows=8),), "num_steps": 9, "local_iterations": 3,
        "method": Hift(), "batch_size": 4, "microbatches": 2, "max_length": 8, "hidden_size": 4,
    }  # fmt: skip
    return Course(**{**fields, **changes})


def test_frozen_blocks_and_the_embedding_below_are_in_no_group() -> None:
    """An embedding that is always active is refused there. Nor is a unit active twice."""
    with pytest.raises(PlanError, match="always_active has a unit twice"):
        Hift(always_active=("head", "head"))
    with pytest.raises(PlanError, match=r"privacy\.private_blocks = 0"):
        course(method=Hift(always_active=("embedding",)), frozen_blocks=1)
    own = course(method=Hift(group_size=2), frozen_blocks=1)
    assert [set(units) for units in Hift(group_size=2).groups(own.num_blocks, 1)] == [
        set(range(first, min(first + 2, own.num_blocks + 1))) for first in range(1, own.num_blocks + 1, 2)
    ]
    assert own.trainable == own.method.reach(own) and not own.trainable.has_embedding
    with pytest.raises(JobError, match="below private blocks, which never train, the embedding does not either"):
        job().with_overrides({"train.method": "hift", "hift.always_active": ["embedding"], "privacy.private_blocks": 1})
    check_group(HiftSettings(group_size=4), 4, private_blocks=1)
    with pytest.raises(JobError, match="but 4 units take turns"):
        check_group(HiftSettings(group_size=5), 4, private_blocks=1)
