"""One what-if: change a profile and a plan, plan again if asked, predict, and list the differences.

``WhatIf`` is a picklable callable, so that a sweep can send it to other processes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypedDict

from coordinator.planner.limits import Effort
from coordinator.planner.make_plan import check_inputs, make_plan
from coordinator.planner.replan import placed_without
from coordinator.planner.replicas import layout_text
from ringtune.config.sections import SKIP_OWNER
from ringtune.costs.action_costs import move_s
from ringtune.costs.memory_sizes import MemorySettings
from ringtune.costs.memory_terms import MemoryEstimate
from ringtune.costs.profile import NodeFacts, Profile, TimedShape
from ringtune.errors import CapacityError, PlanError, RingTuneError, StorageError, UsageError
from ringtune.job.job import Job
from ringtune.run_control.recovery import RecoveryPolicy, loss_outcome
from ringtune.schedule.actions import Action
from ringtune.schedule.course import Course
from ringtune.schedule.migration import first_step
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import row_uses
from ringtune.storage.strict import nearest
from ringtune.techniques import TECHNIQUES
from ringtune.texts import counted
from sim.prediction import Prediction, check_fits, memory_bounds, predict
from sim.recorded_run import Recording
from sim.what_if import (
    add_node,
    change_all,
    change_nodes,
    change_plan,
    check_rows,
    drop_from_plan,
    drop_from_profile,
    split_change,
)

Sample = tuple[str, Action, float]


class Times(TypedDict, total=False):
    """Keyword arguments of ``sim.prediction.predict`` from a recording."""

    samples: tuple[Sample, ...]
    same_run: bool
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecording:
    """A recording of a run. ``is_of_plan``: whether the recording matches the plan action by action."""

    recording: Recording
    plan: Plan
    is_of_plan: bool
    seed: int = 0

    def options(self, plan: Plan, before: Profile, after: Profile, added: Sequence[tuple[str, str]]) -> Times:
        """Return the recorded times as arguments of a prediction; raises ``PlanError``.

        Times are scaled by the ratio of a node's speeds in ``after`` and ``before``. ``added``: (name, like): a new
        node takes the times of node ``like``.
        """
        course, recorded = plan.course, self.plan.course
        sizes = [(each.microbatch_sizes()[0], each.max_length) for each in (recorded, course)]
        if sizes[0] != sizes[1]:
            raise PlanError(
                f"the recorded times are of micro-batches of {sizes[0][0]} x {sizes[0][1]} tokens, the plan has "
                f"{sizes[1][0]} x {sizes[1][1]}; leave out --trace, then the times of the profile are scaled"
            )
        old, new = before.by_name, after.by_name
        speeds = {name: _speed(old[name], new[name]) for name in old if name in new}
        samples = [(node, action, seconds / speeds.get(node, 1.0)) for node, action, seconds in self.recording.samples]
        for name, like in added:
            speed = _speed(old[like], new[name]) if like in old and name in new else 1.0
            samples += [(name, action, s / speed) for node, action, s in self.recording.samples if node == like]
        same_run = self.is_of_plan and plan.digest == self.plan.digest
        return Times(samples=tuple(samples), same_run=same_run, seed=self.seed)


def _speed(before: NodeFacts, after: NodeFacts) -> float:
    """Return how many times as fast a node is afterwards: 0.004 s after 0.008 s a block is 2."""
    old, new = (_some_s(node) for node in (before, after))
    return old / new if old and new else 1.0


def _some_s(node: NodeFacts) -> float:
    """Return a measured time of the node; all its times scale alike."""
    times: Mapping[str, float] = {str(point.work): point.median_s for point in node.work_times if point.median_s > 0}
    return times[min(times)] if times else node.block_forward_s


_OF_TRAINING = ("batch_size", "microbatches", "local_iterations", "eval_every", "checkpoint_every", "method", "turns")
JOB_KEYS = {
    **{key: f"train.{key}" for key in _OF_TRAINING},
    "num_steps": "train.max_steps",
    "every_steps": "unfreeze.every_steps",
    "wire_dtype": "wire.dtype",
    **{key: of_job for technique in TECHNIQUES for key, of_job in technique.plan_keys.items()},
}
"""Keys of a plan that may be changed -> keys of a job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedPlan:
    """A plan with its prediction.

    Attributes:
        left_out: nodes of the profile that the plan does not use.
        note: of its planning, for example that the clock ended the search.
    """

    plan: Plan
    prediction: Prediction
    memory: Mapping[str, MemoryEstimate]
    left_out: tuple[str, ...] = ()
    note: str = ""

    @property
    def trained_rows(self) -> int:
        """Rows of all steps together; a row counts each time it is trained."""
        return sum(use.trained_rows for use in row_uses(self.plan.course))

    @property
    def rows_per_s(self) -> float:
        """Trained rows per second of wall time, which compares plans of different batch sizes."""
        wall_s = self.prediction.wall_s
        return self.trained_rows / wall_s if wall_s else 0.0

    @property
    def fullest(self) -> tuple[str, float]:
        """Name of the node that needs the largest share of its memory budget, and that share."""
        shares = [(node.needed_bytes / max(1, node.budget_bytes), node.node) for node in self.prediction.nodes]
        share, node = max(shares)
        return node, share

    def to_json(self) -> dict[str, Any]:
        """Return plan, memory and prediction as dictionaries, lists, numbers and strings."""
        node, share = self.fullest
        return {
            "plan_digest": self.plan.digest,
            "slices": {piece.node: [piece.start, piece.stop] for piece in self.plan.placement.slices},
            **({"moves": self._moves()} if self.plan.moves else {}),
            "left_out": list(self.left_out),
            "rows_per_s": self.rows_per_s,
            "trained_rows": self.trained_rows,
            "note": self.note,
            "fullest_node": node,
            "fullest_share": share,
            "memory_bound_bytes": {name: bound.total_bytes for name, bound in self.memory.items()},
            **self.prediction.to_json(),
        }

    def _moves(self) -> list[dict[str, Any]]:
        course = self.plan.course
        return [
            {
                "step": first_step(course, placement),
                "slices": {piece.node: [piece.start, piece.stop] for piece in placement.slices},
            }
            for placement in self.plan.placements[1:]
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class CellResult:
    """The result of one cell of a sweep.

    Attributes:
        wall_s: predicted; None if the plan is not possible, like the next ones.
        trained_rows: of all steps; times of equal numbers can be compared.
        fullest_node: node that needs the largest share of its memory budget.
    """

    values: tuple[str, ...]
    wall_s: float | None = None
    bubble_share: float | None = None
    rows_per_s: float | None = None
    trained_rows: int | None = None
    fullest_node: str = ""
    fullest_share: float | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """A question: how does a plan run after some changes?

    Attributes:
        shape: of the batches for which the profile was timed.
        job: plan again for it; None = keep the plan.
        move_s: measured seconds of a move; None = by the planner's formula.
        recorded: times of a real run, in place of the profile's medians.
    """

    plan: Plan
    profile: Profile
    settings: MemorySettings
    shape: TimedShape | None = None
    changes: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    add: tuple[tuple[str, str], ...] = ()
    job: Job | None = None
    move_s: float | None = None
    recorded: RunRecording | None = None

    def before(self) -> PredictedPlan:
        """Predict the plan without changes; raises ``RingTuneError``."""
        return self._predicted(self.plan, self.profile, self.settings, self.shape)

    def check(self, cells: Sequence[Sequence[str]]) -> None:
        """Refuse an invalid job or invalid cells of a sweep before any cell is computed.

        A plan that does not fit is not invalid but a result.
        """
        if self.job is not None:
            check_inputs(self.job, self.profile)
        for more in cells:
            change_nodes(self._joined(), (*self.changes, *more))

    def after(self, more: Sequence[str] = ()) -> PredictedPlan:
        """Predict the plan with all changes, and those of ``more``; raises ``RingTuneError``."""
        profile, plan, note = self._joined(), self.plan, ""
        changes = (*self.changes, *more)
        if self.job is None:
            profile, plan = change_all(profile, plan, changes)
            for name in self.drop:
                profile, plan = drop_from_profile(profile, name), drop_from_plan(plan, name)
        else:
            profile, plan, note = self._planned(profile, self.job, changes)
        settings = self.settings if self.job is None else MemorySettings.of_job(self.job)
        return self._predicted(plan, profile, settings, note=note)

    def __call__(self, more: Sequence[str]) -> CellResult:
        """Compute a cell of a sweep; an error of its plan becomes part of the result."""
        values = tuple(split_change(text)[1] for text in more)
        try:
            planned = self.after(more)
        except RingTuneError as error:
            return CellResult(values=values, error=str(error))
        node, share = planned.fullest
        return CellResult(
            values=values,
            wall_s=planned.prediction.wall_s,
            bubble_share=planned.prediction.bubble_share,
            rows_per_s=planned.rows_per_s,
            trained_rows=planned.trained_rows,
            fullest_node=node,
            fullest_share=share,
        )

    def _joined(self) -> Profile:
        if self.add and self.job is None:
            raise PlanError(f"--add {self.add[0][0]}: the plan has no blocks for it; give --replan JOB")
        profile = self.profile
        for name, like in self.add:
            profile = add_node(profile, name, like)
        return profile

    def _planned(self, profile: Profile, job: Job, changes: Sequence[str]) -> tuple[Profile, Plan, str]:
        """Plan again with the changes, as ``ringtune plan`` does: the profile, the plan, and its note.

        Keys of a plan change the job, except for credits, which no job has.
        """
        profile, values = change_nodes(profile, changes)
        of_job: dict[str, object] = {JOB_KEYS[key]: value for key, value in values.items() if key in JOB_KEYS}
        for technique in TECHNIQUES:
            of_job |= technique.job_values(values, profile.by_name)
        for name in self.drop:
            profile = drop_from_profile(profile, name)
        job = job.with_overrides(of_job)
        rows = -(-job.train.batch_size // job.train.microbatches)
        check_rows(profile, rows, self.plan.course.microbatch_sizes()[0])
        planned = make_plan(job, profile.by_name, links=profile.links)
        of_plan = {key: value for key, value in values.items() if key not in JOB_KEYS}
        return *change_plan(profile, planned.plan, of_plan), planned.note

    def _predicted(
        self, plan: Plan, profile: Profile, settings: MemorySettings, shape: TimedShape | None = None, note: str = ""
    ) -> PredictedPlan:
        check_fits(plan, profile, settings, shape=shape)
        times = self.recorded.options(plan, self.profile, profile, self.add) if self.recorded else Times()
        prediction = predict(plan, profile, settings, move_s=self.move_s, **times)
        memory = memory_bounds(plan, profile, settings)
        left_out = tuple(node.node for node in profile.nodes if node.node not in plan.nodes)
        return PredictedPlan(plan=plan, prediction=prediction, memory=memory, left_out=left_out, note=note)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossResult:
    """The predicted outcome of the loss of some nodes at once.

    Attributes:
        why: why the run ends, or waits.
        awaited: owners for which it waits.
        layout: in which it continues; empty if it ends.
        seconds: of the move to this layout by the planner's formula, without those in which the loss is noticed; 0 if
            no blocks move, None if the run ends.
    """

    lost: tuple[str, ...]
    why: str = ""
    awaited: tuple[str, ...] = ()
    layout: str = ""
    seconds: float | None = None

    @property
    def outcome(self) -> str:
        """Whether the run ``ends``, ``waits`` or ``goes on``."""
        return "ends" if self.seconds is None else "waits" if self.awaited else "goes on"

    def to_json(self) -> dict[str, Any]:
        """Return all of it as a row of values."""
        return {
            **dataclasses.asdict(self),
            "lost": list(self.lost),
            "awaited": list(self.awaited),
            "outcome": self.outcome,
        }


_NUMBERS: Final = {"one": 1, "two": 2, "three": 3}
_SEARCH_S: Final = 5.0


def lost_nodes(nodes: Sequence[str], text: str) -> list[tuple[str, ...]]:
    """Read ``NODE+NODE``, or ``any two`` (``any 2``): every set of so many nodes; raises ``UsageError``."""
    word, _, count = text.partition(" ")
    if word == "any":
        number = _NUMBERS.get(count, int(count) if count.isdecimal() else 0)
        if not 0 < number < len(nodes):
            most = f"at most {len(nodes) - 1} of {counted(len(nodes), 'node')} can be lost"
            raise UsageError(f"--lose {text!r}: {most}; write 'any one' or 'any 2', or names as NODE+NODE")
        return list(itertools.combinations(nodes, number))
    names = tuple(dict.fromkeys(text.split("+")))
    for name in names:
        if name not in nodes:
            raise UsageError(f"--lose {text}: the plan has no node {name!r}; {nearest(name, nodes)}")
    if len(names) == len(nodes):
        raise UsageError(f"--lose {text}: no node would be left; name fewer")
    return [names]


def loss_result(plan: Plan, profile: Profile, job: Job, lost: tuple[str, ...]) -> LossResult:
    """Predict the loss of nodes at once, in the last placement of a plan, by the rules of a run of ``job``."""
    part, recovery = plan.parts[-1], job.recovery
    policy = RecoveryPolicy(leaves_out=recovery.owners == SKIP_OWNER, awaits_s=recovery.wait_s)
    outcome = loss_outcome(part, lost, policy)
    if outcome.ends:
        return LossResult(lost=lost, why=outcome.ends)
    gone, placement = tuple(node for node in lost if node not in outcome.awaited), part.placement
    after = Plan(outcome.course, part.placements)
    try:
        placement = placed_without(after, job, profile, gone, Effort(seconds=_SEARCH_S)) if gone else placement
    except (CapacityError, StorageError) as error:
        return LossResult(lost=lost, why=str(error))
    rows = f"own{'s' * (len(outcome.awaited) == 1)} rows, which no other node has"
    return LossResult(
        lost=lost,
        why=f"{', '.join(outcome.awaited)} {rows}" if outcome.awaited else "",
        awaited=outcome.awaited,
        layout=layout_text(Plan.of(outcome.course, dataclasses.replace(placement, placement_number=0, first_turn=0))),
        seconds=move_s(part.placement, placement, profile.nodes[0]),
    )


_SHOWN = ("num_steps", "batch_size", "microbatches", "max_length", "wire_dtype", "eval_every", "local_iterations")
_PATHS = ("model.path", "data.train", "data.eval")


def is_same_work(before: PredictedPlan, after: PredictedPlan) -> bool:
    """Whether both plans train equally many steps and rows at each depth, so that wall times are comparable."""
    first, second = before.plan.course, after.plan.course
    depths = [[(each.depth, each.steps) for each in outcome.prediction.depths] for outcome in (before, after)]
    return (first.batch_size, first.num_steps) == (second.batch_size, second.num_steps) and depths[0] == depths[1]


def course_differences(before: PredictedPlan, after: PredictedPlan) -> dict[str, tuple[str, str]]:
    """Return the fields of the course that differ, with both values: ``{"num_steps": ("60", "120")}``."""
    first, other = _figures(before.plan.course), _figures(after.plan.course)
    return {name: (first[name], other[name]) for name in first if first[name] != other[name]}


def _figures(course: Course) -> dict[str, str]:
    values = {name: str(getattr(course, name)) for name in _SHOWN}
    owners = ", ".join(
        f"{owner.node} {owner.train_rows}" for owner in sorted(course.owners, key=lambda each: each.node)
    )
    return {"method": course.method.name, **values, "owners": owners}


def job_differences(run: Job, changed: Job) -> dict[str, tuple[str, str]]:
    """Return the keys in which two jobs differ, with both values; paths are not compared."""
    first, other = (_keys(job) for job in (run, changed))
    names = [name for name in dict.fromkeys((*first, *other)) if first.get(name) != other.get(name)]
    return {name: (first.get(name, "nothing"), other.get(name, "nothing")) for name in names if name not in _PATHS}


def _keys(job: Job) -> dict[str, str]:
    values, section = {}, ""
    for line in job.to_toml().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line:
            key, _, value = line.partition(" = ")
            values[f"{section}.{key}"] = value
    return values


def difference_text(differences: dict[str, tuple[str, str]]) -> str:
    """Write differences on one line: ``num_steps 60 -> 120, batch_size 16 -> 8``."""
    return ", ".join(f"{name} {first} -> {second}" for name, (first, second) in differences.items())
