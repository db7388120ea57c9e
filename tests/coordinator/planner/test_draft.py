"""The draft of a job: the order of owners' turns, and how frozen weights are held."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from coordinator.planner.draft import initiator_order
from coordinator.planner.explain import explain, explanation_text
from coordinator.planner.given_plan import GivenPlan, accept_plan
from coordinator.planner.make_plan import check_inputs, make_plan
from coordinator.planner.planned import Planned
from coordinator.run.planning import FirstInspectionDone
from coordinator.screen.plan_text import plan_text
from ringtune.costs.profile import NodeFacts, Profile, TimedShape
from ringtune.errors import CapacityError, PlanError
from ringtune.schedule.course import FrozenWeights
from tests.coordinator.run.test_planning import looked
from tests.support.fake_agents import MODEL, NO_TIMES, facts, job


def test_initiators_follow_the_best_links() -> None:
    """From the start of the shortest round on, always the best link to who has not had its turn."""
    seconds = {frozenset("ac"): 3.0, frozenset("bc"): 1.0, frozenset("ab"): 5.0}
    far = 10.0

    def hand_over_s(source: str, target: str) -> float:
        return seconds.get(frozenset((source, target)), far)

    assert initiator_order(["d", "c", "a", "b"], hand_over_s) == ("a", "c", "b", "d")


def test_initiators_may_go_one_way_only() -> None:
    """Links are directed: the round goes where they are good."""
    good = {("a", "c"), ("c", "b"), ("b", "a")}
    assert initiator_order(["a", "b", "c"], lambda *pair: 1.0 if pair in good else 2.0) == ("a", "c", "b")


def test_initiators_without_links_come_by_name() -> None:
    """Names decide without links, among two, and among equals."""
    assert initiator_order(["c", "a", "b"], None) == ("a", "b", "c")
    assert initiator_order(["b", "a"], lambda *pair: 1.0) == ("a", "b")
    assert initiator_order(["c", "a", "b"], lambda *pair: 1.0) == ("a", "b", "c")


BF16, INT8 = FrozenWeights(dtype="bfloat16"), FrozenWeights(dtype="int8")
LARGE = dataclasses.replace(
    MODEL,
    block_bytes=4_000_000,
    block_matrix_params=990_000,
    block_matrix_rows=1_000,
    largest_matrix_params=10_000,
)


def nodes(memory_bytes: int = 1 << 30, **changes: Any) -> dict[str, NodeFacts]:
    """Two nodes with blocks of 4 MB in float32."""
    return {name: facts(name, memory_bytes=memory_bytes, model=LARGE, **{**NO_TIMES, **changes}) for name in "ab"}


def planned(wish: str, memory_bytes: int = 1 << 30, **changes: Any) -> Planned:
    """The plan of a job with this wish."""
    return make_plan(job(runtime__frozen=wish), nodes(memory_bytes, **changes))


def min_bytes(wish: str) -> int:
    """What the fuller of the two nodes needs."""
    return max(planned(wish).memory_bytes.values())


@pytest.mark.parametrize(("wish", "frozen"), [("float32", None), ("bfloat16", BF16), ("int8", INT8), ("auto", None)])
def test_plan_holds_frozen_weights_as_the_job_says(wish: str, frozen: FrozenWeights | None) -> None:
    """With room for all, ``auto`` rounds nothing."""
    assert planned(wish).plan.course.frozen == frozen


@pytest.mark.parametrize(("fast", "native"), [("ab", True), ("a", False), ("", False)])
def test_plan_multiplies_natively_only_where_every_node_does(fast: str, native: bool) -> None:
    """One node that widens lets all widen: no result depends on who hosts what."""
    members = {name: dataclasses.replace(each, fast_bfloat16=name in fast) for name, each in nodes().items()}
    course = make_plan(job(runtime__frozen="bfloat16"), members).plan.course
    assert course.frozen == FrozenWeights(dtype="bfloat16", native=native)


@pytest.mark.parametrize(("fits", "frozen"), [("float32", None), ("bfloat16", BF16), ("int8", INT8)])
def test_auto_takes_the_first_type_that_fits(fits: str, frozen: FrozenWeights | None) -> None:
    """On nodes that have just enough for one type, it is taken; ``--explain`` says what the larger ones lack."""
    found = planned("auto", min_bytes(fits))
    assert found.plan.course.frozen == frozen
    assert found.choice is not None
    lines = explanation_text(explain(found.choice, relative=True))
    told = [line for line in lines if line.startswith("  frozen weights in")]
    assert len(told) == 1
    if frozen is None:
        assert told == ["  frozen weights in float32: they fit unrounded"]
    else:
        assert told[0].startswith(f"  frozen weights in {frozen}: in float32 node ")
        assert "needs" in told[0] and "but has" in told[0]
        assert ("in bfloat16 widened node" in told[0]) is (frozen == INT8)


def test_explanation_says_nothing_of_a_type_that_was_given() -> None:
    """Only what was chosen has a reason."""
    choice = planned("bfloat16").choice
    assert choice is not None
    assert explain(choice, relative=True).frozen == ""


def test_auto_that_fits_with_no_type_is_refused_with_the_smallest() -> None:
    """Both numbers are those of int8."""
    with pytest.raises(CapacityError) as smallest:
        planned("int8", 100_000)
    with pytest.raises(CapacityError) as refused:
        planned("auto", 100_000)
    assert str(refused.value) == str(smallest.value)


def test_nodes_are_timed_as_the_plan_will_hold_frozen_weights() -> None:
    """The look before the measurement settles the type."""
    room = min_bytes("bfloat16")
    assert looked(job(runtime__frozen="auto"), nodes(room)) == FirstInspectionDone(None, BF16)
    assert looked(job(runtime__frozen="auto"), nodes()) == FirstInspectionDone(None, None)


def test_plan_says_how_frozen_weights_are_held() -> None:
    """One line, and none where they are as computed."""
    found = {wish: planned(wish) for wish in ("float32", "int8")}
    lines = {
        wish: [line for line in plan_text(each.plan, each.memory, num_steps=0, measured=False) if "frozen" in line]
        for wish, each in found.items()
    }
    assert lines == {
        "float32": [],
        "int8": ["frozen weights in int8, a scale for each row, widened to float32 a matrix at a time"],
    }


def test_given_plan_with_another_type_is_refused() -> None:
    """The job's type is kept; ``auto`` takes what the plan has."""
    given = GivenPlan(plan=planned("bfloat16").plan)
    for wish in ("bfloat16", "auto"):
        assert accept_plan(given, job(runtime__frozen=wish), nodes()).plan == given.plan
    with pytest.raises(PlanError, match=r"the plan has frozen = bfloat16, the job says float32 \(runtime\.frozen\)"):
        accept_plan(given, job(), nodes())


def test_times_of_another_type_are_refused_or_called_rough() -> None:
    """Blocks in bfloat16 take other times; ``auto`` takes what it can and says so."""
    shape = TimedShape(rows=1, frozen="bfloat16 widened")
    given = Profile(nodes=tuple(nodes(shape=shape).values()))
    with pytest.raises(PlanError, match=r"with frozen weights in bfloat16 widened, the run has them in float32"):
        check_inputs(job(), given)
    assert "predicted times are rough" in make_plan(job(runtime__frozen="auto"), given.by_name).note
    assert "rough" not in make_plan(job(runtime__frozen="bfloat16"), given.by_name).note


def test_refusal_names_the_types_of_frozen_weights_that_would_fit() -> None:
    """Only those: where int8 alone would fit, bfloat16 is not named, and where none would, neither is."""
    least = {wish: min_bytes(wish) for wish in ("float32", "bfloat16", "int8")}
    with pytest.raises(CapacityError, match=r"runtime\.frozen = 'bfloat16' or runtime\.frozen = 'int8' would fit; or "):
        planned("float32", least["bfloat16"])
    with pytest.raises(CapacityError, match=r"runtime\.frozen = 'int8' would fit; or ") as refused:
        planned("bfloat16", least["int8"])
    assert "'bfloat16'" not in str(refused.value)
    with pytest.raises(CapacityError) as refused:
        planned("float32", least["int8"] // 2)
    assert "would fit" not in str(refused.value)
