"""What adapters that users have of their own take: where they are kept, and where they travel."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ringtune.costs.kind_facts import KindFacts
from ringtune.costs.memory.estimate import memory_estimate
from ringtune.costs.memory.share import Share
from ringtune.costs.memory.sizes import Sizes
from ringtune.costs.offload.set_bytes import SetBytes, set_bytes
from ringtune.costs.offload.traffic import step_traffic
from ringtune.costs.profile import ModelFacts
from ringtune.schedule.course import Course
from ringtune.schedule.extent import Owner, UserRows
from ringtune.schedule.helped import helped
from ringtune.schedule.helping.helpers import Helper
from ringtune.schedule.helping.offload import ALONE, COLLABORATION, Manner
from ringtune.schedule.placement import Placement, Slice
from ringtune.schedule.plan import Plan
from ringtune.schedule.whose_rows.users import most_changed
from tests.support.plans import changed, make_plan
from tests.support.profiles import model_of, node

ONE = 1000
TOGETHER: Any = {"users": COLLABORATION, "merged": True}
PLACEMENT = Placement(
    slices=(Slice(node="a", start=0, stop=2), Slice(node="b", start=2, stop=4)),
    helpers=(Helper(node="b", start=0, stop=2), Helper(node="a", start=2, stop=4)),
)


def _owner(name: str, users: int) -> Owner:
    rows = tuple(UserRows(name=f"{name}{index}", train_rows=3) for index in range(users))
    return Owner(node=name, train_rows=3 * users, users=rows)


def _plan(counts: tuple[int, int] = (3, 6), **manner: Any) -> Plan:
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"], method="all", batch_size=4, num_steps=12, eval_rows=0)
    plan = changed(plan, owners=(_owner("a", counts[0]), _owner("b", counts[1])))
    return helped(plan, {"a": "b", "b": "a"}, Manner(**manner))


def _model(course: Course, *, block_bytes: int = 50 * ONE) -> ModelFacts:
    return dataclasses.replace(model_of(Plan.of(course, PLACEMENT)), adapter_block_bytes=ONE, block_bytes=block_bytes)


def _bytes(**manner: Any) -> SetBytes:
    course = _plan(**manner).course
    return set_bytes(course, _model(course))


@pytest.mark.parametrize(
    ("counts", "interval", "most"), [((3, 2), 1, 3), ((3, 6), 1, 4), ((3, 6), 2, 8), ((3, 6), 3, 9), ((1, 1), 2, 2)]
)
def test_update_changes_at_most_a_user_a_row(counts: tuple[int, int], interval: int, most: int) -> None:
    """A batch has four rows; over several steps all users may come."""
    assert most_changed(_plan(counts, users=ALONE, interval=interval).course) == most
    assert most_changed(_plan(counts, interval=interval).course) == 1


def test_sets_take_what_the_table_says() -> None:
    """One set for all, merged or not; nine users alone; in collaboration their sum goes back."""
    assert _bytes() == SetBytes(ONE, ONE, ONE, ONE)
    assert _bytes(merged=True) == SetBytes(0, ONE, ONE, ONE)
    assert _bytes(users=ALONE) == SetBytes(9 * ONE, 9 * ONE, 4 * ONE, 4 * ONE)
    assert _bytes(**TOGETHER) == SetBytes(0, 9 * ONE, 9 * ONE, 4 * ONE)


def test_sum_is_no_larger_than_the_block_or_of_linear_models_than_one() -> None:
    """However many users there are."""
    course = _plan(**TOGETHER).course
    assert set_bytes(course, _model(course, block_bytes=5 * ONE), adapter="lora[r=64]").sent == 5 * ONE
    assert set_bytes(course, _model(course), adapter="linear[alpha=2.0]").sent == ONE


def test_traffic_of_weights_is_that_of_the_sets_that_change() -> None:
    """Pairs are the same, whoever has adapters."""
    joint, alone = _plan(interval=1), _plan(users=ALONE)
    facts = dataclasses.replace(node(joint, "a"), model=_model(joint.course))
    traffic = [step_traffic(plan, plan.placement.helpers[0], facts) for plan in (joint, alone)]
    assert traffic[0][0] == traffic[1][0]
    assert [weights for _, weights in traffic] == [ONE, 4 * ONE]


@pytest.mark.parametrize(
    ("manner", "hosted", "held"),
    [({}, 2, 2), ({"merged": True}, 0, 2), ({"users": ALONE}, 18, 18), (TOGETHER, 0, 18)],
)
def test_memory_has_sets_where_they_are(manner: dict[str, Any], hosted: int, held: int) -> None:
    """Node a hosts two helped blocks, and fits two others."""
    plan = _plan(**manner)
    sizes = Sizes(plan.course, _model(plan.course), optimizer="adamw", dtype="float32", activation_token_bytes=10.0)
    terms = {term.what: term for term in memory_estimate(plan.course, Share.of(plan, "a"), sizes).terms}
    own, others = (
        terms.get("adapter of a block that a helper fits"),
        terms["adapter of a block that another node hosts"],
    )
    assert (own.total_bytes if own else 0) == hosted * ONE
    assert others.total_bytes == held * ONE
    moments = terms["gradient and moments of an adapter that is fitted for another node"]
    sets, changing = (9, 4) if manner.get("users") else (1, 1)
    assert moments.total_bytes == 2 * (changing * ONE + sets * 2 * ONE)


def _kind(*users: str, **sizes: float) -> KindFacts:
    values: dict[str, Any] = {
        "adapter_block_bytes": 7 * ONE,
        "adapter_block_factor_bytes": 70,
        "pair_token_bytes": 0,
        "pair_rounded_token_bytes": 0,
        "pair_projected_token_bytes": 0,
        "more_activation_token_bytes": 0.0,
    }
    return KindFacts(config="linear", users=users, **{**values, **sizes})


def test_sets_of_other_kinds_take_what_they_are() -> None:
    """Two of nine users have sets of seven times the size; the largest are taken to change."""
    for manner in ({"users": ALONE}, TOGETHER):
        course = _plan(**manner).course
        model = dataclasses.replace(_model(course), kinds=(_kind("a0", "b5", "zoe"),), beside_block_bytes=9 * ONE)
        alone = manner == {"users": ALONE}
        held, changing = 7 * ONE + 14 * ONE, 14 * ONE + 2 * ONE
        hosted, sent = (held, changing) if alone else (0, 9 * ONE)
        assert set_bytes(course, model) == SetBytes(hosted, held, sent, changing)


def test_optimizer_state_of_other_kinds_is_that_of_their_size() -> None:
    """Seven sets with two moments of 1,000 bytes, and two of 7,000."""
    plan = _plan(users=ALONE)
    model = dataclasses.replace(_model(plan.course), kinds=(_kind("a0", "b5"),))
    profile = dataclasses.replace(node(plan, "a"), model=model)
    assert Sizes.at(plan.course, profile, optimizer="adamw", dtype="float32").sets_state_bytes == 2 * (7 + 14) * ONE


def test_pairs_and_activations_are_those_of_the_largest_kind() -> None:
    """Nothing of a kind counts where all users train the same."""
    kind = _kind("a0", pair_token_bytes=10**6, more_activation_token_bytes=500.0)
    for users, more in ((ALONE, 500.0), ("joint", 0.0)):
        plan = _plan(users=users)
        course = plan.course
        model = dataclasses.replace(_model(course), kinds=(kind,))
        profile = dataclasses.replace(node(plan, "a"), model=model, activation_token_bytes=1000.0)
        sizes = Sizes.at(course, profile, optimizer="adamw", dtype="float32")
        assert sizes.kept_bytes(1) == 1000.0 + more
        assert sizes.sent_pair_bytes(1) == 10**6
