"""Predict how long all steps of a planned job take, and say from what.

With measured times it is the planner's own prediction. Without any it is a rough guess: the multiplications of a block
at a rate that is assumed for every node, with messages that take no time. Such a guess orders magnitudes, no more.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from coordinator.planner.planned import Planned
from coordinator.planner.predict.plan_time import plan_job_s
from coordinator.planner.predict.score_time import score_pass_s, score_passes
from ringtune.costs.memory.sizes import DTYPE_BYTES
from ringtune.costs.profile import ModelFacts, Profile
from ringtune.errors import PlanError
from ringtune.jobs.job import Job
from ringtune.models.adapters.adapter_config import auxiliary_of, trains_own_weights
from ringtune.quantities import format_seconds
from ringtune.schedule.plan import Plan

ASSUMED_FLOP_PER_S: Final = 20e9
"""Assumed of a node that was never measured; not a measurement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobTime:
    """The predicted seconds of all steps of a job.

    Attributes:
        steps_s: seconds; evaluations, scores, checkpoints and the start come on top.
        by: ``simulator``, ``formula`` or ``rough guess``.
        scores_s: seconds of gathering scores, by the simulator; 0 if the run gathers none, None if not known.
        assumed_flop_per_s: the rate of every node under a rough guess; None with measured times.
        lacks_helpers: whether nodes help in the plan, but not in this prediction: only the simulator knows helpers.
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
        """Describe time and source on a line."""
        if self.assumed_flop_per_s is None:
            steps = f"predicted: {format_seconds(self.steps_s)} for all steps, by the {self.by} from measured times"
            return f"{steps}{self._on_top()}"
        return (
            f"rough guess: {format_seconds(self.steps_s)} for all steps{self._on_top()}, if every node did "
            f"{self.assumed_flop_per_s / 1e9:g} billion operations a second and messages took no time; nothing was "
            "measured: 'ringtune measure' and --profile give a prediction"
        )

    def _on_top(self) -> str:
        helpers = " if nobody helped" if self.lacks_helpers else ""
        if self.scores_s is None:
            return f"{helpers}; scores come on top"
        scores = f"; scores come on top, {format_seconds(self.scores_s)} by the simulator" if self.scores_s else ""
        return f"{helpers}{scores}"


def measured_time(planned: Planned, profile: Profile, optimizer: str) -> JobTime | None:
    """Predict the steps of a plan from measured times; None if a node has none.

    Args:
        planned: the plan; its choice has the prediction, if the plan was made here.
        profile: with times.
        optimizer: of the job.
    """
    if planned.plan.moves:
        is_known = planned.phases is not None and planned.phases.is_taken  # else nobody has judged the moves
        return JobTime(steps_s=planned.phases.moving_s, by="simulator") if planned.phases and is_known else None
    scores_s = _scores_s(planned.plan, profile, optimizer)
    lacks = bool(planned.plan.placement.helpers)
    if planned.replicas is not None and planned.replicas.best_s is not None:
        return JobTime(steps_s=planned.replicas.best_s, by="simulator", scores_s=scores_s)
    if planned.choice is not None and not planned.choice.even:
        best = planned.choice.runs
        if best.simulated_s is not None:
            return JobTime(steps_s=best.simulated_s, by="simulator", scores_s=scores_s)
        return JobTime(steps_s=best.job_s, by="formula", scores_s=scores_s, lacks_helpers=lacks)
    try:
        steps_s = plan_job_s(planned.plan, profile, optimizer=optimizer)
        by = "simulator" if planned.plan.placement.has_replicas else "formula"
        return JobTime(steps_s=steps_s, by=by, scores_s=scores_s, lacks_helpers=lacks)
    except PlanError:  # a node of the plan has no times
        return None


def _scores_s(plan: Plan, profile: Profile, optimizer: str) -> float | None:
    passes = score_passes(plan.course)
    try:
        return passes * score_pass_s(plan, profile, optimizer=optimizer) if passes else 0.0
    except PlanError:  # a node of the plan has no times
        return None


def guessed_time(planned: Planned, job: Job, model: ModelFacts) -> JobTime | None:
    """Guess the steps of a plan for nodes that nobody has measured; None for a plan that was made elsewhere.

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
    """Count the operations of one block's forward for one micro-batch of full length.

    Each weight is multiplied and added once a token; attention compares each token with all and adds up all values.
    The weights of an adapter of the library are too few to count; a ``linear`` is as large as its matrix.
    Example: 1.77 million weights, 8 rows of 64 tokens and width 384 are 1.9 billion.
    """
    tokens, rows = plan.course.max_length, max(plan.course.microbatch_sizes())
    adapter = job.adapter.config
    own_bytes = model.adapter_block_bytes if trains_own_weights(adapter) or auxiliary_of(adapter) else 0
    weights = (model.block_bytes + own_bytes) / DTYPE_BYTES[job.model.dtype]
    return rows * tokens * (2 * weights + 4 * tokens * model.hidden_size)
