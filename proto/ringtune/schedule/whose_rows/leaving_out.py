"""A run goes on without the rows of an owner that is lost: its turns are left out from then on.

Owners a, b and c, turns of 10 steps, 90 steps. Owner b is lost when 40 steps are committed::

    before    a b c a | b c a b c       the run ends with step 90
    after     a b c a | c a c           the run ends with step 70

All others have the turns, and the batches, that they would have had, one after another; steps are numbered without
gaps. What goes by the number of steps, as a learning rate that falls to the last one, goes by the new number.
"""

from __future__ import annotations

import dataclasses

from ringtune.errors import PlanError
from ringtune.schedule.course import Course
from ringtune.schedule.extent import LeftOut, Owner
from ringtune.schedule.owner_turns import next_owner, turn_counts, weights


def why_it_waits(course: Course, owner: str) -> str:
    """Why a run can't go on without an owner's rows; empty if it can."""
    if len(course.owners) == 1:
        return f"no other node than {owner} owns rows"
    if course.operations is not None:
        return "its table of operations is for the batches of all owners"
    return ""


def without_owner(course: Course, node: str, num_turns: int) -> Course:
    """The course of a run that leaves an owner's turns out once so many train turns are done.

    Raises:
        PlanError: the node is no owner, or the course can't go on without it.
    """
    at = next((index for index, owner in enumerate(course.owners) if owner.node == node), -1)
    problem = f"{node} owns no rows" if at < 0 else why_it_waits(course, node)
    if problem:
        raise PlanError(f"the turns of node {node} can't be left out: {problem}")
    own, length = weights(course.owners, course.turns), course.local_iterations
    total = course.turns_of_owners(-(-course.num_steps // length))
    had = turn_counts(own, min(course.turns_of_owners(num_turns), total))[at]
    left = turn_counts(own, total)[at] - had
    steps = left * length
    if left and next_owner(own, turn_counts(own, total - 1)) == at:
        steps -= -course.num_steps % length  # the last turn may be short
    return dataclasses.replace(
        course,
        owners=tuple(owner for owner in course.owners if owner.node != node),
        left_out=(*course.left_out, LeftOut(owner=course.owners[at], at=at, turns=had)),
        num_steps=course.num_steps - steps,
    )


def all_owners(course: Course) -> tuple[Owner, ...]:
    """The owners with which a run began, in initiator order: those that it has left out too."""
    owners = list(course.owners)
    for one in reversed(course.left_out):
        owners.insert(one.at, one.owner)
    return tuple(owners)


def steps_of_rest(course: Course, num_steps: int) -> int:
    """Steps of a run that leaves owners out, and that would have so many with all of them."""
    length, owners = course.local_iterations, all_owners(course)
    out = {one.owner.node: one.turns for one in course.left_out}
    own, total = weights(owners, course.turns), -(-num_steps // length)
    counts = turn_counts(own, total)
    turns = [out.get(owner.node, count) for owner, count in zip(owners, counts, strict=True)]
    last = next_owner(own, turn_counts(own, total - 1)) if total else 0  # its last turn may be short
    return sum(turns) * length - (-num_steps % length if turns[last] == counts[last] else 0)


def with_owner_back(course: Course, num_steps: int) -> Course:
    """The course before it left out the last owner that it has left out.

    Args:
        course: that leaves owners out.
        num_steps: that a run with all owners would have.
    """
    last = course.left_out[-1]
    owners = [*course.owners]
    owners.insert(last.at, last.owner)
    found = dataclasses.replace(course, owners=tuple(owners), left_out=course.left_out[:-1])
    return dataclasses.replace(found, num_steps=steps_of_rest(found, num_steps))


def head_holder(course: Course, owner: str) -> str:
    """The owner that keeps a copy of the head as another one had it at the end of its turn: the next in their order.

    Empty if there is none: then the head is nowhere else.
    """
    names = [one.node for one in course.owners]
    if len(names) < 2 or owner not in names:
        return ""
    return names[(names.index(owner) + 1) % len(names)]
