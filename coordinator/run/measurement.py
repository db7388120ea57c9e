"""Measurement of nodes and links: for a profile, or for the plan of a run within a budget of time.

A measurement excludes other work of the coordinator, as a run does. Nodes of one machine are timed at the same moment,
as they compute in a ring; ``one_by_one`` times them one after another. Links are measured when no node computes, a pair
at a time on each machine.

Before a run only unknown links between machines are measured, in rounds in which no node and no machine is in two
pairs. No round begins after the budget; a note says what is assumed of the other links.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from coordinator.planner.make_plan import agreed_model, make_plan
from coordinator.run.driver import Participants, raise_if_over
from coordinator.run.members import LinkCache, Member, machine_of, num_neighbours
from coordinator.run.node_client import AgentCalls, inspect_request, read_facts
from coordinator.run.requests import MeasureRequest, RunRequest
from ringtune.costs.links import with_assumed
from ringtune.costs.measurement import Pair, hidden_bytes, link_rounds
from ringtune.costs.profile import LinkFacts, ModelFacts, NodeFacts, Profile
from ringtune.errors import (
    CapacityError,
    FrameError,
    IntegrityError,
    InvalidInputError,
    PeerLostError,
    RingTuneError,
)
from ringtune.ids import naming_node
from ringtune.job.job import Job
from ringtune.schedule.course import AS_COMPUTED, FrozenWeights
from ringtune.techniques.frozen_weights import frozen_of
from ringtune.v1 import control_pb2

BUDGET_S = 30.0
_ASKED = control_pb2.MeasureLinkReply.DESCRIPTOR.fields_by_name
_FIGURES = tuple(field.name for field in dataclasses.fields(LinkFacts) if field.name in _ASKED)


class LinkMeasurement:
    """Measurement of the unknown links between the members of one run.

    Args:
        job: defines the size of the messages.
        cache: of known links; measured ones are added.
        answered: gets the answers, from any thread; they have to be passed to ``take``.
        budget_s: no further round begins after so many seconds.
    """

    def __init__(
        self,
        members: Sequence[Member],
        calls: Mapping[str, AgentCalls],
        job: Job,
        model: ModelFacts,
        *,
        cache: LinkCache,
        answered: Callable[[Pair, control_pb2.MeasureLinkReply], None],
        budget_s: float = BUDGET_S,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._addresses, self._machines = _places(members)
        self._calls, self._answered = calls, answered
        self._message_bytes, self._cache = hidden_bytes(job, model), cache
        self._now_s, self._end_s = now_s, now_s() + budget_s
        self._known: dict[Pair, LinkFacts] = {
            (link.source, link.target): link for link in cache.find(self._addresses, self._message_bytes)
        }
        self._waves = self._wanted()
        self._awaited: set[Pair] = set()

    @staticmethod
    def is_wanted(request: RunRequest) -> bool:
        """Whether a run measures links for its plan: no evaluation, and without a given profile, plan or checkpoint."""
        return request.needs_times and request.plan is None and request.resume is None

    @property
    def is_done(self) -> bool:
        """Whether no pair is left to ask or to wait for."""
        return not self._awaited and not self._waves

    def go_on(self) -> None:
        """Start the next wave, unless one is under way, none is left, or the budget is used up."""
        if self._awaited or not self._waves:
            return
        if self._now_s() >= self._end_s:
            self._waves = []
            return
        wave = self._waves.pop(0)
        self._awaited = set(wave)
        for pair in wave:
            self._ask(pair)

    def _ask(self, pair: Pair) -> None:
        source, target = pair
        request = control_pb2.MeasureLinkRequest(
            target=target, address=self._addresses[target], message_bytes=self._message_bytes, brief=True
        )
        self._calls[source].measure_link(request, lambda reply: self._answered(pair, reply))

    def take(self, pair: Pair, reply: control_pb2.MeasureLinkReply) -> None:
        """Take an answer; the last one of a wave starts the next. Raises ``IntegrityError``: it can't be.

        An answer to a measurement before, with a node that was left out, is ignored.
        """
        if pair not in self._awaited:
            return
        link = self._known[pair] = link_of(pair, reply)
        self._cache.put((link,), self._addresses, self._message_bytes)
        self._awaited.discard(pair)
        self.go_on()

    def links(self) -> tuple[LinkFacts, ...]:
        """Every directed pair of the members, measured or assumed."""
        return with_assumed(tuple(self._addresses), self._machines, tuple(self._known.values()))

    @property
    def note(self) -> str:
        """Say how many links are assumed, and how; empty if none."""
        missing = sum(link.is_assumed and not self._is_inside(link) for link in self.links())
        if not missing:
            return ""
        total = sum(not self._is_inside(link) for link in self.links())
        return (
            f"{missing} of {total} links were not measured within {BUDGET_S:g} s: each is taken for as fast as the "
            "slower of its two ends; 'ringtune measure' measures all of them, for --profile"
        )

    def _is_inside(self, link: LinkFacts) -> bool:
        return self._machines[link.source] == self._machines[link.target]

    def _wanted(self) -> list[list[Pair]]:
        """Waves of unknown directed pairs on different machines."""
        machines, known = self._machines, self._known
        waves = (
            [pair for pair in wave if machines[pair[0]] != machines[pair[1]] and pair not in known]
            for wave in _waves(machines)
        )
        return [wave for wave in waves if wave]


def _waves(machines: Mapping[str, str]) -> Iterator[tuple[Pair, ...]]:
    """Yield the directed pairs that are measured at the same moment, of all nodes by machine."""
    for pairs in link_rounds(list(machines), machines):
        yield pairs
        yield tuple((target, source) for source, target in pairs)


def _places(members: Sequence[Member]) -> tuple[dict[str, str], dict[str, str]]:
    """Return address and machine of each member by name."""
    addresses = {member.node: member.address for member in members}
    return addresses, {member.node: machine_of(member) for member in members}


def remembered_links(members: Sequence[Member], job: Job, model: ModelFacts, cache: LinkCache) -> tuple[LinkFacts, ...]:
    """Every directed pair of the members from the cache, without measurement.

    Empty if no link between machines is cached.
    """
    addresses, machines = _places(members)
    known = cache.find(addresses, hidden_bytes(job, model))
    return with_assumed(tuple(addresses), machines, known) if known or len(set(machines.values())) == 1 else ()


def link_of(pair: Pair, reply: control_pb2.MeasureLinkReply) -> LinkFacts:
    """Convert a node's answer; raises ``IntegrityError``."""
    figures: Mapping[str, float] = {name: getattr(reply, name) for name in _FIGURES}
    try:
        return LinkFacts(source=pair[0], target=pair[1], **figures)  # type: ignore[arg-type]
    except InvalidInputError as error:
        raise IntegrityError(naming_node(pair[0], f"{error}; use one version on all machines")) from error


T = TypeVar("T")
MEASURE_S = 4.0
COMPUTING_S = 3.0


class _Answer(NamedTuple):
    """The result of a call, with its node or pair as key."""

    key: Any
    value: Any


class MeasureWork:
    """One measurement, as its driver sees it."""

    def __init__(self, participants: Participants, request: MeasureRequest) -> None:
        self._participants, self._request = participants, request
        self._calls, self._emit = participants.calls, participants.output.emit
        self._chosen: tuple[Member, ...] = ()

    def report(self, request: control_pb2.ReportRequest) -> None:
        """Refuse a node's report; raises ``FrameError``."""
        raise FrameError(f"{self._participants.run_id} is a measurement; node {request.node} can't report a run of it")

    def begin_after(self, failed: RingTuneError) -> None:
        """Let the failure be the end."""

    def finish_files(self) -> None:
        """Do nothing: there are none."""

    def drive(self) -> None:
        """Measure nodes and links, and send the profile; raises ``RingTuneError``."""
        request = self._request
        recruits = RunRequest(request.job, num_nodes=request.num_nodes, join_s=request.join_s)
        self._chosen = tuple(sorted(self._participants.recruit(recruits), key=lambda member: member.node))
        self._emit(control_pb2.RunEvent(state="measuring nodes"))
        facts = self._measure_nodes()
        agreed_model(facts)
        links: tuple[LinkFacts, ...] = ()
        if request.with_links and len(facts) > 1:
            self._emit(control_pb2.RunEvent(state="measuring links"))
            message_bytes = hidden_bytes(request.job, facts[0].model)
            links = self._measure_links(message_bytes)
            addresses, _ = _places(self._chosen)
            self._participants.members.links.put(links, addresses, message_bytes)
            facts = self._with_load(facts)
        profile = Profile(nodes=tuple(facts), links=links)
        self._emit(control_pb2.RunEvent(profile_json=json.dumps(profile.to_json())))

    # ---- nodes ------------------------------------------------------------------------------------

    def _measure_nodes(self) -> list[NodeFacts]:
        frozen = self._frozen()
        facts: dict[str, NodeFacts] = {}
        for group in self._groups():
            neighbours = num_neighbours(group)
            self._participants.models.expect(neighbours)
            for member in group:
                inspect = inspect_request(
                    self._request.job,
                    measure=True,
                    neighbours=neighbours[member.node],
                    frozen=frozen,
                    measure_s=MEASURE_S,
                )
                inspect.fresh = self._request.is_fresh
                self._calls[member.node].inspect(inspect, self._answer_to(member.node))
            facts |= self._facts_of(group, is_timed=True)
        return [facts[node] for node in sorted(facts)]

    def _frozen(self) -> FrozenWeights | None:
        """The type of frozen weights that a run of the job would have on these nodes; they are timed with it.

        Nodes that are timed one by one are all asked before: one of the last may be the only one with the model.
        """
        job = self._request.job
        is_computed = job.runtime.frozen == AS_COMPUTED
        if is_computed and len(self._groups()) == 1:
            return None
        self._participants.models.expect(member.node for member in self._chosen)
        for member in self._chosen:
            request = control_pb2.InspectRequest(job_toml=job.to_toml())
            self._calls[member.node].inspect(request, self._answer_to(member.node))
        facts = self._facts_of(self._chosen, is_timed=False)
        if is_computed:
            return None
        try:
            return make_plan(job, facts).plan.course.frozen
        except CapacityError:  # as small as the job allows
            return frozen_of(job, facts.values())[-1]

    def _facts_of(self, members: Sequence[Member], *, is_timed: bool) -> dict[str, NodeFacts]:
        answers = self._await({member.node for member in members})
        return {node: read_facts(node, answer, is_timed=is_timed) for node, answer in answers.items()}

    def _groups(self) -> list[list[Member]]:
        """Group the members that are timed at the same moment: all, or with ``one_by_one`` one per machine.

        Example: a and b on machine x, c on machine y are the groups [a, c] and [b].
        """
        if not self._request.one_by_one:
            return [list(self._chosen)]
        by_machine: dict[str, list[Member]] = {}
        for member in self._chosen:
            by_machine.setdefault(machine_of(member), []).append(member)
        return [[each for each in group if each is not None] for group in itertools.zip_longest(*by_machine.values())]

    # ---- links ------------------------------------------------------------------------------------

    def _measure_links(self, message_bytes: int) -> tuple[LinkFacts, ...]:
        _, machines = _places(self._chosen)
        links: dict[Pair, LinkFacts] = {}
        for wave in _waves(machines):
            for pair in wave:
                self._ask_link(pair, message_bytes)
            answers = self._await(set(wave))
            links |= {pair: link_of(pair, answer) for pair, answer in answers.items()}
        return tuple(links[pair] for pair in sorted(links))

    def _with_load(self, facts: list[NodeFacts]) -> list[NodeFacts]:
        """Measure computing time lost to messages: all nodes compute and send in a ring at once."""
        message_bytes, nodes = hidden_bytes(self._request.job, facts[0].model), [each.node for each in facts]
        pairs = list(zip(nodes, [*nodes[1:], nodes[0]], strict=True))
        for pair in pairs:
            self._ask_link(pair, message_bytes, computing_s=COMPUTING_S)
        answers = self._await(set(pairs))
        lost_s = {source: answer.computing_lost_s_per_byte for (source, _), answer in answers.items()}
        return [dataclasses.replace(each, message_s_per_byte=lost_s[each.node]) for each in facts]

    def _ask_link(self, pair: Pair, message_bytes: int, *, computing_s: float = 0.0) -> None:
        source, target = pair
        address = next(member.address for member in self._chosen if member.node == target)
        request = control_pb2.MeasureLinkRequest(
            target=target, address=address, message_bytes=message_bytes, computing_s=computing_s
        )
        self._calls[source].measure_link(request, self._answer_to(pair))

    # ---- waiting ----------------------------------------------------------------------------------

    def _answer_to(self, key: object) -> Callable[[Any], None]:
        return lambda value: self._participants.queue.put(_Answer(key, value))

    def _await(self, keys: set[T]) -> Mapping[T, Any]:
        """Wait for the answers to all calls of ``keys``, each of which has its deadline; raises ``RingTuneError``."""
        answers: dict[T, Any] = {}
        while set(answers) != keys:
            entry = self._participants.next_entry()
            raise_if_over(entry)
            if isinstance(entry, _Answer):
                answers[entry.key] = entry.value
            for _, message in self._participants.silent_nodes():
                raise PeerLostError(message)
        return answers
