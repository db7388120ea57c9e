"""A plan with the memory of its nodes, its seconds, its copies, and the reasons for it.

With measured times the seconds are the planner's prediction. Without, they are a rough guess of the order of magnitude:
the multiplications of a block at one assumed rate for every node, and messages that take no time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeVar

from coordinator.planner.draft import racks_of
from coordinator.planner.judge import plan_job_s, score_pass_s, score_passes
from coordinator.planner.phases import PhasesReason
from coordinator.planner.replicas import ReplicasReason
from coordinator.planner.search import RingChoice
from ringtune.config.sections import NONE, SKIP_OWNER
from ringtune.costs.measurement import differing_transformers
from ringtune.costs.memory_estimate import end_of_turn_bytes
from ringtune.costs.memory_sizes import DTYPE_BYTES, Sizes
from ringtune.costs.memory_terms import MemoryEstimate, Share
from ringtune.costs.profile import ModelFacts, NodeFacts, Profile
from ringtune.errors import CapacityError, PlanError, StorageError
from ringtune.job.job import Job
from ringtune.models.adapter_config import auxiliary_of, trains_own_weights
from ringtune.quantities import format_bytes, format_seconds
from ringtune.schedule.access import HEADER_BYTES, CopyBytes
from ringtune.schedule.course import Course
from ringtune.schedule.migration import copy_holders, shared_racks, stay_reason
from ringtune.schedule.placement import Rack
from ringtune.schedule.plan import Plan
from ringtune.schedule.units import EMBEDDING
from ringtune.techniques import TECHNIQUES


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A helper for a host, as the planner tried it.

    Attributes:
        without_s: the same without this helper, but with those that were taken before.
    """

    host: str
    helper: str
    with_s: float | None = None
    without_s: float | None = None
    full: str = ""
    is_taken: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class HelpersReason:
    """The planner's trials of helpers under ``offload.mode = "auto"``.

    Attributes:
        note: that nothing fitted without helpers, or that nothing could be tried.
        is_needed: whether every host needs a helper, so that there is no trial without helpers.
    """

    trials: tuple[Trial, ...] = ()
    note: str = ""
    is_needed: bool = False

    def lines(self, seconds: Callable[[float], str]) -> list[str]:
        """Write the trials as lines of an explanation."""
        lines = ['  helpers (offload.mode = "auto"):' + (f" {self.note}" if self.note else "")]
        return lines + [f"    {trial.helper} for {trial.host}: {self._end(trial, seconds)}" for trial in self.trials]

    def _end(self, trial: Trial, seconds: Callable[[float], str]) -> str:
        if trial.full:
            return f"it does not fit: {trial.full}"
        if self.is_needed:
            end = "taken" if trial.is_taken else "not taken, as another one is faster"
            return end if trial.with_s is None else f"{seconds(trial.with_s)} for all steps: {end}"
        if trial.with_s is None or trial.without_s is None:
            return "taken, so that every slice fits"
        end = "taken" if trial.is_taken else "not taken" if trial.with_s < trial.without_s else "it does not pay"
        return f"{seconds(trial.with_s)} for all steps, {seconds(trial.without_s)} without: {end}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A plan with the memory that each of its nodes needs.

    Attributes:
        choice: of the search; None for a plan that was made before.
        profile: that the plan was made with; times of alike nodes are equal.
        left_out: settings of the job that the plan does not have, each with its reason, for example helpers of hosts
            without trainable blocks.
        told: what else the user should know of the plan.
        num_searched: number of layouts searched; 0 for a plan that was made before.
    """

    plan: Plan
    memory: Mapping[str, MemoryEstimate]
    choice: RingChoice | None = None
    profile: Profile | None = None
    left_out: tuple[str, ...] = ()
    told: tuple[str, ...] = ()
    helping: HelpersReason | None = None
    replicas: ReplicasReason | None = None
    phases: PhasesReason | None = None
    num_searched: int = dataclasses.field(default=0, compare=False)
    search_s: float = dataclasses.field(default=0.0, compare=False)

    def moved_to(self, plan: Plan, fitting: Fitting) -> Planned:
        """Return these reasons for another plan, with its memory."""
        return dataclasses.replace(self, plan=plan, memory=fitting(plan).memory)

    @property
    def effort_line(self) -> str:
        """Number of searched layouts and seconds: ``searched 412 layouts in 1.8 s``; empty for a plan made before."""
        if not self.num_searched:
            return ""
        plural = "s" if self.num_searched > 1 else ""
        return f"searched {self.num_searched:,} layout{plural} in {format_seconds(self.search_s)}"

    @property
    def note(self) -> str:
        """Notes on the plan: settings left out, notes of techniques, a search ended by the clock; mostly empty."""
        cut_after_s = self.choice.cut_after_s if self.choice else None
        cut = (
            f"planning was cut after {cut_after_s:g} s (runtime.plan_s): this is the best plan found so far; with more "
            "time or on another machine it may be another one"
            if cut_after_s is not None
            else ""
        )
        nodes = self.profile.nodes if self.profile else ()
        unlike = differing_transformers([node for node in nodes if node.node in self.plan.nodes])
        notes = [note for technique in TECHNIQUES for note in technique.notes(self.plan, nodes)]
        return "; ".join([*self.left_out, *self.told, *notes, *unlike, *filter(None, [cut])])

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Peak bytes of each node of the plan."""
        return {node: estimate.total_bytes for node, estimate in self.memory.items()}


Fitting = Callable[[Plan], Planned]
"""Plan -> the plan with its memory; raises an error if nodes, disks or links have no room for it."""

Option = TypeVar("Option")
Refusal = CapacityError | StorageError


def first_that_fits(
    options: Iterable[Option],
    place: Callable[[Option], Planned],
    errors: tuple[type[Refusal], ...] = (CapacityError, StorageError),
) -> tuple[Planned | None, list[Refusal]]:
    """Place the first option that fits; return the plan, None if none fits, and why each option before it does not.

    ``errors``: that say that an option does not fit; others are raised.
    """
    refused: list[Refusal] = []
    for option in options:
        try:
            return place(option), refused
        except errors as error:
            refused.append(error)
    return None, refused


ASSUMED_FLOP_PER_S: Final = 20e9
"""Assumed rate of a node that was never measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobTime:
    """Predicted seconds of all steps of a job.

    Attributes:
        steps_s: without evaluations, scores, checkpoints and start.
        scores_s: of gathering scores, by the simulator; 0 if the run gathers none, None if not known.
        assumed_flop_per_s: the rate of every node under a rough guess; None with measured times.
        lacks_helpers: whether the plan has helpers that the prediction leaves out: only the simulator knows helpers.
    """

    steps_s: float
    by: str
    scores_s: float | None = 0.0
    assumed_flop_per_s: float | None = None
    lacks_helpers: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the fields as numbers and strings."""
        return asdict(self)

    def line(self) -> str:
        """Return seconds and source as a line."""
        if self.assumed_flop_per_s is None:
            steps = f"predicted: {format_seconds(self.steps_s)} for all steps, by the {self.by} from measured times"
            return f"{steps}{self._on_top()}"
        return (
            f"rough guess: {format_seconds(self.steps_s)} for all steps{self._on_top()}, if every node did "
            f"{self.assumed_flop_per_s / 1e9:g} billion operations a second and messages took no time; nothing was "
            "measured: 'ringtune measure' and --profile give a prediction"
        )

    def _on_top(self) -> str:
        helpers = " without helpers" if self.lacks_helpers else ""
        if self.scores_s is None:
            return f"{helpers}; scores come on top"
        scores = f"; scores come on top, {format_seconds(self.scores_s)} by the simulator" if self.scores_s else ""
        return f"{helpers}{scores}"


def measured_time(planned: Planned, profile: Profile, optimizer: str) -> JobTime | None:
    """Predict the steps of a plan from measured times; None if a node has none, or the plan's moves were not judged."""
    plan, phases = planned.plan, planned.phases
    if plan.moves:
        return JobTime(steps_s=phases.moving_s, by="simulator") if phases is not None and phases.is_taken else None
    scores_s, lacks = _scores_s(plan, profile, optimizer), bool(plan.placement.helpers)
    best = planned.choice.runs if planned.choice is not None and not planned.choice.even else None
    simulated_s = planned.replicas.best_s if planned.replicas is not None else None
    if simulated_s is None and best is not None:
        simulated_s = best.simulated_s
    if simulated_s is not None:
        return JobTime(steps_s=simulated_s, by="simulator", scores_s=scores_s)
    if best is not None:
        return JobTime(steps_s=best.job_s, by="formula", scores_s=scores_s, lacks_helpers=lacks)
    try:
        steps_s = plan_job_s(plan, profile, optimizer=optimizer)
    except PlanError:  # a node of the plan has no times
        return None
    by = "simulator" if plan.placement.has_replicas else "formula"
    return JobTime(steps_s=steps_s, by=by, scores_s=scores_s, lacks_helpers=lacks)


def _scores_s(plan: Plan, profile: Profile, optimizer: str) -> float | None:
    passes = score_passes(plan.course)
    try:
        return passes * score_pass_s(plan, profile, optimizer=optimizer) if passes else 0.0
    except PlanError:  # a node of the plan has no times
        return None


def guessed_time(planned: Planned, job: Job, model: ModelFacts) -> JobTime | None:
    """Guess the steps of a plan for nodes without measured times; None for a plan that was not searched here.

    The planner counts a block's forward of one micro-batch as 1, and its backward as much.
    """
    if planned.choice is None:
        return None
    block_s = block_flop(planned.plan, job, model) / ASSUMED_FLOP_PER_S
    profile = planned.profile or Profile(nodes=())
    scores_s = _scores_s(planned.plan, profile, job.train.optimizer)
    return JobTime(
        steps_s=planned.choice.runs.job_s * block_s,
        by="rough guess",
        scores_s=scores_s and scores_s * block_s,
        assumed_flop_per_s=ASSUMED_FLOP_PER_S,
        lacks_helpers=bool(planned.plan.placement.helpers),
    )


def block_flop(plan: Plan, job: Job, model: ModelFacts) -> float:
    """Floating-point operations of one block's forward for one micro-batch of full length.

    Each weight is multiplied and added once a token; attention compares each token with all others and adds up their
    values. Adapters of the library are too small to count; a ``linear`` is as large as its matrix. Example: 1.77
    million weights, 8 rows of 64 tokens and width 384 are 1.9 billion.
    """
    tokens, rows = plan.course.max_length, max(plan.course.microbatch_sizes())
    adapter = job.adapter.config
    own_bytes = model.adapter_block_bytes if trains_own_weights(adapter) or auxiliary_of(adapter) else 0
    weights = (model.block_bytes + own_bytes) / DTYPE_BYTES[job.model.dtype]
    return rows * tokens * (2 * weights + 4 * tokens * model.hidden_size)


def with_copies(job: Job, planned: Planned, facts: Mapping[str, NodeFacts], fitting: Fitting) -> Planned:
    """Return a plan with the copies that its job asks for, or without them and with the reason.

    Raises:
        PlanError: the job requires copies, and the run can't move from its placement, or has no checkpoints to copy.
        CapacityError: the job requires copies, for which a node has no memory.
    """
    plan, course, is_needed = planned.plan, planned.plan.course, job.needs_copies
    if (job.recovery.copies == NONE and not is_needed) or not course.num_steps:
        return _uncopied(planned, fitting)
    if is_full := course.method.full_parameters:
        what = "checkpoints can't be copied to the next host"
        why = "" if course.checkpoint_every else "train.checkpoint_every = 0, so there are none"
    else:
        what, why = "the run can't continue without a lost node", stay_reason(course)
    if why and is_needed:
        raise PlanError(f"{what}: {why}; set recovery.copies = 'none'")
    has_other_owners = not is_full and job.recovery.owners == SKIP_OWNER and len(course.owners) > 1
    if len(plan.placement.members) == 1 and not is_needed and not has_other_owners:
        return _uncopied(planned, fitting)
    if why:
        return _without(job, planned, facts, fitting, why)
    try:
        copied = _numbered(job, planned, facts, fitting)
    except (CapacityError, StorageError) as error:
        if is_needed:
            raise
        return _without(job, planned, facts, fitting, str(error))
    if not is_full:
        return copied
    number = job.recovery.num_copies
    sizes = Sizes.of_job(job, plan.course, facts[plan.nodes[0]])
    most = max(piece.num_blocks for piece in plan.placement.hosts) * sizes.snapshot_bytes
    where = "the next host" if number < 1 else f"{number} other host{'s' if number > 1 else ''}"
    said = (
        f"at each checkpoint hosts send their blocks, {format_bytes(most)} at most, to the disk of "
        f"{where}{_copying_time(copied, sizes)}, so that the run can go back there without a lost one; predictions "
        "leave this out"
    )
    return dataclasses.replace(copied, told=(*copied.told, said))


def copy_bytes(course: Course, node: NodeFacts, job: Job) -> CopyBytes:
    """Return the bytes of a trained block and of the head, with optimizer state, in a copy.

    Where all parameters train, a file with the head has the embedding too.
    """
    sizes = Sizes.of_job(job, course, node)
    head_bytes = sizes.handed_over_bytes
    if course.method.full_parameters:
        head_bytes += sizes.trained_bytes(EMBEDDING) + sizes.state_bytes(EMBEDDING)
    names = len(course.user_sets) * HEADER_BYTES
    return CopyBytes(math.ceil(sizes.snapshot_bytes) + names, math.ceil(head_bytes))


def _copying_time(planned: Planned, sizes: Sizes) -> str:
    """Tell the seconds in which the slowest link carries the copies of a checkpoint; empty without measured links."""
    placement, links = planned.plan.placement, planned.profile.link_by_pair if planned.profile else {}
    times_s = [
        link.seconds(piece.num_blocks * sizes.snapshot_bytes) * len(holders)
        for piece in placement.hosts
        for holders in [copy_holders(placement, piece.node)]
        for holder in holders
        if (link := links.get((piece.node, holder))) is not None and not link.is_assumed
    ]
    return f" in {format_seconds(max(times_s))}" if times_s else ""


def copies_line(plan: Plan, memory: Mapping[str, MemoryEstimate]) -> list[str]:
    """Name the nodes that keep copies of the last turns and their bytes; empty without copies."""
    if not plan.goes_back:
        return []
    kept = {node: memory[node].parts()["kept"] for node in plan.nodes if node in memory}
    each = ", ".join(f"{node} {format_bytes(size)}" for node, size in kept.items() if size)
    return [f"hosts keep copies of the last turns in memory, to continue without a lost one: {each or 'nothing'}"]


def _uncopied(planned: Planned, fitting: Fitting) -> Planned:
    if not any(placement.copies for placement in planned.plan.placements):
        return planned
    return planned.moved_to(planned.plan.with_copies(False), fitting)


def _copied(planned: Planned, fitting: Fitting, number: int, racks: tuple[Rack, ...]) -> Planned:
    plan = planned.plan.with_copies(True, number, racks)
    return planned if plan == planned.plan else planned.moved_to(plan, fitting)


def _numbered(job: Job, planned: Planned, facts: Mapping[str, NodeFacts], fitting: Fitting) -> Planned:
    """Return a plan with the copies that its job requires, on other racks, and the nodes without places for so many."""
    number = job.recovery.num_copies
    racks = racks_of(facts.values(), number)
    try:
        copied = _copied(planned, fitting, number, racks)
    except (CapacityError, StorageError):
        if number or not racks:
            raise
        copied = _copied(planned, fitting, 0, ())  # the next host may have room where that on another rack has none
    if not number:
        return copied
    plan = copied.plan
    few = dict.fromkeys(node for placement in plan.placements for node in shared_racks(plan.course, placement))
    if not few:
        return copied
    said = (
        f"what node {', '.join(few)} trains has no {number} copies on racks of their own, so that it is lost with fewer"
        f" than {number + 1} racks (ringtune node --rack, by default its machine); add nodes on other racks"
    )
    return dataclasses.replace(copied, told=(*copied.told, said))


def _without(job: Job, planned: Planned, facts: Mapping[str, NodeFacts], fitting: Fitting, why: str) -> Planned:
    """Return the plan without copies, with the reason and the bytes that they would take."""
    plan, course = planned.plan, planned.plan.course
    sizes = Sizes.of_job(job, course, facts[plan.nodes[0]])
    most = max(end_of_turn_bytes(course, Share.of(plan, name), sizes) for name in plan.nodes)
    kind, each = ("checkpoints", "checkpoint") if course.method.full_parameters else ("trained blocks", "turn")
    can_resume = "; the run can be resumed from checkpoints on the disks" * bool(course.checkpoint_every)
    said = f"no copies of {kind} are kept, {format_bytes(most)} a {each} at most: {why}{can_resume}"
    return dataclasses.replace(_uncopied(planned, fitting), left_out=(*planned.left_out, said))


def with_techniques(job: Job, planned: Planned, fitting: Fitting) -> Planned:
    """Return a plan with the techniques of its job, or without those that do not fit and with the reason."""
    for technique in TECHNIQUES:
        try:
            plan = technique.placed(job, planned.plan)
            if plan is not planned.plan:
                planned = planned.moved_to(plan, fitting)
        except (CapacityError, PlanError, StorageError) as error:
            left_out = f"{technique.left_out}: {error}"
            planned = dataclasses.replace(planned, left_out=(*planned.left_out, left_out))
    return planned
