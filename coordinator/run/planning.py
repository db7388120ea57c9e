"""Preparation of one run's plan: a first check of sizes, times and links, and planning on a thread.

::

    nodes' sizes --> check --> nodes' times --> links --> planning --> PlanReady, or PlanFailed

Steps are left out where times, links or a plan are given. Everything here is called on the run's thread; long work has
a thread of its own and answers through the run's queue, so that leases, status and Ctrl-C are served meanwhile.

Nodes are asked twice. The first answers have sizes, rows and budgets; only if a plan fits them, by computed sizes, do
the nodes time themselves, which builds a block and runs it. That check plans with every choice of the run, so it
refuses nothing that the run could carry out.

The nodes' answers, the check of sizes and the measurements share one time limit, half as long again as that of a call
(``runtime.wait_s``). The check takes at most half of the time that the first answers leave of the latter.
"""

from __future__ import annotations

import functools
import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from coordinator.planner.given_plan import accept_plan, check_given, with_given_times
from coordinator.planner.limits import Effort
from coordinator.planner.make_plan import make_plan, odd_models
from coordinator.planner.planned import JobTime, Planned, measured_time
from coordinator.run.checkpoint import CheckpointManager
from coordinator.run.driver import Participants
from coordinator.run.events import Entry, work_beside
from coordinator.run.measurement import LinkMeasurement, remembered_links
from coordinator.run.members import Member
from coordinator.run.requests import RunRequest
from ringtune.costs.measurement import Pair, hidden_bytes
from ringtune.costs.profile import LinkFacts, NodeFacts, Profile
from ringtune.errors import DeadlineError, IntegrityError, PlanError, RingTuneError
from ringtune.job.job import Job
from ringtune.quantities import format_bytes, format_seconds
from ringtune.run_control import events as rd
from ringtune.schedule.course import FrozenWeights
from ringtune.schedule.lowering import links
from ringtune.schedule.plan import Plan
from ringtune.v1 import control_pb2


def check_waits(job: Job, plan: Plan, profile: Profile) -> None:
    """Refuse a plan with a link over which one hidden state takes longer than ``runtime.wait_s``; raises ``PlanError``.

    Such a run would end with its first step. Assumed links are not checked. Example: 3 MB over 0.05 Mbit/s take 8
    minutes; nodes wait for 5 minutes by default.
    """
    known = {pair: link for pair, link in profile.link_by_pair.items() if not link.is_assumed}
    course, wait_s = plan.course, job.runtime.wait_s
    job = job.with_overrides({"train.microbatches": course.microbatches, "wire.dtype": course.wire_dtype})
    num_bytes = hidden_bytes(job, profile.nodes[0].model)
    for source, target in sorted(pair for part in plan.parts for pair in links(part)):
        link = known.get((source, target))
        if link is not None and link.seconds(num_bytes) > wait_s:
            raise PlanError(
                f"a hidden state of {format_bytes(num_bytes)} takes {format_seconds(link.seconds(num_bytes))} from "
                f"{source} to {target} ({link.rate_bytes_per_s * 8e-6:.3g} Mbit/s), but nodes wait for no more than "
                f"runtime.wait_s = {wait_s:g} s; raise it, raise train.microbatches, lower train.batch_size, or set "
                "wire.dtype = 'bfloat16'"
            )


_LOG = logging.getLogger(__name__)


class PlanReady(NamedTuple):
    """A plan for the run's thread, with the profile that it was made with."""

    planned: Planned
    profile: Profile

    def predicted(self, request: RunRequest) -> JobTime | None:
        """Predict the seconds of all steps; None without measured times, and for a resumed run."""
        if request.plan_only or request.resume or not self.planned.plan.course.num_steps:
            return None
        return measured_time(self.planned, self.profile, request.job.train.optimizer)


def run_profile(request: RunRequest, facts: Mapping[str, NodeFacts], links: tuple[LinkFacts, ...] = ()) -> Profile:
    """Combine the nodes' facts with the times of a given profile, or the rows of an evaluation.

    ``links`` are those measured for this run; a given profile has its own. Raises ``DataError`` or ``PlanError``.
    """
    if request.evaluation is not None:
        facts = request.evaluation.narrow(facts)
    if request.profile is not None:
        return with_given_times(facts, request.profile)
    return Profile(nodes=tuple(facts[name] for name in sorted(facts)), links=links)


def plan_run(request: RunRequest, profile: Profile, kept: Planned | None, effort: Effort) -> Planned:
    """Make a plan as ``ringtune plan`` does, or accept the given one, or ``kept``, that of the resumed run.

    Raises ``RingTuneError``: no plan fits, the given plan or profile is of another job, or a link is too slow.
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


_SHARE_OF_WAIT = 0.5


class SizesChecked(NamedTuple):
    """The check of all nodes' sizes is done.

    Attributes:
        error: why no plan is possible; None = one is.
        frozen: the type of frozen weights in the possible plan; the nodes are timed with it.
    """

    error: RingTuneError | None
    frozen: FrozenWeights | None = None


def check_sizes(
    request: RunRequest,
    facts: Mapping[str, NodeFacts],
    end_s: float,
    *,
    is_cancelled: Callable[[], bool],
    now_s: Callable[[], float] = time.monotonic,
) -> SizesChecked:
    """Check whether a plan fits the nodes, in half of the time to ``end_s`` at most; raises ``RingTuneError``."""
    seconds = min(request.job.runtime.plan_s, _SHARE_OF_WAIT * max(0.0, end_s - now_s()))
    effort = Effort(seconds=seconds, is_cancelled=is_cancelled, judged_actions=0)
    try:
        planned = plan_run(request, run_profile(request, facts), None, effort)
    except DeadlineError as error:  # the planner that knows all will say what is wrong
        _LOG.info("the check of sizes took too long: %s", error)
        return SizesChecked(None)
    return SizesChecked(None, planned.plan.course.frozen)


class RunPlanner:
    """The steps of one run before its plan.

    Args:
        on_sizes_checked: called on the run's thread after the check of sizes, which is over with that.
        on_plan: called there with the plan, or the reason why there is none.

    Attributes:
        is_checking_sizes: whether nodes' answers are for the check of sizes, before they measure for a plan that is not
            made yet; else they count for the plan.
    """

    def __init__(
        self,
        participants: Participants,
        request: RunRequest,
        checkpoints: CheckpointManager,
        *,
        on_sizes_checked: Callable[[SizesChecked], None],
        on_plan: Callable[[PlanReady | rd.PlanFailed], None],
        enter: Callable[[str], None],
    ) -> None:
        self._request, self._checkpoints, self._cache = request, checkpoints, participants.members.links
        self._calls, self._put, self._emit = participants.calls, participants.queue.put, participants.output.emit
        self._on_sizes_checked, self._on_plan, self._enter = on_sizes_checked, on_plan, enter
        self._cancelled = threading.Event()
        self._members: tuple[Member, ...] = ()
        self._spare: Collection[str] = ()
        self.is_checking_sizes = request.needs_times and request.resume is None
        self._check_end_s = 0.0
        self._sizes: dict[str, NodeFacts] = {}
        self._measuring: LinkMeasurement | None = None
        self._facts: Mapping[str, NodeFacts] = {}

    # ---- nodes ------------------------------------------------------------------------------------

    def begin(self, members: Sequence[Member], spare: Collection[str] = ()) -> None:
        """Begin with the members of the run, of which it may leave out the ``spare`` ones; they are inspected next."""
        self._members, self._spare = tuple(members), spare
        self._check_end_s = time.monotonic() + self._request.job.runtime.wait_s

    def take_sizes(self, facts: NodeFacts) -> None:
        """Take a node's answer for the check of sizes; the last one starts it."""
        self._sizes[facts.node] = facts
        self._check_once_all_answered()

    def leave(self, node: str) -> None:
        """Plan without a node that has not answered, or answered what can't be; a plan with it is not wanted."""
        self._members = tuple(member for member in self._members if member.node != node)
        self._measuring = None
        self._sizes.pop(node, None)
        if self.is_checking_sizes:
            self._check_once_all_answered()

    def _leaves_out(self, facts: Mapping[str, NodeFacts]) -> bool:
        """Whether nodes that have another model than most leave the run, which continues without them.

        Where the run needs one of them it ends with that.
        """
        odd = odd_models(facts.values())
        if not odd or not all(node in self._spare for node in odd):
            return False
        for node, problem in odd.items():
            self._put(rd.NodeFailed(node, IntegrityError.__name__, f"node {node}: {problem}"))
        return True

    def _check_once_all_answered(self) -> None:
        members, facts = self._members, dict(self._sizes)

        def check() -> Entry:
            return done(check_sizes(self._request, facts, self._check_end_s, is_cancelled=self._cancelled.is_set))

        def done(checked: SizesChecked) -> Entry:
            return functools.partial(self._checked, members, checked)

        if len(facts) == len(members) and not self._leaves_out(facts):
            work_beside("check-sizes", check, self._put, lambda error: done(SizesChecked(error)))

    def _checked(self, members: Sequence[Member], checked: SizesChecked) -> None:
        if self._members is members:  # else a node was left out meanwhile, and the others are checked anew
            self.is_checking_sizes = False
            self._on_sizes_checked(checked)

    @property
    def needs_times(self) -> bool:
        """Whether a node that is asked now has to measure itself."""
        return self._request.needs_times and not self.is_checking_sizes

    # ---- links and plan ---------------------------------------------------------------------------

    def plan(self, facts: Mapping[str, NodeFacts]) -> None:
        """Plan with the facts of all nodes, after the measurement of links if the plan needs it."""
        self._facts = facts
        if self._leaves_out(facts):
            return
        job, model = self._request.job, next(iter(facts.values())).model
        if not LinkMeasurement.is_wanted(self._request):
            is_own = self._request.needs_times
            self._plan_with(remembered_links(self._members, job, model, self._cache) if is_own else ())
            return
        self._measuring = LinkMeasurement(
            self._members,
            self._calls,
            job,
            model,
            cache=self._cache,
            answered=lambda pair, reply: self._put(lambda: self._add_link_answer(pair, reply)),
        )
        if not self._measuring.is_done:
            self._enter("measuring links")
        self._measuring.go_on()
        self._plan_once_measured()

    def _add_link_answer(self, pair: Pair, reply: control_pb2.MeasureLinkReply) -> None:
        if self._measuring is None:
            return
        try:
            self._measuring.take(pair, reply)
        except IntegrityError as error:
            self._put(rd.NodeFailed(pair[0], type(error).__name__, str(error)))
            return
        self._plan_once_measured()

    def _plan_once_measured(self) -> None:
        """Start planning once all links are known."""
        measuring = self._measuring
        if measuring is None or not measuring.is_done:
            return
        self._measuring = None
        self._enter("planning")
        if measuring.note:
            self._emit(control_pb2.RunEvent(note=measuring.note))
        self._plan_with(measuring.links())

    def _plan_with(self, links: tuple[LinkFacts, ...]) -> None:
        """Start planning on a thread, and send the profile to the submitter."""
        request, cancelled, members = self._request, self._cancelled, self._members

        def end(made: PlanReady | rd.PlanFailed) -> None:
            if self._members is members:
                self._on_plan(made)

        def failed(error: RingTuneError) -> Entry:
            return functools.partial(end, rd.PlanFailed(type(error).__name__, str(error)))

        try:
            profile = run_profile(request, self._facts, links)
        except RingTuneError as error:
            self._put(failed(error))
            return

        def plan() -> Entry:
            effort = Effort(seconds=request.job.runtime.plan_s, is_cancelled=cancelled.is_set)
            planned = plan_run(request, profile, self._checkpoints.planned(profile, effort), effort)
            return functools.partial(end, PlanReady(planned, profile))

        work_beside("plan", plan, self._put, failed)
        self._emit(control_pb2.RunEvent(profile_json=json.dumps(profile.to_json())))

    def cancel(self) -> None:
        """Make all threads end soon: their answers are not needed."""
        self._cancelled.set()

    # ---- after the run ----------------------------------------------------------------------------

    def remember(self, shown: Sequence[LinkFacts]) -> None:
        """Cache the links that this run's transfers showed; links of a given profile are not cached."""
        if self._request.needs_times:
            addresses = {member.node: member.address for member in self._members}
            model = next(iter(self._facts.values())).model
            self._cache.put(shown, addresses, hidden_bytes(self._request.job, model))
