"""Make the plan of one run: from the first answers of its nodes to a plan on its way to the run's thread.

::

    nodes' sizes --> first look --> nodes' times --> links --> planning --> PlanReady, or PlanFailed

Steps are left out where times, links or a plan are given. Everything here is called on the run's thread. What takes
long goes on beside it, and its answers come back through the run's queue.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from coordinator.drive.agent_calls import AgentCalls
from coordinator.drive.checkpointing import Checkpointing
from coordinator.drive.plan_making.first_look import FirstLook, Looked
from coordinator.drive.plan_making.link_measuring import (
    LinkAnswer,
    LinkMeasuring,
    has_own_links,
    remember,
    remembered_links,
)
from coordinator.drive.plan_making.planning import PlanningThread, PlanReady
from coordinator.drive.requests import RunRequest
from coordinator.members.link_cache import LinkCache
from coordinator.members.registry import Member
from coordinator.records.events import EventSink
from ringtune.costs.profile import LinkFacts, NodeFacts
from ringtune.errors import RingTuneError
from ringtune.rounds import rounds
from ringtune.v1 import control_pb2


class PlanMaking:
    """Takes one run through the steps before its plan.

    Args:
        request: what is asked for.
        checkpoints: of the run; they have a plan to keep if it goes on.
        cache: links that are known.
        put: takes, from any thread, what has to come back: ``Looked`` is followed by ``end_look``, a ``LinkAnswer``
            by ``take_link``; with a plan or a failure all is done.
        emit: sends an event to the submitter.
        enter: is told the name of a step that begins.
    """

    def __init__(
        self,
        request: RunRequest,
        checkpoints: Checkpointing,
        cache: LinkCache,
        *,
        put: Callable[[Looked | LinkAnswer | PlanReady | rounds.PlanFailed], None],
        emit: EventSink,
        enter: Callable[[str], None],
    ) -> None:
        self._request, self._checkpoints, self._cache = request, checkpoints, cache
        self._put, self._emit, self._enter = put, emit, enter
        self._planning = PlanningThread(request, put)
        self._members: tuple[Member, ...] = ()
        self._calls: Mapping[str, AgentCalls] = {}
        self._first_look: FirstLook | None = None
        self._measuring: LinkMeasuring | None = None
        self._facts: Mapping[str, NodeFacts] = {}

    # ---- nodes ------------------------------------------------------------------------------------

    def begin(self, members: Sequence[Member], calls: Mapping[str, AgentCalls]) -> None:
        """Begin with the members of the run, which are asked about themselves next."""
        self._members, self._calls = tuple(members), calls
        if FirstLook.is_wanted(self._request):
            self._first_look = FirstLook(self._request, tuple(member.node for member in members), self._put)

    @property
    def is_looking(self) -> bool:
        """Whether the answers of nodes are only looked at: they are asked again, to measure themselves."""
        return self._first_look is not None

    @property
    def needs_times(self) -> bool:
        """Whether a node that is asked now shall measure itself."""
        return self._request.needs_times and not self.is_looking

    def look_at(self, facts: NodeFacts) -> None:
        """Look at a node's answer; after the last one ``Looked`` comes."""
        if self._first_look is not None:
            self._first_look.take(facts)

    def end_look(self) -> None:
        """Let answers count from now on."""
        self._first_look = None

    # ---- links and plan ---------------------------------------------------------------------------

    def plan(self, facts: Mapping[str, NodeFacts]) -> None:
        """Plan with the facts of all nodes; first measure the links that the run may use, if it is planned by them."""
        self._facts = facts
        job, model = self._request.job, next(iter(facts.values())).model
        if not LinkMeasuring.is_wanted(self._request):
            is_own = has_own_links(self._request)
            self._plan_with(remembered_links(self._members, job, model, self._cache) if is_own else ())
            return
        self._measuring = LinkMeasuring(self._members, self._calls, job, model, cache=self._cache, put=self._put)
        if not self._measuring.is_done:
            self._enter("measuring links")
        self._measuring.go_on()
        self._plan_once_measured()

    def take_link(self, answer: LinkAnswer) -> None:
        """Take a node's answer about a link."""
        if self._measuring is not None:
            self._measuring.take(answer)
            self._plan_once_measured()

    def _plan_once_measured(self) -> None:
        """Begin to plan once every link that is asked about is known."""
        measuring = self._measuring
        if measuring is None or not measuring.is_done:
            return
        self._measuring = None
        self._enter("planning")
        if measuring.note:
            self._emit(control_pb2.RunEvent(note=measuring.note))
        self._plan_with(measuring.links())

    def _plan_with(self, links: tuple[LinkFacts, ...]) -> None:
        """Begin to plan beside the run's thread, and tell the submitter what the plan is made with."""
        try:
            profile = self._planning.start(self._facts, self._checkpoints, links)
        except RingTuneError as error:
            self._put(rounds.PlanFailed(type(error).__name__, str(error)))
        else:
            self._emit(control_pb2.RunEvent(profile_json=json.dumps(profile.to_json())))

    def cancel(self) -> None:
        """Let what goes on beside the run's thread end soon: nobody waits for its answer any more."""
        self._planning.cancel()
        if self._first_look is not None:
            self._first_look.cancel()

    # ---- after the run ----------------------------------------------------------------------------

    def remember(self, shown: Sequence[LinkFacts]) -> None:
        """Keep for the next run what this one's transfers showed; the latencies of a given profile are not ours."""
        if has_own_links(self._request):
            addresses = {member.node: member.address for member in self._members}
            remember(shown, addresses, self._request.job, next(iter(self._facts.values())).model, self._cache)
