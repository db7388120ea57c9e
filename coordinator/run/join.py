"""Nodes that join a run under way, new or returned: inspect, check, admit.

::

    joined --> inspect --answer--> checks --> the run has one node more
                   '---error---> a note

A node is asked for the same facts as every node at the start. If its model is that of the run, and an owner's rows are
those of the plan, it may get blocks, and the planner decides whether they pay. An awaited node returns to its place. An
owner whose turns were left out has turns again from the next turn boundary on. Where all parameters train it is from
the next checkpoint on, from which another run continues.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Final, NamedTuple

from coordinator.planner.given_plan import with_given_times
from coordinator.planner.make_plan import keep_plan
from coordinator.run.driver import Participants
from coordinator.run.members import Member, Members, check_reachable, lost_message, machine_of, num_neighbours, rack_of
from coordinator.run.migration import ReplanSearch
from coordinator.run.node_client import AgentCalls, inspect_request, read_facts
from coordinator.run.recorder import RunRecorder
from coordinator.run.recovery import Reports
from coordinator.run.requests import RunRequest
from ringtune.costs.links import with_assumed
from ringtune.costs.measurement import hidden_bytes, refuse_differing_copies
from ringtune.costs.profile import LinkFacts, NodeFacts, Profile
from ringtune.errors import PeerLostError, PlanError, RingTuneError
from ringtune.ids import naming_node
from ringtune.run_control import events as rd
from ringtune.run_control.continuation import whole_num_steps
from ringtune.run_control.state_machine import RunStateMachine
from ringtune.schedule.migration import with_owner
from ringtune.schedule.plan import Plan
from ringtune.v1 import control_pb2


class JoinCandidate(NamedTuple):
    """A node that is being inspected, and the calls to it."""

    member: Member
    calls: AgentCalls


def release_node(calls: AgentCalls, reason: str) -> None:
    """Release a node, then close the calls to it."""
    calls.release(reason).add_done_callback(lambda _: calls.close())


@dataclass(frozen=True, slots=True)
class KnownNodes:
    """Plan and facts of a run's nodes.

    Attributes:
        plan: as it was made; the rows of its owners are compared.
        facts: by node, lost ones included.
    """

    plan: Plan
    facts: Mapping[str, NodeFacts]


def refusal_reason(facts: NodeFacts, known: KnownNodes) -> str:
    """Say why a node can't take part; empty if it can.

    Its base model must be that of the others, an owner's rows those of the plan, and its copies of embedding and head
    must be updated as those of the other owners.
    """
    model = next(iter(known.facts.values())).model  # nodes of former placements may lack
    if facts.model.digest != model.digest:
        return (
            f"it has model {facts.model.digest[:12]}…, the run has {model.digest[:12]}…; put the same folder there, or "
            "start it without --model"
        )
    before = known.facts.get(facts.node)
    owner = next((owner for owner in known.plan.course.all_owners if owner.node == facts.node), None)
    if owner is None:
        return ""
    since = before or owner  # it was left out before this part of the run began
    rows, had = (facts.train_rows, facts.eval_rows), (since.train_rows, since.eval_rows)
    if rows != had:
        return (
            f"it has {rows[0]} training and {rows[1]} evaluation rows, the run began with {had[0]} and {had[1]}; start "
            "it again with the same data"
        )
    others = "its rows have other labels or users than when the run began; start it again with the same data"
    if before is None:
        same = {*facts.labels, *facts.eval_labels} <= {*known.plan.course.labels} and facts.users == owner.users
        return "" if same else others
    labels = (facts.labels, facts.eval_labels, facts.users)
    if labels != (before.labels, before.eval_labels, before.users):
        return others
    if known.plan.course.method.full_parameters:  # replicas are placed by what nodes are now
        try:
            refuse_differing_copies(known.plan, {**known.facts, facts.node: facts})
        except PlanError as error:
            return str(error)
    return ""


def links_of(
    member: Member, facts: NodeFacts, profile: Profile, members: Members, request: RunRequest
) -> tuple[LinkFacts, ...]:
    """The links between a new node and those of a profile: given, cached or assumed, as at the start of a run.

    None where the profile has none.
    """
    living = {each.node: each for each in members.living() if each.node in profile.by_name}
    if not profile.links:
        return ()
    everybody = {**living, member.node: member}
    addresses = {name: each.address for name, each in everybody.items()}
    measured = [link for link in profile.links if not link.is_assumed and member.node not in (link.source, link.target)]
    remembered = members.links.find(addresses, hidden_bytes(request.job, facts.model))
    given = request.profile.links if request.profile is not None else ()
    machines = {name: machine_of(each) for name, each in everybody.items()}
    links = with_assumed(tuple(addresses), machines, (*measured, *remembered, *given))
    return tuple(link for link in links if member.node in (link.source, link.target))


_OVER: Final = ("done", "failed")


class JoinHandler:
    """The nodes that join one run; everything is called on the run's thread.

    Args:
        participants: the nodes of the run, of which a candidate becomes one.
        reports: of the nodes; a new process counts its own from 1.
        addresses: of the run's nodes; those of nodes that join are added.
        shards_run: the run at whose start nodes have kept a digest of their rows.
    """

    def __init__(
        self,
        participants: Participants,
        request: RunRequest,
        machine: RunStateMachine,
        reports: Reports,
        *,
        feed: Callable[[rd.Event], None],
        addresses: dict[str, str],
        shards_run: str,
    ) -> None:
        self._participants, self._members = participants, participants.members
        self._put, self._note = participants.queue.put, participants.output.note
        self._request, self._machine, self._reports = request, machine, reports
        self._feed, self._shards_run, self._addresses = feed, shards_run, addresses
        self._candidates: dict[str, JoinCandidate] = {}
        self._early: dict[str, Member] = {}
        self._told: dict[str, str] = {}  # by node, why it was refused last
        self._known: KnownNodes | None = None  # until ``begin``, which also sets the next two
        self._recorder: RunRecorder
        self._replanning: ReplanSearch
        self._has_gathered = False

    def begin(self, known: KnownNodes, recorder: RunRecorder, replanning: ReplanSearch) -> None:
        """Start with a plan: nodes that joined before may be inspected now, and owners that were left out.

        Where all parameters train, a resumed run has taken back those that were there and can take part.
        """
        self._known, self._recorder, self._replanning = known, recorder, replanning
        course = known.plan.course
        absent = [dropped.owner.node for dropped in course.absent] if not course.method.full_parameters else []
        there = {member.node: member for member in self._members.living() if member.node in absent}
        for member in (there | self._early).values():
            self._put(functools.partial(self._consider, member))
        self._early = {}

    @property
    def facts(self) -> Mapping[str, NodeFacts]:
        """The facts of the run's nodes by name, with lost ones and those that have joined; none before the plan."""
        return self._known.facts if self._known is not None else {}

    def close(self) -> None:
        """End with the run: release all candidates."""
        for node in list(self._candidates):
            self._drop(node, "the run is over")

    def ask_others(self) -> None:
        """Inspect members outside of the run, if it waits for any node with room."""
        if self._machine.awaited.needs_room:
            for member in self._members.living():
                if member.node not in self._participants.nodes and not member.is_guest:
                    self._put(functools.partial(self._consider, member))

    # ---- events -----------------------------------------------------------------------------------

    def gathered(self) -> None:
        """Take nodes that join from now on as such: the run has its first ones."""
        self._has_gathered = True

    def joined(self, member: Member) -> None:
        """Inspect a node that has joined the coordinator; if it takes part already, its former process is lost."""
        node, needed = member.node, self._participants.nodes
        if not self._request.is_training or (node in needed and not self._has_gathered):
            return  # it has joined while nodes were gathered, and is among them
        if node in needed:
            message = lost_message(node, float("inf"), self._participants.lease_s)
            self._feed(rd.NodeFailed(node, PeerLostError.__name__, message))
        self._machine.joins.note(node)
        if self._known is None:
            self._early[node] = member
        else:
            self._consider(member)

    def _consider(self, member: Member) -> None:
        """Inspect a member without a part in the run, or note why not: once as long as the reason stays."""
        node, needed = member.node, self._participants.nodes - {member.node}
        if self._machine.phase in _OVER:
            return
        if why := self._refusal_reason(member, needed):
            self._drop(node, why)
            if self._told.get(node) != why:
                self._note(f"node {node} has joined the coordinator, and takes no part in this run: {why}")
            self._told[node] = why
            return
        if self._is_awaited(node):
            self._note(f"asking node {node} for its rows, memory and times ...")
        self._ask(member, needed)

    def _refusal_reason(self, member: Member, needed: Set[str]) -> str:
        """Say why a member is not inspected; empty if it is."""
        if member.node in self._machine.excluded:
            return "it computed otherwise than another node that repeated its work"
        if member.is_guest:
            return "it is a guest"
        if self._known is None:
            return "there is no plan yet"
        is_awaited = self._is_awaited(member.node)
        if why := self._machine.joins.refusal_reason(member.node, is_awaited=is_awaited):
            return why
        living = {each.node: each for each in self._members.living()}
        try:
            check_reachable([member, *(living[node] for node in sorted(needed) if node in living)])
        except RingTuneError as error:
            return str(error)
        if is_awaited:
            return ""
        if member.node not in living:
            return "it is drained"
        if member.node in self._machine.left_out:
            why = self._machine.return_reason(member.node)
            if not why or self._replanning.why_closed:
                return why and f"its rows stay left out: {why}"
        return self._replanning.why_closed

    def _is_awaited(self, node: str) -> bool:
        """Whether the run waits for this node, or for any node with room."""
        awaited = self._machine.awaited
        return node in awaited.owners or awaited.needs_room

    def _ask(self, member: Member, needed: Set[str]) -> None:
        """Inspect a node, in place of a former process of its name."""
        node, instance = member.node, member.instance
        others = [each for each in self._members.living() if each.node in needed]
        self._drop(node, "it has joined again")
        calls = AgentCalls(
            node,
            member.address,
            self._participants.run_id,
            lease_s=self._participants.lease_s,
            wait_s=self._request.job.runtime.wait_s,
            on_failure=lambda name, error: self._put(lambda: self._failed(name, instance, error)),
            models=self._participants.models,
        )
        self._candidates[node] = JoinCandidate(member, calls)
        request = inspect_request(
            self._request.job,
            measure=not self._has_given_times(node),
            neighbours=num_neighbours([*others, member])[node],
            frozen=self._known.plan.course.frozen if self._known is not None else None,
        )
        request.rows_run = self._shards_run
        calls.inspect(request, lambda reply: self._put(lambda: self._answered(node, instance, reply)))

    def _take_candidate(self, node: str, instance: str) -> JoinCandidate | None:
        """Remove and return a candidate; None if no such process is being inspected."""
        candidate = self._candidates.get(node)
        return self._candidates.pop(node) if candidate and candidate.member.instance == instance else None

    def _drop(self, node: str, reason: str) -> None:
        """Release a candidate, if there is one of this name."""
        if (candidate := self._candidates.pop(node, None)) is not None:
            release_node(candidate.calls, reason)

    def _has_given_times(self, node: str) -> bool:
        return self._request.profile is not None and node in self._request.profile.by_name

    def _failed(self, node: str, instance: str, error: RingTuneError) -> None:
        """Take the failure of a call to a node that joined, before or after its admission."""
        candidate = self._take_candidate(node, instance)
        if candidate is not None:
            self._refuse(candidate, str(error))
        elif self._participants.instances.get(node) == instance and node in self._participants.nodes:
            self._feed(rd.NodeFailed(node, type(error).__name__, naming_node(node, str(error))))

    def _answered(self, node: str, instance: str, reply: control_pb2.InspectReply) -> None:
        """Admit a node if it fits the run; else say why not."""
        candidate = self._take_candidate(node, instance)
        if candidate is None:
            return
        if self._machine.phase in _OVER or self._known is None:
            release_node(candidate.calls, "the run is over")
            return
        try:
            facts = read_facts(node, reply, is_timed=not self._has_given_times(node))
            facts = dataclasses.replace(facts, rack=rack_of(candidate.member))
            problem = refusal_reason(facts, self._known)
            why = self._machine.return_reason(node) if node in self._machine.left_out else ""
            if why and self._replanning.why_closed:
                problem = problem or f"its rows stay left out: {why}"
            if not problem:
                self._check_room(facts, self._known)
        except RingTuneError as error:
            problem = str(error)
        if problem:
            self._refuse(candidate, problem)
        else:
            if self._has_given_times(facts.node) and self._request.profile is not None:
                facts = with_given_times({facts.node: facts}, self._request.profile).nodes[0]
            self._take_in(candidate, facts, self._known)

    def _check_room(self, facts: NodeFacts, known: KnownNodes) -> None:
        """Refuse an owner without room for its part where the run would end, and be resumed, to take it back.

        Raises ``CapacityError``, ``StorageError`` or ``PlanError``.
        """
        course, node, job = known.plan.course, facts.node, self._request.job
        if course.method.full_parameters and node in self._machine.left_out:
            after = with_owner(course, node, course.turns_of(self._machine.last_step), whole_num_steps(job, course))
            keep_plan(job, Plan(after, known.plan.placements[-1:]), {**known.facts, node: facts})

    def _take_in(self, candidate: JoinCandidate, facts: NodeFacts, known: KnownNodes) -> None:
        member, is_awaited = candidate.member, self._is_awaited(facts.node)
        is_left_out = facts.node in self._machine.left_out
        why = self._machine.return_reason(facts.node) if is_left_out else ""
        if self._participants.admit(member, candidate.calls) != member.instance:
            self._reports.forget(facts.node)
        self._told.pop(facts.node, None)
        self._addresses[facts.node] = member.address
        links = links_of(member, facts, self._replanning.profile, self._members, self._request)
        self._known = dataclasses.replace(known, facts={**known.facts, facts.node: facts})
        self._recorder.joined(facts, links)
        self._replanning.joined(facts, links, looks=not is_awaited)
        if is_left_out and not why:
            is_full = known.plan.course.method.full_parameters
            since = "checkpoint on, from which another run continues" if is_full else "turn boundary on"
            self._note(f"node {facts.node} is back; its rows are trained again from the next {since}")
        else:
            self._note(
                f"node {facts.node} is back; resuming"
                if is_awaited
                else f"node {facts.node} may get blocks of this run; that is decided after the next turn"
                + f"; its rows stay left out: {why}" * is_left_out
            )
        self._feed(rd.NodeJoined(facts.node))

    def _refuse(self, candidate: JoinCandidate, problem: str) -> None:
        node = candidate.member.node
        waits = "; the run still waits" if self._is_awaited(node) else ""
        self._note(f"node {node} takes no part in this run: {problem}{waits}")
        release_node(candidate.calls, problem)
