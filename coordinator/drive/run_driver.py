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
from typing import Any, NamedTuple

from coordinator.drive.agent_calls import AgentCalls
from coordinator.drive.answers import Answer, Facts, Files, Hosted, Reported, read_facts, read_object
from coordinator.drive.checkpointing import Checkpointing, Noted
from coordinator.drive.evaluation_request import Evaluation, invited
from coordinator.drive.lost_peers import Blame
from coordinator.drive.outbox import Outbox
from coordinator.drive.status_board import StatusBoard
from coordinator.members.recruiting import (
    Members,
    choose,
    choose_named,
    lost_message,
    not_there,
    num_neighbours,
    too_few,
)
from coordinator.members.registry import Member
from coordinator.planner.given_profile import check_given, with_given_times
from coordinator.planner.make_plan import Planned, make_plan
from coordinator.records.books import RunBooks
from coordinator.records.file_events import send_file
from coordinator.records.result_files import adapter_folder
from ringtune.costs.profile import Profile
from ringtune.engine.events import CancelTimer, SetTimer, TimerFired
from ringtune.errors import (
    IntegrityError,
    InterruptedRunError,
    PeerLostError,
    PlanError,
    RingTuneError,
    error_from_name,
)
from ringtune.jobs.job import Job
from ringtune.rounds import rounds
from ringtune.rounds.checkpoint import Resume
from ringtune.rpc.codec import numbers_from_proto
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StartPoint
from ringtune.v1 import control_pb2

_LOG = logging.getLogger(__name__)
_TICK_S = 0.25
_RELEASE_WAIT_S = 4.0
# A run measures as it starts, so only briefly; 'ringtune measure' takes longer, and nodes remember the better one.
_MEASURE_S = 1.0


class RunRequest(NamedTuple):
    """What the submitter asked for."""

    job: Job
    plan_only: bool
    num_nodes: int
    join_s: float
    evaluation: Evaluation | None = None
    resume: Resume | None = None
    profile: Profile | None = None


_Entry = rounds.Event | Answer | Noted


class RunDriver:
    """One run, from its request to its last event.

    Args:
        run_id: of the run.
        request: what is asked for.
        members: who is there.
        lease_s: a node that was not heard of for so long is lost.
        on_end: called once, when every node is released.

    Attributes:
        board: where the run stands.
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
        self._outbox = Outbox()
        self.board = StatusBoard(run_id)
        self._rounds = rounds.Rounds(self._plan, plan_only=request.plan_only, wait_s=request.job.runtime.wait_s)
        self._checkpoints = Checkpointing(run_id, request.job, request.resume)
        self._timers: dict[str, float] = {}
        self._addresses: dict[str, str] = {}
        self._instances: dict[str, str] = {}
        self._neighbours: dict[str, int] = {}
        self._calls: dict[str, AgentCalls] = {}
        self._planned: Planned | None = None
        self._books: RunBooks | None = None
        self._files: dict[str, dict[str, bytes]] = {}
        self._num_reports: dict[str, int] = {}
        self._blame = Blame()
        self._needed: frozenset[str] = frozenset()
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

    def drain(self, reason: str) -> None:
        """Stop the run after the turns that were granted, with a checkpoint; again = at once. Returns at once."""
        self._queue.put(rounds.DrainAsked(reason))

    def noted(self, step: int) -> None:
        """The submitter has the manifest of a checkpoint on disk; returns at once."""
        self._queue.put(Noted(step))

    def node_failed(self, node: str, error: RingTuneError) -> None:
        """Hear from elsewhere that a node has ended; returns at once."""
        self._queue.put(rounds.NodeFailed(node, type(error).__name__, str(error)))

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes that work for this run."""
        return self._needed

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
        self._queue.put(Reported(request))

    def events(self) -> Iterator[control_pb2.RunEvent]:
        """What happens, until the run is over."""
        return self._outbox.events()

    def _emit(self, event: control_pb2.RunEvent) -> None:
        self.board.take(event)
        self._outbox.emit(event)

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
            self._outbox.close()

    def _drive(self) -> RingTuneError | None:
        """Run the state machine to its end; the error of a failed run."""
        self._emit(control_pb2.RunEvent(run_id=self.run_id))
        self._emit(control_pb2.RunEvent(job_toml=self._job_toml))
        self._emit(control_pb2.RunEvent(state="joining"))
        members = self._await_members()
        self._addresses = {member.node: member.address for member in members}
        self._instances = {member.node: member.instance for member in members}
        self._neighbours = num_neighbours(members)
        self._calls = {
            node: AgentCalls(node, address, self.run_id, on_failure=self.node_failed)
            for node, address in self._addresses.items()
        }
        self._needed = frozenset(self._addresses)
        self._feed(rounds.Started(tuple(sorted(self._addresses))))
        while self._finish is None:
            entry = self._next()
            if entry is not None:
                self._take(entry)
            self._fire_timers()
            self._check_leases()
        if self._finish.error:
            return error_from_name(self._finish.error, self._finish.message)
        self._hand_results_in()
        return None

    def _await_members(self) -> tuple[Member, ...]:
        wanted = self._request.num_nodes
        deadline_s = self._started_s + self._request.join_s
        while True:
            living = invited(self._members.living(), self._request.evaluation)
            named = self._checkpoints.needed_nodes
            chosen = choose_named(living, named) if named else choose(living, wanted)
            if chosen is not None:
                return chosen
            if named and time.monotonic() >= deadline_s:
                raise not_there(living, named, self._request.join_s)
            if not named and (not wanted or time.monotonic() >= deadline_s):
                raise too_few(living, wanted, self._request.join_s)
            entry = self._next()
            if isinstance(entry, rounds.StopAsked | rounds.DrainAsked):
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
            case Reported(request):
                self._on_report(request)
            case Facts(node, _, shards):
                self._checkpoints.note_states(node, shards)
                self._feed(rounds.Inspected(node, read_facts(entry)))
            case Hosted(node, hosted_bytes):
                if self._books is not None:
                    self._books.ledger.nodes[node].hosted_bytes = hosted_bytes
                self._feed(rounds.Prepared(node))
            case Files(node, files):
                self._files[node] = files
                self._feed(rounds.Collected(node))
            case Noted(step):
                self._let_go_of_shards(step)
            case _:
                self._feed(entry)

    def _on_report(self, request: control_pb2.ReportRequest) -> None:
        if self._books is None:
            raise IntegrityError(f"node {request.node} reports before there is a plan; use one version on all machines")
        if request.number < 1:
            raise IntegrityError(f"a report of node {request.node} has no number; use one version on all machines")
        if request.number <= self._num_reports.get(request.node, 0):
            return  # the node did not hear that it had arrived
        self._num_reports[request.node] = request.number
        self._books.add_report(request)
        for step in request.steps:
            self._books.note_end(step.seq, step.at_unix_s)
            values = numbers_from_proto(step.values)
            self._feed(rounds.StepReported(request.node, step.seq, step.step, step.kind, values))
        self._checkpoints.note_saved(request.node, request.saved)
        for turn in request.turns_done:
            self._feed(rounds.TurnReported(request.node, turn))
        if request.error:
            failed = rounds.NodeFailed(request.node, request.error, request.message)
            if request.lost_peer:
                self._blame.add(failed, request.lost_peer, time.monotonic())
            else:
                self._feed(failed)

    def _check_leases(self) -> None:
        verdict = self._blame.verdict(time.monotonic())
        if verdict is not None:
            self._feed(verdict)
        for node in sorted(self._needed):
            silent_s = self._members.silent_for_s(node, self._instances[node])
            if silent_s >= self._lease_s:
                message = lost_message(node, silent_s, self._lease_s)
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
                    self._job_toml,
                    measure=self._request.profile is None,
                    timeout_s=wait_s,
                    on_result=self._put_facts(node),
                    extend=lambda request: self._ask_more(node, request),
                )
            case rounds.Prepare(node, plan):
                plan_json, addresses = json.dumps(plan.to_json()), {name: self._addresses[name] for name in plan.nodes}
                self._calls[node].prepare(
                    plan_json,
                    self._job_toml,
                    addresses,
                    timeout_s=wait_s,
                    on_result=self._put_hosted(node),
                    saved=self._request.evaluation.folder if self._request.evaluation else None,
                    extend=lambda request: self._checkpoints.go_on(node, request),
                )
            case rounds.Grant(turns):
                if self._books is not None:
                    self._books.granted(turns)
                for node in self._require_plan().plan.nodes:
                    self._calls[node].grant(turns, keep_from_step=self._checkpoints.keep_from_step)
            case rounds.Collect(node, with_head, with_private):
                self._calls[node].collect(
                    with_head=with_head, with_private=with_private, timeout_s=wait_s, on_result=self._put_files(node)
                )
            case rounds.Release(node, reason):
                self._needed -= {node}
                self._releases.append(self._calls[node].release(reason))
            case SetTimer(timer, at_s):
                self._timers[timer] = at_s
            case CancelTimer(timer):
                self._timers.pop(timer, None)
            case rounds.Finish():
                self._finish = command
            case rounds.LogCheckpoint(step, holder, unfreezing):
                manifest = self._checkpoints.manifest(self._require_plan().plan, step, holder, unfreezing)
                self._emit(control_pb2.RunEvent(checkpoint_json=json.dumps(manifest.to_json())))
            case rounds.LogStep() | rounds.LogTurn() | rounds.LogUnfreeze() | rounds.LogEvaluation():
                if self._books is not None:
                    self._books.log(command)

    def _ask_more(self, node: str, request: control_pb2.InspectRequest) -> None:
        """Nodes of one machine are timed at the same moment, as they will compute."""
        request.measure_s, request.neighbours = _MEASURE_S, self._neighbours[node]
        self._checkpoints.ask_about(node, request)

    def _let_go_of_shards(self, step: int) -> None:
        """Tell nodes at once which shards they may drop: there may be no further turn to grant."""
        if self._checkpoints.note_kept(step) and self._rounds.phase in ("training", "collecting"):
            for node in self._require_plan().plan.nodes:
                self._calls[node].grant((), keep_from_step=self._checkpoints.keep_from_step)

    def _put_facts(self, node: str) -> Callable[[control_pb2.InspectReply], None]:
        return lambda reply: self._queue.put(Facts(node, reply.facts_json, tuple(reply.shards)))

    def _put_hosted(self, node: str) -> Callable[[int], None]:
        return lambda hosted_bytes: self._queue.put(Hosted(node, hosted_bytes))

    def _put_files(self, node: str) -> Callable[[dict[str, bytes]], None]:
        return lambda files: self._queue.put(Files(node, files))

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

    def _plan(self, facts: Mapping[str, Any]) -> Plan | tuple[Plan, StartPoint]:
        """The planner of the state machine: also tells the submitter and opens the books."""
        self._enter("planning")  # the state machine says so only after its planner has answered
        evaluation = self._request.evaluation
        if evaluation is not None:
            facts = evaluation.narrow(facts)
        given = self._request.profile
        profile = with_given_times(facts, given) if given else Profile(nodes=tuple(facts[n] for n in sorted(facts)))
        facts = profile.by_name
        self._emit(control_pb2.RunEvent(profile_json=json.dumps(profile.to_json())))
        kept = self._checkpoints.planned(facts)
        is_evaluation = evaluation is not None
        self._planned = planned = kept or make_plan(
            self._job, facts, links=profile.links, evaluation_only=is_evaluation
        )
        if given is not None:
            check_given(given, facts, self._job, planned.plan)
        self._checkpoints.note_model(facts, planned.plan)
        self._emit(control_pb2.RunEvent(plan_json=json.dumps(planned.plan.to_json())))
        self._books = RunBooks(planned.plan, self._job, profile, self._emit)
        start = self._checkpoints.start
        if start is None:
            return planned.plan
        resumed = {"step": start.step, "passed_over": self._checkpoints.passed_over}
        self._emit(control_pb2.RunEvent(resumed_json=json.dumps(resumed)))
        return planned.plan, start

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
            totals = read_object(files.get("totals.json", b""), f"totals.json of node {node}")
            self._books.ledger.add_totals(node, totals)
        if self._request.evaluation is None:
            for name, content in sorted(adapter_folder(self._files).items()):
                send_file(f"adapter/{name}", content, self._emit)
        self._emit(control_pb2.RunEvent(profile_json=json.dumps(self._books.profile().to_json())))
        report = self._books.ledger.report(
            run_id=self.run_id,
            wall_s=time.monotonic() - self._started_s,
            phases_s=self._phases_s,
            predicted_bytes=self._require_plan().memory_bytes,
            unfreeze_at=self._rounds.unfreeze_at,
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
