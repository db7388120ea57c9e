"""A technique as planner, driver, screen and simulator see it: one record with a function for each question.

Each technique is one module with one record, ``TECHNIQUE``, in the list of ``ringtune.techniques``. Others ask every
record in the order of that list. A field that a record leaves out has no effect::

    a job is read, compared      check_job, check_model, later_keys, unused_keys, equal_values
    a result is evaluated        evaluation_sections
    a plan is made               courses, check_course, placed, smaller_settings, memory_terms, disk_terms, parcels,
                                 copies
    a plan or times are given    course_fields, check_plan, timing_mismatch
    a plan is shown              course_lines, course_notes, training_lines, helper_lines, notes, plan_lines,
                                 table_lines
    turns are granted            turn_rule
    a run is reported            decisions, totals, report, report_lines
    a what-if changes a plan     plan_keys, job_values, check_changes, changed, without_node

A job, facts of nodes and sizes are passed as ``Any``: their types are defined above this package, and no import runs
upwards, also not for type checks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from ringtune.models.family import Dimensions, Family, Widths
from ringtune.schedule.course import Course
from ringtune.schedule.placement import Helper, Placement
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Turn

ANEW: Final = "plan anew with 'ringtune plan JOB --save FILE'"
"""What to do with a given plan that does not fit its job."""


class Term(NamedTuple):
    """A number of equal things in a node's memory at once; ``part`` is one of ``costs.memory_terms.PARTS``."""

    part: str
    what: str
    number: int
    each_bytes: int

    @property
    def total_bytes(self) -> int:
        """``number * each_bytes``."""
        return self.number * self.each_bytes


class DiskTerm(NamedTuple):
    """Bytes that a run keeps in a node's folder at most: what (a plural), and how to do without."""

    what: str
    size_bytes: int
    remedy: str


class Copies(NamedTuple):
    """Tensors of which several nodes of a plan hold equal copies, in words, and an alternative for the user."""

    what: str
    nodes: tuple[str, ...]
    remedy: str


class Parcel(NamedTuple):
    """The largest message of a kind that nodes send in one piece.

    Attributes:
        what: in words, with a verb: ``the gradient of blocks [0, 2), which nodes a, b send each other, has``.
        size_bytes: upper bound.
        remedy: what to do where a link does not take it.
    """

    what: str
    nodes: tuple[str, ...]
    size_bytes: int
    remedy: str


class DecisionLines(NamedTuple):
    """The texts of a decision that a run logs, from its line of ``metrics.jsonl``: of its progress, and of the page."""

    progress: Callable[[Mapping[str, Any]], str]
    page: Callable[[Mapping[str, Any]], str]


class Shape(NamedTuple):
    """A model of which a job is checked.

    Attributes:
        where: its file, in words.
        passes_more: whether its blocks pass on more than a hidden state.
    """

    family: Family
    dimensions: Dimensions
    widths: Widths
    where: str
    passes_more: bool = False


class TurnRule(Protocol):
    """Decisions of a technique about the turns of one placement."""

    def may_grant(self, turn: Turn) -> bool:
        """Whether everything is known on which the decisions for this turn may depend."""

    def decided(self, turn: Turn) -> Turn:
        """Return the turn with the decisions."""

    def granted(self, turn: Turn) -> None:
        """Note that a turn is granted."""

    def close(self, turn: Turn) -> None:
        """Note that every node has done a turn; turns are closed in order."""

    def lose(self, node: str, problem: str) -> bool:
        """Stop using a node, which has reported why it can't do its part; return False if that was known."""


def _nothing(*_: Any) -> tuple[()]:
    return ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Technique:
    """The answers of one technique.

    Attributes:
        later_keys: its job keys that the first version did not have, each with the value that means the former
            behaviour; a job with that value has the digest of one without the key.
        unused_keys: its job keys without any effect on the result of a job, because of its other keys.
        equal_values: its job keys of which several values give the same bits, each with those values; a run continues
            with any of them.
        evaluation_sections: sections of the job of an evaluation that differ from those of the run's job.
        check_job: refuses a job that does not permit the technique as set; raises ``JobError``.
        check_model: refuses a job for a model; raises ``JobError``.
        courses: variants of a course for nodes with these facts, the preferred first, each next one in less memory; the
            planner takes the first that fits.
        check_course: refuses the course of a job, given facts of the model; raises ``JobError`` or ``PlanError``.
        smaller_settings: keys and values with which a job takes less memory, the mildest first; of the keys that
            ``coordinator.planner.make_plan.as_job_says`` follows.
        placed: adds the technique to a plan as its job asks; raises ``PlanError`` with the reason where the plan can't
            have it, and the run continues without.
        left_out: text that precedes that reason.
        memory_terms: memory of a node, by its ``costs.memory_terms.Share`` of a placement and the sizes of the course,
            beyond what ``costs.memory_estimate`` counts.
        disk_terms: bytes in a node's folder beyond those that ``costs.memory_estimate`` counts.
        parcels: of a plan, with the sizes of its course at any node.
        copies: of a plan: tensors that several nodes hold alike and update each by itself.
        course_fields: fields of a course in which a given plan may have another value than the job's draft.
        check_plan: refuses a given plan with other settings than the job's, given facts of the model; raises
            ``PlanError``.
        timing_mismatch: how the timing of a node, by its facts, differs from the course; empty if it does not.
        course_lines: what a course trains with, for plans and for screens beside a run's nodes.
        course_notes: warnings about a course, for the same texts.
        training_lines: what trains, for plans alone, from the plan and the needs of its nodes in memory.
        helper_lines: lines about other nodes than hosts and owners, from a plan, the most bytes that a helper gets in a
            step and returns after an update, and the model's other kinds of adapters; both need sizes of nodes.
        plan_lines: what stays at hosts or travels between nodes, for plans alone.
        table_lines: further tables below a plan's table of actions.
        notes: warnings before the run, from a plan and the facts of its nodes.
        turn_rule: decisions about the turns of a placement; the number is the minimum of items between a turn and a
            turn that depends on it. None where the placement does not use the technique.
        decisions: the kinds of decisions that it logs, each with its texts.
        totals: figures that a node reports at the end of a placement, each with the function that combines two
            placements.
        report: entries of report.json, from a plan and the number of steps done since the beginning of the run.
        report_lines: lines of a report's text.
        plan_keys: its keys of ``ringtune.plan_keys``, each with the key of a job.
        job_values: keys and values of a job for values of ``plan_keys`` that a job writes in another way, or that
            change more of its keys; given the names of all nodes.
        check_changes: refuses changes of any keys of a plan that its course excludes; raises ``PlanError``.
        changed: changes a plan by values of its ``plan_keys``, given facts of all nodes; raises ``PlanError``.
        without_node: fields of the course, and placements, of a plan without a node, given its placements without that
            node and without helpers; raises ``PlanError``.
    """

    name: str
    later_keys: Mapping[str, object] = field(default_factory=dict)
    unused_keys: Callable[[Any], Sequence[str]] = _nothing
    equal_values: Mapping[str, Sequence[object]] = field(default_factory=dict)
    evaluation_sections: Mapping[str, object] = field(default_factory=dict)
    check_job: Callable[[Any], object] = _nothing
    check_model: Callable[[Any, Shape], object] = _nothing
    courses: Callable[[Any, Course, Sequence[Any]], Sequence[Course]] = lambda job, course, nodes: (course,)
    check_course: Callable[[Any, Course, Any], object] = _nothing
    smaller_settings: Callable[[Any], Iterable[tuple[str, object]]] = _nothing
    placed: Callable[[Any, Plan], Plan] = lambda job, plan: plan
    left_out: str = ""
    memory_terms: Callable[[Course, Any, Any], Iterable[Term]] = _nothing
    disk_terms: Callable[[Plan, str], Iterable[DiskTerm]] = _nothing
    parcels: Callable[[Plan, Any], Iterable[Parcel]] = _nothing
    copies: Callable[[Plan], Iterable[Copies]] = _nothing
    course_fields: Sequence[str] = ()
    check_plan: Callable[[Any, Plan, Any], object] = _nothing
    timing_mismatch: Callable[[Course, Any], str] = lambda course, facts: ""
    course_lines: Callable[[Course], Sequence[str]] = _nothing
    course_notes: Callable[[Course], Sequence[str]] = _nothing
    training_lines: Callable[[Plan, Mapping[str, Any]], Sequence[str]] = _nothing
    helper_lines: Callable[[Plan, Callable[[Helper], Sequence[float]] | None, Sequence[Any]], Sequence[str]] = _nothing
    plan_lines: Callable[[Plan], Sequence[str]] = _nothing
    table_lines: Callable[[Plan], Sequence[str]] = _nothing
    notes: Callable[[Plan, Sequence[Any]], Sequence[str]] = _nothing
    turn_rule: Callable[[Plan, int], TurnRule | None] = lambda part, items_ahead: None
    decisions: Mapping[str, DecisionLines] = field(default_factory=dict)
    totals: Mapping[str, Callable[[float, float], float]] = field(default_factory=dict)
    report: Callable[[Plan, int], Mapping[str, Any]] = lambda plan, steps: {}
    report_lines: Callable[[Mapping[str, Any]], Sequence[str]] = _nothing
    plan_keys: Mapping[str, str] = field(default_factory=dict)
    job_values: Callable[[Mapping[str, int | str], Collection[str]], Mapping[str, object]] = lambda values, known: {}
    check_changes: Callable[[Course, Mapping[str, int | str]], object] = _nothing
    changed: Callable[[Plan, Mapping[str, int | str], Sequence[Any]], Plan] = lambda plan, values, nodes: plan
    without_node: Callable[[Plan, str, Sequence[Placement]], tuple[Mapping[str, object], Sequence[Placement]]] = (
        lambda plan, node, placements: ({}, placements)
    )
