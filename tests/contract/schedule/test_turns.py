"""Turns of a run: unfreezing, their order, boundaries, row use, and the rule that ends a run early."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtune.errors import PlanError
from ringtune.schedule.batches import BatchStream
from ringtune.schedule.course import Course
from ringtune.schedule.operation_tables import Choice, ScheduledTable
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import next_owner, owner_indices, turn_counts, weights
from ringtune.schedule.turns import (
    NONE_DONE,
    NOTHING_KNOWN,
    Evaluations,
    StartPoint,
    StepKind,
    Turn,
    Unfreezing,
    checkpoint_is_due,
    hand_overs,
    holder_after,
    items,
    next_checkpoint,
    row_uses,
    scores_are_due,
    table_is_due,
    turn_sequence,
)
from ringtune.schedule.versions import depth
from tests.support.cases import cases
from tests.support.choosing import make_choice, table_of
from tests.support.plans import changed, make_plan, random_plan, unfreezing_after

LOSSES = st.lists(st.floats(0, 10), max_size=40)


def auto_plan(
    num_owners: int = 1, *, num_blocks: int = 6, local_iterations: int = 10, patience_steps: int = 20, **changes: object
) -> Plan:
    """A long run with one host."""
    values: dict[str, object] = {"num_steps": 400, "unfreeze": "auto"} | changes
    return make_plan(
        [("a", 0, num_blocks)],
        [f"owner-{index}" for index in range(num_owners)],
        num_blocks=num_blocks,
        local_iterations=local_iterations,
        patience_steps=patience_steps,
        **values,  # type: ignore[arg-type]
    )


ROWS = st.lists(st.integers(1, 40), min_size=4, max_size=4)


def with_turns_by_rows(plan: Plan, rows: Sequence[int]) -> Plan:
    """The plan whose owners have so many rows, and as many turns."""
    owners = zip(plan.course.owners, rows, strict=False)
    return changed(plan, owners=tuple(dataclasses.replace(one, train_rows=own) for one, own in owners), turns="rows")


PLANS = st.builds(
    auto_plan,
    st.integers(1, 4),
    num_blocks=st.integers(2, 8),
    local_iterations=st.integers(1, 7),
    patience_steps=st.integers(1, 25),
    num_steps=st.integers(0, 200),
    min_improvement=st.sampled_from([0.0, 0.01, 0.5]),
).flatmap(lambda plan: st.one_of(st.just(plan), st.builds(with_turns_by_rows, st.just(plan), ROWS)))


def test_unfreezing_table_of_the_docstring() -> None:
    """Three owners, turns of 10 steps, a patience of 20, a loss that never improves."""
    plan = auto_plan(3)
    known = [unfreezing_after(plan.course, [1.0] * count) for count in range(1, 9)]
    assert [entry.waited_steps for entry in known] == [0, 0, 0, 10, 0, 0, 10, 0]
    assert known[-1].unfreeze_at == (60, 90)
    view = plan.decided(known[-1].unfreeze_at)
    assert [depth(view.course, turn * 10) for turn in range(10)] == [1, 1, 1, 1, 1, 1, 2, 2, 2, 3]


def by_rows(*rows: int, **changes: object) -> Course:
    """The course of owners with so many rows, whose turns go by rows."""
    return with_turns_by_rows(auto_plan(len(rows), **changes), rows).course  # type: ignore[arg-type]


def losses_of(course: Course, first: Sequence[float], fall: Callable[[int, int], float]) -> list[float]:
    """The losses of all turns: an owner's first loss times what ``fall`` says of the turn and of its own turn."""
    order = owner_indices(weights(course.owners, course.turns), 0)
    counts, found = [0] * len(first), []
    for turn in range(course.num_steps // course.local_iterations):
        owner = next(order)
        found.append(first[owner] * fall(turn, counts[owner]))
        counts[owner] += 1
    return found


@cases("first", [(1.0, 0.5, 0.5), (0.5, 1.0, 1.0)])
@cases("fall", [lambda turn, _: 0.97**turn, lambda _, own: 0.97**own])
def test_unfreezing_by_rows_is_not_fooled_by_who_had_the_last_turns(
    first: tuple[float, ...], fall: Callable[[int, int], float]
) -> None:
    """The owner of most rows has four turns before the others have one; every loss falls by 3 percent a turn."""
    course = by_rows(800, 100, 100, num_steps=600)
    assert unfreezing_after(course, losses_of(course, first, fall)).unfreeze_at == ()
    plateau = unfreezing_after(course, losses_of(course, first, lambda turn, own: 1.0))
    assert len(plateau.unfreeze_at) == 5


def test_unfreezing_of_a_diverged_run_goes_on() -> None:
    """A loss that is no number is no improvement, and what is known stays a number that JSON has."""
    found = unfreezing_after(auto_plan().course, [1.0, math.nan, math.inf, math.nan])
    assert found.unfreeze_at == (40,)
    assert all(math.isfinite(value) for value in (*found.recent, found.best or 0.0))


def test_unfreezing_comes_where_a_loss_improves_too_little_and_stops_at_private_blocks() -> None:
    """Half a percent a turn beats the best loss by one percent only every third turn; a patience of 20 steps is two."""
    found = unfreezing_after(auto_plan().course, [0.995**turn for turn in range(40)])
    assert found.unfreeze_at[0] == 40 and len(found.unfreeze_at) == 5
    private = changed(auto_plan(), slices=[("a", 4, 6)], private_blocks=4)
    assert unfreezing_after(private.course, [1.0] * 40).unfreeze_at == (40,)
    assert unfreezing_after(auto_plan(num_steps=40).course, [1.0] * 4).unfreeze_at == (), "the run ends before"
    with pytest.raises(PlanError, match="of another run"):  # this one has nothing to remember
        found.check(make_plan([("a", 0, 4)], ["a"]).course, 4)


@settings(max_examples=40)
@given(PLANS, LOSSES, LOSSES)
def test_unfreezing_decisions_are_only_ever_added(plan: Plan, losses: list[float], more: list[float]) -> None:
    """Later losses change no earlier decision, and each one holds two turns after the last loss that it rests on."""
    losses = losses[: -(-plan.course.num_steps // plan.course.local_iterations)]
    before, after = unfreezing_after(plan.course, losses), unfreezing_after(plan.course, losses + more)
    assert after.unfreeze_at[: len(before.unfreeze_at)] == before.unfreeze_at
    assert all(
        step >= (len(losses) + 2) * plan.course.local_iterations
        for step in after.unfreeze_at[len(before.unfreeze_at) :]
    )
    assert all(step <= (len(losses) + 1) * plan.course.local_iterations for step in before.unfreeze_at)
    plan.decided(after.unfreeze_at)


@settings(max_examples=40)
@given(PLANS, LOSSES)
def test_unfreezing_is_never_sooner_than_without_any_improvement(plan: Plan, losses: list[float]) -> None:
    """The plan that memory is checked for is the deepest at every step, and a constant loss gives it exactly.

    Exactly where turns are equal; by rows it may come later.
    """
    num_turns = -(-plan.course.num_steps // plan.course.local_iterations)
    soonest = plan.soonest()
    constant = plan.decided(unfreezing_after(plan.course, [1.0] * num_turns).unfreeze_at)
    assert constant == soonest or plan.course.turns == "rows"
    found = plan.decided(unfreezing_after(plan.course, losses[:num_turns]).unfreeze_at)
    assert all(depth(found.course, step) <= depth(soonest.course, step) for step in range(plan.course.num_steps))


@settings(max_examples=40)
@given(PLANS, LOSSES)
def test_unfreezing_fits_the_step_that_it_knows_of(plan: Plan, losses: list[float]) -> None:
    """What a checkpoint keeps is accepted at its own step alone."""
    losses = losses[: plan.course.num_steps // plan.course.local_iterations]
    step = len(losses) * plan.course.local_iterations
    known = unfreezing_after(plan.course, losses)
    known.check(plan.course, step)
    if step < plan.course.num_steps:
        with pytest.raises(PlanError, match="the checkpoint is of another run"):
            known.check(plan.course, min(plan.course.num_steps, step + plan.course.local_iterations))


@cases(
    "known",
    [
        NOTHING_KNOWN,
        Unfreezing(num_turns=2, recent=()),
        Unfreezing(num_turns=2, recent=(1.0,), best=1.0, unfreeze_at=(15,)),
        Unfreezing(num_turns=2, recent=(1.0,), best=1.0, unfreeze_at=(40, 30)),
    ],
)
def test_unfreezing_that_can_not_be_is_refused(known: Unfreezing) -> None:
    """A manifest of another run, or a damaged one."""
    with pytest.raises(PlanError):
        known.check(auto_plan().course, 20)


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


@settings(max_examples=40)
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


def test_checkpoints_are_at_the_boundary_after_every_multiple() -> None:
    """Every third step with turns of two: after steps 4, 6 and at the end, never twice."""
    course = make_plan(RING, ["a"], num_steps=9, local_iterations=2, checkpoint_every=3).course
    assert [step for step in (2, 4, 6, 8, 9) if checkpoint_is_due(course, step)] == [4, 6, 9]
    rows = [(0, 0, 4), (4, 0, 4), (4, 4, 6), (6, 4, 6), (6, 6, None), (8, 0, None)]  # none is new, or before the end
    assert [(step, after, next_checkpoint(course, step, after=after)) for step, after, _ in rows] == rows


def test_turns_by_rows_of_a_very_long_run_are_counted_at_once() -> None:
    """A run that goes on after 10^12 steps does not count them."""
    assert turn_counts([1, 2], 3 * 10**12) == [10**12, 2 * 10**12]


@cases("turns", ["equal", "rows"])
@cases("seed", range(10))
def test_turns_go_on_at_any_boundary_with_the_same_owners_and_batches(seed: int, turns: str) -> None:
    """From each step at which a train turn begins, the rest is that of the whole run; the head is where it was."""
    plan = changed(random_plan(random.Random(seed)), turns=turns)
    whole = [turn for turn in turn_sequence(plan.course) if turn.kind is StepKind.TRAIN]
    for at, turn in enumerate(whole[1:], start=1):
        assert holder_after(plan.course, turn.first_step) == whole[at - 1].owner
        start = StartPoint.of(plan.course, step=turn.first_step, holder=whole[at - 1].owner)
        rest = [turn for turn in turn_sequence(plan.course, start=start) if turn.kind is StepKind.TRAIN]
        assert list(map(_facts, rest)) == list(map(_facts, whole[at:]))


@cases("seed", range(25))
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


def _walked(course: Course, start: StartPoint) -> set[tuple[str, str]]:
    """The hand-overs of a whole run, turn after turn."""
    owners = [start.holder, *(turn.owner for turn in turn_sequence(course, start=start))]
    return {(before, after) for before, after in itertools.pairwise(owners) if before != after}


@cases("seed", range(20))
def test_hand_overs_are_those_of_the_turns(seed: int) -> None:
    """For any owners, evaluations, scores, start and holder: none is missing; without evaluations none too many."""
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
    choice = rng.choice([None, make_choice(refresh_steps=rng.choice([0, 2, 5]))])
    course = dataclasses.replace(course, owners=owners, turns=rng.choice(["equal", "rows"]), choice=choice)
    steps = {0, course.num_steps, *range(0, course.num_steps, course.local_iterations)}
    for step, holder in itertools.product(sorted(steps), names if seed % 2 else names[:1]):
        start = StartPoint.of(course, step=step, holder=holder)
        found = hand_overs(course, start)
        assert _walked(course, start) <= found
        if not course.eval_every and not choice and not step and holder == StartPoint.of(course).holder:
            assert _walked(course, start) == found


PLAN = changed(
    make_plan([("a", 0, 4)], ["a"], num_steps=60, local_iterations=10, checkpoint_every=20, eval_every=25),
    choice=make_choice(refresh_steps=16),
)


@cases(
    ("choice", "tables", "scores"),
    [
        (None, [], []),
        (make_choice(), [0], [0]),
        (make_choice("random"), [0], []),
        (make_choice("random", refresh_steps=30), [0, 30], []),
        (make_choice("magnitude", refresh_steps=31), [0, 40], [0, 40]),
        (make_choice(refresh_steps=100), [0], [0]),
    ],
)
def test_boundaries_tables_and_scores_of_a_choice(choice: Choice | None, tables: list[int], scores: list[int]) -> None:
    """A table is due at the start and where a multiple was passed; scores only for a policy that needs them."""
    course = changed(PLAN, choice=choice).course
    steps = range(0, 61, 10)
    assert [step for step in steps if table_is_due(course, step)] == tables
    assert [step for step in steps if scores_are_due(course, step)] == scores


def test_boundaries_given_tables_are_due_at_their_steps() -> None:
    """Nothing else says when a given table begins to hold."""
    tables = [ScheduledTable(step=step, operations=table_of(PLAN.course, step)) for step in (0, 30)]
    course = changed(PLAN, choice=Choice.given(tables)).course
    assert [step for step in range(0, 61, 10) if table_is_due(course, step)] == [0, 30]
    assert not any(scores_are_due(course, step) for step in range(0, 61, 10))


def test_boundaries_a_run_of_no_steps_chooses_nothing() -> None:
    """An evaluation alone needs no table."""
    course = changed(PLAN, num_steps=0).course
    assert [turn.kind.value for turn in turn_sequence(course)] == ["evaluate"]


def turns(start: StartPoint | None = None) -> list[tuple[str, str, int, int]]:
    """(kind, owner, step, items) of every turn of a small run."""
    plan = make_plan(
        [("a", 0, 4)], ["b", "a", "c"], num_steps=8, local_iterations=2, checkpoint_every=4, eval_every=4, eval_rows=3
    )
    course = changed(plan, choice=make_choice(refresh_steps=4)).course
    return [
        (turn.kind.value, turn.owner, turn.first_step, turn.num_items) for turn in turn_sequence(course, start=start)
    ]


def test_turns_with_scores_follow_the_head() -> None:
    """Scores come last at a boundary, from the owner on that trained last, wherever the run goes on; the sequence."""
    whole = [
        *[("score", owner, 0, 3) for owner in "bac"],
        ("train", "b", 0, 2),
        ("train", "a", 2, 2),
        ("checkpoint", "a", 4, 1),
        *[("evaluate", owner, 4, 1) for owner in "acb"],
        *[("score", owner, 4, 3) for owner in "acb"],
        ("train", "c", 4, 2),
        ("train", "b", 6, 2),
        ("checkpoint", "b", 8, 1),
        *[("evaluate", owner, 8, 1) for owner in "bac"],
    ]
    assert turns() == whole
    assert turns(StartPoint(step=4, holder="a")) == whole[6:]


def counted(plan: Plan) -> dict[str, Counter[int]]:
    """How often each row of each owner is in a batch, by walking through all turns."""
    course = plan.course
    found = {owner.node: Counter(dict.fromkeys(range(owner.train_rows), 0)) for owner in course.owners}
    for turn in turn_sequence(course):
        if turn.kind is StepKind.TRAIN:
            owner = course.owner(turn.owner)
            assert owner is not None
            stream = BatchStream(owner.train_rows, course.batch_size, course.seed, owner.node)
            for item in items(course, turn):
                assert len(stream.rows(item.batch)) == item.rows
                found[turn.owner].update(stream.rows(item.batch))
    return found


@cases("seed", range(30))
def test_row_use_is_what_all_turns_together_use(seed: int) -> None:
    """For any plan: steps, rows that are used at all, the least and the most used row."""
    rng = random.Random(seed)
    plan = changed(random_plan(rng), num_steps=rng.randint(1, 60), seed=seed)
    for use in row_uses(plan.course):
        counts = counted(plan)[use.owner]
        assert use.trained_rows == counts.total()
        assert use.used_rows == sum(count > 0 for count in counts.values())
        assert (use.least, use.most) == (min(counts.values()), max(counts.values()))


EVALUATED = st.lists(st.floats(0.0, 3.0) | st.just(math.nan), max_size=12)


def after(losses: Sequence[float]) -> list[Evaluations]:
    """What is known after each evaluation, one every 10 steps."""
    found = [NONE_DONE]
    for index, loss in enumerate(losses, start=1):
        found.append(found[-1].after(10 * index, loss))
    return found[1:]


@settings(max_examples=40)
@given(losses=EVALUATED, patience=st.integers(1, 4))
def test_early_stop_ends_where_counting_by_hand_does(losses: list[float], patience: int) -> None:
    """The first evaluation of which so many, itself the last, are all no better than the best before them."""

    def is_over(count: int) -> bool:
        if count < patience:
            return False
        before, last = losses[: count - patience], losses[count - patience : count]
        best = min((loss for loss in before if math.isfinite(loss)), default=math.inf)
        return not any(loss < best for loss in last)

    by_hand = next((count for count in range(1, len(losses) + 1) if is_over(count)), None)
    found = next((count for count, entry in enumerate(after(losses), start=1) if entry.stops_run(patience)), None)
    assert found == by_hand
