"""Plan a run from the nodes' facts on a thread of its own, with a given profile or plan if there is one.

The run's thread stays free meanwhile: leases, the status board and a Ctrl-C are served as at any other time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from coordinator.drive.checkpointing import Checkpointing
from coordinator.drive.requests import RunRequest
from coordinator.planner.effort import Effort
from coordinator.planner.given.given_plan import accept_plan
from coordinator.planner.given.given_profile import check_given, with_given_times
from coordinator.planner.job_time import JobTime, measured_time
from coordinator.planner.make_plan import make_plan
from coordinator.planner.planned import Planned
from coordinator.planner.waits import check_waits
from ringtune.costs.profile import LinkFacts, NodeFacts, Profile
from ringtune.errors import RingTuneError, internal_error
from ringtune.rounds import rounds

_LOG = logging.getLogger(__name__)


class PlanReady(NamedTuple):
    """A plan on its way to the run's thread, with the profile that it was made with."""

    planned: Planned
    profile: Profile

    def predicted(self, request: RunRequest) -> JobTime | None:
        """Predict the seconds of all steps; None if the times do not say, and for the rest of a run."""
        if request.plan_only or request.resume or not self.planned.plan.course.num_steps:
            return None
        return measured_time(self.planned, self.profile, request.job.train.optimizer)


def run_profile(request: RunRequest, facts: Mapping[str, NodeFacts], links: tuple[LinkFacts, ...] = ()) -> Profile:
    """Merge what a run is planned with: the nodes' facts, the times of a given profile, the rows of an evaluation.

    Args:
        request: what is asked for.
        facts: of each node.
        links: that were measured for this run; those of a given profile go before.

    Raises:
        DataError: the owner of the evaluation has no rows.
        PlanError: the given profile lacks a node.
    """
    if request.evaluation is not None:
        facts = request.evaluation.narrow(facts)
    if request.profile is not None:
        return with_given_times(facts, request.profile)
    return Profile(nodes=tuple(facts[name] for name in sorted(facts)), links=links)


def plan_run(request: RunRequest, profile: Profile, kept: Planned | None, effort: Effort) -> Planned:
    """Plan a run as ``ringtune plan`` does, or carry out the given plan, or that of the run that goes on.

    Args:
        request: what is asked for.
        profile: what it is planned with.
        kept: the plan of the run that goes on; None = it begins.
        effort: how hard to look.

    Raises:
        RingTuneError: no plan fits, the given plan or profile is of another job, or a link is too slow for it.
    """
    job, facts = request.job, profile.by_name
    if kept is None and request.plan is not None:
        kept = accept_plan(request.plan, job, facts)
    planned = kept or make_plan(
        job,
        facts,
        links=profile.links,
        microbatches=request.choices.microbatches,
        wire_dtypes=request.choices.wire_dtypes,
        evaluation_only=request.evaluation is not None,
        effort=effort,
    )
    if request.profile is not None:
        check_given(request.profile, facts, job, planned.plan)
    check_waits(job, planned.plan, profile)
    return planned


class PlanningThread:
    """Plans a run beside the run's thread.

    Args:
        request: what is asked for.
        on_done: takes the plan or the error; called on the planning thread.
    """

    def __init__(self, request: RunRequest, on_done: Callable[[PlanReady | rounds.PlanFailed], None]) -> None:
        self._request = request
        self._on_done = on_done
        self._cancelled = threading.Event()

    def start(
        self, facts: Mapping[str, NodeFacts], checkpoints: Checkpointing, links: tuple[LinkFacts, ...] = ()
    ) -> Profile:
        """Begin to plan.

        Args:
            facts: of each node.
            checkpoints: of the run; they have a plan to keep if it goes on.
            links: that were measured for this run.

        Returns:
            The profile that is planned with.

        Raises:
            RingTuneError: there is nothing to plan with.
        """
        profile = run_profile(self._request, facts, links)
        threading.Thread(target=self._plan, args=(profile, checkpoints), name="plan", daemon=True).start()
        return profile

    def cancel(self) -> None:
        """Let the thread end soon: nobody waits for its plan any more."""
        self._cancelled.set()

    def _plan(self, profile: Profile, checkpoints: Checkpointing) -> None:
        effort = Effort(seconds=self._request.job.runtime.plan_s, is_cancelled=self._cancelled.is_set)
        try:
            kept = checkpoints.planned(profile, effort)
            self._on_done(PlanReady(plan_run(self._request, profile, kept, effort), profile))
        except RingTuneError as error:
            self._on_done(rounds.PlanFailed(type(error).__name__, str(error)))
        except Exception as error:
            _LOG.exception("planning failed by a bug")
            self._on_done(rounds.PlanFailed(RingTuneError.__name__, str(internal_error(error))))
