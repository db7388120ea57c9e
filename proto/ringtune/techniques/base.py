"""A technique as planner, driver, screen and simulator see it: one record of what it says at each of their questions.

A technique is one module with one record, ``TECHNIQUE``, which ``ringtune.techniques`` lists. Others ask every record
in the order of that list. What a record leaves out says nothing::

    a job is read, compared      check_job, later_keys
    a plan is made               courses, placed, smaller_settings, disk_terms, parcels, copies
    a plan or times are given    check_plan, timing_mismatch
    a plan is shown              course_lines, plan_lines, notes
    turns are granted            turn_rule
    a node reports its totals    totals

A job, facts of nodes and sizes are passed as ``Any``: they are made of what is here, above this room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ringtune.schedule.course import Course
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Turn


class DiskTerm(NamedTuple):
    """What a run keeps in a node's folder.

    Attributes:
        what: in words, in the plural.
        size_bytes: at most.
        remedy: how to do without.
    """

    what: str
    size_bytes: int
    remedy: str


class Copies(NamedTuple):
    """Copies that some nodes of a plan hold alike.

    Attributes:
        what: in words.
        nodes: that update a copy each; at least two.
        remedy: what else the user can do.
    """

    what: str
    nodes: tuple[str, ...]
    remedy: str


class Parcel(NamedTuple):
    """The largest message of a kind that nodes send each other in one piece.

    Attributes:
        what: in words, with a verb: ``the gradient of blocks [0, 2), which nodes a, b send each other, has``.
        nodes: that send it.
        size_bytes: at most.
        remedy: what can be done where a link does not take it.
    """

    what: str
    nodes: tuple[str, ...]
    size_bytes: int
    remedy: str


class TurnRule(Protocol):
    """What a technique decides of the turns of one placement as they are granted."""

    def may_grant(self, turn: Turn) -> bool:
        """Whether all is known on which this turn may depend."""

    def decided(self, turn: Turn) -> Turn:
        """The turn with what is decided of it."""

    def granted(self, turn: Turn) -> None:
        """Note a turn that was granted."""

    def close(self, turn: Turn) -> None:
        """Note that every node has done a turn; turns are closed in their order."""

    def lose(self, node: str, problem: str) -> bool:
        """Count on a node no longer, which has reported why it can't do its part; whether that is news."""


def _nothing(*_: Any) -> tuple[()]:
    return ()


def _no_word(*_: Any) -> str:
    return ""


def _the_course(_: Any, course: Course, __: Sequence[Any]) -> tuple[Course]:
    return (course,)


def _as_it_is(_: Any, plan: Plan) -> Plan:
    return plan


def _no_rule(*_: Any) -> None:
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Technique:
    """What a technique says.

    Attributes:
        name: of its module.
        later_keys: its keys of a job that the first version did not have, each with the value that stands for the
            behaviour before; a job with that value has the digest of one without the key.
        check_job: refuses a job that the technique can't go with; raises ``JobError``.
        courses: the ways of carrying a course out on the nodes with these facts, the preferred first, each next one in
            less memory; the planner takes the first that fits.
        smaller_settings: keys and values with which a job takes less memory, the mildest first; of the keys that
            ``coordinator.planner.draft.as_job_says`` follows.
        placed: the plan with the technique as its job asks for it; raises ``PlanError`` with the reason where the plan
            can't have it and the run goes on without.
        left_out: text before that reason.
        disk_terms: what a node keeps in its folder under a plan, beside what ``costs.memory_estimate`` counts.
        parcels: that nodes send each other under a plan, with the sizes of its course at any node.
        copies: what several nodes of a plan hold alike and update each by itself.
        check_plan: refuses a given plan that has the technique otherwise than the job says; raises ``PlanError``.
        timing_mismatch: how a node, by its facts, was timed otherwise than a course needs; empty if it was not.
        course_lines: lines of a text about training.
        plan_lines: lines of a plan's text.
        notes: of a plan and the facts of its nodes: what a reader has to know before the run.
        turn_rule: of a placement: what is decided of its turns, with how many items lie at least between a turn that
            decides and the turn that depends on it; None where the placement does not use the technique.
        totals: figures that a node reports at the end of a placement, each with how those of two placements make one.
    """

    name: str
    later_keys: Mapping[str, object] = field(default_factory=dict)
    check_job: Callable[[Any], object] = _nothing
    courses: Callable[[Any, Course, Sequence[Any]], Sequence[Course]] = _the_course
    smaller_settings: Callable[[Any], Iterable[tuple[str, object]]] = _nothing
    placed: Callable[[Any, Plan], Plan] = _as_it_is
    left_out: str = ""
    disk_terms: Callable[[Plan, str], Iterable[DiskTerm]] = _nothing
    parcels: Callable[[Plan, Any], Iterable[Parcel]] = _nothing
    copies: Callable[[Plan], Iterable[Copies]] = _nothing
    check_plan: Callable[[Any, Plan], object] = _nothing
    timing_mismatch: Callable[[Course, Any], str] = _no_word
    course_lines: Callable[[Course], Sequence[str]] = _nothing
    plan_lines: Callable[[Plan], Sequence[str]] = _nothing
    notes: Callable[[Plan, Sequence[Any]], Sequence[str]] = _nothing
    turn_rule: Callable[[Plan, int], TurnRule | None] = _no_rule
    totals: Mapping[str, Callable[[int, int], int]] = field(default_factory=dict)
