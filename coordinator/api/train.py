"""``ringtune.train``: run a job on local processes or on a coordinator; ``ringtune.measure``: time its work there."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from coordinator.api.arguments import JobLike, for_python, initial_file, job_here
from coordinator.api.estimates import estimate
from coordinator.api.output import choose_progress
from coordinator.api.plan import PlannedJob
from coordinator.api.run import Run
from coordinator.client.checkpoints import RunCheckpoints, find_resume
from coordinator.client.connection import Connection
from coordinator.client.detached_runs import start_in_background, update_run_folder
from coordinator.client.local_nodes import OWN_COORDINATOR, LocalNodes, LocalSetup, node_name
from coordinator.client.run_files import TensorBoardLog, require_tensorboard
from coordinator.client.run_folder import (
    ASKED,
    KIND,
    LOG,
    RunFolder,
    files_of_run,
    locked_for_resume,
    remove_unused_folder,
    require_inputs_elsewhere,
    require_no_run,
)
from coordinator.client.saved_run import RunLocation
from coordinator.client.submit import Client, Interrupts
from coordinator.planner.given_plan import read_given_plan, read_profile, require_members, require_profile_place
from coordinator.planner.limits import read_choices
from coordinator.run.events import EventSink
from coordinator.run.requests import MeasureRequest, RunRequest
from coordinator.screen.progress import Progress
from coordinator.screen.tables import profile_text
from ringtune.costs.profile import Profile
from ringtune.errors import DivergedError, RingTuneError, UsageError
from ringtune.job.job import Job
from ringtune.job.rows import check_rows
from ringtune.schedule.plan import Plan
from ringtune.storage.durable import check_writable, require_free, write_durably
from ringtune.transport.credentials import using_credentials
from ringtune.v1 import control_pb2

if TYPE_CHECKING:
    from coordinator.server.coordinator import Coordinator

_LOG = logging.getLogger(__name__)
_STOP_S = 8.0


@contextlib.contextmanager
def local_ring(
    job: Job,
    num_nodes: int,
    progress: Progress,
    *,
    folder: RunFolder | None = None,
    resumed: Plan | None = None,
    page: tuple[str, Path | None] | None = None,
) -> Iterator[Client]:
    """Start a coordinator, agents and a client, which end with the context; raises ``RingTuneError``.

    The calls are those of a remote run: over gRPC, from submitter to coordinator to agents.

    ``folder`` is for logs and checkpoints; None = both are temporary. ``resumed`` is the plan of the run to resume.
    ``page`` is ``host:port`` of a web page, and the file with its token.
    """
    from coordinator.server.server import CoordinatorServer

    progress.state(f"starting {num_nodes} local node{'s' if num_nodes > 1 else ''}")
    setup = LocalSetup.of(job, num_nodes)
    if resumed is not None:
        _require_nodes(resumed, setup)
    with using_credentials(None), contextlib.ExitStack() as stack:
        if folder is None:
            logs, states = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ringtune-"))), None
        else:
            logs, states = folder.path / "logs", folder.checkpoints.node_states()
        server = stack.enter_context(CoordinatorServer("127.0.0.1:0", lease_s=job.runtime.lease_s))
        server.coordinator.awaits_nodes = False  # a local node that ends is not restarted
        if page is not None:
            stack.enter_context(_shown_on_page(server.coordinator, *page, progress))
        failed = server.coordinator.node_failed
        nodes = LocalNodes(
            setup, job, server.address, logs=logs, on_exit=failed, options=[OWN_COORDINATOR], states=states
        )
        stack.enter_context(nodes)
        client = stack.enter_context(Client(server.address))
        stack.callback(server.coordinator.stop, "the submitter stopped it", _STOP_S)
        yield client


def _require_nodes(plan: Plan, setup: LocalSetup) -> None:
    """Refuse to resume with other local nodes than the run began with."""
    names = [node_name(index, setup.num_nodes) for index in range(setup.num_nodes)]
    missing = [node for node in plan.nodes if node not in names]
    if missing:
        raise UsageError(
            f"the run began with the nodes {', '.join(plan.nodes)}; --local {setup.num_nodes} lacks "
            f"{', '.join(missing)}, give the same number"
        )
    num_owners = len(plan.course.all_owners)
    if setup.num_owners != num_owners:
        raise UsageError(
            f"{num_owners} nodes owned data when the run began, --local {setup.num_nodes} would share it "
            f"among {setup.num_owners}; give the same number"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDisplay:
    """How the caller of ``train`` shows a run.

    Attributes:
        show: makes the progress, once output is guarded against a closed terminal.
        resume_hint: step of the newest checkpoint -> how to resume.
        say: gets lines on a detached run, or on files that were renamed.
        words: arguments of the typed command, to repeat it in the background; empty in Python.
    """

    show: Callable[[], Progress]
    resume_hint: Callable[[int], str]
    say: Callable[[str], object] = str
    words: Sequence[str] = ()


Ring: TypeAlias = Callable[[Progress], AbstractContextManager[Client]]
"""Connects to the coordinator of a run; starts it first for a local run."""


def _follow(
    request: RunRequest,
    folder: RunFolder,
    ring: Ring,
    face: RunDisplay,
    notes: Sequence[str],
    *,
    local: int,
    coordinator_wait_s: float,
    log: str,
) -> None:
    out = folder.path
    with Interrupts(log=out / LOG) as interrupts, folder, face.show() as progress:
        folder.say = progress.note
        if request.initial is not None:
            folder.write_initial(request.initial)
        for note in (*notes, *_of_replaced(folder)):
            progress.note(note)
        goes_on = False
        try:
            with ring(progress) as client, contextlib.ExitStack() as stack:
                sinks: list[EventSink] = [functools.partial(_note_place, out, client.address, local)]
                if log:
                    sinks.append(stack.enter_context(contextlib.closing(TensorBoardLog(out))))
                try:
                    client.run(
                        request,
                        progress=progress,
                        folder=folder,
                        interrupts=interrupts,
                        sinks=sinks,
                        coordinator_wait_s=0.0 if local else coordinator_wait_s,
                    )
                finally:
                    goes_on = client.goes_on
        except (RingTuneError, KeyboardInterrupt) as error:
            if RunCheckpoints(out).steps() and not goes_on:
                if isinstance(error, DivergedError):
                    progress.note(_ONLY_A_FAULT)
                progress.note(face.resume_hint(RunCheckpoints(out).steps()[0]))
            raise
        from coordinator.api.predict import show_sample

        show_sample(request.job, out, progress)
        progress.note(f"the run's files are in {out}")


_ONLY_A_FAULT: Final = "resuming helps only if that was a fault of a machine: the same numbers would diverge again"


def _of_replaced(folder: RunFolder) -> list[str]:
    return [f"the files of the earlier run are in {folder.replaced}"] if folder.replaced else []


@contextlib.contextmanager
def _shown_on_page(coordinator: Coordinator, bind: str, token: Path | None, progress: Progress) -> Iterator[None]:
    from coordinator.web.feeds import watch
    from coordinator.web.server import PageServer

    with PageServer(watch(coordinator), bind, token_file=token) as page:
        for line in page.lines():
            progress.note(line)
        yield


def _note_place(out: Path, address: str, local: int, event: control_pb2.RunEvent) -> None:
    """Write where a run is driven, once it has its id."""
    if run_id := event.run_id:
        place = RunLocation(run_id=run_id, coordinator=address, is_local=local > 0, pid=os.getpid(), local_nodes=local)
        place.write(out)


def _submit(request: RunRequest, folder: RunFolder, client: Client, say: Callable[[str], object]) -> None:
    """Start a run on a coordinator that stores it, and return once it trains.

    Only the record of where the run is driven is written to the folder.
    """
    with client, folder:
        for line in _of_replaced(folder):
            say(line)
        if request.initial is not None:
            folder.write_initial(request.initial)
        _note_place(folder.path, client.address, 0, control_pb2.RunEvent(run_id=client.start(request)))


def require_place(local: int, coordinator: str, nodes: int) -> None:
    """Refuse a command with both local nodes and a coordinator, or with neither; raises ``UsageError``."""
    if bool(local) == bool(coordinator):
        raise UsageError("give one of --local N and --coordinator HOST:PORT")
    if nodes and local:
        raise UsageError("--nodes is for --coordinator; --local says how many nodes there are")


def _require_extras(web: str, log: str, *, local: int, wait: bool) -> None:
    """Refuse an impossible page or log before anything is started."""
    if web:
        from coordinator.web.server import require_web

        if not local:
            raise UsageError("--web is for --local; start the coordinator with 'ringtune coordinator --web HOST:PORT'")
        require_web()
    if log:
        require_tensorboard(log)
        if not (wait or local):
            raise UsageError("--log is written by the command that follows the run; leave out --detach")


PlanLike: TypeAlias = str | PathLike[str] | PlannedJob | None


@for_python
def train(
    job: JobLike = None,
    *,
    local: int = 0,
    coordinator: str = "",
    out: str | PathLike[str] | None = None,
    wait: bool = True,
    progress: bool | RunDisplay = True,
    resume: bool = False,
    replace: bool = False,
    plan: PlanLike = None,
    profile: str | PathLike[str] | None = None,
    microbatches: str = "",
    wire: str = "",
    nodes: int = 0,
    join_s: float = 60.0,
    insecure: bool = False,
    coordinator_wait_s: float = 300.0,
    web: str = "",
    web_token: str | PathLike[str] | None = None,
    log: str = "",
    **keys: Any,
) -> Run:
    """Train a job as ``ringtune train`` does, and return the run.

    Ctrl-C, in a notebook "interrupt the kernel", ends the run after the granted turns, with a checkpoint; a second one
    at once. Only the main thread receives it. ``Run.stop`` does the same from any thread or process.

    Example: ``run = ringtune.train("job.toml", local=3, train__rounds=2)``.

    Args:
        job: a job file, or a mapping of its sections; None if all keys are given as keywords.
        local: number of nodes to start on this machine.
        coordinator: ``host:port`` of a coordinator with the nodes, in place of ``local``.
        out: folder for the run's files; None = a new one, ``run-1``, ``run-2`` and so on.
        wait: whether to follow the run to its end. False = return once it trains, detached from this process, as
            ``--detach``.
        progress: whether to show progress; or, for the command line, how.
        resume: resume the run in ``out`` from its newest checkpoint.
        replace: move an earlier run's files to ``<out>.replaced-<time>``.
        plan: plan to carry out: a result of ``ringtune.plan``, or a file that it saved.
        profile: file of measured times.
        microbatches: numbers for the planner to choose from in place of the job's, such as ``2,4`` or ``auto``.
        wire: types for the planner to choose from in place of the job's, such as ``float32,bfloat16``.
        nodes: number of joined nodes to wait for; 0 = use those that have joined.
        join_s: seconds to wait for them.
        insecure: whether the coordinator may be on another machine without encryption.
        coordinator_wait_s: seconds to wait for a coordinator that does not answer.
        web: ``host:port`` of a web page of a local run; beyond this machine a token is needed.
        web_token: file with the token of the page, made if missing; None = a new token each time.
        log: ``tensorboard`` also writes the metrics to ``tensorboard`` in the run's folder.
        keys: keys of the job, ``train__rounds=5`` for ``train.rounds``; they take precedence over ``job``.

    Raises:
        RingTuneError: the job is invalid, or the error of the run; ``InterruptedRunError`` if it was stopped.
    """
    require_place(local, coordinator, nodes)
    if resume and (replace or out is None):
        raise UsageError("resume=True resumes the run in out=DIR; replace=True would move its files away")
    if plan is not None and (microbatches or wire):
        raise UsageError("a plan has its micro-batches and wire dtype; leave out --microbatches and --wire")
    if resume and (plan is not None or microbatches or wire):
        raise UsageError("--resume uses the run's own plan; leave out --plan, --microbatches and --wire")
    _require_extras(web, log, local=local, wait=wait)
    if resume and job is None and out is not None:
        job = Path(out) / "job.toml"
    to_run = job_here(job, keys, Path(out) if resume and out is not None else None)
    choices = read_choices(microbatches, wire, batch_size=to_run.train.batch_size)
    with _folder(out) as folder, locked_for_resume(folder) if resume and wait else contextlib.nullcontext():
        given = plan.given if isinstance(plan, PlannedJob) else read_given_plan(Path(plan)) if plan else None
        times = read_profile(Path(profile)) if profile else None
        if given is not None and local:
            require_members(given.plan, [node_name(index, local) for index in range(local)])
        if not resume:
            require_free(folder, KIND)
            require_no_run(folder, files_of_run(folder), replace=replace)
        require_inputs_elsewhere(folder, to_run)
        notes = []
        if local:  # reads rows and model as the nodes will, before anything is started or written
            notes = check_rows(to_run.model.task, to_run.data) if resume else estimate(to_run, local).notes
        elif resume:
            with Connection(coordinator, insecure=insecure) as client:
                notes += filter(None, [update_run_folder(client, folder)])
        start = find_resume(folder, to_run, notes.append) if resume else None
        request = RunRequest(
            to_run,
            num_nodes=local or nodes,
            join_s=join_s,
            resume=start,
            profile=times,
            plan=given,
            choices=choices,
            initial=initial_file(to_run, folder if resume else None),
        )
        face = progress if isinstance(progress, RunDisplay) else _python_face(folder, is_shown=progress)
        anew = resume and start is None
        files = RunFolder(folder, replace=replace or resume, resume=resume, begins_anew=anew, say=face.say)

        def ring(shown: Progress) -> AbstractContextManager[Client]:
            if not local:
                return Client(coordinator, insecure=insecure)
            page = (web, Path(web_token) if web_token else None) if web else None
            return local_ring(to_run, local, shown, folder=files, resumed=start.plan if start else None, page=page)

        process = None
        if wait:
            _follow(request, files, ring, face, notes, local=local, coordinator_wait_s=coordinator_wait_s, log=log)
        elif not local:
            _submit(request, files, Client(coordinator, insecure=insecure), face.say)
        else:
            options = {"--profile": profile, "--microbatches": microbatches, "--wire": wire}
            options |= {"--web": web, "--web-token": web_token, "--log": log}
            process = _in_background(request, files, face, options)
        return Run(folder, insecure=insecure, process=process)


def _python_face(folder: Path, *, is_shown: bool) -> RunDisplay:
    again = f"resume with train(out={str(folder)!r}, resume=True) and the same nodes"
    return RunDisplay(
        show=lambda: choose_progress(is_shown),
        resume_hint=lambda step: f"saved up to step {step}; {again}",
        say=_LOG.warning,
    )


@contextmanager
def _folder(out: str | PathLike[str] | None) -> Iterator[Path]:
    """Yield the folder of a run; remove a new one after an error if it has nothing but the request."""
    if out is not None:
        yield Path(out)
        return
    folder = _new_folder()
    try:
        yield folder
    except BaseException:
        remove_unused_folder(folder)
        raise


def _new_folder() -> Path:
    """Make the first of ``run-1``, ``run-2`` and so on that does not exist, in the current folder."""
    for number in itertools.count(1):
        with contextlib.suppress(FileExistsError):
            (folder := Path(f"run-{number}")).mkdir()
            return folder
    raise AssertionError


def _in_background(
    request: RunRequest, files: RunFolder, face: RunDisplay, options: Mapping[str, object]
) -> subprocess.Popen[bytes]:
    """Start ``ringtune train`` as a process of its own: as typed, or with the job from a file in the run's folder.

    ``job.toml`` of a resumed run has its first job, so the present one is in another file.
    """
    with files:  # an earlier run is moved away before the log of this one is opened
        for line in _of_replaced(files):
            face.say(line)
        if not request.resume:
            files.write_job(request.job.to_toml())
    if face.words:
        return start_in_background(files.path, [word for word in face.words if word != "--replace"])[1]
    job = files.path / (ASKED if request.resume else "job.toml")
    if request.resume:
        write_durably(job, request.job.to_toml().encode())
    words = ["train", str(job), "--local", str(request.num_nodes), "--out", str(files.path)]
    words += [word for option, value in options.items() if value for word in (option, str(value))]
    with tempfile.TemporaryDirectory(prefix="ringtune-") as name:
        if request.plan is not None:
            path = Path(name) / "plan.json"
            write_durably(path, json.dumps(request.plan.to_json()).encode())
            words += ["--plan", str(path)]
        return start_in_background(files.path, [*words, *(["--resume"] if request.resume else [])])[1]


@dataclass(frozen=True, slots=True, repr=False)
class Measurement:
    """The measured profile of nodes and links for a job."""

    profile: Profile

    def lines(self) -> list[str]:
        """Return tables of nodes and links for people."""
        return profile_text(self.profile)

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``profile.json``."""
        return self.profile.to_json()

    def save(self, path: str | PathLike[str]) -> Path:
        """Write a file for ``train(profile=...)`` and ``plan(profile=...)``; return its path.

        Raises:
            UsageError: something other than an earlier profile is there.
            StorageError: it can't be written.
        """
        require_profile_place(Path(path))
        write_durably(Path(path), (json.dumps(self.to_json(), indent=1) + "\n").encode())
        return Path(path)

    def __repr__(self) -> str:
        return "\n".join(self.lines())


@for_python
def measure(
    job: JobLike = None,
    *,
    local: int = 0,
    coordinator: str = "",
    save: str | PathLike[str] | None = None,
    progress: bool | Progress = True,
    links: bool = True,
    fresh: bool = False,
    busy: bool = True,
    rehearse: bool = True,
    nodes: int = 0,
    join_s: float = 60.0,
    insecure: bool = False,
    **keys: Any,
) -> Measurement:
    """Measure every kind of work of a job on the nodes, and the links; nodes cache their times.

    At the end the nodes train some steps together, which are discarded; the times are corrected to match a whole ring.

    Example: ``ringtune.measure("job.toml", local=3, save="profile.json")``.

    Args:
        job: a job file, or a mapping of its sections; None if all keys are given as keywords.
        local: number of nodes to start on this machine.
        coordinator: ``host:port`` of the coordinator with the nodes, in place of ``local``.
        save: file for the profile; only an earlier profile is replaced.
        progress: whether to show progress, or an object that shows it.
        links: measure the links too; without them there is no rehearsal.
        fresh: ignore cached times.
        busy: measure all nodes of one machine at once, as in a run; False = one after another.
        rehearse: end with some steps of the job.
        nodes: number of joined nodes to wait for; 0 = use those that have joined.
        join_s: seconds to wait for them.
        insecure: whether the coordinator may be on another machine without encryption.
        keys: keys of the job, ``train__rounds=5`` for ``train.rounds``; they take precedence over ``job``.

    Raises:
        RingTuneError: the job is invalid, the file can't be written, or nodes can't measure it.
    """
    require_place(local, coordinator, nodes)
    to_measure = job_here(job, keys)
    if save is not None:
        require_profile_place(Path(save))
        check_writable(Path(save))
    with (
        progress if isinstance(progress, Progress) else choose_progress(progress) as shown,
        local_ring(to_measure, local, shown) if local else Client(coordinator, insecure=insecure) as client,
    ):
        request = MeasureRequest(to_measure, local or nodes, join_s, links, is_fresh=fresh, one_by_one=not busy)
        profile = client.measure(request, progress=shown)
        if rehearse and links:
            profile = client.rehearse(to_measure, profile, progress=shown, num_nodes=local or nodes, join_s=join_s)
    measured = Measurement(profile)
    if save is not None:
        measured.save(save)
    return measured
