"""The coordinator: its members, its one run or measurement at a time, its lines on the terminal, and its shutdown."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePath
from types import FrameType

from coordinator.run.driver import Driver, Participants
from coordinator.run.events import EventSink
from coordinator.run.measurement import MeasureWork
from coordinator.run.members import LinkCache, Member, Registry, WakingClock
from coordinator.run.requests import MeasureRequest, RunRequest, read_run_request, run_request_to_proto, with_initial
from coordinator.run.run_driver import RunWork
from coordinator.server.restart import RunHistory, resume_request, run_to_resume
from coordinator.server.run_record import RunRecord
from coordinator.server.run_store import RunStore
from ringtune.errors import (
    BusyError,
    FrameError,
    InterruptedRunError,
    JobError,
    PeerLostError,
    RingTuneError,
    UsageError,
)
from ringtune.ids import check_node_name, make_run_id
from ringtune.job.job import Job
from ringtune.machine.process import end_within, handled
from ringtune.machine.resources import trim_heap
from ringtune.models.folder import name_of_folder
from ringtune.models.weights_by_digest import ModelManifest, Offers
from ringtune.quantities import format_bytes, format_seconds
from ringtune.storage.pieces import FilePieces, Pieces
from ringtune.texts import one_line, printable
from ringtune.transport.endpoints import WIRE, require_compatible, require_private
from ringtune.transport.open_calls import TokenBucket
from ringtune.v1 import control_pb2


def record_of(run_id: str, request: RunRequest, now_unix_s: float, *, takes_up: str = "", owner: str = "") -> RunRecord:
    """Make the record of a run that begins; ``takes_up`` is the interrupted run that it resumes, if any."""
    return RunRecord(
        run_id=run_id,
        first_run=request.resume.run_id if request.resume else run_id,
        model=name_of_folder(PurePath(request.job.model.path)),
        method=request.job.train.method,
        submitted_by=request.submitted_by,
        started_unix_s=now_unix_s,
        saved_step=request.resume.saved_step if request.resume else -1,
        kept_step=request.resume.manifests[0].step if request.resume else -1,
        takes_up=takes_up,
        submission=request.submission,
        owner=owner,
    )


def joined_line(member: Member) -> str:
    """Return the line about a node that has joined.

    Example: ``node pi joined from 10.0.0.7:4000: 4 threads, 3,788 MiB, cpu, owns rows``.
    """
    owns = ", owns rows" if member.has_data else ""
    guest = ", a guest" if member.is_guest else ""
    return (
        f"node {member.node} joined from {member.address}: {member.threads} threads, "
        f"{format_bytes(member.memory_bytes)}, {member.device}{owns}{guest}"
    )


class RunLogger:
    """An event sink that passes a line to ``say`` when a run begins and when it ends."""

    def __init__(self, what: str, *, who: str, model: str, say: Callable[[str], None]) -> None:
        self._what, self._who, self._model, self._say = what, who, model, say
        self._name, self._started_s, self._steps = what, time.monotonic(), 0

    def __call__(self, event: control_pb2.RunEvent) -> None:
        """Pass a line on if the event begins or ends the run."""
        match event.WhichOneof("event"):
            case "run_id":
                self._name = f"{self._what} {event.run_id}"
                by = f" by {self._who}" if self._who else ""
                self._say(f"{self._name} of {self._model} started{by}")
            case "step_json":
                step = json.loads(event.step_json)
                self._steps += step["kind"] == "train"
            case "done":
                self._say(f"{self._name} done: {self._so_far()}")
            case "failure":
                stopped = event.failure.error == InterruptedRunError.__name__
                reason = printable(" ".join(event.failure.message.split()))
                self._say(f"{self._name} {'' if stopped else 'failed: '}{reason}; {self._so_far()}")

    def _so_far(self) -> str:
        steps = f"{self._steps} steps, whole run " if self._what == "run" else ""
        return f"{steps}{format_seconds(time.monotonic() - self._started_s)}"


_MAX_LINES = 20
"""Lines a minute of one node that joins and leaves again and again."""
_LOG = logging.getLogger(__name__)
_BEGUN_S = 5.0
"""Wait for the driver of a run that is stored already; shorter than the deadline of who asks to end the run."""
_LONGEST_BEGIN_S = 60.0
"""Wait for the beginning of another run, which is refused while a run drives; then the run that goes back begins."""


class Coordinator:
    """Keeps the members and drives at most one run or measurement; safe for threads.

    Attributes:
        links: measured between members, in this process's life.
        kept: store of runs; None = runs are not stored, and end with their submitter.
        awaits_nodes: whether runs wait for lost nodes, which may be started again.
        say: gets lines about nodes and runs; must not block.
        sinks: readers of the events of each later run; must not block. Their exceptions are logged.
        onlookers: like ``sinks``, but they also get the actions of each turn.
        owners: user of the newest run, and of those that it takes up, which may be none that are stored.
    """

    def __init__(self, *, lease_s: float = 10.0, insecure: bool = False) -> None:
        self.lease_s = lease_s
        self.offers = Offers()
        self.kept: RunStore | None = None
        self.awaits_nodes = True
        self.say: Callable[[str], None] = lambda line: None
        self.sinks: list[EventSink] = []
        self.onlookers: list[EventSink] = []
        self.owners: dict[str, str] = {}
        self.links = LinkCache()
        self._insecure = insecure
        self._lock = threading.Lock()
        self._beginning = threading.Lock()  # held while a run begins, also by a stop
        self._registry = Registry(lease_s)
        self._lines = TokenBucket(_MAX_LINES, _MAX_LINES / 60.0)
        self._now_s = WakingClock()
        self._driver: Driver | None = None
        self._replaced: Driver | None = None  # by the driven one, to which it passes what is asked of it
        self._drivers: list[Driver] = []  # the driven one, and earlier ones that may still send their last event

    # ---- members ----------------------------------------------------------------------------------

    def join(self, member: Member) -> None:
        """Add a node to the members; raises ``BusyError`` or ``UsageError``."""
        check_node_name(member.node)
        require_private(member.address, option=f"node {member.node}: its address", insecure=self._insecure)
        require_compatible(f"node {member.node}", member.version)
        if member.wire != WIRE:
            raise UsageError(
                f"node {member.node} has another build of ringtune (its messages are those of number "
                f"{member.wire}, here of {WIRE}); install the same build on both"
            )
        with self._lock:
            was_there = self._registry.is_alive(member.node, self._now_s())
            self._registry.join(member, self._now_s())
            if self._driver is not None and not was_there:
                self._driver.joined(member)  # before other threads see it as living
        if self._lines.take(member.node):
            _LOG.info("node %s at %s joined", member.node, member.address)
            self.tell(joined_line(member))

    def heartbeat(self, node: str, instance: str, rss_bytes: int) -> tuple[bool, str]:
        """Renew a node's lease; return whether the node is a member, and the id of the driven run."""
        with self._lock:
            known = self._registry.heartbeat(node, instance, rss_bytes, self._now_s())
            return known, self._driver.run_id if self._driver else ""

    def leave(self, node: str, instance: str) -> None:
        """Remove a member that leaves in order."""
        with self._lock:
            has_left = self._registry.leave(node, instance)
        if has_left and self._lines.take(node):
            _LOG.info("node %s left", node)
            self.tell(f"node {node} left")

    def remove(self, node: str, reason: str, *, forever: bool) -> bool:
        """Remove a member; a driven run treats it as lost; raises ``UsageError``.

        With ``forever`` its name is refused as long as this coordinator runs.

        Returns:
            Whether it was a member.
        """
        check_node_name(node)
        with self._lock:
            was_member = self._registry.remove(node, reason, forever=forever)
            driver = self._driver
        if was_member:
            self.tell(reason)
        if driver is not None and node in driver.participants.nodes:
            driver.participants.node_failed(node, PeerLostError(f"{reason}; the run can't use it any more"))
        return was_member

    def drain_node(self, node: str, *, undo: bool) -> str:
        """Exclude a member from new runs, or undo that; return the run that it still works on.

        Raises ``UsageError``: it is no member.
        """
        with self._lock:
            if not self._registry.drain(node, undo=undo):
                raise UsageError(f"node {node} is no member of this coordinator; 'ringtune nodes' lists them")
            return self._driver.run_id if self._driver and node in self._driver.participants.nodes else ""

    def tell(self, line: str) -> None:
        """Pass a line to ``say``, where no text in it can begin another one; log it if it can't be shown."""
        try:
            self.say(one_line(line))
        except OSError as error:  # the terminal is gone; the caller continues
            _LOG.info("%s (can't be shown: %s)", line, error)

    def report_lost_members(self) -> None:
        """Pass on a line about each newly lost member, once."""
        now_s = self._now_s()
        with self._lock:
            lost = self._registry.newly_lost(now_s)
        for member in lost:
            silent = format_seconds(now_s - member.seen_at_s)
            self.tell(f"node {member.node} is lost: last contact {silent} ago")

    def living(self) -> tuple[Member, ...]:
        """Return the living members that may be taken into a run, sorted by name."""
        with self._lock:
            living = self._registry.living(self._now_s())
            return tuple(member for member in living if not self._registry.is_drained(member.node))

    def names(self) -> tuple[str, ...]:
        """Return the names of all living and recently lost members, also of those that take no part in new runs."""
        with self._lock:
            return tuple(member.node for member in self._registry.all(self._now_s()))

    def model_manifest(self, run_id: str) -> ModelManifest | None:
        """Return the manifest of this machine's copy of a run's model; None if it has none, or a damaged one."""
        try:
            return self.offers.source(run_id).manifest
        except RingTuneError as error:
            _LOG.info("run %s: %s", run_id, error)
            return None

    def silent_for_s(self, node: str, instance: str) -> float:
        """Seconds since the last call of a node's process; infinite if it is no member."""
        with self._lock:
            return self._registry.silent_for_s(node, instance, self._now_s())

    def members(self) -> tuple[tuple[Member, str, float], ...]:
        """Return every member with its state, and the seconds since its last call.

        States: idle, running, drained (excluded from new runs), draining (drained and running), lost.
        """
        with self._lock:
            now_s = self._now_s()
            busy = self._driver.participants.nodes if self._driver else frozenset()
            return tuple(
                (member, self._state(member, busy, now_s), now_s - member.seen_at_s)
                for member in self._registry.all(now_s)
            )

    def _state(self, member: Member, busy: frozenset[str], now_s: float) -> str:
        if not self._registry.is_alive(member.node, now_s):
            return "lost"
        is_running = member.node in busy
        if self._registry.is_drained(member.node):
            return "draining" if is_running else "drained"
        return "running" if is_running else "idle"

    # ---- runs -------------------------------------------------------------------------------------

    def run(
        self,
        request: RunRequest,
        *,
        takes_up: str = "",
        owner: str = "",
        replaces: Driver | None = None,
        without: Mapping[str, str] = {},
        num_in_vain: int = 0,
    ) -> Driver:
        """Start or resume a run, or evaluate a saved adapter; nodes measure unless the request has a profile.

        ``takes_up`` is the interrupted run that the coordinator resumes by itself, and ``replaces`` that run while it
        ends. ``without`` are lost processes, as for ``Participants``, ``num_in_vain`` counts the resumptions since the
        last checkpoint, this one included, and ``owner`` is the user in the certificate of its submitter.

        Raises:
            BusyError: a run or measurement is driven already.
            JobError: the job has a shorter lease than this coordinator.
            PlanError: the checkpoint is of another job or plan.
        """

        def make(run_id: str, on_end: Callable[[], None]) -> Driver:
            participants = Participants(run_id, self, lease_s=request.job.runtime.lease_s, without=without)
            work = RunWork(participants, request, awaits_nodes=self.awaits_nodes)
            driver = Driver(participants, work, on_end)
            if self.kept is not None and request.is_training:
                record = record_of(run_id, request, time.time(), takes_up=takes_up, owner=owner)
                content = run_request_to_proto(request).SerializeToString()
                participants.output.keeper = self.kept.begin(
                    record, request=content, initial=request.initial, on_saved=driver.noted
                )
            history = RunHistory(request, num_in_vain=num_in_vain)
            participants.output.listeners.append(history)
            work.go_back = functools.partial(self._go_back, driver, request, history, owner)
            return driver

        return self._begin(
            request.job,
            request.kind,
            request.submitted_by,
            make,
            owner=owner,
            initial=request.initial,
            replaces=replaces,
        )

    def _go_back(
        self,
        driver: Driver,
        request: RunRequest,
        history: RunHistory,
        owner: str,
        without: Mapping[str, str],
        why: str,
        join_s: float,
    ) -> Driver:
        """Resume a run that ends with the loss of a node, or as an owner is back, from its newest checkpoint."""
        run_id = driver.run_id
        resumed = history.resumption(record_of(run_id, request, time.time()), join_s)
        if self.kept is not None:  # the received file went with its call
            resumed = with_initial(resumed, self.kept.initial_file(run_id))
            owner = self.kept.require(run_id).owner  # who may have been removed meanwhile
        num_in_vain = history.num_in_vain + 1
        after = self.run(
            resumed, takes_up=run_id, owner=owner, replaces=driver, without=without, num_in_vain=num_in_vain
        )
        if self.kept is not None:
            self.kept.interrupt(run_id, why)
        self.tell(f"run {run_id}: {why}; {after.run_id} resumes it from its checkpoint")
        return after

    def resume_interrupted(self, *, within_s: float) -> None:
        """Resume the run that was interrupted by the end of the previous coordinator process, if any.

        A run that can't be resumed is reported to ``say``, and stays interrupted. One that was interrupted more than
        ``within_s`` seconds ago is left to the user. Raises ``UsageError``.
        """
        kept = self.require_kept()
        interrupted = run_to_resume(kept.records(), now_unix_s=time.time(), within_s=within_s)
        if interrupted is None:
            return
        try:
            first_request = with_initial(
                read_run_request(kept.request(interrupted.run_id)), kept.initial_file(interrupted.run_id)
            )
            request = resume_request(first_request, interrupted, kept.events(interrupted.run_id, wait=False))
            driver = self.run(request, takes_up=interrupted.run_id, owner=interrupted.owner)
            if request.resume is None:  # the run starts from the beginning, so the old events are not needed
                kept.fetched(interrupted.run_id)
        except RingTuneError as error:
            self.tell(
                f"run {interrupted.run_id} was interrupted when the coordinator ended, and can't be resumed: {error}"
            )
        else:
            self.tell(
                f"run {interrupted.run_id} was interrupted when the coordinator ended; {driver.run_id} resumes it"
            )

    def keeps(self, run_id: str) -> RunStore | None:
        """Return the store if it has the run; else None."""
        return self.kept if self.kept is not None and run_id in self.kept.records() else None

    def require_kept(self) -> RunStore:
        """Return the store of runs; raises ``UsageError``."""
        if self.kept is None:
            raise UsageError("this coordinator stores no runs; it is part of a local run: see the folder of its --out")
        return self.kept

    def measure(self, request: MeasureRequest, *, owner: str = "") -> Driver:
        """Start a measurement of the user ``owner``; raises ``BusyError`` or ``JobError``."""

        def make(run_id: str, on_end: Callable[[], None]) -> Driver:
            participants = Participants(run_id, self, lease_s=request.job.runtime.lease_s)
            return Driver(participants, MeasureWork(participants, request), on_end)

        return self._begin(request.job, "measurement", "", make, owner=owner)

    def _begin(
        self,
        job: Job,
        what: str,
        who: str,
        make: Callable[[str, Callable[[], None]], Driver],
        *,
        owner: str,
        initial: Pieces | None = None,
        replaces: Driver | None = None,
    ) -> Driver:
        if job.runtime.lease_s < self.lease_s:
            raise JobError(
                f"runtime.lease_s = {job.runtime.lease_s:g} is shorter than this coordinator's {self.lease_s:g}; "
                f"start it with --lease {job.runtime.lease_s:g}"
            )
        with self._alone(_LONGEST_BEGIN_S if replaces else 0.0) as is_alone:
            if not is_alone:
                raise BusyError("this coordinator begins another run already; wait for its end or stop it")
            with self._lock:  # free while initial values are written and hashed
                if self._driver is not None and self._driver is not replaces:
                    raise BusyError(
                        f"this coordinator drives run {self._driver.run_id} already; wait for its end or stop it"
                    )
            run_id = make_run_id(time.time(), secrets.token_bytes(4))
            driver: Driver = make(run_id, lambda: self._forget(driver))
            with contextlib.ExitStack() as undo:
                if self.kept is not None:
                    undo.callback(self.kept.remove, run_id)
                    if initial is not None:
                        initial = FilePieces(self.kept.initial_file(run_id))  # the received one goes with its call
                self.offers.put(run_id, model_folder(job), initial)
                undo.pop_all()
            model = name_of_folder(PurePath(job.model.path))
            output = driver.participants.output
            logger = RunLogger(what, who=who, model=model, say=self.tell)
            output.listeners += [logger, *self.sinks, *self.onlookers]
            output.onlookers += self.onlookers
            with self._lock:
                self._registry.set_lease(max(self.lease_s, job.runtime.lease_s), self._now_s())
                self._driver, self._replaced = driver, replaces
                self.owners = {**(self.owners if replaces else {}), run_id: owner}
                driver.start()
                ending = (other for other in self._drivers if other is replaces or not other.join(0.0))
                self._drivers = [*ending, driver]
            return driver

    @contextlib.contextmanager
    def _alone(self, timeout_s: float) -> Iterator[bool]:
        """Keep other runs from beginning; yield whether that was possible in time."""
        is_alone = self._beginning.acquire(timeout=timeout_s)
        try:
            yield is_alone
        finally:
            if is_alone:
                self._beginning.release()

    def run_status(self) -> control_pb2.RunStatus | None:
        """Return the state of the run, or the end of the last one; None before the first."""
        with self._lock:
            last = self._drivers[-1:]
        return last[0].board.read() if last else None

    def report(self, request: control_pb2.ReportRequest) -> None:
        """Pass a node's report to the driven run, and renew the node's lease if the run takes it.

        Raises:
            FrameError: the run is not driven here, or the node, or its process, has no part in it.
            IntegrityError: the node is not in the run.
            BusyError: too many of its reports wait; heartbeats renew its lease meanwhile.
        """
        with self._lock:
            driver = self._driver
        if driver is None or driver.run_id != request.run_id:
            raise FrameError(f"run {request.run_id} is not driven here; forget it")
        driver.work.report(request)
        with self._lock:
            self._registry.touch(request.node, self._now_s())

    def driver_of(self, run_id: str) -> Driver:
        """Return the driver of a run, also of one that another run replaces just now; raises ``FrameError``.

        A run that is stored and not driven yet is waited for.
        """
        if (driver := self._driver_with(run_id)) is not None:
            return driver
        if self.kept is not None and (record := self.kept.records().get(run_id)) and record.state == "running":
            with self._alone(_BEGUN_S):
                if (driver := self._driver_with(run_id)) is not None:
                    return driver
        raise FrameError(f"run {run_id} is not driven here; it is over")

    def _driver_with(self, run_id: str) -> Driver | None:
        with self._lock:
            drivers = (self._driver, self._replaced) if self._driver is not None else ()
        return next((driver for driver in drivers if driver is not None and driver.run_id == run_id), None)

    def node_failed(self, node: str, error: RingTuneError) -> None:
        """Tell the driven run, if any, that a node has failed."""
        with self._lock:
            driver = self._driver
        if driver is not None:
            driver.participants.node_failed(node, error)

    def driven(self) -> str:
        """Return the id of the driven run or measurement; empty if there is none."""
        with self._lock:
            return self._driver.run_id if self._driver else ""

    def stop(self, reason: str, timeout_s: float) -> bool:
        """Stop the driven run, and wait for the last event of every run.

        Returns:
            False if a run has not ended after ``timeout_s`` seconds.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._alone(timeout_s) as is_alone:  # else a run could begin unseen
            if not is_alone:
                return False
            with self._lock:
                driver = self._driver
            if driver is not None:
                driver.stop(reason)
        ended: list[Driver] = []
        while ended is not self._drivers:  # a run that was just going back begins one more before it ends
            ended = self._drivers
            if not all(each.join(max(0.0, deadline_s - time.monotonic())) for each in ended):
                return False
        return True

    def _forget(self, driver: Driver) -> None:
        with self._lock:
            if self._driver is driver:
                self._driver = self._replaced = None
                self._registry.set_lease(self.lease_s, self._now_s())
            self.offers.drop(driver.run_id)
        trim_heap()  # return memory of the run, and of refused callers, to the system


def model_folder(job: Job) -> Path | None:
    """Return the job's model folder; None if it is not on this machine."""
    folder = Path(job.model.path)
    return folder if folder.is_dir() else None


SAVE_S = 60.0
GRACE_S = 30.0
"""Longest time, in seconds, from the saved run to the forced end of the process."""
# Short: a signal may go to any thread and then does not wake the main thread, which runs the handlers.
_WAIT_S = 0.5
_POLL_S = 0.1


class ShutdownSignals:
    """Handles SIGINT, SIGTERM and SIGHUP in its context, as ``handled`` does; for the main thread.

    Attributes:
        by_ctrl_c: whether SIGINT was among the signals; the others end a service.
    """

    def __init__(self) -> None:
        self.by_ctrl_c = False
        self._count = 0
        self._asked = threading.Event()
        self._hearing = handled(self._on_signal)

    def __enter__(self) -> ShutdownSignals:
        self._hearing.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._hearing.__exit__(None, None, None)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._count += 1
        self.by_ctrl_c |= number == signal.SIGINT
        # on a thread: the main thread may hold the event's lock just now, twice in each wait
        threading.Thread(target=self._asked.set, name="signal", daemon=True).start()
        end_within(GRACE_S + (SAVE_S if self._count == 1 else 0.0), 128 + number)

    @property
    def is_asked(self) -> bool:
        """Whether a signal has arrived."""
        return self._count > 0

    def wait(self) -> bool:
        """Wait up to ``_WAIT_S``; return whether a signal has arrived."""
        self._asked.wait(_WAIT_S)
        return self.is_asked

    def save(self, coordinator: Coordinator) -> None:
        """End the driven run with a checkpoint; give up after ``SAVE_S`` or at a second signal."""
        run_id = coordinator.driven()
        if not run_id:
            return
        try:
            coordinator.driver_of(run_id).drain("the coordinator was stopped")
        except FrameError:  # it has ended by itself
            return
        coordinator.tell(f"stopping {run_id} with a checkpoint; the same signal again stops at once")
        deadline_s = time.monotonic() + SAVE_S
        while coordinator.driven() and self._count < 2 and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
