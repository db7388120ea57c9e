"""Tests of ``ringtune.schedule.migration``: leaving out, placements."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from ringtune.errors import PlanError
from ringtune.run_control.events import Move
from ringtune.run_control.recovery import Recovery
from ringtune.schedule.batches import BatchStream
from ringtune.schedule.course import Course, Offload
from ringtune.schedule.migration import (
    CopyHolders,
    Source,
    copied_from,
    copies_of,
    copy_holders,
    course_before,
    head_holders,
    reduced_num_steps,
    rows_reason,
    shared_racks,
    sources,
    with_owner,
    without_owner,
)
from ringtune.schedule.placement import Helper, Placement, Rack, Slice
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import Owner
from ringtune.schedule.turns import (
    StartPoint,
    StepKind,
    Turn,
    hand_overs,
    holder_after,
    row_uses,
    steps_of_owners,
    turn_sequence,
)
from ringtune.schedule.units import Range
from ringtune.techniques.activation_cache import step_of
from ringtune.techniques.replicas import CopyDigest
from tests.support.cases import cases
from tests.support.moves import moving
from tests.support.plans import changed, make_plan


def course_of(rng: random.Random) -> Course:
    """Any course of two to five owners."""
    names = [chr(ord("a") + index) for index in range(rng.randint(2, 5))]
    rng.shuffle(names)
    length = rng.choice([1, 2, 3])
    plan = make_plan([("a", 0, 4)], ["a"], num_steps=rng.randint(1, 40), local_iterations=length)
    return dataclasses.replace(
        plan.course,
        owners=tuple(Owner(node=name, train_rows=rng.randint(1, 90), eval_rows=rng.choice([0, 3])) for name in names),
        turns=rng.choice(["equal", "rows"]),
        eval_every=rng.choice([0, 4]),
        checkpoint_every=rng.choice([0, 5]),
    )


def train_turns(course: Course, start: StartPoint | None = None) -> list[Turn]:
    """The train turns of a course."""
    return [turn for turn in turn_sequence(course, start=start) if turn.kind is StepKind.TRAIN]


def what(turn: Turn) -> tuple[str, int, int]:
    """What a turn trains on."""
    return turn.owner, turn.first_batch, turn.num_items


class Story(NamedTuple):
    """Owners that are lost and come back at turn boundaries, by the turns of a run with all of them."""

    courses: list[Course]
    done: list[Turn]
    left: list[Turn]


def story_of(rng: random.Random) -> Iterator[Story]:
    """Lose owners and take them back at any boundary; yields what is to follow from there, after each change."""
    course = course_of(rng)
    every, whole = train_turns(course), course.num_steps
    courses, done = [course], list[Turn]()
    after = 0  # turns of the whole run that are done or missed
    for _ in range(rng.randint(1, 6)):
        here = {owner.node for owner in course.owners}
        for _ in range(rng.choice([0, 1, 2, 5])):
            at = next((at for at in range(after, len(every)) if every[at].owner in here), None)
            if at is None:
                break
            done.append(every[at])
            after = at + 1
        node = rng.choice(course.all_owners).node
        if node not in here:
            course = with_owner(course, node, len(done), whole)
            here.add(node)
        elif len(here) > 1:
            course = without_owner(course, node, len(done))
            here.remove(node)
        else:
            continue
        courses.append(course)
        yield Story(courses, done, [turn for turn in every[after:] if turn.owner in here])


@cases("seed", range(80))
def test_owners_have_the_turns_of_the_whole_run_while_they_are_there(seed: int) -> None:
    """Whatever is lost and comes back: a turn is trained where its owner is there, unless one after it was trained."""
    rng = random.Random(seed)
    for courses, done, left in story_of(rng):
        course, whole = courses[-1], courses[0].num_steps
        step = sum(turn.num_items for turn in done)
        assert course.num_steps == step + sum(turn.num_items for turn in left)
        assert reduced_num_steps(course, whole) == course.num_steps
        start = StartPoint.of(course, step=step)
        found = train_turns(course, start)
        assert [what(turn) for turn in found] == [what(turn) for turn in left]
        assert [turn.first_step for turn in found] == [
            step + sum(turn.num_items for turn in found[:at]) for at in range(len(found))
        ]
        if left:
            later = rng.randrange(len(left))
            resumed = train_turns(course, StartPoint.of(course, step=found[later].first_step))
            assert [(what(turn), turn.first_step) for turn in resumed] == [
                (what(turn), turn.first_step) for turn in found[later:]
            ]
            assert holder_after(course, course.num_steps) == found[-1].owner
            pairs = hand_overs(course, start)
            ways = itertools.pairwise([start.holder, *(turn.owner for turn in turn_sequence(course, start=start))])
            assert {(one, other) for one, other in ways if one != other} <= pairs
        for before, after in zip(courses[::-1][1:], courses[::-1], strict=False):
            assert course_before(after, whole) == before
        assert Course.from_json(json.loads(json.dumps(course.to_json()))) == course


@cases("seed", range(40))
def test_rows_and_visits_are_counted_for_the_turns_that_there_are(seed: int) -> None:
    """Steps of owners, uses of rows, and the step of each batch, are those of the turns that are trained."""
    rng = random.Random(seed)
    for courses, done, left in story_of(rng):
        course = courses[-1]
        batches = {owner.node: list[int]() for owner in course.all_owners}
        for turn in (*done, *left):
            batches[turn.owner] += range(turn.first_batch, turn.first_batch + turn.num_items)
        assert steps_of_owners(course) == {node: len(used) for node, used in batches.items()}
        for use in row_uses(course):
            stream = BatchStream(use.rows, course.batch_size, course.seed, use.owner)
            count = Counter(row for batch in batches[use.owner] for row in stream.rows(batch))
            each = [count[row] for row in range(use.rows)]
            assert (use.steps, use.used_rows, use.least, use.most) == (
                len(batches[use.owner]),
                len(count),
                min(each),
                max(each),
            )
        for turn in train_turns(course, StartPoint.of(course, step=sum(turn.num_items for turn in done))):
            assert [step_of(course, turn.owner, turn.first_batch + at) for at in range(turn.num_items)] == [
                *range(turn.first_step, turn.end_step)
            ]


def test_rounds_count_on() -> None:
    """With equal turns a round is one turn of each owner that is there."""
    course = make_plan([("a", 0, 4)], ["a", "b", "c"], num_steps=18, local_iterations=2).course
    after = without_owner(course, "b", 3)
    found = train_turns(after, StartPoint.of(after, step=6))
    assert [(turn.owner, turn.round) for turn in found] == [("a", 1), ("c", 1), ("a", 2), ("c", 2)]


def test_course_without_an_owner_survives_json_and_has_its_owners_again() -> None:
    """What was left out is in the plan, with its place."""
    plan = make_plan([("a", 0, 4)], ["a", "b", "c", "d"], num_steps=18, local_iterations=2)
    course = without_owner(without_owner(plan.course, "b", 3), "d", 4)
    assert [owner.node for owner in course.owners] == ["a", "c"]
    assert [owner.node for owner in course.all_owners] == ["a", "b", "c", "d"]
    changed = Plan(course, plan.placements)
    assert Plan.from_json(json.loads(json.dumps(changed.to_json()))) == changed
    assert changed.digest != plan.digest


def test_owner_whose_turns_end_the_run_is_not_left_out_while_gradients_are_added_up() -> None:
    """Turns a b a b a of two steps: after step 8 only a is left, two steps into an interval of three."""
    course = make_plan([("a", 0, 4)], ["a", "b"], num_steps=10, local_iterations=2, method="all").course
    adds = dataclasses.replace(course, offload=Offload(blocks=(Range(0, 4),), interval=3))
    assert "gradients are added up" in rows_reason(adds, "a", 8)
    assert not rows_reason(adds, "b", 8) and not rows_reason(adds, "a", 6) and not rows_reason(course, "a", 8)
    even = dataclasses.replace(adds, offload=Offload(blocks=(Range(0, 4),), interval=4))
    assert not rows_reason(even, "a", 8)
    assert "no other node than a" in rows_reason(without_owner(course, "b", 1), "a", 2)


def test_owner_that_can_not_be_left_out_is_refused() -> None:
    """The only one, one that is none, and places that can't be."""
    course = make_plan([("a", 0, 4)], ["a", "b"], num_steps=18).course
    with pytest.raises(PlanError, match="node c can't be left out: c owns no rows"):
        without_owner(course, "c", 1)
    alone = without_owner(course, "b", 1)
    with pytest.raises(PlanError, match="no other node than a owns rows"):
        without_owner(alone, "a", 2)
    with pytest.raises(PlanError, match="from place -1"):
        dataclasses.replace(alone, left_out=(dataclasses.replace(alone.left_out[0], at=-1),))
    with pytest.raises(PlanError, match="distinct"):
        dataclasses.replace(course, left_out=alone.left_out)
    with pytest.raises(PlanError, match="node a can't count again: they are not left out"):
        with_owner(alone, "a", 1, 18)
    again = with_owner(alone, "b", 1, 18)
    (lost, back) = again.left_out
    for events in ((back,), (lost, dataclasses.replace(back, at=0)), (lost, dataclasses.replace(back, turns=-1))):
        with pytest.raises(PlanError, match="owner b came back to"):
            dataclasses.replace(again, left_out=events)


def test_next_owner_keeps_the_head() -> None:
    """In their order, around."""
    plan, alone = (make_plan([("a", 0, 4)], owners, num_steps=18) for owners in (["a", "b", "c"], ["a"]))
    found = [head_holders(plan.course, plan.placement, node) for node in ("a", "b", "c", "x")]
    assert found == [("b",), ("c",), ("a",), ()]
    assert head_holders(alone.course, alone.placement, "a") == ()


@pytest.mark.parametrize("seed", range(40))
def test_copies_are_on_as_many_racks_as_there_are(seed: int) -> None:
    """Any ring and racks: no node twice, none of the stage's own, and no choice of places has more racks."""
    rng = random.Random(seed)
    names = [*"abcdef"[: rng.randint(2, 6)]]
    racks = {name: rng.choice("123") for name in names if rng.random() < 0.8}
    stages = sorted(rng.choices(range(1, 5), k=len(names)))  # equal ones are replicas
    slices = [Slice(node=name, start=stage, stop=stage + 1) for name, stage in zip(names, stages, strict=True)]
    at = {stage: place for place, stage in enumerate(sorted(set(stages)))}
    slices = [dataclasses.replace(one, start=at[one.start], stop=at[one.start] + 1) for one in slices]
    placement = Placement(
        slices=tuple(slices), copies=True, num_copies=rng.randint(1, 4), racks=tuple(map(Rack._make, racks.items()))
    )
    plan = make_plan([("a", 0, 4)], names[:2])
    for stage in placement.stages:
        own = [piece.node for piece in stage]
        found = [*own, *copy_holders(placement, own[0])]
        places = {racks.get(name, f"of {name}") for name in names}
        number = max(len(own), placement.num_copies + 1)
        first = {racks.get(name, f"of {name}") for name in own}
        assert len(found) == len(set(found)) == min(len(names), number)
        assert len({racks.get(name, f"of {name}") for name in found}) == min(
            len(places), len(first) + len(found) - len(own)
        )
        assert all(copy_holders(placement, name) == () for name in own[1:])
    heads = head_holders(plan.course, placement, "a")
    assert len({"a", *heads}) == len(heads) + 1 == min(len(names), placement.num_copies + 1)


def test_nodes_with_too_few_racks_are_named() -> None:
    """Two boards with two hosts each have room for one copy of each host on another board, not for two."""
    plan = make_plan([("a", 0, 1), ("b", 1, 2), ("c", 2, 3), ("d", 3, 4)], ["a", "c"])
    boards = tuple(map(Rack._make, [("a", "1"), ("b", "1"), ("c", "2"), ("d", "2")]))
    one, two = (plan.with_copies(True, number, boards) for number in (1, 2))
    assert [copy_holders(one.placement, node) for node in "abcd"] == [("c",), ("c",), ("a",), ("a",)]
    assert shared_racks(one.course, one.placement) == ()
    assert shared_racks(two.course, two.placement) == ("a", "b", "c", "d")
    apart = plan.with_copies(True, 2)
    assert [copy_holders(apart.placement, node) for node in "ad"] == [("b", "c"), ("a", "b")]
    assert shared_racks(apart.course, apart.placement) == ()
    assert head_holders(apart.course, apart.placement, "a") == ("c", "b") and Plan.from_json(two.to_json()) == two


FIRST = [("a", 0, 2), ("b", 2, 4)]
NEXT = [("b", 0, 1), ("c", 1, 4)]
PLAN = make_plan(FIRST, ["a"], num_steps=8, every_steps=2)
MOVES = moving(PLAN, (2, NEXT))


def test_part_of_a_plan_is_a_plan_that_is_written_and_read() -> None:
    """Nodes get it; it has a digest of its own, and that of a plan with one placement is the plan's."""
    assert PLAN.at(0) is PLAN and not PLAN.moves and MOVES.moves
    assert MOVES.nodes == ("a", "b", "c") and MOVES.at(1).nodes == ("b", "c", "a")
    for plan in (MOVES, *MOVES.parts):
        assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    digests = {plan.digest for plan in (PLAN, MOVES, MOVES.at(1))}
    assert len(digests) == 3 and MOVES.at(0).digest == PLAN.digest
    with pytest.raises(PlanError, match=r"the plan has no placement 2, it has \[0, 1\]"):
        MOVES.at(2)


@cases(
    ("changes", "message"),
    [
        (
            {"placement_number": 0},
            "placement 0 from turn 2 on comes after placement 0 from turn 0 on; numbers count up",
        ),
        ({"first_turn": 0}, "placement 1 from turn 0 on comes after placement 0 from turn 0 on"),
        ({"recompute": (Range(1, 2),)}, "placement 1 runs other blocks again than the one before; give both the same"),
    ],
)
def test_placements_that_do_not_follow_each_other_are_refused(changes: dict[str, Any], message: str) -> None:
    """They count up, and each begins later."""
    last = dataclasses.replace(MOVES.placements[1], **changes)
    with pytest.raises(PlanError, match=message):
        Plan(PLAN.course, (PLAN.placement, last))


def test_placements_have_equal_private_blocks() -> None:
    """What stays with an owner stays there."""
    plan = make_plan([("a", 1, 4)], ["a"], private_blocks=1)
    last = dataclasses.replace(make_plan([("a", 0, 4)], ["a"]).placement, placement_number=1, first_turn=1)
    with pytest.raises(
        PlanError, match="placement 1 has 0 private blocks, the one before 1; give all placements the same"
    ):
        Plan(plan.course, (plan.placement, last))


def test_placement_0_holds_from_the_beginning() -> None:
    """A later one may too: a run that lost a node in its first turn begins again."""
    with pytest.raises(PlanError, match="placement 0 has to hold from turn 0"):
        changed(PLAN, first_turn=2)
    assert changed(PLAN, placement_number=2).placement.placement_number == 2


def test_course_that_stays_on_one_placement_is_refused_by_name() -> None:
    """With one placement it is as good as ever."""
    stale = make_plan(FIRST, ["a"], method="pipeadapter")
    with pytest.raises(
        PlanError, match="can't move to another placement: the result of pipeadapter depends on the ring"
    ):
        moving(stale, (1, [("b", 0, 2), ("c", 2, 4)]))


def test_copies_of_a_helper_are_at_the_hosts() -> None:
    """And what a host trains itself at the next one, or at an idle helper if it is the only host."""
    helpers = (Helper(node="z", start=0, stop=1), Helper(node="a", start=2, stop=3), Helper(node="z", start=3, stop=4))
    placement = changed(make_plan([("a", 0, 2), ("b", 2, 4)], ["a"]), helpers=helpers).placement
    assert copies_of(placement, "z") == {"a": (0,), "b": (3,)}
    assert copies_of(placement, "a") == {"b": (1, 2)} and copies_of(placement, "b") == {}
    assert copied_from(placement, "b") == {"a": (1, 2), "z": (3,)}
    twice = dataclasses.replace(placement, copies=True, num_copies=2)
    assert copies_of(twice, "z") == {"a": (0, 3), "b": (0, 3)}
    assert copies_of(twice, "a") == {"b": (1, 2), "z": (1, 2)}
    alone = changed(make_plan([("a", 0, 4)], ["a"]), helpers=helpers[:1]).placement
    assert copies_of(alone, "a") == {"z": (1, 2, 3)} and copies_of(alone, "z") == {"a": (0,)}


def test_only_blocks_that_were_trained_travel() -> None:
    """After 4 steps two blocks have been trained, one of them for two steps; the others are as all nodes make them."""
    before, after = (one.placement for one in MOVES.parts)
    assert sources(PLAN.course, before, after, "c", 4) == (Source("b", 2, 4),)
    assert sources(PLAN.course, before, after, "b", 4) == ()
    assert sources(PLAN.course, before, after, "c", 5) == (Source("a", 1, 2), Source("b", 2, 4)), "once is enough"


def test_replica_goes_on_with_its_own_copy() -> None:
    """Others take the blocks from the first host of the stage."""
    both = moving(PLAN, (2, [("a", 0, 4), ("b", 0, 4)]), (3, [("c", 0, 2), ("b", 2, 4)]))
    before, after = (both.at(placement_number).placement for placement_number in (1, 2))
    assert sources(PLAN.course, before, after, "b", 8) == (Source("b", 2, 4),)
    assert sources(PLAN.course, before, after, "c", 8) == (Source("a", 0, 2),)


def test_kept_state_has_the_digests_of_those_who_trained_it() -> None:
    """A node says what it trained itself, no more: not of others' blocks, another's head, or an older turn."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"], num_steps=8, local_iterations=2, every_steps=1)
    first, second = (turn for turn in itertools.islice(train_turns(plan.course), 2))
    kept = CopyHolders()
    kept.note("a", first.index, [(0, "old")])
    kept.note("b", second.index, [(2, "b2"), (3, "b3"), (1, "lie"), (plan.course.head, "head")])
    kept.note("a", second.index, [(1, "a1"), (3, "lie"), (plan.course.head, "lie")])
    kept.commit(plan.course, plan.placement, second)
    assert second.owner == "b" and kept.digests == {1: "a1", 2: "b2", 3: "b3", plan.course.head: "head"}
    (source,) = kept.sources(plan.at(0).placement, "b")
    assert kept.other_sources([source]) == tuple(Source("a", block, block + 1) for block in range(2, 4))
    assert (kept.head_source("b"), kept.other_head("b")) == ("", "a")
    recovery = Recovery(placement_number=1, lost=("z",), nodes=("a", "b"), began_s=0.0, step=4)
    recovery.place(plan, moving(plan, (2, [("a", 0, 3), ("b", 3, 4)])).at(1).placement)
    to_a, to_b = (move for move in recovery.move(kept, second, ()) if isinstance(move, Move))
    assert to_a.digests == (CopyDigest(1, "a1"), CopyDigest(2, "b2")) and to_a.sources == (Source("a", 0, 3),)
    assert to_b.digests == (CopyDigest(3, "b3"), CopyDigest(plan.course.head, "head"))
    assert (to_b.others, to_b.head_from, to_b.other_head) == ((Source("a", 3, 4),), "", "a")
    kept.lose("b")
    assert kept.other_sources([Source("a", 2, 4)]) == () and kept.other_head("a") == ""
    kept.commit(plan.course, plan.placement, second)  # nothing was said since
    assert kept.digests == {}
