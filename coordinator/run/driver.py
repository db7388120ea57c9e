"""The thread of a run or measurement, its nodes, its events for the submitter, and its status.

::

    calls to nodes --answers--.                        .--> calls to nodes
    leases, stop -------------+--> queue --> thread ---+
    failures of nodes --------'                        '--> outbox --> events for the submitter

One thread does the work; the other threads put their events into its queue.

A resumed run waits for its former nodes as long as its request says. If then all owners are present, or the job leaves
out the absent ones, it continues on all present members, and asks them for the files on their disks. A run with a
method that does not move needs its own nodes, and ends.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from coordinator.run.events import EventSink, Outbox
from coordinator.run.members import (
    Member,
    Members,
    WakingClock,
    check_reachable,
    choose_members,
    choose_named,
    lost_message,
    missing_nodes_error,
    too_few_nodes_error,
)
from coordinator.run.node_client import AgentCalls, AgreedModel
from coordinator.run.requests import RunRequest, invited
from coordinator.run.run_text import LastStep
from ringtune.config.sections import SKIP_OWNER
from ringtune.errors import (
    InterruptedRunError,
    RingTuneError,
    StorageError,
    error_from_name,
    internal_error,
)
from ringtune.ids import naming_node
from ringtune.job.job import Job
from ringtune.run_control import events as rd
from ringtune.run_control.checkpoint import Resume
from ringtune.schedule.migration import stay_reason, wait_reason
from ringtune.schedule.plan import Plan
from ringtune.storage.strict import read_object
from ringtune.v1 import control_pb2


class AbsentNodes:
    """The absent nodes of a resumed run."""

    def __init__(self, resume: Resume, job: Job) -> None:
        self._resume, self._job = resume, job

    def need_reason(self, missing: Sequence[str]) -> str:
        """Say why the run can't resume without these nodes; empty if it can."""
        course = self._resume.plan.course
        if stays := stay_reason(course, from_disks=True):
            return f"their parts of the checkpoint are on no other node: {stays}"
        owners = [node for node in missing if course.owner(node) is not None]
        if not owners:
            return ""
        if self._job.recovery.owners != SKIP_OWNER:
            return f"no other node has the rows of {', '.join(owners)}; or set recovery.owners = 'skip'"
        if len(owners) == len(course.owners):
            return "no other node owns rows"
        return wait_reason(course, owners[0])

    def instead(self, living: Sequence[str], named: Sequence[str]) -> tuple[str, ...]:
        """Names of the members on which the run resumes without some of its ``named`` nodes; empty if it needs them."""
        missing = [node for node in named if node not in living]
        return () if not living or self.need_reason(missing) else tuple(sorted(living))

    def waits(self, living: Sequence[str], named: Sequence[str], join_s: float, *, hosts_s: float) -> str:
        """Describe the wait: nodes, time limit (``hosts_s`` for hosts alone), and how the run continues after it."""
        missing = [node for node in named if node not in living]
        why = self.need_reason(missing)
        waits = f"waiting up to {join_s if why else hosts_s:g} s for node {', '.join(missing)}"
        if why:
            return f"{waits}, and the run can't continue without them: {why}"
        return f"{waits}; then the run continues without them, if the disks of other nodes have their trained blocks"


_FIGURES = ("round", "initiator", "depth", "trains", "loss")


class StatusBoard:
    """The present phase, helpers, step and figures of a run; thread-safe."""

    def __init__(self, run_id: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._started_s = self._phase_since_s = clock()
        self._ended_s: float | None = None
        self._awaited_until_s = 0.0
        self._last = LastStep()
        self._now = control_pb2.RunStatus(run_id=run_id, phase="joining")

    def awaits(self, nodes: Sequence[str], why: str, until_s: float) -> None:
        """Note the awaited nodes, the reason, and the deadline on the board's clock; the next phase clears them."""
        with self._lock:
            self._now.awaited[:] = nodes
            self._now.awaited_why, self._awaited_until_s = why, until_s

    def take(self, event: control_pb2.RunEvent) -> None:
        """Update phase, plan, step, figures or failure from an event."""
        with self._lock:
            match event.WhichOneof("event"):
                case "state":
                    self._enter(event.state)
                case "plan_json":
                    self._take_plan(Plan.from_json(read_object(event.plan_json, "the plan")))
                case "step_json":
                    self._take_step(read_object(event.step_json, "a step"))
                case "failure":
                    self._now.message = event.failure.message
                    self._end("failed")
                case "done":
                    self._end("done")

    def _enter(self, phase: str) -> None:
        self._now.phase = phase
        for field in ("awaited", "awaited_why"):
            self._now.ClearField(field)
        self._phase_since_s = self._clock()

    def _take_plan(self, plan: Plan) -> None:
        self._now.num_steps = plan.course.num_steps
        self._now.ClearField("helpers")
        placement = plan.placements[-1]
        for helper in placement.joined_helpers():
            host = placement.host_of(helper.start)
            self._now.helpers.add(node=helper.node, host=host, start=helper.start, stop=helper.stop)

    def _end(self, phase: str) -> None:
        self._enter(phase)
        self._now.is_over = True
        self._ended_s = self._phase_since_s

    def _take_step(self, step: dict[str, Any]) -> None:
        if not self._last.take(step):
            return
        self._now.steps_done = step["step"]
        for name in _FIGURES:
            if step.get(name) is None:
                self._now.ClearField(name)
            else:
                setattr(self._now, name, step[name])

    def read(self) -> control_pb2.RunStatus:
        """Return a copy of the status, with the seconds of phase and run until now."""
        with self._lock:
            status = control_pb2.RunStatus()
            status.CopyFrom(self._now)
            now_s = self._clock()
            status.phase_s = now_s - self._phase_since_s
            status.awaited_s = max(0.0, self._awaited_until_s - now_s) if status.awaited_why else 0.0
            status.run_s = (now_s if self._ended_s is None else self._ended_s) - self._started_s
            return status


_LOG = logging.getLogger(__name__)
TICK_S = 0.25
_RELEASE_WAIT_S = 4.0
_COMING_S = 2.0  # nodes that are about to join are not worth a line


class EventOutput:
    """The events of a run or measurement: to its status board, its readers, and its keeper or else its submitter.

    Attributes, which are set before the work begins:
        keeper: gets all events in place of the submitter; an error of it ends the work. None = there is none.
        listeners: readers of all events.
        onlookers: readers of the actions of each turn, which are neither sent nor kept.
    """

    def __init__(self, run_id: str) -> None:
        self.board = StatusBoard(run_id)
        self.outbox = Outbox()
        self.keeper: EventSink | None = None
        self.listeners: list[EventSink] = []
        self.onlookers: list[EventSink] = []
        self._run_id = run_id

    def emit(self, event: control_pb2.RunEvent) -> None:
        """Send an event; raises what the keeper raises, or ``InterruptedRunError`` without one."""
        self.board.take(event)
        self.tell(self.listeners, event)
        (self.keeper or self.outbox.emit)(event)

    def note(self, text: str) -> None:
        """Send a sentence for the user."""
        self.emit(control_pb2.RunEvent(note=text))

    def tell(self, sinks: Sequence[EventSink], event: control_pb2.RunEvent) -> None:
        """Pass an event to readers; their errors are logged."""
        for sink in sinks:
            try:
                sink(event)
            except Exception:
                _LOG.exception("%s: a reader of events failed; the run continues", self._run_id)


class MemberJoined(NamedTuple):
    """A node has joined the coordinator during the work, for the first time or again."""

    member: Member


class NodeMessage(NamedTuple):
    """What a node says in a report or an answer; ``events`` parses it, and raises ``IntegrityError``."""

    node: str
    events: Iterator[rd.Event]


class ManifestKept(NamedTuple):
    """The submitter has the manifest of the checkpoint of this step on disk."""

    step: int


class Participants:
    """The nodes of a run or measurement, the calls to them, and the queue and the events of its thread.

    Args:
        run_id: name under which nodes keep what they have read, until they are released.
        lease_s: a node without a heartbeat for so long is lost.
        without: lost processes, by node its random ``instance``: hosts are not taken, owners not in the first lease.

    Attributes:
        now_s: clock of timers and deadlines; time in which this process stood still does not count.
        nodes: those that take part and are not released.
        excluded: nodes that an earlier part of the run has named as wrong; they are not taken.
        accused: returns the node that a node's error names as its cause, if the work may go on without it; else empty.
    """

    def __init__(
        self, run_id: str, members: Members, *, lease_s: float, without: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.run_id, self.members, self.lease_s, self.without = run_id, members, lease_s, without
        self.started_s, self.now_s = time.monotonic(), WakingClock()
        self.queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.output = EventOutput(run_id)
        self.calls: dict[str, AgentCalls] = {}
        self.models = AgreedModel(lambda: members.model_manifest(run_id))
        self.instances: dict[str, str] = {}
        self.nodes: frozenset[str] = frozenset()
        self.excluded: frozenset[str] = frozenset()
        self.accused: Callable[[RingTuneError], str] = lambda error: ""
        self._releases: dict[str, Future[None]] = {}

    def next_entry(self) -> Any:
        """Take the next entry of the queue; None after ``TICK_S`` without one."""
        try:
            return self.queue.get(timeout=TICK_S)
        except queue.Empty:
            return None

    def hear(self, node: str, events: Iterator[rd.Event]) -> None:
        """Queue what a node says; a node with an impossible event has failed."""
        self.queue.put(NodeMessage(node, events))

    def node_failed(self, node: str, error: RingTuneError) -> None:
        """Queue that a node has failed or ended, unless it was lost before; from any thread."""
        if node in self.without and node not in self.calls:
            return
        text = naming_node(node, str(error))
        self.queue.put(rd.NodeFailed(node, type(error).__name__, text, self.accused(error)))

    def recruit(
        self,
        request: RunRequest,
        named: Sequence[str] = (),
        *,
        returning: Callable[[Sequence[Member], Sequence[Member]], tuple[Member, ...]] = lambda chosen, living: (),
    ) -> tuple[Member, ...]:
        """Wait for the members of a request, or exactly those that are ``named``, and open the calls to them.

        ``returning`` gets the chosen and the living members; it returns which of the living ones are taken too.
        Raises ``RingTuneError``: too few have joined in time, a node failed, or the work was stopped.
        """
        emit = self.output.emit
        emit(control_pb2.RunEvent(run_id=self.run_id))
        emit(control_pb2.RunEvent(job_toml=request.job.to_toml()))
        emit(control_pb2.RunEvent(state="joining"))
        chosen, living = self._await_members(request, named)
        members = (*chosen, *returning(chosen, living))
        emit(control_pb2.RunEvent(members_json=json.dumps([member.node for member in members])))
        self.instances |= {member.node: member.instance for member in members}
        self.models.owners = [member.node for member in members if member.has_data]
        for member in members:
            self.calls[member.node] = AgentCalls(
                member.node,
                member.address,
                self.run_id,
                lease_s=self.lease_s,
                wait_s=request.job.runtime.wait_s,
                on_failure=self.node_failed,
                nodes=sorted(self.instances),
                models=self.models,
            )
        self.nodes = frozenset(self.calls)
        return members

    def _await_members(
        self, request: RunRequest, named: Sequence[str]
    ) -> tuple[tuple[Member, ...], tuple[Member, ...]]:
        """Return the chosen members, and the living ones from which others may be taken too."""
        num_nodes, join_s, resume = request.num_nodes, request.join_s, request.resume
        absent = AbsentNodes(resume, request.job) if resume is not None else None
        deadline_s, is_told = self.started_s + join_s, False
        gone = {*self.without, *self.excluded.intersection(named)}
        while True:
            # by the end of a lease a process that is lost is no member any more, and an owner that came back is
            is_first_lease = time.monotonic() < self.started_s + self.lease_s
            here = (
                each
                for each in self.members.living()
                if each.node not in self.excluded
                and (each.instance != self.without.get(each.node) or (each.has_data and not is_first_lease))
            )
            living = invited(tuple(here), request.evaluation)
            chosen = choose_named(living, named) if named else choose_members(living, num_nodes)
            if chosen is not None:
                check_reachable(chosen)
                return chosen, living
            names = [member.node for member in living]
            if named and absent is not None and not is_told and time.monotonic() >= self.started_s + _COMING_S:
                is_told = True
                hosts_s = min(join_s, self.lease_s) if self.without else join_s
                self.output.note(absent.waits(names, named, join_s, hosts_s=hosts_s))
            is_late = time.monotonic() >= deadline_s
            # a lost host is not waited for again; others that are silent for a moment have a lease to come back
            is_known = (gone and {*named} - {*names} <= gone) or (self.without and not is_first_lease)
            if named and absent is not None and (is_late or is_known):
                members = choose_named(living, absent.instead(names, named))
                if members:
                    check_reachable(members)
                    return members, ()
            if named and is_late:
                is_given = request.plan is not None and resume is None
                raise missing_nodes_error(living, named, join_s, has_given_plan=is_given)
            if not named and (not num_nodes or is_late):
                raise too_few_nodes_error(living, num_nodes, join_s)
            raise_if_over(self.next_entry())

    def admit(self, member: Member, calls: AgentCalls) -> str:
        """Take a node into the work; return the former process (``instance``) of its name, empty = none."""
        before = self.instances.get(member.node, "")
        if member.node in self.calls:
            self.calls[member.node].close()
        self.calls[member.node], self.instances[member.node] = calls, member.instance
        self._releases.pop(member.node, None)
        self.nodes |= {member.node}
        return before

    def silent_nodes(self) -> Iterator[tuple[str, str]]:
        """Yield each node without a lease, with the message that it is lost."""
        for node in sorted(self.nodes):
            silent_s = self.members.silent_for_s(node, self.instances[node])
            if silent_s >= self.lease_s:
                yield node, lost_message(node, silent_s, self.lease_s)

    def release(self, node: str, reason: str, *, is_finished: bool = False) -> None:
        """Release a node from the work, in any phase."""
        self.nodes -= {node}
        self._releases[node] = self.calls[node].release(reason, is_finished=is_finished)

    def release_all(self, reason: str) -> None:
        """Release all nodes that are not released yet, and close the calls."""
        for node in [node for node in self.calls if node not in self._releases]:
            self.release(node, reason)
        wait(self._releases.values(), timeout=_RELEASE_WAIT_S)
        for calls in self.calls.values():
            calls.close()


class Work(Protocol):
    """A run or a measurement, as its driver sees it."""

    def drive(self) -> RingTuneError | None:
        """Do the work, on the driver's thread; return the error of a failure, None after success."""

    def report(self, request: control_pb2.ReportRequest) -> None:
        """Take a node's report, from any thread; raises ``RingTuneError``."""

    def begin_after(self, failed: RingTuneError) -> Driver | None:
        """Begin the work that continues in place of this one, which has failed; None = the failure is the end."""

    def finish_files(self) -> None:
        """Complete the growing files, however the work ended."""


class Driver:
    """The thread of a run or measurement, from the request to the last event, as the coordinator sees it.

    Args:
        participants: nodes, queue and events of the work.
        work: what the thread does; it takes orders and answers from the queue.
        on_end: called once, when every node is released.

    Attributes:
        after: the work that continues in place of this one, which has failed; None = there is none.
    """

    def __init__(self, participants: Participants, work: Work, on_end: Callable[[], None]) -> None:
        self.run_id, self.board = participants.run_id, participants.output.board
        self.participants, self.work = participants, work
        self.after: Driver | None = None
        self._stop_reason = self._drain_reason = ""
        self._handing_over = threading.Lock()  # a wish is passed on once, by whoever asks or by this one's thread
        self._output, self._on_end = participants.output, on_end
        self._thread = threading.Thread(target=self._run, name=f"drive-{self.run_id}", daemon=True)

    # ---- from other threads -----------------------------------------------------------------------

    def start(self) -> None:
        """Start the work's thread."""
        self._thread.start()

    def stop(self, reason: str) -> None:
        """Ask for the end of the work, or of that which continues in its place, at once."""
        with self._handing_over:
            self._stop_reason, after = reason, self.after
        if after is not None:
            after.stop(reason)
        self.participants.queue.put(rd.RunStopRequested(reason))

    def drain(self, reason: str) -> None:
        """Ask for the end after the granted turns, with a checkpoint; without checkpoints, or asked again, at once."""
        with self._handing_over:
            self._drain_reason, after = reason, self.after
        if after is not None:
            after.drain(reason)
        self.participants.queue.put(rd.DrainRequested(reason))

    def noted(self, step: int) -> None:
        """Queue that the submitter has the manifest of the checkpoint of ``step`` on disk."""
        self.participants.queue.put(ManifestKept(step))

    def joined(self, member: Member) -> None:
        """Queue that a node has joined the coordinator."""
        self.participants.queue.put(MemberJoined(member))

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the work; False after ``timeout_s``."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def events(self) -> Iterator[control_pb2.RunEvent]:
        """Yield the events for the submitter until the end; none where a keeper takes them."""
        yield from self._output.outbox.events()
        if self.after is not None:
            yield from self.after.events()

    # ---- its own thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        outcome: RingTuneError | None
        try:
            outcome = self.work.drive()
        except RingTuneError as error:
            outcome = error
        except Exception as error:
            outcome = error_of_bug(self.run_id, error)
        try:
            self.participants.release_all(str(outcome or "the run is done"))
        finally:
            try:
                if outcome is not None:
                    self._hand_over(outcome)
                self._on_end()  # before the last event: its reader may submit the next run
                if self.after is None:
                    self._log_outcome(outcome)
            finally:
                self._output.outbox.close()  # else the submitter would wait for ever

    def _hand_over(self, failed: RingTuneError) -> None:
        """Let other work go on in place of this one, if it can; pass on to it what is asked meanwhile."""
        after = None if self._stop_reason or self._drain_reason else self.work.begin_after(failed)
        with self._handing_over:
            self.after, stopped, drained = after, self._stop_reason, self._drain_reason
        if after is not None and stopped:
            after.stop(stopped)
        elif after is not None and drained:
            after.drain(drained)

    def _log_outcome(self, outcome: RingTuneError | None) -> None:
        try:
            self.work.finish_files()
        except StorageError as error:  # the keeper's disk is full
            outcome = outcome or error
        except InterruptedRunError as error:
            _LOG.info("%s: %s", self.run_id, error)
            return
        except Exception as error:  # without a last event whoever follows the run would wait for ever
            outcome = outcome or error_of_bug(self.run_id, error)
        try:
            if outcome is None:
                self._output.emit(control_pb2.RunEvent(done=True))
            else:
                failure = control_pb2.RunFailure(error=type(outcome).__name__, message=str(outcome))
                self._output.emit(control_pb2.RunEvent(failure=failure))
        except InterruptedRunError as error:
            _LOG.info("%s: %s", self.run_id, error)


def error_of_bug(run_id: str, error: Exception) -> RingTuneError:
    """Log an error that nobody foresaw; return the one for the user."""
    _LOG.error("%s failed by a bug", run_id, exc_info=error)
    return internal_error(error)


def raise_if_over(entry: object) -> None:
    """Raise an error if an entry of the queue ends the work; raises ``InterruptedRunError`` or ``RingTuneError``."""
    match rd.without_stop(entry):
        case rd.RunStopRequested(reason) | rd.DrainRequested(reason):
            raise InterruptedRunError(reason)
        case rd.NodeFailed(_, error, message):
            raise error_from_name(error, message)
