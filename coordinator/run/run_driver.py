"""The work of one run: answers and reports of nodes become events of its state machine, commands become calls.

::

    calls to nodes --answers--.                             .--> calls to nodes
    reports of nodes ---------+--> queue --> state machine -+--> events for the submitter
    leases, timers, stop -----'   (one thread)              '--> recorder (ledger, trace)

Only the run's thread uses the state machine and the recorder. The state machine makes all decisions.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from coordinator.planner.planned import JobTime, Planned, copy_bytes
from coordinator.run.audit import CellRepeated, RunAudit
from coordinator.run.checkpoint import CheckpointManager
from coordinator.run.collect import ResultCollector
from coordinator.run.driver import Driver, ManifestKept, MemberJoined, NodeMessage, Participants, error_of_bug
from coordinator.run.events import Entry, now_unix_s, work_beside
from coordinator.run.join import JoinHandler, KnownNodes
from coordinator.run.members import Member, check_reachable, num_neighbours, rack_of, unused_owners
from coordinator.run.migration import MigrationDriver, ReplanOutcome, ReplanSearch
from coordinator.run.node_client import inspect_request, read_facts
from coordinator.run.planning import PlanReady, RunPlanner, SizesChecked
from coordinator.run.recorder import RunRecorder
from coordinator.run.recovery import Reports, with_role
from coordinator.run.report import judge_of
from coordinator.run.requests import RunRequest
from coordinator.run.run_text import rows_lines, wait_text
from ringtune.config.sections import SKIP_OWNER
from ringtune.costs.measurement import SKIPPED_ITEMS
from ringtune.costs.profile import Profile
from ringtune.engine.events import CancelTimer, SetTimer, TimerFired
from ringtune.errors import (
    BusyError,
    ConnectionFailedError,
    FrameError,
    IntegrityError,
    InterruptedRunError,
    PeerLostError,
    PlanError,
    RingTuneError,
    error_from_name,
)
from ringtune.machine.resources import busy_text
from ringtune.quantities import format_seconds
from ringtune.run_control import events as rd
from ringtune.run_control.recovery import RecoveryPolicy, checkpoint_reason
from ringtune.run_control.state_machine import RunStateMachine
from ringtune.schedule.course import Course
from ringtune.schedule.operation_tables import BlockScores
from ringtune.schedule.plan import Plan
from ringtune.storage.tensor_files import TensorFile
from ringtune.techniques.initial_adapter import INITIAL_FILE, head_note
from ringtune.transport.credentials import process_credentials
from ringtune.v1 import control_pb2

_MAX_WAITING_BYTES: Final = 32 << 20
"""Most bytes of reports of one node that wait for the run's thread; a node sends one after the other."""


def choose_beside(
    course: Course,
    step: int,
    scores: Sequence[BlockScores],
    put: Callable[[rd.OperationsChosen | rd.OperationsFailed], None],
) -> threading.Thread:
    """Choose the operation table from ``step`` on, on a thread of its own; return the thread.

    ``put`` takes the table or the failure, on that thread. The state machine limits the wait.
    """

    def work() -> rd.OperationsChosen | rd.OperationsFailed:
        # loads numpy, which no other part of the coordinator needs
        room = importlib.import_module("ringtune.techniques.knapsacks")
        return rd.OperationsChosen(step, room.choose_table(course, scores, step=step))

    return work_beside("choose", work, put, lambda error: rd.OperationsFailed(step, type(error).__name__, str(error)))


class PlacedRun(NamedTuple):
    """What a run needs once it has a plan; ``audit`` is None where nothing is audited."""

    recorder: RunRecorder
    migration: MigrationDriver
    replanning: ReplanSearch
    audit: RunAudit | None


class RunWork:
    """One run, as its driver sees it.

    Args:
        awaits_nodes: whether lost nodes may return.

    Attributes:
        go_back: begins the run that continues from the last checkpoint of this one without lost processes, as in
            ``Participants.without``, for a reason, and waits so many seconds for owners of rows; None = no run does.
    """

    def __init__(self, participants: Participants, request: RunRequest, *, awaits_nodes: bool = True) -> None:
        self.go_back: Callable[[Mapping[str, str], str, float], Driver] | None = None
        self._participants, self._request, self._job = participants, request, request.job
        participants.accused = self._accused
        self._calls, self._put = participants.calls, participants.queue.put
        self._output, self._emit, self._note = participants.output, participants.output.emit, participants.output.note
        self._addresses: dict[str, str] = {}
        self._members: dict[str, Member] = {}  # at the start
        self._initial_metadata = None
        if request.initial is not None:  # read now: the file may belong to the call that submits the run
            self._initial_metadata = TensorFile(request.initial, where=INITIAL_FILE).metadata
        self._policy = recovery_policy(request, awaits_nodes=awaits_nodes)
        self._rounds = state_machine_of(request, self._policy)
        if request.resume is not None:
            self._rounds.excluded.update(*(manifest.excluded for manifest in request.resume.manifests))
            participants.excluded = frozenset(self._rounds.excluded)
        self._checkpoints = CheckpointManager(participants.run_id, request.job, request.resume, self._rounds.excluded)
        self._run_planner = RunPlanner(
            participants,
            request,
            self._checkpoints,
            on_sizes_checked=self._on_sizes_checked,
            on_plan=self._on_plan,
            enter=self._enter,
        )
        self._reports = Reports(self._checkpoints, participants.now_s)
        self._collector = ResultCollector(participants, request.job)
        self._join_handler = JoinHandler(
            participants,
            request,
            self._rounds,
            self._reports,
            feed=self._feed,
            addresses=self._addresses,
            shards_run=self._checkpoints.shards_run,
        )
        self._timers: dict[str, float] = {}
        self._due: dict[str, float] = {}  # those that are queued
        self._planned: Planned | None = None
        self._placed: PlacedRun | None = None
        self._predicted: JobTime | None = None
        self._timed_frozen = request.resume.plan.course.frozen if request.resume else None
        self._phase = ("joining", participants.started_s)
        self._phases_s: dict[str, float] = {}
        self._waiting_bytes, self._counting = Counter[str](), threading.Lock()
        self._refused = set[str]()  # names in which reports were refused; unknown ones are the empty name
        self._finish: rd.Finish | None = None

    # ---- from other threads -----------------------------------------------------------------------

    def report(self, request: control_pb2.ReportRequest) -> None:
        """Queue a node's report; raises ``IntegrityError`` or ``FrameError``, or ``BusyError`` for too many at once."""
        node, size, placed = request.node, request.ByteSize(), self._placed
        if node not in self._addresses:
            self._note_refusal("", f"node {node} is not in the run")
            raise IntegrityError(f"node {node} is not in run {self._participants.run_id}; start it again")
        if request.instance != self._participants.instances[node]:
            self._note_refusal(node, f"node {node} of the run is another process")
            raise FrameError(f"another process is node {node} of run {self._participants.run_id}; forget it")
        if placed is None or node not in placed.recorder.nodes:
            raise FrameError(f"node {node} has no part in run {self._participants.run_id}; forget it")
        with self._counting:
            if (waiting := self._waiting_bytes[node]) and waiting + size > _MAX_WAITING_BYTES:
                raise BusyError(f"{waiting:,} bytes of reports of node {node} are not read yet; send this one later")
            self._waiting_bytes[node] += size
        self._participants.hear(node, self._reported(request))

    def _note_refusal(self, key: str, why: str) -> None:
        """Note for the user, once for each ``key``, why a process leaves the run; other nodes only see a lost link."""
        with self._counting:
            if key in self._refused:
                return
            self._refused.add(key)
        self._put(functools.partial(self._note, f"{why}: a report in its name is refused, its sender leaves"))

    # ---- the run's thread -------------------------------------------------------------------------

    def drive(self) -> RingTuneError | None:
        """Run the state machine to its end; return the error of a failed run, None after success."""
        outcome: RingTuneError | None
        try:
            outcome = self._drive()
        except InterruptedRunError as error:
            outcome = error
        if isinstance(outcome, InterruptedRunError) and self._request.is_training:
            return InterruptedRunError(self._checkpoints.stopped(str(outcome)))
        return outcome

    def _drive(self) -> RingTuneError | None:
        request, participants = self._request, self._participants
        planned = self._checkpoints.needed_nodes or (request.plan.plan.nodes if request.plan else ())
        members = participants.recruit(request, planned or request.nodes, returning=self._returning)
        self._put(self._join_handler.gathered)  # behind their own events
        if unused := unused_owners(participants.members.living(), members) if request.plan else ():
            self._note(f"not in the given plan, so their rows are not trained on: {', '.join(unused)}")
        self._addresses |= {member.node: member.address for member in members}
        self._members = {member.node: member for member in members}
        spare = tuple(sorted(member.node for member in members if not (planned or member.has_data)))
        returning = request.resume.returning(request.job) if request.resume else ()
        self._run_planner.begin(members, (*spare, *returning))
        participants.models.may_leave_out((*spare, *returning), participants.node_failed)
        participants.models.expect(self._addresses)
        self._feed(rd.Started(tuple(sorted(self._addresses)), spare, returning))
        try:
            while self._finish is None:
                entry = participants.next_entry()
                if entry is not None:
                    self._take(entry)
                self._fire_timers()
                self._check_leases()
        finally:
            self._run_planner.cancel()
            self._join_handler.close()
        if self._finish.error:
            return error_from_name(self._finish.error, self._finish.message)
        self._send_results()
        return None

    def _returning(self, chosen: Sequence[Member], living: Sequence[Member]) -> tuple[Member, ...]:
        """Return the owners that a resumed run takes back; a note says why one that is there stays out."""
        resume, returning = self._request.resume, list[Member]()
        names = resume.returning(self._job) if resume else ()
        for member in (each for each in living if each.node in names and not each.is_guest):
            try:
                check_reachable((*chosen, *returning, member))
            except RingTuneError as error:
                self._note(f"the rows of {member.node} stay left out: {error}")
            else:
                returning.append(member)
        return tuple(returning)

    # ---- events -----------------------------------------------------------------------------------

    def _take(self, entry: Entry | MemberJoined | ManifestKept | NodeMessage) -> None:
        match entry:
            case MemberJoined(member):
                self._join_handler.joined(member)
            case ManifestKept(step):
                self._on_noted(step)
            case NodeMessage(node, events):
                self._feed_heard(node, events)
            case _ if callable(entry):
                entry()
            case _:
                self._feed(entry)

    def _feed_heard(self, node: str, events: Iterator[rd.Event]) -> None:
        while True:
            try:
                event = next(events, None)
            except IntegrityError as error:
                self._participants.node_failed(node, error)
                return
            if event is None:
                return
            self._feed(event)

    def _facts_of(self, node: str, reply: control_pb2.InspectReply) -> Iterator[rd.Event]:
        """Take a node's facts; raises ``IntegrityError``."""
        facts = read_facts(node, reply, is_timed=self._run_planner.needs_times)
        facts = dataclasses.replace(facts, rack=rack_of(self._members[node]))
        if self._run_planner.is_checking_sizes:
            self._run_planner.take_sizes(facts)
        else:
            self._checkpoints.note_states(node, reply.shards, reply.saved)
            yield rd.Inspected(node, facts)

    def _on_sizes_checked(self, checked: SizesChecked) -> None:
        """Make the nodes measure themselves, or end a run for which no plan is possible."""
        if checked.error is not None:
            self._feed(rd.PlanFailed(type(checked.error).__name__, str(checked.error)))
            return
        self._timed_frozen = checked.frozen
        for node in sorted(self._addresses):
            self._inspect(node)

    def _on_noted(self, step: int) -> None:
        if self._checkpoints.note_kept(step) and self._rounds.phase in ("training", "collecting"):
            self._require_placed().migration.grant(())

    def _on_replanned(self, outcome: ReplanOutcome) -> None:
        if (event := self._require_placed().replanning.take(outcome, self._participants.nodes)) is not None:
            self._feed(event)

    def _on_repeated(self, answer: CellRepeated) -> None:
        audit = self._require_placed().audit
        if audit is not None and (failed := audit.take(answer)) is not None:
            (self._judge if failed.lost else self._feed)(failed)

    def _reported(self, request: control_pb2.ReportRequest) -> Iterator[rd.Event]:
        placed, node = self._require_placed(), request.node
        recorder, audit = placed.recorder, placed.audit
        with self._counting:
            self._waiting_bytes[node] -= request.ByteSize()
        if not recorder.plan.has_role(node, 0):
            return  # the node has joined and has no work in the run, so there is nothing to report
        if audit is not None and self._reports.is_new(request):
            audit.note(request)
        yield from self._reports.take(request, recorder, placed.migration.part.placement.placement_number)

    def _check_leases(self) -> None:
        if (verdict := self._reports.suspicions.verdict(self._participants.now_s())) is not None:
            self._judge(verdict)
        for node, message in self._participants.silent_nodes():
            told = with_role(message, node, self._planned.plan) if self._planned else message
            self._participants.nodes -= {node}
            self._reports.suspicions.died(node)
            self._put(rd.NodeFailed(node, PeerLostError.__name__, told))  # behind the node's earlier reports

    def _accused(self, error: RingTuneError) -> str:
        """Return a host that does not take the link of a node that prepares.

        An owner is left out by no node's word, but one that a resumed run takes back is not taken back then.
        """
        plan = self._planned.plan if self._planned else None
        is_of_link = isinstance(error, FrameError | ConnectionFailedError) and self._rounds.phase == "preparing"
        if plan is None or not is_of_link or error.peer not in plan.nodes:
            return ""
        may_go = plan.owner(error.peer) is None or error.peer in self._checkpoints.taken_back
        return error.peer if may_go else ""

    def _judge(self, complaint: rd.NodeFailed) -> None:
        """Call the accused node: if it answers, it is not lost, and its link is opened again.

        All links may have been opened again by the time of the answer.
        """
        if complaint.lost not in self._participants.nodes:
            self._feed(complaint)
            return
        number = self._require_placed().migration.part.placement.placement_number
        suspect = self._reports.suspicions.suspect(complaint)
        self._calls[complaint.lost].ask_alive(
            lambda is_alive: self._put(rd.LinkFailed(complaint, number, is_alive, suspect))
        )

    def _fire_timers(self) -> None:
        """Queue the timers that are due, behind what is awaited and there already, but before what comes later."""
        now_s = self._participants.now_s()
        for timer, at_s in self._timers.items():
            if at_s <= now_s and self._due.get(timer) != at_s:
                self._due[timer] = at_s
                self._put(functools.partial(self._fire, timer, at_s))

    def _fire(self, timer: str, at_s: float) -> None:
        if self._timers.get(timer) == at_s:  # else it was set anew meanwhile
            del self._timers[timer]
            self._feed(TimerFired(timer))

    def _feed(self, event: rd.Event) -> None:
        if isinstance(event, rd.TurnChecked) and event.problem:
            self._note(f"the audit: {event.problem}")
        if isinstance(event, rd.LinkFailed) and not event.answers:
            self._reports.suspicions.died(event.failed.lost)
        commands = self._rounds.handle(event, self._participants.now_s())
        if isinstance(event, rd.TurnChecked):
            self._checkpoints.tell_excluded(self._emit)
        for command in commands:
            self._carry_out(command)

    # ---- commands ---------------------------------------------------------------------------------

    def _carry_out(self, command: rd.Command) -> None:
        match command:
            case rd.EnterPhase(phase):
                self._enter(phase)
            case rd.Inspect(node):
                self._inspect(node)
            case rd.MakePlan(facts):
                self._run_planner.plan(facts)
            case rd.Prepare(node, plan):
                self._require_placed().migration.prepare(command, self._request.saved_for(node, plan))
            case rd.FetchAhead() | rd.Rest() | rd.Move() | rd.Halt():
                placed = self._require_placed()
                if placed.audit is not None and isinstance(command, rd.Halt):
                    placed.audit.forget()
                placed.migration.tell(command)
            case rd.CheckTurn(turn):
                placed = self._require_placed()
                if placed.audit is not None:
                    placed.audit.check(placed.migration.part, turn)
            case rd.AwaitNodes():
                self._note(self._awaits(command))
                self._join_handler.ask_others()
            case rd.LogMove() | rd.FindPlacement() | rd.LogRecovery():
                self._note(self._recover(command))
            case rd.LogNodeError(node, _, message) if self._placed is None:
                self._note(f"{message}; the run begins without node {node}")
                del self._addresses[node]
                self._run_planner.leave(node)
            case rd.LogTurn(turn):
                recorder, migration, replanning, audit = self._require_placed()
                recorder.log(command)
                if audit is not None:
                    recorder.add_to_ledger(audit.closed(turn))
                prepare_s, end_step, links = self._phases_s.get("preparing", 0.0), recorder.end_step, recorder.links
                replanning.turn_done(
                    migration.part, turn, end_step, links, prepare_s=prepare_s, living=self._participants.nodes
                )
            case rd.Grant(turns):
                recorder, migration, _, audit = self._require_placed()
                recorder.granted(turns)
                migration.grant(turns, audit.granted(migration.part, turns) if audit is not None else None)
            case rd.Collect() | rd.CollectBest() | rd.LogBest():
                part, needed_steps = self._require_placed().migration.part, self._checkpoints.best_steps
                self._collector.carry_out(command, part, needed_steps=needed_steps)
            case rd.Release(node, reason, is_finished):
                self._participants.release(node, reason, is_finished=is_finished)
            case SetTimer(timer, at_s):
                self._timers[timer] = at_s
            case CancelTimer(timer):
                self._timers.pop(timer, None)
            case rd.Finish():
                self._finish = command
            case rd.ChooseOperations(step, scores):
                choose_beside(self._require_plan().plan.course, step, scores, self._put)
            case rd.LogCheckpoint() | rd.LogKept():
                placed, is_kept = self._require_placed(), self._output.keeper is not None
                part = placed.migration.part
                if isinstance(command, rd.LogCheckpoint) and (missing := self._checkpoints.unsaved(part, command.step)):
                    for node in missing:
                        self._participants.node_failed(
                            node,
                            IntegrityError(
                                f"it did not report its shard of step {command.step}; use one version everywhere"
                            ),
                        )
                    return
                self._checkpoints.log(part, command, self._emit, is_kept=is_kept)
                if isinstance(command, rd.LogCheckpoint):
                    placed.recorder.emit_profile()  # for a submitter or coordinator that does not live to see the end
            case _:
                self._require_placed().recorder.log(command)

    def _awaits(self, command: rd.AwaitNodes) -> str:
        """Show the awaited nodes on the board; return the sentence for the user."""
        nodes, why, until_s = command
        left_s = max(0.0, until_s - self._participants.now_s())
        self._output.board.awaits(nodes, why, time.monotonic() + left_s)
        return f"the run {wait_text(nodes, f'{format_seconds(left_s)} at most (recovery.wait_s)', why)}"

    def _recover(self, command: rd.LogMove | rd.FindPlacement | rd.LogRecovery) -> str:
        """Search a placement, or record a move or a recovery and grant in its placement; return a sentence for it."""
        recorder, migration, replanning, _ = self._require_placed()
        if isinstance(command, rd.FindPlacement):
            replanning.find_placement(command, self._put)
            return f"node {', '.join(command.lost)} is lost; the others go back to the end of step {command.step}"
        if isinstance(command, rd.LogMove):
            told = migration.log(command)
            recorder.moved(command, now_unix_s())
            recorder.pace = replanning.moved(command)
            return told
        told = migration.recovered(command)
        recorder.recovered(command, now_unix_s())
        recorder.pace = replanning.recovered(command)
        self._reports.forgive()
        return told

    def _inspect(self, node: str) -> None:
        request = inspect_request(
            self._job,
            measure=self._run_planner.needs_times,
            neighbours=num_neighbours(self._members.values())[node],
            frozen=self._timed_frozen,
        )
        self._checkpoints.ask_about(node, request)
        self._calls[node].inspect(request, lambda reply: self._participants.hear(node, self._facts_of(node, reply)))

    def _enter(self, phase: str) -> None:
        now_s, (name, since_s) = time.monotonic(), self._phase
        if phase == name:
            return
        self._phases_s[name] = self._phases_s.get(name, 0.0) + now_s - since_s
        self._phase = (phase, now_s)
        if phase == "training" and not (recorder := self._require_placed().recorder).is_open:
            recorder.begin(now_unix_s())
        if phase not in ("done", "failed"):
            self._emit(control_pb2.RunEvent(state=phase))

    def _on_plan(self, made: PlanReady | rd.PlanFailed) -> None:
        """Send the plan to the submitter, open the books, and continue the run."""
        if isinstance(made, rd.PlanFailed):
            self._feed(made)
            return
        if self._rounds.phase != "planning":
            return
        self._planned, plan = made.planned, made.planned.plan
        self._emit(control_pb2.RunEvent(plan_json=json.dumps(plan.to_json())))
        self._collector.last.model = made.profile.nodes[0].model
        if made.planned.note:
            self._note(made.planned.note)
        if made.planned.effort_line:
            self._note(made.planned.effort_line)
        for line in rows_lines(made.profile.nodes, self._job.train.max_length):
            self._note(line)
        metadata = self._initial_metadata if not self._checkpoints.start else None
        if metadata is not None and (line := head_note(metadata, self._job.model.task, plan.course.labels)):
            self._note(line)
        start, self._predicted = self._checkpoints.start, made.predicted(self._request)
        if self._predicted is not None:
            self._note(self._predicted.line())
            loads = {each.node: each.load for each in made.profile.nodes}
            if self._run_planner.needs_times and (busy := busy_text(loads, "when measured")):
                self._note(busy)
        self._checkpoints.tell(self._emit)
        if not self._request.plan_only:
            part = plan.at(start.placement_number if start else plan.placement.placement_number)
            self._placed = placed = self._place(plan, part, made.profile)
            self._join_handler.begin(KnownNodes(plan, made.profile.by_name), placed.recorder, placed.replanning)
        self._feed(rd.PlanMade(plan, start))

    def _place(self, plan: Plan, part: Plan, profile: Profile) -> PlacedRun:
        """Open the books of the run, and prepare the calls to its nodes; ``part`` of the plan holds first."""
        job, put = self._job, self._put
        skipped = SKIPPED_ITEMS if self._request.is_rehearsal else 0
        recorder = RunRecorder(plan, job, profile, self._emit, skipped_items=skipped, part=part)
        copies = copy_bytes(plan.course, profile.nodes[0], job)
        migration = MigrationDriver(
            self._participants, part, job, self._checkpoints, self._addresses, copies, recorder.ledger
        )
        audit = None
        if job.audit_share and self._request.is_training:
            who = process_credentials()
            audit = RunAudit(
                self._participants,
                job,
                lambda: self._join_handler.facts,
                lambda answer: put(functools.partial(self._on_repeated, answer)),
                authorities=lambda: who.identity.authorities if who is not None else (),
            )
        replanning = ReplanSearch(
            plan,
            part,
            job,
            profile,
            put=lambda outcome: put(functools.partial(self._on_replanned, outcome)),
            note=self._note,
        )
        recorder.pace = replanning.pace
        if self._output.onlookers:
            recorder.onlooker = functools.partial(self._output.tell, self._output.onlookers)
        return PlacedRun(recorder, migration, replanning, audit)

    def _require_plan(self) -> Planned:
        if self._planned is None:
            raise PlanError("there is no plan yet; please report this")
        return self._planned

    def _require_placed(self) -> PlacedRun:
        if self._placed is None:
            raise PlanError("no placement holds yet; please report this")
        return self._placed

    # ---- the end ----------------------------------------------------------------------------------

    def _send_results(self) -> None:
        """Send report and merged adapter or model to the submitter; raises ``IntegrityError``."""
        state, request = self._rounds, self._request
        if request.plan_only:
            return
        recorder, migration, _, audit = self._require_placed()
        for node, totals in self._collector.last.totals():
            recorder.ledger.add_totals(node, totals)
        if request.evaluation is None and not self._collector.settle(state.best, state.last_step):
            self._collector.last.send(request.job, self._emit, part=migration.part)
        report = recorder.ledger.report(
            rows=recorder.rows,
            run_id=self._participants.run_id,
            wall_s=time.monotonic() - self._participants.started_s,
            phases_s=self._phases_s,
            predicted_bytes=self._require_plan().memory_bytes,
            unfreeze_at=state.unfreeze_at,
            predicted_steps_s=self._predicted.steps_s if self._predicted else None,
            best=state.best,
            measured={
                "operations": recorder.operations.report(recorder.profile()),
                **({"audit": audit.figures} if audit is not None else {}),
            },
        )
        self._emit(control_pb2.RunEvent(report_json=json.dumps(report)))

    def begin_after(self, failed: RingTuneError) -> Driver | None:
        """Begin the run that continues from the last checkpoint; None if there is none, with the reason in the failure.

        It does where all parameters train and a node is lost or back, and where a resumed run loses a node before a
        turn has ended: from the checkpoint, or the end of a turn, that it was resumed from.
        """
        resume, step = self._request.resume, self._checkpoints.saved_step
        plan = self._planned.plan if self._planned else resume.plan if resume else None
        if plan is None or not self._request.is_training:
            return None
        if not plan.course.method.full_parameters:
            if self._checkpoints.start is None or not plan.goes_back:
                return None
            step = self._checkpoints.start.step
        back = self._rounds.continues_with
        without = {node: instance for node, instance in self._participants.without.items() if node not in back}
        if not back:
            lost = self._rounds.lost if self._finish is not None else ""
            if lost not in plan.nodes:
                return None
            if why := checkpoint_reason(lost, plan, step, self._policy):
                failed.args = (f"{failed}; {why}",)
                return None
            without[lost] = self._participants.instances[lost]
        if self.go_back is None:
            return None
        try:
            self._note(f"the run goes back to the checkpoint of step {step}: {failed}")
            self.finish_files()
            why = "an owner is back" if back else "a node was lost"
            return self.go_back(without, why, self._policy.awaits_s)
        except Exception as error:  # also by a bug: the coordinator is busy until this run has ended
            why = str(error if isinstance(error, RingTuneError) else error_of_bug(self._participants.run_id, error))
            failed.args = (f"{failed}; going back to the checkpoint of step {step} failed: {why}",)
            return None

    def finish_files(self) -> None:
        """Send the profile from the run's own times, and complete the growing files, however the run ended."""
        self._collector.drop()
        if self._placed is not None:
            recorder = self._placed.recorder
            recorder.emit_profile()
            self._run_planner.remember(recorder.shown_links())
            recorder.close()


def recovery_policy(request: RunRequest, *, awaits_nodes: bool) -> RecoveryPolicy:
    """Make the policy of a run that loses nodes; ``awaits_nodes``: it waits for an indispensable one to return."""
    recovery = request.job.recovery
    return RecoveryPolicy(
        leaves_out=recovery.owners == SKIP_OWNER,
        awaits_s=recovery.wait_s if awaits_nodes and request.is_training else 0.0,
        num_steps=request.job.train.num_steps,
    )


def state_machine_of(request: RunRequest, policy: RecoveryPolicy) -> RunStateMachine:
    """Make the state machine for a request; with copies in the plan it continues without lost nodes."""
    job, runtime = request.job, request.job.runtime
    machine = functools.partial(
        RunStateMachine, None, plan_only=request.plan_only, plan_s=runtime.plan_s, wait_s=runtime.wait_s
    )
    if request.evaluation is not None:
        return machine()
    return machine(
        patience_evals=job.train.patience_evals,
        keeps_best=bool(job.train.keep_best),
        judge=judge_of(job.train.keep_best),
        recovery=policy,
        audits=job.audit is not None and request.is_training,
    )
