"""Turns and items: who begins when, with which batch, and where evaluation comes."""

from __future__ import annotations

import dataclasses
import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtune.schedule.course import Course
from ringtune.schedule.owner_turns import next_owner, turn_counts
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.turns import StartPoint, StepKind, Turn, hand_overs, holder_after, items, turn_sequence
from tests.support.plans import changed, make_plan, random_plan

RING = [("a", 0, 2), ("b", 2, 4)]


def with_rows(plan: Plan, *rows: int) -> Plan:
    """The plan whose owners have so many rows."""
    return changed(
        plan, owners=tuple(replace(owner, train_rows=own) for owner, own in zip(plan.course.owners, rows, strict=True))
    )


def _facts(turn: Turn) -> tuple[object, ...]:
    return turn.owner, turn.round, turn.first_step, turn.num_items, turn.first_batch


def _show(plan: Plan) -> list[str]:
    return [
        f"{turn.index:>2} r{turn.round} {turn.kind:<8} {turn.owner} seq [{turn.first_seq:>2},{turn.end_seq:>2}) "
        f"steps [{turn.first_step},{turn.end_step}) batch {turn.first_batch}"
        for turn in turn_sequence(plan.course)
    ]


def test_turns_go_round_and_evaluate_at_the_end() -> None:
    """Initiators take turns; every owner's stream goes on where it stopped; the end evaluates, head first."""
    plan = make_plan(RING, ["c", "a"], num_steps=7, local_iterations=2, eval_rows=5)
    assert _show(plan) == [
        " 0 r0 train    c seq [ 0, 2) steps [0,2) batch 0",
        " 1 r0 train    a seq [ 2, 4) steps [2,4) batch 0",
        " 2 r1 train    c seq [ 4, 6) steps [4,6) batch 2",
        " 3 r1 train    a seq [ 6, 7) steps [6,7) batch 2",
        " 4 r1 evaluate a seq [ 7, 9) steps [7,7) batch 0",
        " 5 r1 evaluate c seq [ 9,11) steps [7,7) batch 0",
    ]


def test_turns_evaluate_at_the_boundary_after_every_multiple() -> None:
    """``eval_every = 3`` with turns of 2 steps: after steps 4, 6 and at the end, never twice."""
    plan = make_plan(RING, ["a"], num_steps=9, local_iterations=2, eval_every=3, eval_rows=3)
    assert _show(plan) == [
        " 0 r0 train    a seq [ 0, 2) steps [0,2) batch 0",
        " 1 r1 train    a seq [ 2, 4) steps [2,4) batch 2",
        " 2 r1 evaluate a seq [ 4, 5) steps [4,4) batch 0",
        " 3 r2 train    a seq [ 5, 7) steps [4,6) batch 4",
        " 4 r2 evaluate a seq [ 7, 8) steps [6,6) batch 0",
        " 5 r3 train    a seq [ 8,10) steps [6,8) batch 6",
        " 6 r4 train    a seq [10,11) steps [8,9) batch 8",
        " 7 r4 evaluate a seq [11,12) steps [9,9) batch 0",
    ]


def test_turns_without_evaluation_rows_only_train() -> None:
    """An owner without evaluation rows has no evaluation turn."""
    plan = make_plan(RING, ["a", "b"], eval_rows=0, num_steps=4)
    assert {turn.kind for turn in turn_sequence(plan.course)} == {StepKind.TRAIN}


def test_turns_of_no_steps_are_one_evaluation() -> None:
    """A plan without steps evaluates once, every owner with rows."""
    plan = make_plan(RING, ["c", "a"], num_steps=0, eval_rows=5)
    assert _show(plan) == [
        " 0 r0 evaluate c seq [ 0, 2) steps [0,0) batch 0",
        " 1 r0 evaluate a seq [ 2, 4) steps [0,0) batch 0",
    ]


def test_turns_by_rows_are_this_table() -> None:
    """Rows 40, 20 and 10: four, two and one of seven turns, spread out; then the same again."""
    plan = make_plan(RING, ["a", "b", "c"], num_steps=27, local_iterations=2, eval_rows=0, turns="rows")
    plan = with_rows(plan, 40, 20, 10)
    turns = list(turn_sequence(plan.course))
    assert "".join(turn.owner for turn in turns) == "abacaba" * 2
    assert [turn.round for turn in turns] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3 + [4] * 2
    assert [turn.first_batch for turn in turns if turn.owner == "b"] == [0, 2, 4, 6]
    assert turns[-1].num_items == 1


@given(rows=st.lists(st.integers(1, 1000), min_size=1, max_size=6), num_turns=st.integers(0, 300))
def test_turns_by_rows_stay_near_each_owners_share(rows: list[int], num_turns: int) -> None:
    """At any time an owner has had its share of the turns, give or take about one; counted at once or one by one."""
    counts = [0] * len(rows)
    for _ in range(num_turns):
        counts[next_owner(rows, counts)] += 1
    assert turn_counts(rows, num_turns) == counts
    quotas = [num_turns * own / sum(rows) for own in rows]
    assert all(abs(count - quota) < 1 + len(rows) / 4 for count, quota in zip(counts, quotas, strict=True))
    assert turn_counts(rows, sum(rows)) == rows


def test_turns_by_rows_of_a_very_long_run_are_counted_at_once() -> None:
    """A run that goes on after 10^12 steps does not count them."""
    assert turn_counts([1, 2], 3 * 10**12) == [10**12, 2 * 10**12]


@pytest.mark.parametrize("turns", ["equal", "rows"])
@pytest.mark.parametrize("seed", range(20))
def test_turns_go_on_at_any_boundary_with_the_same_owners_and_batches(seed: int, turns: str) -> None:
    """From each step at which a train turn begins, the rest is that of the whole run; the head is where it was."""
    plan = changed(random_plan(random.Random(seed)), turns=turns)
    whole = [turn for turn in turn_sequence(plan.course) if turn.kind is StepKind.TRAIN]
    for at, turn in enumerate(whole[1:], start=1):
        assert holder_after(plan.course, turn.first_step) == whole[at - 1].owner
        start = StartPoint.of(plan.course, step=turn.first_step, holder=whole[at - 1].owner)
        rest = [turn for turn in turn_sequence(plan.course, start=start) if turn.kind is StepKind.TRAIN]
        assert list(map(_facts, rest)) == list(map(_facts, whole[at:]))


@pytest.mark.parametrize("seed", range(60))
def test_turns_count_steps_and_items_without_gaps(seed: int) -> None:
    """For any plan: indices, seqs and steps are consecutive, and each owner's batches are its own stream."""
    plan = random_plan(random.Random(seed))
    index = seq = step = 0
    batch = dict.fromkeys([owner.node for owner in plan.course.owners], 0)
    for turn in turn_sequence(plan.course):
        assert (turn.index, turn.first_seq, turn.first_step) == (index, seq, step)
        assert turn.num_items > 0
        if turn.kind is StepKind.TRAIN:
            assert turn.first_batch == batch[turn.owner]
            batch[turn.owner] += turn.num_items
        index, seq, step = index + 1, turn.end_seq, turn.end_step
    assert step == plan.course.num_steps
    assert sum(batch.values()) == plan.course.num_steps


def test_items_of_a_training_turn_are_full_batches() -> None:
    """Each item is one step with ``batch_size`` rows of the owner's next batch."""
    plan = make_plan(RING, ["a"], batch_size=4)
    turn = Turn(
        index=3, kind=StepKind.TRAIN, owner="a", round=1, first_seq=10, num_items=2, first_step=6, first_batch=4
    )
    expanded = [(item.seq, item.step, item.batch, item.rows, item.turn) for item in items(plan.course, turn)]
    assert expanded == [(10, 6, 4, 4, 3), (11, 7, 5, 4, 3)]


def test_items_of_an_owner_with_few_rows_are_all_its_rows() -> None:
    """No row twice in a batch."""
    plan = with_rows(make_plan(RING, ["a"], batch_size=4, eval_rows=0), 3)
    assert {item.rows for turn in turn_sequence(plan.course) for item in items(plan.course, turn)} == {3}


def test_items_of_an_evaluation_end_with_a_short_batch() -> None:
    """Evaluation does not advance the step, and passes every row once."""
    plan = make_plan(RING, ["a"], batch_size=4, eval_rows=9)
    turn = Turn(
        index=3, kind=StepKind.EVALUATE, owner="a", round=1, first_seq=10, num_items=3, first_step=6, first_batch=0
    )
    assert [(item.seq, item.step, item.batch, item.rows) for item in items(plan.course, turn)] == [
        (10, 6, 0, 4),
        (11, 6, 1, 4),
        (12, 6, 2, 1),
    ]


@pytest.mark.parametrize(
    ("kind", "backward", "update"),
    [
        (StepKind.TRAIN, True, True),
        (StepKind.EVALUATE, False, False),
        (StepKind.SCORE, True, False),
        (StepKind.MEASURE, True, False),
    ],
)
def test_step_kinds_say_what_flows(kind: StepKind, backward: bool, update: bool) -> None:
    """Only training changes weights; evaluation alone has no gradients."""
    assert (kind.has_backward, kind.has_update) == (backward, update)


def _walked(course: Course, start: StartPoint) -> set[tuple[str, str]]:
    """The hand-overs of a whole run, turn after turn."""
    owners = [start.holder, *(turn.owner for turn in turn_sequence(course, start=start))]
    return {(before, after) for before, after in itertools.pairwise(owners) if before != after}


@pytest.mark.parametrize("seed", range(40))
def test_hand_overs_are_those_of_the_turns(seed: int) -> None:
    """For any owners, evaluation rows, start and holder: none is missing, and without evaluations none is too many."""
    rng = random.Random(seed)
    names = [f"node-{index}" for index in range(rng.randint(1, 6))]
    course = make_plan(
        [(names[0], 0, 4)],
        names,
        num_steps=rng.randint(0, 30),
        local_iterations=rng.randint(1, 4),
        eval_every=rng.choice([0, 0, 5, 7]),
        checkpoint_every=rng.choice([0, 3]),
    ).course
    owners = tuple(
        dataclasses.replace(owner, eval_rows=rng.choice([0, 3]), train_rows=rng.choice([5, 10, 10, 30]))
        for owner in course.owners
    )
    course = dataclasses.replace(course, owners=owners, turns=rng.choice(["equal", "rows"]))
    steps = {0, course.num_steps, *range(0, course.num_steps, course.local_iterations)}
    for step, holder in itertools.product(sorted(steps), names if seed % 2 else names[:1]):
        start = StartPoint.of(course, step=step, holder=holder)
        found = hand_overs(course, start)
        assert _walked(course, start) <= found
        if not course.eval_every and not step and holder == StartPoint.of(course).holder:
            assert _walked(course, start) == found


def test_hand_overs_go_round_not_from_everyone_to_everyone() -> None:
    """128 owners: 128 hand-overs, 256 if evaluations come between; never 16,256."""
    names = [f"node-{index}" for index in range(128)]
    for eval_every, most in ((0, 2 * 128), (50, 3 * 128)):
        course = make_plan([("h", 0, 4)], names, num_steps=2560, local_iterations=10, eval_every=eval_every).course
        assert len(hand_overs(course, StartPoint.of(course))) <= most


def test_hand_overs_of_many_turns_are_found_without_making_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 owners whose turns by rows repeat after 2,426: every node asks for them before its first frame."""
    plan = make_plan([("h", 0, 4)], [f"node-{index}" for index in range(16)], num_steps=5000, eval_every=50)
    course = changed(with_rows(plan, 101, *range(141, 171, 2)), turns="rows").course
    monkeypatch.setattr("ringtune.schedule.turns.turns._next_turn", None)
    assert len(hand_overs(course, StartPoint.of(course))) <= 16 * 15
