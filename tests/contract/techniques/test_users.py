"""Whose row is which, told from the course alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ringtune.errors import PlanError
from ringtune.schedule.batches import BatchStream
from ringtune.schedule.course import ALONE, COLLABORATION, JOINT, Course, HelperSettings
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import Owner, UserRows
from ringtune.schedule.turns import Item, StepKind, items, turn_sequence
from ringtune.techniques.offload import UserRowUse, helped, rows_by_user, rows_of_users, uses_of_users
from tests.support.cases import cases
from tests.support.plans import changed, make_plan

ANNA, BEN = UserRows(name="anna", train_rows=3, eval_rows=2), UserRows(name="ben", train_rows=7, eval_rows=1)
MIXED = Owner(node="a", train_rows=10, eval_rows=3, users=(ANNA, BEN))
PLAIN = Owner(node="b", train_rows=5, eval_rows=4)
HELPERS = {"a": "b", "b": "a"}


def _plan(**changes: Any) -> Plan:
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"], method="all", num_steps=12, eval_every=6)
    return changed(plan, **{"owners": (MIXED, PLAIN), **changes})


def _items(course: Course) -> list[Item]:
    return [item for turn in turn_sequence(course) for item in items(course, turn)]


def test_users_are_those_of_the_rows_and_otherwise_the_nodes() -> None:
    """Who has rows at several owners is one user."""
    assert _plan().course.users == ("anna", "ben", "b")
    also_ben = dataclasses.replace(PLAIN, users=(UserRows(name="ben", train_rows=5, eval_rows=4),))
    assert _plan(owners=(MIXED, also_ben)).course.users == ("anna", "ben")
    both = UserRows(name="ben", train_rows=7 + 5, eval_rows=1 + 4)
    assert rows_by_user(_plan(owners=(MIXED, also_ben)).course) == (ANNA, both)


def test_rows_of_users_are_those_of_the_batch_stream() -> None:
    """Every row of every item is of the user in whose range its index is; a batch mixes users."""
    plan, mixed = _plan(), 0
    stream = BatchStream(10, 4, plan.course.seed, "a")
    for item in _items(plan.course):
        own = stream.rows(item.batch) if item.kind is StepKind.TRAIN else range(item.batch * 4, 3)
        sizes, first = plan.course.microbatch_sizes(item.rows), 0
        for micro, size in enumerate(sizes):
            found = rows_of_users(plan.course, item, micro)
            if item.owner == "b":
                assert found == (("b", tuple(range(size))),)
                continue
            edge = 3 if item.kind is StepKind.TRAIN else 2
            names = ["anna" if row < edge else "ben" for row in own[first : first + size]]
            first += size
            assert {at: user for user, rows in found for at in rows} == dict(enumerate(names))
            assert [user for user, _ in found] == sorted(set(names))
            mixed += len(found) > 1
    assert mixed


def test_users_without_sets_of_their_own_train_the_same() -> None:
    """Sets are there where users train alone or in collaboration, and only where helpers fit every block."""
    plan = _plan()
    assert plan.course.user_sets == ()
    assert helped(plan, HELPERS, HelperSettings(interval=2)).course.user_sets == ()
    for manner in (HelperSettings(users=ALONE), HelperSettings(users=COLLABORATION, merged=True)):
        assert helped(plan, HELPERS, manner).course.user_sets == ("anna", "ben", "b")
    with pytest.raises(PlanError, match="block 2 has no helper"):
        helped(plan, {"a": "b"}, HelperSettings(users=ALONE))


def test_plan_with_users_survives_its_file() -> None:
    """Users are written where there are some, so that digests of plans without them last."""
    plan = helped(_plan(), HELPERS, HelperSettings(users=ALONE))
    assert Plan.from_json(plan.to_json()) == plan
    plain = _plan(owners=(PLAIN,)).course.to_json()
    assert plain["owners"] == [{"node": "b", "train_rows": 5, "eval_rows": 4}]


@cases(
    ("users", "problem"),
    [
        ((ANNA,), "have 3 training and 2 evaluation rows"),
        ((ANNA, dataclasses.replace(BEN, name="anna")), "distinct"),
        ((ANNA, dataclasses.replace(BEN, name="../x")), "user name '../x' is not allowed"),
        ((ANNA, BEN, UserRows(name="carl", train_rows=0)), "no rows"),
    ],
)
def test_owner_refuses_users_that_do_not_fit(users: tuple[UserRows, ...], problem: str) -> None:
    """Rows that nobody has, or that two have under one name, can't be told apart."""
    with pytest.raises(PlanError, match=problem):
        Owner(node="a", train_rows=10, eval_rows=3, users=users)


@cases(
    ("values", "problem"),
    [
        ({"users": "together"}, "not one of joint, alone, collaboration"),
        ({"users": ALONE, "merged": True}, "beside the matrix.*offload.merged = false"),
        ({"users": COLLABORATION}, "one matrix; set offload.merged = true"),
    ],
)
def test_manner_refuses_users_that_can_not_be_merged_so(values: dict[str, Any], problem: str) -> None:
    """One matrix has room for the sum of all users, and for no single one of them."""
    with pytest.raises(PlanError, match=problem):
        HelperSettings(**values)
    assert HelperSettings(users=JOINT).is_exact
    assert not HelperSettings(users=ALONE).is_exact


@cases("interval", [1, 3])
@cases("steps", [0, 5, 12])
def test_uses_of_users_are_counted_from_every_batch(interval: int, steps: int) -> None:
    """Who has no row in an interval is not updated by it; what is left over at the end is one more update."""
    owners = (MIXED, PLAIN)
    plan = helped(_plan(owners=owners, num_steps=12), HELPERS, HelperSettings(users=ALONE, interval=interval))
    course, rows, updates = plan.course, dict.fromkeys(("anna", "ben", "b"), 0), dict.fromkeys(("anna", "ben", "b"), 0)
    done = [item for item in _items(course) if item.kind is StepKind.TRAIN][:steps]
    for first in range(0, len(done), interval):
        part, seen = done[first : first + interval], set()
        for item in part:
            for micro in range(len(course.microbatch_sizes(item.rows))):
                for user, positions in rows_of_users(course, item, micro):
                    rows[user] += len(positions)
                    seen.add(user)
        if len(part) == interval or part[-1].step == course.num_steps - 1:
            for user in seen:
                updates[user] += 1
    found = uses_of_users(course, steps)
    assert found == {user: UserRowUse(rows[user], updates[user]) for user in rows}
    assert sum(use.trained_rows for use in found.values()) == sum(item.rows for item in done)


def test_uses_of_users_are_of_users_with_adapters_of_their_own() -> None:
    """Where all train the same there are none."""
    assert uses_of_users(_plan().course, 5) == {}
