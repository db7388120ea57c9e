"""Agent of a node: carries out the coordinator's calls, one run at a time, and measures links to other nodes.

::

    inspect -> prepare -> grant ... -> collect -> release      (release at any time, also during prepare)

A call for another run releases the current one. Everything with torch runs on one compute thread, through
``edge.agent.torch_backend``, which is loaded after the agent has joined.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from edge.agent.active_run import ANSWER_SHARE, ActiveRun, TorchBackend, check_private, open_links
from edge.agent.migration import AgentMigration
from edge.checkpoint.shard_saver import NO_FOLDER_FOR_BEST, ResumeShard, open_saver, require_rows
from edge.checkpoint.snapshot_servicer import fetch_audited
from edge.checkpoint.snapshots import MigratedState
from edge.machine import resources
from edge.machine.libraries import ComputeThread
from edge.options import AgentOptions
from edge.profiler.timing import TimingRequest
from edge.runtime.loop import NO_TRAIL, AgentRun
from edge.runtime.reporter import Note, Reporter, SharedClock, Totals
from edge.transport.access import RunAccess
from edge.transport.probe import computing_lost_s_per_byte, measure_link
from edge.weights.weight_fetch import ModelFetcher
from ringtune.errors import (
    ConnectionFailedError,
    DeadlineError,
    FrameError,
    IntegrityError,
    InterruptedRunError,
    PeerLostError,
    RingTuneError,
    UsageError,
)
from ringtune.job.job import Job, parse_job, result_of
from ringtune.schedule.access import NOT_PLANNED, CopyBytes
from ringtune.schedule.actions import TensorKey
from ringtune.schedule.plan import Plan
from ringtune.schedule.stages import saves_head
from ringtune.schedule.turns import StartPoint, Turn
from ringtune.storage.chunks import write_files
from ringtune.storage.pieces import Pieces
from ringtune.storage.strict import read_object
from ringtune.techniques.audit import Cell, CellPlace, Exchange, tensor_name
from ringtune.v1 import control_pb2

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_FLUSH_S: Final = 5.0


class Agent:
    """One node's part in runs. ``models``: fetches missing base weights; None = the model's folder has to exist."""

    def __init__(
        self,
        options: AgentOptions,
        attach_ring: Callable[[Any], None],
        report: Callable[[control_pb2.ReportRequest], object],
        *,
        load_workshop: Callable[[], TorchBackend] | None = None,
        models: ModelFetcher | None = None,
        clock: SharedClock | None = None,
    ) -> None:
        self.models, self._clock = models, clock or SharedClock()
        self.options, self._attach_ring = options, attach_ring
        self._ring: Any = None
        self._report = report
        self._load = load_workshop or (lambda: importlib.import_module("edge.agent.torch_backend"))
        self._loaded: TorchBackend | None = None
        self._compute = ComputeThread()
        self._lock = threading.Lock()
        self._active: ActiveRun | None = None
        self._ended = threading.Event()  # the last end that was begun
        self._ended.set()
        self._data: tuple[str, Any] = ("", None)
        self.totals = Totals()
        self.access = RunAccess(options.name)
        self.moves = AgentMigration(self, options.name)

    @property
    def current_run(self) -> str:
        """Id of the prepared or active run; empty = none."""
        active = self._active
        return active.run_id if active else ""

    def current(self) -> ActiveRun | None:
        """Return the prepared or active run, if any."""
        return self._active

    def preload(self) -> None:
        """Load torch in the background; an error is raised again when a run needs torch."""
        self._compute.submit(lambda: self.backend().preload())

    # ---- calls of the coordinator -----------------------------------------------------------------

    def inspect(
        self,
        run_id: str,
        job_toml: str,
        timing: TimingRequest | None,
        *,
        timeout_s: float,
        nodes: Collection[str] = (),
        shards_run: str = "",
        model_sha256: str = "",
        rows_run: str = "",
    ) -> str:
        """Count rows and labels, and time every kind of work (nothing if ``timing`` is None); raises ``RingTuneError``.

        ``nodes`` of the run may measure their links to this one, and fetch what is on its disk of run ``shards_run``.
        A node without a copy of the model fetches that with digest ``model_sha256``. Rows have to be those of the start
        of run ``rows_run``, where the node's folder has their digest.

        Returns:
            ``profile.NodeFacts`` as JSON; empty if the node has no copy of the model and got no digest.
        """
        deadline_s = time.monotonic() + timeout_s
        self._release_other(run_id, timeout_s)
        self.access.inspect(run_id, nodes, shards_run=shards_run)
        job = self.job_of(run_id, job_toml)
        if self.models is not None and self.models.lacks(run_id, job):
            if not model_sha256:
                return ""
            self.models.trust(run_id, model_sha256)
            job = self.models.for_planning(run_id, job, timeout_s=timeout_s)
        budget = self.options.memory_bytes or resources.memory_budget()

        def work() -> dict[str, Any]:
            known = self._data[1] if self._data[0] == run_id else None
            self._data = ("", None)
            facts, dataset = self.backend().inspect(
                self.options, job, timing=timing, memory_bytes=budget, dataset=known
            )
            self._data = (run_id, dataset)
            if rows_run and dataset is not None:
                require_rows(self.options.state, self.options.name, rows_run, dataset.digest(rows_run))
            return facts

        left_s, what = deadline_s - time.monotonic(), f"node {self.options.name} to inspect its model and data"
        return json.dumps(self._compute.call(work, timeout_s=left_s, what=what))

    def prepare(
        self,
        run_id: str,
        placement_number: int,
        *,
        plan_json: str,
        job_toml: str,
        addresses: Mapping[str, str],
        timeout_s: float,
        resume: ResumeShard | None = None,
        sizes: CopyBytes = NOT_PLANNED,
    ) -> int:
        """Build the slice and open the links; with ``resume`` load the state of a checkpoint or the end of a turn.

        ``sizes`` limit the copies that other nodes send.

        Returns:
            Bytes of materialised weights.

        Raises:
            PlanError: the plan is not readable or does not have this node.
            ConnectionFailedError: a peer can't be reached.
            InterruptedRunError: the run was released meanwhile.
            IntegrityError: the checkpoint or snapshot to resume from is missing or damaged.
            StorageError: the folder for shards can't be used.
        """
        deadline_s = time.monotonic() + ANSWER_SHARE * timeout_s
        self._release_other("", deadline_s - time.monotonic())
        plan = Plan.from_json(read_object(plan_json, "the received plan"))
        start = StartPoint.of(plan.course, step=resume.shard.step, holder=resume.holder) if resume else None
        taken = self.moves.from_disks(resume, plan.course.head, job_toml, addresses, deadline_s, sizes)
        active = self.adopt(run_id, placement_number, plan, start, sizes)
        hosted_bytes = self.begin(
            active, job_toml, addresses, deadline_s, resume=None if taken else resume, taken=taken
        )
        _LOG.debug("run %s is prepared, %d bytes of weights", run_id, hosted_bytes)
        return hosted_bytes

    def adopt(
        self, run_id: str, placement_number: int, plan: Plan, start: StartPoint | None, sizes: CopyBytes
    ) -> ActiveRun:
        """Make this the agent's current run, in preparation; ``sizes`` are planned, of copies."""
        self.access.place(run_id, plan, start, sizes)
        with self._lock:
            self._active = active = ActiveRun(
                run_id, self.options.name, placement_number, plan, start, sizes, clock=self._clock, access=self.access
            )
        return active

    def begin(
        self,
        active: ActiveRun,
        job_toml: str,
        addresses: Mapping[str, str],
        deadline_s: float,
        *,
        resume: ResumeShard | None = None,
        taken: MigratedState | None = None,
    ) -> int:
        """Prepare a run, or resume it from a ``MigratedState``; see ``prepare``."""
        run_id, plan = active.run_id, active.plan
        _LOG.info("run %s begins, blocks %s", run_id, plan.slice_of(active.node).text)
        try:
            job = self.job_of(run_id, job_toml)
            active.result = result_of(job)
            if self.models is not None:
                job = self.models.for_run(run_id, job, plan, timeout_s=deadline_s - time.monotonic())
                active.check_wanted()
            initial: AbstractContextManager[Job] = nullcontext(job)
            if self.models is not None:
                left_s = deadline_s - time.monotonic()
                initial = self.models.with_initial(run_id, job, plan.course.initial, timeout_s=left_s)
            with initial as job_here:
                left_s, what = deadline_s - time.monotonic(), f"node {active.node} to build its slice"
                build = functools.partial(self._build, active, job_here, deadline_s, resume, taken)
                self._compute.call(build, timeout_s=left_s, what=what)
            open_links(active, self.options, self.backend(), addresses, deadline_s)
            with self._lock:  # a release comes before it starts, or stops what has started
                active.check_wanted()
                active.keeper = self.moves.keeper(active, job, addresses)
                active.addresses, active.lease_s = dict(addresses), job.runtime.lease_s
                if job.audit is not None:
                    self.access.audit(run_id, plan)
                hosted_bytes, copied = int(active.executor.hosted_bytes), active.executor.copied
                reporter = self._start(active, job)
            if taken is None and copied:
                reporter.put(Note(f"node {active.node}: {copied}"))
            active.check_wanted()
            return hosted_bytes
        except BaseException:
            self.end(active, "preparing failed")
            raise

    def load(self, run_id: str, chunks: Iterable[control_pb2.FileChunk], *, timeout_s: float) -> None:
        """Replace the initial values of trained tensors by a saved result, before the first turn.

        Raises:
            FrameError: another run is prepared here.
            IntegrityError: the files are damaged or belong to another job.
        """
        active, run = self.of(run_id, None)
        executor = active.executor
        active.num_loads += 1
        number = active.num_loads

        def load(folder: Path) -> None:
            if number != active.num_loads:  # turns may have begun since the later call
                raise InterruptedRunError(f"node {active.node} got the saved result again")
            executor.load_saved(folder)

        with tempfile.TemporaryDirectory(prefix="ringtune-") as name:
            folder = Path(name)
            source, result = f"the coordinator of {run_id}", active.result
            write_files(chunks, folder, names=result.loaded, max_bytes=result.max_bytes, source=source)
            run.call(lambda: load(folder), timeout_s=timeout_s, what="the saved result to be loaded")

    def on_compute_thread(self, work: Callable[[], T], what: str, *, timeout_s: float) -> T:
        """Run ``work`` on the compute thread, after all earlier calls, and wait for its result."""
        return self._compute.call(work, timeout_s=timeout_s, what=f"node {self.options.name} to {what}")

    def turns_of(self, request: control_pb2.GrantRequest) -> tuple[Turn, ...]:
        """Read the turns of a grant; raises ``FrameError`` or ``IntegrityError``."""
        return self.of(request.run_id, request.placement_number)[0].grants.turns(request)

    def grant(
        self,
        run_id: str,
        placement_number: int,
        turns: Sequence[Turn],
        *,
        keep_from_step: int = 0,
        keep: Iterable[control_pb2.AuditedTensor] = (),
    ) -> None:
        """Work on these turns, keep tensors of them for the audit, and drop shards of steps before ``keep_from_step``.

        Raises:
            FrameError: another run or placement is prepared here.
        """
        active, run = self.of(run_id, placement_number)
        self.moves.granted(active, turns)
        self.access.granted(turns)
        if self._ring is not None:
            self._ring.granted(turns)
        if (audit := active.audit) is not None:
            audit.recorder.keep({_key_of(tensor): tensor.ticket for tensor in keep})
        run.grant(turns)
        if keep_from_step:
            run.keep_shards_from(keep_from_step)

    def audited(self, request: control_pb2.SnapshotRequest) -> Pieces:
        """Return what this node keeps for the audit: a tensor that it exchanged, or what went into its own work.

        Raises:
            FrameError: another run or placement is prepared here, or it is not kept.
        """
        active, _ = self.of(request.run_id, request.placement_number)
        if (audit := active.audit) is None:
            raise FrameError(f"node {self.options.name} keeps nothing for an audit of run {request.run_id}")
        if request.HasField("cell"):
            return cast(Pieces, audit.recorder.work_file(_place_of(request.cell)))
        return cast(Pieces, audit.recorder.tensor_file(_key_of(request.audited), request.audited.ticket))

    def repeat(self, request: control_pb2.RepeatRequest, *, timeout_s: float) -> control_pb2.RepeatReply:
        """Repeat a cell of another host; one that hands in nothing, or not what was told, is named in the reply.

        Raises:
            FrameError: another run or placement is prepared here.
            CapacityError: there is no memory for the slice of that host.
        """
        deadline_s, place = time.monotonic() + timeout_s, _place_of(request.cell)
        handed_s = deadline_s - timeout_s / 2  # else who hands in too slowly makes this node's answer late
        active, run = self.of(request.run_id, request.placement_number)
        if (audit := active.audit) is None:
            raise FrameError(f"run {request.run_id} is not audited at node {self.options.name}")
        terms = control_pb2.SnapshotRequest(
            node=self.options.name, run_id=request.run_id, placement_number=request.placement_number
        )

        def fetched(source: str, key: TensorKey | None, **what: Any) -> Pieces:
            fetch = control_pb2.SnapshotRequest(**what)
            fetch.MergeFrom(terms)
            if source == self.options.name:
                return self.audited(fetch)
            address = active.addresses.get(source, "")
            check_private(self.options, source, address)
            stub, most = active.audit_stub(source, address), audit.most_bytes(cell, key, active.sizes)
            return fetch_audited(fetch, source, address, handed_s, lease_s=active.lease_s, stub=stub, most_bytes=most)

        def handed_in(exchange: Exchange) -> Any:
            tensor = control_pb2.AuditedTensor(
                **exchange.key._asdict(), ticket=request.tickets.get(tensor_name(exchange.key), "")
            )
            return audit.read_tensor(
                fetched(exchange.peer, exchange.key, audited=tensor),
                exchange.key,
                request.given,
                is_own=exchange.peer == request.node,
            )

        def refused(source: str, error: RingTuneError) -> control_pb2.RepeatReply:
            is_lost = isinstance(error, (PeerLostError, ConnectionFailedError, DeadlineError))
            return control_pb2.RepeatReply(node=source, problem=str(error), is_lost=is_lost)

        source = request.node
        cell = Cell(source, place.seq, place.micro, place.is_fit, place.block)
        try:
            files = audit.read_work(fetched(source, None, cell=request.cell), place, request.given)
            exchanges, tensors = audit.recorder.exchanges(cell, place.turn), {}
            for exchange in (exchange for exchange in exchanges if exchange.comes):
                source = exchange.peer
                tensors[exchange.key] = handed_in(exchange)
        except RingTuneError as error:
            return refused(source, error)
        what, timeout_s = f"the work of node {request.node} to be repeated", deadline_s - time.monotonic()
        try:
            repeated = run.call(
                lambda: audit.repeat(cell, place, files, tensors, request.given), timeout_s=timeout_s, what=what
            )
        except IntegrityError as error:  # what the host told does not fit its slice, or what it got
            _LOG.warning("the work of node %s can't be repeated: %s", request.node, error)
            repeated = audit.failed(exchanges, tensors, request.given)
        handed_s = (time.monotonic() + deadline_s) / 2  # the first half may be over, by the work itself
        try:
            for exchange in (exchange for exchange in exchanges if exchange.key in repeated.differing):
                source = exchange.peer
                repeated.compare(exchange.key, handed_in(exchange))
        except RingTuneError as error:
            return refused(source, error)
        return control_pb2.RepeatReply(results_json=json.dumps(repeated.results))

    def measure(self, request: control_pb2.MeasureLinkRequest, *, timeout_s: float) -> control_pb2.MeasureLinkReply:
        """Measure the link to another node, or the computing that messages to it cost; see ``edge.transport.probe``.

        Raises:
            ConnectionFailedError: the link can't be measured, or is to another machine without encryption; names both
                ends.
            DeadlineError: the timeout is over.
        """
        check_private(self.options, request.target, request.address)
        ends, size = (self.options.name, request.target, request.address), request.message_bytes
        if request.computing_s:
            lost_s = computing_lost_s_per_byte(*ends, size, request.computing_s, timeout_s=timeout_s)
            return control_pb2.MeasureLinkReply(computing_lost_s_per_byte=lost_s)
        return measure_link(*ends, message_bytes=size, timeout_s=timeout_s, brief=request.brief)

    def collect(
        self,
        run_id: str,
        *,
        with_head: bool,
        with_private: bool,
        timeout_s: float,
        goes_on: bool = False,
        best_step: int = 0,
        needed_steps: Collection[int] = (),
    ) -> dict[str, Pieces]:
        """Collect the trained tensors, and at the end of a run this node's totals, as files by name.

        Nothing is copied: tensors are read during the sending, so nothing may train meanwhile. With ``goes_on`` the run
        trains further afterwards. With ``best_step`` its files are kept on the disk, beside those of ``needed_steps``,
        and none is returned; at the end of a run the files that were kept at that step are returned.

        Raises:
            FrameError: another run is prepared here.
            DivergedError: a trained weight is not finite.
            IntegrityError: what was kept is missing or damaged.
            StorageError: the disk is full.
            UsageError: this node has no folder to keep files in.
        """
        active, run = self.of(run_id, None)
        executor, reporter, saver = active.executor, active.reporter, active.saver
        deadline_s = time.monotonic() + timeout_s
        if best_step and saver is None:
            raise UsageError(f"node {active.node} {NO_FOLDER_FOR_BEST}")
        active.is_collected = active.is_collected or not goes_on
        files: dict[str, Pieces]
        if best_step and saver is not None and not goes_on:
            files = saver.open().best(best_step)
        else:
            files = dict(
                run.call(
                    lambda: executor.adapter_files(with_head=with_head, with_private=with_private),
                    timeout_s=timeout_s,
                    what="the trained tensors",
                )
            )
        if goes_on:
            if not best_step or saver is None:
                return files
            saver.keep_best(best_step, files, needed_steps=needed_steps, timeout_s=deadline_s - time.monotonic())
            return {}
        files["totals.json"] = Pieces.of(json.dumps(active.figures()).encode())
        if reporter is not None:
            reporter.flush(min(_FLUSH_S, timeout_s))  # the trace is complete when the run ends
        return files

    def release(self, run_id: str, reason: str, *, is_finished: bool = False) -> None:
        """Stop and forget a run in any state; an unknown ``run_id`` is no error, an empty one is any run.

        ``reason`` is for the log. With ``is_finished`` the run ended well, and the retention rule may remove its
        shards.
        """
        if self.models is not None:
            self.models.release(run_id)
        active = self._active
        if active is not None and run_id in ("", active.run_id):
            active.is_finished = active.is_finished or is_finished
            self.end(active, reason)
        self.access.release(run_id, is_finished=is_finished)
        self.moves.release(run_id, is_finished=is_finished)
        self._data = ("", None) if run_id in ("", self._data[0]) else self._data

    # ---- calls of the process ---------------------------------------------------------------------

    def abandon(self, error: RingTuneError) -> None:
        """Report that this node leaves, so that its lease is not awaited, and release the run."""
        active = self._active
        run, reporter = (active.run, active.reporter) if active is not None else (None, None)
        if run is not None and reporter is not None:
            run.fail(error)
            reporter.flush(3.0)  # a busy machine may need this long for the report
        self.release("", str(error))

    def close(self, timeout_s: float) -> bool:
        """Release any run; False if the compute thread is still busy after ``timeout_s`` seconds."""
        self.release("", "the agent ends")
        return self._compute.close(timeout_s)

    # ---- parts of prepare -------------------------------------------------------------------------

    def _build(
        self, active: ActiveRun, job: Job, deadline_s: float, resume: ResumeShard | None, taken: MigratedState | None
    ) -> None:
        """Build the executor of a run, open its saver, and load the checkpoint or snapshots; on the compute thread.

        ``resume`` is the shard to resume from, ``taken`` the trained state of the last placement or from disks; both
        None for a new run. ``deadline_s`` is monotonic seconds, for the lock of the folder for shards.

        Raises:
            InterruptedRunError: the run was released meanwhile.
            RingTuneError: the slice can't be built, or the shard not be loaded.
        """
        active.check_wanted()
        backend, options, plan = self.backend(), self.options, active.plan
        resources.reset_peak()
        # before the slice is built, as faster peers may open their links meanwhile
        backend.expect(self._ring, active, job)
        if active.cancelled.is_set():
            self._ring.forget(active)
            active.check_wanted()
        data_run, dataset = self._data
        active.executor = backend.build(options, job, plan, dataset if data_run == active.run_id else None)
        first_run = resume.run_id if resume else taken.shards_run if taken else active.run_id
        active.saver = saver = open_saver(
            options.state,
            plan,
            active.node,
            first_run,
            is_resumed=resume is not None or (taken is not None and taken.is_resumed),
            keeps_state=job.keeps_state_on_disk,
            keeps_best=job.keeps_best_on_disk and plan.course.num_steps > 0,
            kept=options.kept,
            rows=active.executor.rows_digest(first_run),
            timeout_s=deadline_s - time.monotonic(),
        )
        if job.keeps_state_on_disk and saver is not None:
            active.inactive_state = active.executor.inactive_state
            active.inactive_state.keep_on_disk(saver.open().moments, {"run": first_run, "node": active.node})
        if plan.course.helper_settings.merged and saver is not None:
            active.executor.offloading.keep_on_disk(saver.open().moments, {"run": first_run, "node": active.node})
        if job.generation is not None and active.executor.texts is not None and saver is not None:
            active.executor.texts.file = saver.open().texts()
        if job.audit is not None:
            active.audit = backend.audit(options, active.run_id, job, plan, active.executor)
        for technique in active.executor.techniques.values():
            try:
                technique.open(saver.open().hidden if saver is not None else None, active.start)
            except RingTuneError as error:  # the run continues without, and the node reports the reason
                technique.open(None, active.start, problem=str(error))
        if taken is not None:
            if taken.is_resumed and saver is not None:
                saver.require_rows()
            backend.load_migrated(active.executor, taken)
        if resume is not None and saver is not None:
            with_head = saves_head(plan.course, active.node, resume.holder)
            shard, plan_digest = resume.shard, resume.plan_digest
            saver.load(shard.step, shard.sha256, active.executor, with_head=with_head, plan_digest=plan_digest)

    def _start(self, active: ActiveRun, job: Job) -> Reporter:
        """Start the loop of a run on the compute thread; its links are open. Returns what reports for it."""
        if self.totals.run_id != active.run_id:
            self.totals = Totals(active.run_id)
        totals = self.totals
        active.reporter = reporter = Reporter(
            run_id=active.run_id,
            node=active.node,
            num_blocks=active.plan.course.num_blocks,
            send=self._report,
            on_refused=lambda reason: self.end(active, reason),
            clock=self._clock,
            numbers=totals.report_numbers,
        )
        active.run = AgentRun(
            plan=active.plan,
            node=active.node,
            executor=active.executor,
            links=active.links,
            ack=self._ring.ack,
            done_before=self._ring.done_before,
            reports=reporter,
            wait_s=job.runtime.wait_s,
            record=job.runtime.record,
            start=active.start,
            saver=active.saver,
            keeper=active.keeper,
            trail=active.audit.recorder if active.audit is not None else NO_TRAIL,
            worked=self.backend().working_clock(active.executor),
            totals=totals,
        )
        self._compute.submit(active.run.loop)
        return reporter

    # ---- the end of a run -------------------------------------------------------------------------

    def end(self, active: ActiveRun, reason: str) -> None:
        """Stop a run and free its resources; thread-safe; a second call does nothing."""
        with self._lock:
            if active.cancelled.is_set():
                return
            active.cancelled.set()
            if self._active is active:
                self._active = None
            ended = self._ended = threading.Event()
        _LOG.info("run %s is over: %s", active.run_id, reason)
        try:
            active.stop(reason)
            if self._ring is not None:
                self._ring.forget(active)
            self._compute.submit(active.drop)
        finally:
            ended.set()

    def await_end(self, timeout_s: float) -> None:
        """Wait for an end that another thread carries out; the compute thread then frees the run before later calls."""
        self._ended.wait(timeout_s)

    def _release_other(self, run_id: str, timeout_s: float) -> None:
        active = self._active
        if active is not None and active.run_id != run_id:
            self.end(active, "another run begins")
        self.await_end(timeout_s)
        self.moves.shelf.drop_others(run_id)

    def of(self, run_id: str, placement_number: int | None) -> tuple[ActiveRun, AgentRun]:
        """Return a run and its loop; with ``placement_number`` None in any placement; raises ``FrameError``."""
        active = self._active
        run = active.run if active is not None else None
        if active is None or run is None or active.run_id != run_id:
            doing = f"run {active.run_id}" if active else "no run"
            raise FrameError(f"node {self.options.name} has {doing}, not run {run_id}; prepare it first")
        if placement_number is not None and placement_number != active.placement_number:
            raise FrameError(
                f"node {self.options.name} has placement {active.placement_number}, not {placement_number}; "
                "prepare it first"
            )
        return active, run

    def backend(self) -> TorchBackend:
        """Return the torch backend, loaded at the first call."""
        if self._loaded is None:
            start_s = time.monotonic()
            self._loaded = self._load()
            self._ring = self._loaded.ring_servicer()
            self._attach_ring(self._ring)
            _LOG.debug("torch and the model libraries were loaded in %.1f s", time.monotonic() - start_s)
        return self._loaded

    def job_of(self, run_id: str, job_toml: str) -> Job:
        """Read a job; ``--model`` replaces its ``model.path``, and ``adapter.from``, of another machine, is removed."""
        changes: dict[str, object] = {"adapter.from": ""}
        if self.options.model is not None:
            changes["model.path"] = str(self.options.model)
        return parse_job(job_toml, source=f"the job of run {run_id}").with_overrides(changes)


def _key_of(message: control_pb2.AuditedTensor) -> TensorKey:
    return TensorKey(message.payload, message.seq, message.micro, message.boundary)


def _place_of(message: control_pb2.AuditedCell) -> CellPlace:
    return CellPlace(
        message.turn, message.seq, message.micro, message.before, message.last, message.is_fit, message.block
    )
