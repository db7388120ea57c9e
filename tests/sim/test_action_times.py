"""How long actions take: medians by kind of item and size, or recorded samples."""

from __future__ import annotations

import dataclasses

import pytest

from ringtune.costs.action_costs import CourseCosts
from ringtune.costs.profile import Work
from ringtune.errors import PlanError
from ringtune.schedule.actions import Action, Op
from ringtune.schedule.turns import StepKind, Turn, turn_sequence
from ringtune.schedule.units import EMBEDDING
from sim.ledger import Items
from sim.meter import ProfileTimes, RecordedTimes
from tests.support.cases import cases
from tests.support.plans import make_plan
from tests.support.profiles import TIMES, point, profile_of

PLAN = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"], num_steps=8, every_steps=2, eval_rows=5, checkpoint_every=8)
TURNS = list(turn_sequence(PLAN.course))
EMBED = Action(Op.EMBED, 0, 0, EMBEDDING, EMBEDDING + 1)
HEAD = Action(Op.HEAD, 0, 0, PLAN.course.head, PLAN.course.head + 1)
UPDATE_HEAD = Action(Op.UPDATE, 0, -1, PLAN.course.head, PLAN.course.head + 1)


def granted(costs: CourseCosts) -> Items:
    """The items of every turn."""
    items = Items(costs)
    for turn in TURNS:
        items.granted(turn)
    return items


def times(samples: list[tuple[str, Action, float]] | None = None, **options: object) -> ProfileTimes | RecordedTimes:
    """The times of the plan with every turn granted."""
    costs = CourseCosts(PLAN.course, profile_of(PLAN))
    items = granted(costs)
    medians = ProfileTimes(items)
    return medians if samples is None else RecordedTimes(samples, medians, items, **options)  # type: ignore[arg-type]


def turn_of(kind: StepKind) -> Turn:
    """The first turn of a kind."""
    return next(turn for turn in TURNS if turn.kind is kind)


EVALUATION = turn_of(StepKind.EVALUATE).first_seq
CHECKPOINT = turn_of(StepKind.CHECKPOINT).first_seq


@cases(
    ("action", "seconds"),
    [
        (EMBED, TIMES[Work.EMBED]),
        (Action(Op.FORWARD_FREE, 0, 0, 1, 2), TIMES[Work.FORWARD]),
        (Action(Op.FORWARD, 0, 0, 3, 4), TIMES[Work.GRAPH_LOWEST]),
        (Action(Op.BACKWARD, 0, 0, 3, 4), TIMES[Work.BACKWARD_LOWEST]),
        (Action(Op.FORWARD, 2, 0, 2, 4), TIMES[Work.GRAPH_LOWEST] + TIMES[Work.GRAPH]),
        (Action(Op.FORWARD, 4, 0, 2, 4), 2 * TIMES[Work.GRAPH]),
        (Action(Op.BACKWARD, 4, 0, 2, 4), 2 * TIMES[Work.BACKWARD]),
        (HEAD, TIMES[Work.HEAD]),
        (HEAD._replace(seq=EVALUATION), TIMES[Work.HEAD_FREE]),
        (Action(Op.UPDATE, 0, -1, 3, 4), TIMES[Work.UPDATE]),
        (Action(Op.UPDATE, 4, -1, 2, 4), 2 * TIMES[Work.UPDATE]),
        (UPDATE_HEAD, TIMES[Work.UPDATE_HEAD]),
        (Action(Op.SAVE, CHECKPOINT), TIMES[Work.SAVE]),
    ],
)
def test_profile_times_follow_the_kind_of_the_item(action: Action, seconds: float) -> None:
    """The lowest trainable block, evaluations, and updates of several blocks have their own times."""
    found = times()
    assert [found("b", action), found("b", action)] == [seconds, seconds]


def test_items_have_the_sizes_of_their_rows() -> None:
    """A short evaluation batch has smaller micro-batches, a checkpoint none."""
    items = granted(CourseCosts(PLAN.course, profile_of(PLAN)))
    assert items.by_seq[0].sizes == (2 * PLAN.course.max_length, 2 * PLAN.course.max_length)
    assert items.by_seq[EVALUATION + 1].sizes == (PLAN.course.max_length,)
    assert items.by_seq[CHECKPOINT].sizes == ()


def test_items_of_one_depth_and_owner_are_one_kind() -> None:
    """Steps 0 and 1 are alike, step 2 trains one block more."""
    costs = CourseCosts(PLAN.course, profile_of(PLAN))
    items = Items(costs)
    for turn in TURNS[:2]:
        items.granted(turn)
    assert items.by_seq[0] is items.by_seq[1]
    assert (items.by_seq[1].lowest, items.by_seq[2].lowest) == ((3, 3), (2, 2))
    items.forget(TURNS[0])
    with pytest.raises(KeyError):
        items.by_seq[1]
    assert items.by_seq[2].lowest == (2, 2)


def test_profile_times_depend_on_the_size() -> None:
    """With two sizes measured, a shorter batch takes less."""
    profile = profile_of(PLAN)
    points = (point(Work.HEAD_FREE, 1.0, rows=1, tokens=16), point(Work.HEAD_FREE, 3.0, rows=2, tokens=16))
    nodes = tuple(dataclasses.replace(node, work_times=points) for node in profile.nodes)
    costs = CourseCosts(PLAN.course, dataclasses.replace(profile, nodes=nodes))
    items = granted(costs)
    found = ProfileTimes(items)
    assert found("a", HEAD._replace(seq=EVALUATION)) == 3.0
    assert found("a", HEAD._replace(seq=EVALUATION + 1)) == 1.0


BACKWARD = Action(Op.BACKWARD, 4, 0, 2, 4)


def test_recorded_times_of_another_run_are_drawn_per_block() -> None:
    """A sample of two blocks counts half for one; the seed decides which is drawn."""
    samples = [("b", BACKWARD, 8.0), ("b", BACKWARD._replace(micro=1), 2.0), ("b", UPDATE_HEAD._replace(seq=4), 0.1)]
    drawn = [times(samples, same_run=False, seed=seed)("b", Action(Op.BACKWARD, 0, 0, 3, 4)) for seed in range(20)]
    assert set(drawn) == {4.0, 1.0}
    assert drawn == [
        times(samples, same_run=False, seed=seed)("b", Action(Op.BACKWARD, 0, 0, 3, 4)) for seed in range(20)
    ]


def test_recorded_times_tell_heads_of_evaluations_from_those_of_steps() -> None:
    """Item 1 of the recording was updated, item 7 was not: their heads do not stand for each other."""
    samples = [
        ("a", HEAD._replace(seq=1), 5.0),
        ("a", UPDATE_HEAD._replace(seq=1), 0.1),
        ("a", HEAD._replace(seq=7), 2.0),
    ]
    found = times(samples, same_run=False)
    assert found("a", HEAD) == 5.0
    assert found("a", HEAD._replace(seq=EVALUATION)) == 2.0


@cases("same_run", [True, False])
def test_recorded_times_need_no_median_of_what_was_recorded(same_run: bool) -> None:
    """A profile that lacks a work can still be replayed with; what has no sample names the work."""
    profile = profile_of(PLAN)
    lacking = tuple(time for time in profile.nodes[0].work_times if time.work is not Work.HEAD)
    nodes = tuple(dataclasses.replace(node, work_times=lacking) for node in profile.nodes)
    costs = CourseCosts(PLAN.course, dataclasses.replace(profile, nodes=nodes))
    items = granted(costs)
    samples = [("a", HEAD, 5.0), ("a", UPDATE_HEAD, 0.1)]
    found = RecordedTimes(samples, ProfileTimes(items), items, same_run=same_run)
    assert found("a", HEAD) == 5.0
    with pytest.raises(PlanError, match="node b has no measured time for 'head'"):
        found("b", HEAD)
