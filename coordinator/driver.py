"""Drives one run: turns what nodes answer and report into events of ``ringtune.rounds``, carries its commands out.

::

    calls to nodes --answers--.                         .--> calls to nodes
    reports of nodes ---------+--> queue --> Rounds ----+--> events for the submitter
    leases, timers, stop -----'   (one thread)          '--> books (ledger, trace)

One thread touches the state machine and the books. All decisions are the state machine's.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from typing import Any, NamedTuple, Protocol

from coordinator.agent_calls import AgentCalls
from coordinator.planning import Planned, make_plan
from coordinator.registry import Member
from coordinator.result_files import adapter_folder
from coordinator.run_books import RunBooks
from coordinator.run_files import send_file
from ringtune import rounds
from ringtune.codec import numbers_from_proto
from ringtune.errors import (
    CapacityError,
    DeadlineError,
    IntegrityError,
    InterruptedRunError,
    PeerLostError,
    PlanError,
    RingTuneError,
    error_from_name,
)
from ringtune.events import CancelTimer, SetTimer, TimerFired
from ringtune.job import Job
from ringtune.plan import Plan
from ringtune.profile import NodeFacts, Profile
from ringtune.v1 import control_pb2

_LOG = logging.getLogger(__name__)
_TICK_S = 0.25
_RELEASE_WAIT_S = 4.0
# A node that fails closes its links: its neighbours must not be quicker to explain it than itself.
_SUSPECT_S = 1.0
_MAX_EVENTS = 20_000
_EMIT_WAIT_S = 30.0


class Members(Protocol):
    """What a run wants to know about members."""

    def living(self) -> tuple[Member, ...]:
        """Living members by name."""

    def silent_for_s(self, node: str) -> float:
        """Seconds since the last sign of life of a node."""


class RunRequest(NamedTuple):
    """What the submitter asked for."""

    job: Job
    plan_only: bool
    num_nodes: int
    join_s: float
    measure: bool = True


class _Report(NamedTuple):
    """A node's report."""

    request: control_pb2.ReportRequest


class _Facts(NamedTuple):
    """A node's facts, not read yet."""

    node: str
    facts_json: str


class _Hosted(NamedTuple):
    """A node is prepared."""

    node: str
    hosted_bytes: int


class _Files(NamedTuple):
    """A node's results."""

    node: str
    files: dict[str, bytes]


_Entry = rounds.Event | _Report | _Facts | _Hosted | _Files


class RunDriver:
    """One run, from its request to its last event.

    Args:
        run_id: of the run.
        request: what is asked for.
        members: who is there.
        lease_s: a node that was not heard of for so long is lost.
        on_end: called once, when every node is released.
    """

    def __init__(
        self, run_id: str, request: RunRequest, members: Members, *, lease_s: float, on_end: Callable[[], None]
    ) -> None:
        self.run_id = run_id
        self._job = request.job
        self._job_toml = request.job.to_toml()
        self._request = request
        self._members = members
        self._lease_s = lease_s
        self._on_end = on_end
        self._started_s = time.monotonic()
        self._queue: queue.SimpleQueue[_Entry] = queue.SimpleQueue()
        self._out: queue.Queue[control_pb2.RunEvent | None] = queue.Queue(_MAX_EVENTS)
        self._nobody_listens = threading.Event()
        self._rounds = rounds.Rounds(self._plan, plan_only=request.plan_only, wait_s=request.job.runtime.wait_s)
        self._timers: dict[str, float] = {}
        self._addresses: dict[str, str] = {}
        self._calls: dict[str, AgentCalls] = {}
        self._planned: Planned | None = None
        self._books: RunBooks | None = None
        self._files: dict[str, dict[str, bytes]] = {}
        self._seen_steps: set[int] = set()
        self._suspects: dict[str, tuple[float, rounds.NodeFailed]] = {}
        self._complainers: set[str] = set()
        self._needed: set[str] = set()
        self._phase = ("joining", self._started_s)
        self._phases_s: dict[str, float] = {}
        self._releases: list[Any] = []
        self._finish: rounds.Finish | None = None
        self._thread = threading.Thread(target=self._run, name=f"run-{run_id}", daemon=True)

    # ---- from other threads -----------------------------------------------------------------------

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def stop(self, reason: str) -> None:
        """Stop the run, whatever its state; returns at once."""
        self._queue.put(rounds.StopAsked(reason))

    def node_failed(self, node: str, error: RingTuneError) -> None:
        """Hear from elsewhere that a node has ended; returns at once."""
        self._queue.put(rounds.NodeFailed(node, type(error).__name__, str(error)))

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes that work for this run."""
        return frozenset(self._needed)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the run; False if it still goes on."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def report(self, request: control_pb2.ReportRequest) -> None:
        """Take a node's report; returns at once.

        Raises:
            IntegrityError: the node is not in this run.
        """
        if request.node not in self._addresses:
            raise IntegrityError(f"node {request.node} is not in run {self.run_id}")
        self._queue.put(_Report(request))

    def events(self) -> Iterator[control_pb2.RunEvent]:
        """What happens, until the run is over."""
        try:
            while (event := self._out.get()) is not None:
                yield event
        finally:
            self._nobody_listens.set()

    # ---- the run's thread -------------------------------------------------------------------------

    def _run(self) -> None:
        outcome: RingTuneError | None
        try:
            outcome = self._drive()
        except RingTuneError as error:
            outcome = error
        except Exception as error:
            _LOG.exception("run %s failed by a bug", self.run_id)
            outcome = RingTuneError(f"internal error, {type(error).__name__}: {error}; please report it")
        try:
            self._release_all(outcome)
        finally:
            self._on_end()  # before the last event, so that whoever hears it may submit the next run
            self._say_how_it_ended(outcome)
            self._put_out(None)

    def _drive(self) -> RingTuneError | None:
        """Run the state machine to its end; the error of a failed run."""
        self._emit(control_pb2.RunEvent(job_toml=self._job_toml))
        self._emit(control_pb2.RunEvent(state="joining"))
        members = self._await_members()
        self._addresses = {member.node: member.address for member in members}
        self._calls = {
            node: AgentCalls(node, address, self.run_id, on_failure=self.node_failed)
            for node, address in self._addresses.items()
        }
        self._needed = set(self._addresses)
        self._feed(rounds.Started(tuple(sorted(self._addresses))))
        while self._finish is None:
            entry = self._next()
            if entry is not None:
                self._take(entry)
            self._fire_timers()
            self._check_suspects()
            self._check_leases()
        if self._finish.error:
            return error_from_name(self._finish.error, self._finish.message)
        self._hand_results_in()
        return None

    def _await_members(self) -> tuple[Member, ...]:
        """The nodes of this run: all that are there, or as many as asked for, those with data first."""
        wanted = self._request.num_nodes
        deadline_s = self._started_s + self._request.join_s
        while True:
            living = self._members.living()
            if living and len(living) >= wanted:
                ranked = sorted(living, key=lambda member: (not member.has_data, member.node))
                return tuple(ranked[: wanted or len(ranked)])
            names = ", ".join(member.node for member in living) or "none"
            if not wanted:
                raise CapacityError("no node has joined this coordinator; start some with 'ringtune node'")
            if time.monotonic() >= deadline_s:
                raise DeadlineError(
                    f"waited {self._request.join_s:g} s for {wanted} nodes, {len(living)} have joined ({names}); "
                    "start the others or ask for fewer"
                )
            entry = self._next()
            if isinstance(entry, rounds.StopAsked):
                raise InterruptedRunError(entry.reason)
            if isinstance(entry, rounds.NodeFailed):
                raise error_from_name(entry.error, entry.message)

    def _next(self) -> _Entry | None:
        try:
            return self._queue.get(timeout=_TICK_S)
        except queue.Empty:
            return None

    # ---- events -----------------------------------------------------------------------------------

    def _take(self, entry: _Entry) -> None:
        match entry:
            case _Report(request):
                self._on_report(request)
            case _Facts(node, facts_json):
                self._feed(rounds.Inspected(node, _read_facts(facts_json, node)))
            case _Hosted(node, hosted_bytes):
                if self._books is not None:
                    self._books.ledger.nodes[node].hosted_bytes = hosted_bytes
                self._feed(rounds.Prepared(node))
            case _Files(node, files):
                self._files[node] = files
                self._feed(rounds.Collected(node))
            case _:
                self._feed(entry)

    def _on_report(self, request: control_pb2.ReportRequest) -> None:
        if self._books is None:
            raise IntegrityError(f"node {request.node} reports before there is a plan; use one version on all machines")
        self._books.add_report(request)
        for step in request.steps:
            if step.seq in self._seen_steps:  # the node did not hear that its report had arrived
                continue
            self._seen_steps.add(step.seq)
            self._books.note_end(step.seq, step.at_unix_s)
            values = numbers_from_proto(step.values)
            self._feed(rounds.StepReported(request.node, step.seq, step.step, step.kind, values))
        for turn in request.turns_done:
            self._feed(rounds.TurnReported(request.node, turn))
        if request.error:
            failed = rounds.NodeFailed(request.node, request.error, request.message)
            self._on_failure(failed, request.lost_peer)

    def _on_failure(self, failed: rounds.NodeFailed, lost_peer: str) -> None:
        """Give the node that others complain about a moment to say itself what happened."""
        if not lost_peer:
            self._feed(failed)
            return
        self._complainers.add(failed.node)
        self._suspects.setdefault(lost_peer, (time.monotonic() + _SUSPECT_S, failed))

    def _check_suspects(self) -> None:
        """Blame a lost peer that did not speak up, rather than one that itself complained of another."""
        now_s = time.monotonic()
        due = {peer: failed for peer, (until_s, failed) in self._suspects.items() if now_s >= until_s}
        silent = [failed for peer, failed in due.items() if peer not in self._complainers]
        for failed in [*silent, *due.values()][:1]:
            self._feed(failed)

    def _check_leases(self) -> None:
        for node in sorted(self._needed):
            silent_s = self._members.silent_for_s(node)
            if silent_s >= self._lease_s:
                since = "it has left" if silent_s == float("inf") else f"last heard of {silent_s:.1f} s ago"
                message = f"node {node} is lost: {since}, its lease is {self._lease_s:g} s; start it again and repeat"
                self._feed(rounds.NodeFailed(node, PeerLostError.__name__, message))

    def _fire_timers(self) -> None:
        now_s = time.monotonic()
        for timer in [timer for timer, at_s in self._timers.items() if at_s <= now_s]:
            del self._timers[timer]
            self._feed(TimerFired(timer))

    def _feed(self, event: rounds.Event) -> None:
        for command in self._rounds.handle(event, time.monotonic()):
            self._carry_out(command)

    # ---- commands ---------------------------------------------------------------------------------

    def _carry_out(self, command: rounds.Command) -> None:
        wait_s = self._job.runtime.wait_s
        match command:
            case rounds.EnterPhase(phase):
                self._enter(phase)
            case rounds.Inspect(node):
                self._calls[node].inspect(
                    self._job_toml, measure=self._request.measure, timeout_s=wait_s, on_result=self._put_facts(node)
                )
            case rounds.Prepare(node, plan):
                plan_json, addresses = json.dumps(plan.to_json()), {name: self._addresses[name] for name in plan.nodes}
                self._calls[node].prepare(
                    plan_json, self._job_toml, addresses, timeout_s=wait_s, on_result=self._put_hosted(node)
                )
            case rounds.Grant(turns):
                for node in self._require_plan().plan.nodes:
                    self._calls[node].grant(turns)
            case rounds.Collect(node, with_head, with_private):
                self._calls[node].collect(
                    with_head=with_head, with_private=with_private, timeout_s=wait_s, on_result=self._put_files(node)
                )
            case rounds.Release(node, reason):
                self._needed.discard(node)
                self._releases.append(self._calls[node].release(reason))
            case SetTimer(timer, at_s):
                self._timers[timer] = at_s
            case CancelTimer(timer):
                self._timers.pop(timer, None)
            case rounds.Finish():
                self._finish = command
            case rounds.LogStep() | rounds.LogTurn() | rounds.LogEvaluation():
                if self._books is not None:
                    self._books.log(command)

    def _put_facts(self, node: str) -> Callable[[str], None]:
        return lambda facts_json: self._queue.put(_Facts(node, facts_json))

    def _put_hosted(self, node: str) -> Callable[[int], None]:
        return lambda hosted_bytes: self._queue.put(_Hosted(node, hosted_bytes))

    def _put_files(self, node: str) -> Callable[[dict[str, bytes]], None]:
        return lambda files: self._queue.put(_Files(node, files))

    def _enter(self, phase: str) -> None:
        now_s = time.monotonic()
        name, since_s = self._phase
        if phase == name:
            return
        self._phases_s[name] = self._phases_s.get(name, 0.0) + now_s - since_s
        self._phase = (phase, now_s)
        if phase == "training" and self._books is not None:
            self._books.begin(time.time())
        if phase not in ("done", "failed"):
            self._emit(control_pb2.RunEvent(state=phase))

    def _plan(self, facts: Mapping[str, Any]) -> Plan:
        """The planner of the state machine: also tells the submitter and opens the books."""
        self._enter("planning")  # the state machine says so only after its planner has answered
        profile = Profile(nodes=tuple(facts[node] for node in sorted(facts)))
        self._emit(control_pb2.RunEvent(profile_json=json.dumps(profile.to_json())))
        self._planned = planned = make_plan(self._job, facts)
        self._emit(control_pb2.RunEvent(plan_json=json.dumps(planned.plan.to_json())))
        self._books = RunBooks(planned.plan, self._job, self._emit)
        return planned.plan

    def _require_plan(self) -> Planned:
        if self._planned is None:
            raise PlanError("there is no plan yet; please report this")
        return self._planned

    # ---- the end ----------------------------------------------------------------------------------

    def _hand_results_in(self) -> None:
        """Merge what the nodes sent and give it to the submitter."""
        if self._request.plan_only or self._books is None:
            return
        for node, files in self._files.items():
            totals = _read_json(files.get("totals.json", b""), f"totals.json of node {node}")
            self._books.ledger.add_totals(node, totals)
        for name, content in sorted(adapter_folder(self._files).items()):
            send_file(f"adapter/{name}", content, self._emit)
        report = self._books.ledger.report(
            run_id=self.run_id,
            wall_s=time.monotonic() - self._started_s,
            phases_s=self._phases_s,
            predicted_bytes=self._require_plan().memory_bytes,
        )
        self._emit(control_pb2.RunEvent(report_json=json.dumps(report)))

    def _release_all(self, outcome: RingTuneError | None) -> None:
        reason = str(outcome) if outcome else "the run is done"
        if self._finish is None:  # the state machine did not get as far as to release them
            self._releases = [calls.release(reason) for calls in self._calls.values()]
        wait(self._releases, timeout=_RELEASE_WAIT_S)
        for calls in self._calls.values():
            calls.close()

    def _say_how_it_ended(self, outcome: RingTuneError | None) -> None:
        try:
            if self._books is not None:
                self._books.close()
            if outcome is None:
                self._emit(control_pb2.RunEvent(done=True))
            else:
                failure = control_pb2.RunFailure(error=type(outcome).__name__, message=str(outcome))
                self._emit(control_pb2.RunEvent(failure=failure))
        except InterruptedRunError as error:
            _LOG.info("run %s: %s", self.run_id, error)

    def _emit(self, event: control_pb2.RunEvent) -> None:
        if not self._put_out(event):
            raise InterruptedRunError(f"the submitter did not take events for {_EMIT_WAIT_S:g} s; submit again")

    def _put_out(self, event: control_pb2.RunEvent | None) -> bool:
        """Queue an event for the submitter; False if it does not read any more."""
        deadline_s = time.monotonic() + _EMIT_WAIT_S
        while not self._nobody_listens.is_set():
            try:
                self._out.put(event, timeout=_TICK_S)
                return True
            except queue.Full:
                if time.monotonic() >= deadline_s:
                    return False
        return True


def _read_facts(facts_json: str, node: str) -> NodeFacts:
    facts = NodeFacts.from_json(_read_json(facts_json.encode(), f"the facts of node {node}"))
    if facts.node != node:
        raise IntegrityError(f"node {node} sent the facts of node {facts.node}; use one version on all machines")
    return facts


def _read_json(content: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except ValueError as error:
        raise IntegrityError(f"{what}: not JSON ({error}); use one version on all machines") from error
    if not isinstance(value, dict):
        raise IntegrityError(f"{what}: not a JSON object; use one version on all machines")
    return value
