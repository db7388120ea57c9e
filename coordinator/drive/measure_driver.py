"""Drive one measurement: every node times itself, pairs of nodes time their links, and the result is a profile.

A measurement has the coordinator to itself, as a run has: whatever computed beside it would be in its figures. Nodes
of one machine are timed at the same moment, because in a ring they compute at the same moment; ``one_by_one`` times
them one after another. Links are measured when no node computes any more, a pair at a time on each machine.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from coordinator.drive.agent_calls import ask_frozen
from coordinator.drive.answers import Facts, read_facts
from coordinator.drive.driver import TICK_S, Driver, raise_if_over
from coordinator.drive.plan_making.link_measuring import link_of, remember
from coordinator.drive.requests import MeasureRequest
from coordinator.members.recruiting import Members, machine_of, num_neighbours
from coordinator.members.registry import Member
from coordinator.planner.drafting.job_draft import agreed_model
from coordinator.planner.fitting.frozen import frozen_of
from coordinator.planner.make_plan import make_plan
from ringtune.costs.measured.measuring import Pair, hidden_bytes, link_rounds
from ringtune.costs.profile import LinkFacts, NodeFacts, Profile
from ringtune.errors import CapacityError, DeadlineError, PeerLostError
from ringtune.schedule.frozen_weights import AS_COMPUTED, FrozenWeights
from ringtune.v1 import control_pb2

T = TypeVar("T")
MEASURE_S = 4.0
COMPUTING_S = 3.0


class _Answer(NamedTuple):
    """The result of a call, with the key of the node or link that it was asked about."""

    key: Any
    value: Any


class MeasureDriver(Driver):
    """One measurement, from its request to its last event.

    Args:
        run_id: see ``Driver``, as for the others.
        request: what is asked for.
        members: who is there.
        lease_s: a node that was not heard of for so long is lost.
        on_end: called once, when every node is released.
    """

    def __init__(
        self, run_id: str, request: MeasureRequest, members: Members, *, lease_s: float, on_end: Callable[[], None]
    ) -> None:
        super().__init__(run_id, members, lease_s=lease_s, on_end=on_end)
        self._request = request
        self._chosen: tuple[Member, ...] = ()

    def _drive(self) -> None:
        request = self._request
        members = self._recruit(request.job.to_toml(), request.num_nodes, request.join_s)
        self._chosen = tuple(sorted(members, key=lambda member: member.node))
        self._emit(control_pb2.RunEvent(state="measuring nodes"))
        facts = self._measure_nodes()
        agreed_model(facts)
        links: tuple[LinkFacts, ...] = ()
        if request.with_links and len(facts) > 1:
            self._emit(control_pb2.RunEvent(state="measuring links"))
            links = self._measure_links(hidden_bytes(request.job, facts[0].model))
            addresses = {member.node: member.address for member in self._chosen}
            remember(links, addresses, request.job, facts[0].model, self._members.links)
            facts = self._with_load(facts)
        profile = Profile(nodes=tuple(facts), links=links)
        self._emit(control_pb2.RunEvent(profile_json=json.dumps(profile.to_json())))

    # ---- nodes ------------------------------------------------------------------------------------

    def _measure_nodes(self) -> list[NodeFacts]:
        frozen = self._frozen()
        found: dict[str, NodeFacts] = {}
        for group in self._groups():
            neighbours = num_neighbours(group)
            for member in group:
                self._ask_node(member.node, neighbours[member.node], frozen)
            found |= self._facts_of(group, "to measure themselves")
        return [found[node] for node in sorted(found)]

    def _frozen(self) -> FrozenWeights | None:
        """How a run of the job would hold frozen weights on these nodes, which then time themselves so."""
        job = self._request.job
        if job.runtime.frozen == AS_COMPUTED:
            return None
        for member in self._chosen:
            self._calls[member.node].inspect(
                job.to_toml(),
                measure=False,
                timeout_s=job.runtime.wait_s,
                on_result=self._answer_to(member.node),
            )
        facts = self._facts_of(self._chosen, "to say what they are")
        try:
            return make_plan(job, facts).plan.course.frozen
        except CapacityError:  # as small as the job allows
            return frozen_of(job, facts.values())[-1]

    def _facts_of(self, members: Sequence[Member], what: str) -> dict[str, NodeFacts]:
        answers = self._await({member.node for member in members}, what)
        return {node: read_facts(Facts(node, answer.facts_json)) for node, answer in answers.items()}

    def _groups(self) -> list[list[Member]]:
        """Group the members that are timed at the same moment: all in one group, or one member per machine in each.

        Example with ``one_by_one``: a and b on machine x, c on machine y are the groups [a, c] and [b].
        """
        if not self._request.one_by_one:
            return [list(self._chosen)]
        groups: list[list[Member]] = []
        seen: dict[str, int] = {}
        for member in self._chosen:
            index = seen.get(machine_of(member), 0)
            seen[machine_of(member)] = index + 1
            groups += [[]] if index == len(groups) else []
            groups[index].append(member)
        return groups

    def _ask_node(self, node: str, neighbours: int, frozen: FrozenWeights | None) -> None:
        request = self._request

        def extend(inspect: control_pb2.InspectRequest) -> None:
            inspect.measure_s, inspect.fresh, inspect.neighbours = MEASURE_S, request.is_fresh, neighbours
            ask_frozen(inspect, frozen)

        self._calls[node].inspect(
            request.job.to_toml(),
            measure=True,
            timeout_s=request.job.runtime.wait_s,
            on_result=self._answer_to(node),
            extend=extend,
        )

    # ---- links ------------------------------------------------------------------------------------

    def _measure_links(self, message_bytes: int) -> tuple[LinkFacts, ...]:
        machines = {member.node: machine_of(member) for member in self._chosen}
        found: dict[Pair, LinkFacts] = {}
        for pairs in link_rounds(list(machines), machines):
            for direction in (pairs, tuple((target, source) for source, target in pairs)):
                for pair in direction:
                    self._ask_link(pair, message_bytes)
                answers = self._await(set(direction), "to measure their links")
                found |= {pair: link_of(pair, answer) for pair, answer in answers.items()}
        return tuple(found[pair] for pair in sorted(found))

    def _with_load(self, facts: list[NodeFacts]) -> list[NodeFacts]:
        """Let all nodes compute and send around in a ring at once; note what messages took of their computing."""
        message_bytes, nodes = hidden_bytes(self._request.job, facts[0].model), [one.node for one in facts]
        pairs = list(zip(nodes, [*nodes[1:], nodes[0]], strict=True))
        for pair in pairs:
            self._ask_link(pair, message_bytes, computing_s=COMPUTING_S)
        answers = self._await(set(pairs), "to measure what messages take of their computing")
        lost_s = {source: answer.computing_lost_s_per_byte for (source, _), answer in answers.items()}
        return [dataclasses.replace(one, message_s_per_byte=lost_s[one.node]) for one in facts]

    def _ask_link(self, pair: Pair, message_bytes: int, *, computing_s: float = 0.0) -> None:
        source, target = pair
        address = next(member.address for member in self._chosen if member.node == target)
        self._calls[source].measure_link(
            target,
            address,
            message_bytes,
            timeout_s=self._request.job.runtime.wait_s,
            on_result=self._answer_to(pair),
            computing_s=computing_s,
        )

    # ---- waiting ----------------------------------------------------------------------------------

    def _answer_to(self, key: object) -> Callable[[Any], None]:
        return lambda value: self._queue.put(_Answer(key, value))

    def _await(self, keys: set[T], what: str) -> Mapping[T, Any]:
        """Wait until every call of ``keys`` is answered.

        Raises:
            DeadlineError: one was not; names whose.
            RingTuneError: a call failed, a node is lost, or nobody waits any more.
        """
        wait_s = self._request.job.runtime.wait_s
        deadline_s = time.monotonic() + wait_s + TICK_S
        answers: dict[T, Any] = {}
        while set(answers) != keys:
            entry = self._next()
            raise_if_over(entry)
            if isinstance(entry, _Answer):
                answers[entry.key] = entry.value
            elif time.monotonic() >= deadline_s:
                missing = ", ".join(sorted(_name(key) for key in keys - set(answers)))
                raise DeadlineError(f"waited {wait_s:g} s for {missing} {what}; raise runtime.wait_s")
            for _, message in self._silent_nodes():
                raise PeerLostError(message)
        return answers


def _name(key: object) -> str:
    return f"{key[0]} -> {key[1]}" if isinstance(key, tuple) else f"node {key}"
