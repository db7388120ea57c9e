"""Drives one measurement: every node times itself, then pairs of nodes time their links; ends with a profile.

A measurement has the coordinator to itself, as a run has: whatever computed beside it would be in its figures. Nodes
of one machine are timed at the same moment, because in a ring they compute at the same moment; ``one_by_one`` times
them one after another. Links are measured when no node computes any more, a pair at a time on each machine.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from typing import Any, NamedTuple, TypeVar

from coordinator.drive.agent_calls import AgentCalls
from coordinator.drive.answers import Facts, read_facts
from coordinator.drive.evaluation_request import invited
from coordinator.drive.outbox import Outbox
from coordinator.drive.status_board import StatusBoard
from coordinator.members.recruiting import Members, choose, lost_message, machine_of, num_neighbours, too_few
from coordinator.members.registry import Member
from coordinator.planner.make_plan import agreed_model
from ringtune.costs.measuring import Pair, hidden_bytes, link_rounds
from ringtune.costs.profile import LinkFacts, NodeFacts, Profile
from ringtune.errors import DeadlineError, FrameError, InterruptedRunError, PeerLostError, RingTuneError
from ringtune.jobs.job import Job
from ringtune.v1 import control_pb2

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_TICK_S = 0.25
_RELEASE_WAIT_S = 4.0
MEASURE_S = 4.0


class MeasureRequest(NamedTuple):
    """What the user asked for.

    Attributes:
        job: whose model, sizes and adapter.
        num_nodes: wait until so many have joined; 0 = take those that are there.
        join_s: how long to wait for them, seconds.
        with_links: whether links are measured too.
        is_fresh: anew even where a node remembers.
        one_by_one: nodes of one machine one after another.
    """

    job: Job
    num_nodes: int
    join_s: float
    with_links: bool = True
    is_fresh: bool = False
    one_by_one: bool = False


class _Failed(NamedTuple):
    """A call to a node failed, or the node has ended."""

    error: RingTuneError


class _Stopped(NamedTuple):
    """Nobody waits for the measurement any more."""

    reason: str


class _Answer(NamedTuple):
    """What a call gave, and what it was about."""

    key: Any
    value: Any


class MeasureDriver:
    """One measurement, from its request to its last event; what it has in common with a run is named as there.

    Args:
        run_id: under which nodes keep what they have read, until they are released.
        request: what is asked for.
        members: who is there.
        lease_s: a node that was not heard of for so long is lost.
        on_end: called once, when every node is released.

    Attributes:
        board: where it stands.
    """

    def __init__(
        self, run_id: str, request: MeasureRequest, members: Members, *, lease_s: float, on_end: Callable[[], None]
    ) -> None:
        self.run_id = run_id
        self.board = StatusBoard(run_id)
        self._request = request
        self._members = members
        self._lease_s = lease_s
        self._on_end = on_end
        self._queue: queue.SimpleQueue[_Answer | _Failed | _Stopped] = queue.SimpleQueue()
        self._outbox = Outbox()
        self._chosen: tuple[Member, ...] = ()
        self._calls: dict[str, AgentCalls] = {}
        self._thread = threading.Thread(target=self._run, name=f"measure-{run_id}", daemon=True)

    # ---- from other threads -----------------------------------------------------------------------

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def stop(self, reason: str) -> None:
        """Stop, whatever is under way; returns at once."""
        self._queue.put(_Stopped(reason))

    def drain(self, reason: str) -> None:
        """Stop: there is nothing to save."""
        self.stop(reason)

    def noted(self, step: int) -> None:
        """Nothing: there are no checkpoints."""

    def node_failed(self, node: str, error: RingTuneError) -> None:
        """Hear from elsewhere that a node has ended; returns at once."""
        self._queue.put(_Failed(error))

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes that work for it."""
        return frozenset(self._calls)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; False if it still goes on."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def report(self, request: control_pb2.ReportRequest) -> None:
        """Refuse: there is no run.

        Raises:
            FrameError: always.
        """
        raise FrameError(f"{self.run_id} is a measurement; node {request.node} can't report a run of it")

    def events(self) -> Iterator[control_pb2.RunEvent]:
        """What happens, until it is over."""
        return self._outbox.events()

    # ---- its own thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        outcome: RingTuneError | None = None
        try:
            profile = self._measure()
            self._emit(control_pb2.RunEvent(profile_json=json.dumps(profile.to_json())))
        except RingTuneError as error:
            outcome = error
        except Exception as error:
            _LOG.exception("measurement %s failed by a bug", self.run_id)
            outcome = RingTuneError(f"internal error, {type(error).__name__}: {error}; please report it")
        try:
            self._release_all(str(outcome or "the measurement is done"))
        finally:
            self._on_end()  # before the last event, so that whoever hears it may submit the next run
            self._say_how_it_ended(outcome)
            self._outbox.close()

    def _measure(self) -> Profile:
        self._emit(control_pb2.RunEvent(run_id=self.run_id))
        self._emit(control_pb2.RunEvent(job_toml=self._request.job.to_toml()))
        self._enter("joining")
        self._chosen = self._await_members()
        self._calls = {
            member.node: AgentCalls(member.node, member.address, self.run_id, on_failure=self.node_failed)
            for member in self._chosen
        }
        self._enter("measuring nodes")
        facts = self._measure_nodes()
        agreed_model(facts)
        links: tuple[LinkFacts, ...] = ()
        if self._request.with_links and len(facts) > 1:
            self._enter("measuring links")
            links = self._measure_links(hidden_bytes(self._request.job, facts[0].model.hidden_size))
        return Profile(nodes=tuple(facts), links=links)

    def _await_members(self) -> tuple[Member, ...]:
        wanted, join_s = self._request.num_nodes, self._request.join_s
        deadline_s = time.monotonic() + join_s
        while True:
            living = invited(self._members.living(), None)
            chosen = choose(living, wanted)
            if chosen is not None:
                return tuple(sorted(chosen, key=lambda member: member.node))
            if not wanted or time.monotonic() >= deadline_s:
                raise too_few(living, wanted, join_s)
            self._next()

    # ---- nodes ------------------------------------------------------------------------------------

    def _measure_nodes(self) -> list[NodeFacts]:
        found: dict[str, NodeFacts] = {}
        for group in self._groups():
            neighbours = num_neighbours(group)
            for member in group:
                self._ask_node(member.node, neighbours[member.node])
            answers = self._await({member.node for member in group}, "to measure themselves")
            found |= {node: read_facts(Facts(node, answer.facts_json)) for node, answer in answers.items()}
        return [found[node] for node in sorted(found)]

    def _groups(self) -> list[list[Member]]:
        """Who is timed at the same moment: all, or one of each machine."""
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

    def _ask_node(self, node: str, neighbours: int) -> None:
        request = self._request

        def extend(inspect: control_pb2.InspectRequest) -> None:
            inspect.measure_s, inspect.fresh, inspect.neighbours = MEASURE_S, request.is_fresh, neighbours

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
                found |= {pair: _link(pair, answer) for pair, answer in answers.items()}
        return tuple(found[pair] for pair in sorted(found))

    def _ask_link(self, pair: Pair, message_bytes: int) -> None:
        source, target = pair
        address = next(member.address for member in self._chosen if member.node == target)
        self._calls[source].measure_link(
            target,
            address,
            message_bytes,
            timeout_s=self._request.job.runtime.wait_s,
            on_result=self._answer_to(pair),
        )

    # ---- waiting ----------------------------------------------------------------------------------

    def _answer_to(self, key: object) -> Callable[[Any], None]:
        return lambda value: self._queue.put(_Answer(key, value))

    def _await(self, keys: set[T], what: str) -> Mapping[T, Any]:
        """Wait until every call is answered.

        Raises:
            DeadlineError: one was not; names whose.
            RingTuneError: a call failed, a node is lost, or nobody waits any more.
        """
        wait_s = self._request.job.runtime.wait_s
        deadline_s = time.monotonic() + wait_s + _TICK_S
        answers: dict[T, Any] = {}
        while set(answers) != keys:
            answer = self._next()
            if answer is not None:
                answers[answer.key] = answer.value
            elif time.monotonic() >= deadline_s:
                missing = ", ".join(sorted(_name(key) for key in keys - set(answers)))
                raise DeadlineError(f"waited {wait_s:g} s for {missing} {what}; raise runtime.wait_s")
            self._check_leases()
        return answers

    def _next(self) -> _Answer | None:
        try:
            entry = self._queue.get(timeout=_TICK_S)
        except queue.Empty:
            return None
        if isinstance(entry, _Failed):
            raise entry.error
        if isinstance(entry, _Stopped):
            raise InterruptedRunError(entry.reason)
        return entry

    def _check_leases(self) -> None:
        for member in self._chosen:
            silent_s = self._members.silent_for_s(member.node, member.instance)
            if silent_s >= self._lease_s:
                raise PeerLostError(lost_message(member.node, silent_s, self._lease_s))

    # ---- the end ----------------------------------------------------------------------------------

    def _enter(self, phase: str) -> None:
        self._emit(control_pb2.RunEvent(state=phase))

    def _emit(self, event: control_pb2.RunEvent) -> None:
        self.board.take(event)
        self._outbox.emit(event)

    def _release_all(self, reason: str) -> None:
        wait([calls.release(reason) for calls in self._calls.values()], timeout=_RELEASE_WAIT_S)
        for calls in self._calls.values():
            calls.close()

    def _say_how_it_ended(self, outcome: RingTuneError | None) -> None:
        try:
            if outcome is None:
                self._emit(control_pb2.RunEvent(done=True))
            else:
                failure = control_pb2.RunFailure(error=type(outcome).__name__, message=str(outcome))
                self._emit(control_pb2.RunEvent(failure=failure))
        except InterruptedRunError as error:
            _LOG.info("measurement %s: %s", self.run_id, error)


def _link(pair: Pair, reply: control_pb2.MeasureLinkReply) -> LinkFacts:
    return LinkFacts(
        source=pair[0],
        target=pair[1],
        rate_bytes_per_s=reply.rate_bytes_per_s,
        latency_s=reply.latency_s,
        rate_low_bytes_per_s=reply.rate_low_bytes_per_s,
        rate_high_bytes_per_s=reply.rate_high_bytes_per_s,
        send_cpu_s_per_byte=reply.send_cpu_s_per_byte,
        receive_cpu_s_per_byte=reply.receive_cpu_s_per_byte,
        busy_source_s=reply.busy_source_s,
        busy_target_s=reply.busy_target_s,
    )


def _name(key: object) -> str:
    return f"{key[0]} -> {key[1]}" if isinstance(key, tuple) else f"node {key}"
