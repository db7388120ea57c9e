"""Take nodes that come in mid-run into it: one that was lost, or a new one.

A comer is asked about itself as every node was at the start. If its model is that of the run, and its rows are those of
the plan where it owns some, the state machine may give it blocks, and the planner looks whether they pay. One for which
the run waits goes back to its place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Set
from typing import Final

from coordinator.drive.agent_calls import AgentCalls
from coordinator.drive.answers import read_facts
from coordinator.drive.coming.comers import Comer, ComerFailed, Comers, Comes, Gathered, Joined, Met, let_go
from coordinator.drive.coming.fitness import Known, links_of, why_refused
from coordinator.drive.hearing.reports import Reports
from coordinator.drive.moves.replanning import Replanning
from coordinator.drive.requests import RunRequest
from coordinator.members.recruiting import Members, check_reachable, lost_message, num_neighbours
from coordinator.members.registry import Member
from coordinator.planner.given.given_profile import with_given_times
from coordinator.records.books import RunBooks
from ringtune.costs.profile import NodeFacts
from ringtune.errors import PeerLostError, RingTuneError
from ringtune.ids import naming_node
from ringtune.rounds import rounds

_OVER: Final = ("done", "failed")


class Joining:
    """Those who come in one run; everything is called on the run's thread.

    Args:
        run_id: of the run.
        request: what is asked for.
        members: who is there.
        machine: the state machine of the run.
        reports: of the nodes; a new process counts its own from 1.
        lease_s: a node that was not heard of for so long is lost.
        put: takes answers, from any thread; they have to come to ``take``.
        feed: tells the state machine of an event.
        note: tells the user something.
        admit: counts on a node, with the calls to it, from now on; returns which process of its name had a part before.
        addresses: of the run's nodes, which those that come are added to.
    """

    def __init__(
        self,
        run_id: str,
        request: RunRequest,
        members: Members,
        machine: rounds.Rounds,
        reports: Reports,
        *,
        lease_s: float,
        put: Callable[[Comes], None],
        feed: Callable[[rounds.Event], None],
        note: Callable[[str], None],
        admit: Callable[[Member, AgentCalls], str],
        addresses: dict[str, str],
    ) -> None:
        self._request, self._members, self._machine, self._reports = request, members, machine, reports
        self._lease_s, self._put, self._feed, self._note, self._admit = lease_s, put, feed, note, admit
        self._comers = Comers(run_id, request.job, lease_s=lease_s, put=put)
        self._addresses = addresses
        self._early: dict[str, Joined] = {}
        self._known: Known | None = None
        self._books: RunBooks | None = None
        self._replanning: Replanning | None = None
        self._instances: dict[str, str] = {}
        self._has_gathered = False

    def begin(self, known: Known, books: RunBooks, replanning: Replanning) -> None:
        """There is a plan: who came before may be asked now."""
        self._known, self._books, self._replanning = known, books, replanning
        for early in self._early.values():
            self._put(early)
        self._early = {}

    def gathered(self) -> None:
        """Say that the run has the nodes that it begins with, behind what they have said already."""
        self._put(Gathered())

    def close(self) -> None:
        """The run is over: let all go that are still asked."""
        self._comers.close("the run is over")

    def ask_others(self, needed: Set[str]) -> None:
        """Ask members that have no part in the run whether they have room, if it waits for any node that has."""
        awaited = self._machine.awaited if isinstance(self._machine, rounds.RecoveringRounds) else None
        if awaited is not None and awaited.needs_room:
            for member in self._members.living():
                if member.node not in needed and not member.is_guest:
                    self._put(Joined(member))

    # ---- what happens -----------------------------------------------------------------------------

    def take(self, entry: Comes, needed: Set[str]) -> None:
        """Take a node that joined the coordinator, its answer, or a failed call to one.

        Args:
            entry: what happened.
            needed: the nodes that take part and are not lost, as far as that is known.
        """
        if not self._request.is_training or not isinstance(self._machine, rounds.RecoveringRounds):
            return
        match entry:
            case Gathered():
                self._has_gathered = True
            case Joined(member):
                self._on_joined(member, needed)
            case Met(instance, facts):
                comer = self._comers.take(facts.node, instance)
                if comer is not None:
                    self._on_met(comer, entry)
            case ComerFailed(node, instance, error):
                comer = self._comers.take(node, instance)
                if comer is not None:
                    self._refuse(comer, str(error))
                elif self._instances.get(node) == instance and node in needed:
                    self._feed(rounds.NodeFailed(node, type(error).__name__, naming_node(node, str(error))))

    def _on_joined(self, member: Member, needed: Set[str]) -> None:
        """Ask a node about itself; if it has a part in the run, its former process is lost."""
        node = member.node
        if node in needed and not self._has_gathered:
            return  # it has joined while nodes were gathered, and is among them
        if node in needed:
            message = lost_message(node, float("inf"), self._lease_s)
            self._feed(rounds.NodeFailed(node, PeerLostError.__name__, message))
        if self._machine.phase in _OVER:
            return
        if self._known is None:
            self._early[node] = Joined(member)
            return
        if why := self._why_not(member, needed - {node}):
            self._note(f"node {node} has joined the coordinator, and takes no part in this run: {why}")
            return
        if self._is_awaited(node):
            self._note(f"asking node {node} for its rows, memory and times ...")
        self._ask(member, needed - {node})

    def _why_not(self, member: Member, needed: Set[str]) -> str:
        """Why a member is not even asked; empty if it is."""
        living = {one.node: one for one in self._members.living()}
        try:
            check_reachable([member, *(living[node] for node in sorted(needed) if node in living)])
        except RingTuneError as error:
            return str(error)
        if self._is_awaited(member.node):
            return ""
        if member.is_guest:
            return "it is a guest"
        if member.node not in living:
            return "it is drained"
        return self._replanning.why_closed if self._replanning is not None else "there is no plan yet"

    def _is_awaited(self, node: str) -> bool:
        """Whether the run waits for this node, or for any with room."""
        awaited = self._machine.awaited if isinstance(self._machine, rounds.RecoveringRounds) else None
        return awaited is not None and (node in awaited.owners or awaited.needs_room)

    def _ask(self, member: Member, needed: Set[str]) -> None:
        others = [one for one in self._members.living() if one.node in needed]
        self._comers.ask(
            member,
            measure=not self._has_given_times(member.node),
            neighbours=num_neighbours([*others, member])[member.node],
            frozen=self._known.plan.course.frozen if self._known is not None else None,
        )

    def _has_given_times(self, node: str) -> bool:
        return self._request.profile is not None and node in self._request.profile.by_name

    def _on_met(self, comer: Comer, met: Met) -> None:
        """Take a node into the run, if it fits it; else say why not, and go on as before."""
        if self._machine.phase in _OVER or self._known is None:
            let_go(comer.calls, "the run is over")
            return
        try:
            facts = read_facts(met.facts)
            problem = why_refused(facts, self._known)
        except RingTuneError as error:
            problem = str(error)
        if problem:
            self._refuse(comer, problem)
        else:
            self._take_in(comer, self._with_times(facts))

    def _with_times(self, facts: NodeFacts) -> NodeFacts:
        if not self._has_given_times(facts.node) or self._request.profile is None:
            return facts
        return with_given_times({facts.node: facts}, self._request.profile).nodes[0]

    def _take_in(self, comer: Comer, facts: NodeFacts) -> None:
        if self._known is None or self._books is None or self._replanning is None:
            return
        member, is_awaited = comer.member, self._is_awaited(facts.node)
        if self._admit(member, comer.calls) != member.instance:
            self._reports.forget(facts.node)
        self._addresses[facts.node] = member.address
        self._instances[facts.node] = member.instance
        links = links_of(member, facts, self._replanning.profile, self._members, self._request)
        self._known = dataclasses.replace(self._known, facts={**self._known.facts, facts.node: facts})
        self._books.joined(facts, links)
        self._replanning.joined(facts, links, looks=not is_awaited)
        self._note(
            f"node {facts.node} is back; resuming"
            if is_awaited
            else f"node {facts.node} may have blocks of this run; whether they pay is looked at after the next turn"
        )
        self._feed(rounds.NodeJoined(facts.node))

    def _refuse(self, comer: Comer, problem: str) -> None:
        node = comer.member.node
        waits = "; the run waits on" if self._is_awaited(node) else ""
        self._note(f"node {node} takes no part in this run: {problem}{waits}")
        let_go(comer.calls, problem)
