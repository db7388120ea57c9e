"""``ringtune.train``: run a job on local processes or on a coordinator, in the foreground or in the background."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final, TypeAlias

import typer

from coordinator.api.arguments import JobLike, python_words, read_job
from coordinator.api.estimates import estimate
from coordinator.api.output import choose_progress
from coordinator.api.plan import PlannedJob
from coordinator.api.predict import show_sample
from coordinator.api.run import Run
from coordinator.client.checkpoints import RunCheckpoints, find_resume
from coordinator.client.connection import Connection
from coordinator.client.detached_runs import bring_up_to_date, lines_of_detached, start_in_background
from coordinator.client.local_nodes import OWN_COORDINATOR, LocalNodes, LocalSetup, node_name
from coordinator.client.run_folder import (
    ASKED,
    LOG,
    RunFolder,
    files_of_run,
    held_for_resume,
    remove_if_nothing_began,
    require_inputs_elsewhere,
    require_no_run,
    require_run_folder,
)
from coordinator.client.saved_run import RunPlace
from coordinator.client.submit import Client, heard_interrupts
from coordinator.planner.given_plan import GivenPlan, read_given_plan, read_profile, require_members
from coordinator.planner.limits import Choices, read_choices
from coordinator.run.events import EventSink
from coordinator.run.requests import RunRequest
from coordinator.screen.progress import Progress
from coordinator.server.coordinator import Coordinator
from coordinator.server.server import CoordinatorServer
from ringtune.errors import DivergedError, RingTuneError, UsageError
from ringtune.job.job import Job
from ringtune.job.rows import check_rows
from ringtune.schedule.migration import all_owners
from ringtune.schedule.plan import Plan
from ringtune.storage.durable import write_durably
from ringtune.transport.speaker import speaker, speaking_as
from ringtune.v1 import control_pb2

_LOG = logging.getLogger(__name__)
_STOP_S = 8.0


@contextlib.contextmanager
def local_ring(
    job: Job,
    num_nodes: int,
    *,
    logs: Path | None = None,
    states: Path | None = None,
    goes_on: Plan | None = None,
    beside: Callable[[Coordinator], AbstractContextManager[object]] = contextlib.nullcontext,
) -> Iterator[Client]:
    """Start a coordinator, agents and a client, and end them all with the context.

    A run takes the same way as a remote one: over gRPC, from submitter to coordinator to agents.

    Args:
        job: names the data, and how many nodes own it.
        num_nodes: how many.
        logs: folder for what they print; None = it is not kept.
        states: folder in which each node gets one for its parts of checkpoints; None = their own default.
        goes_on: the plan of the run to resume; None = begin.
        beside: made with the coordinator before a node joins, and ended after the nodes.

    Raises:
        RingTuneError: it can't be started here.
    """
    setup = LocalSetup.of(job, num_nodes)
    if goes_on is not None:
        _require_nodes(goes_on, setup)
    with contextlib.ExitStack() as stack:
        logs = logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ringtune-")))
        server = stack.enter_context(CoordinatorServer("127.0.0.1:0", lease_s=job.runtime.lease_s))
        server.coordinator.awaits_nodes = False  # nobody would start one again
        stack.enter_context(beside(server.coordinator))
        failed = server.coordinator.node_failed
        nodes = LocalNodes(
            setup, job, server.address, logs=logs, on_exit=failed, options=[OWN_COORDINATOR], states=states
        )
        stack.enter_context(nodes)
        client = stack.enter_context(Client(server.address))
        stack.callback(server.coordinator.stop, "the submitter stopped it", _STOP_S)
        yield client


def _require_nodes(plan: Plan, setup: LocalSetup) -> None:
    """Refuse to resume with other local nodes than the run began with.

    Raises:
        UsageError: names the nodes that are missing, or says how many owned data.
    """
    names = [node_name(index, setup.num_nodes) for index in range(setup.num_nodes)]
    missing = [node for node in plan.nodes if node not in names]
    if missing:
        raise UsageError(
            f"the run began with the nodes {', '.join(plan.nodes)}; --local {setup.num_nodes} lacks "
            f"{', '.join(missing)}, give the same number"
        )
    num_owners = len(all_owners(plan.course))
    if setup.num_owners != num_owners:
        raise UsageError(
            f"{num_owners} nodes owned data when the run began, --local {setup.num_nodes} would share it "
            f"among {setup.num_owners}; give the same number"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """What is to be trained, and where.

    Attributes:
        request: what is wanted.
        local: nodes to start on this machine; 0 = those of ``coordinator``.
        coordinator: ``host:port``; empty with ``local``.
        insecure: whether it may be on another machine, without encryption.
        replace: whether the files of a run in the folder may be put aside.
        coordinator_wait_s: how long to wait for a coordinator that is away, in seconds.
        web: ``host:port`` of the page of a local run; empty = none.
        web_token: file with its token; None = a new one.
        log: ``tensorboard``, or empty.
    """

    request: RunRequest
    local: int
    coordinator: str
    insecure: bool
    replace: bool
    coordinator_wait_s: float = 0.0
    web: str = ""
    web_token: Path | None = None
    log: str = ""


def follow_run(
    asked: Submission,
    out: Path,
    notes: Sequence[str],
    *,
    how_to_resume: Callable[[int], str],
    show: Callable[[], Progress],
    after: Callable[[Progress], object] = lambda progress: None,
) -> None:
    """Run a job and follow it to its end; in the main thread, signals end it in order.

    Args:
        asked: what, and where.
        out: folder of the run.
        notes: to be shown first.
        how_to_resume: writes for the step of the newest checkpoint how to resume.
        show: makes what shows the run, once what is printed is guarded against a closed terminal.
        after: called once the run is done and its folder is complete.

    Raises:
        RingTuneError: whatever the run failed with.
    """
    with (
        heard_interrupts(log=out / LOG) as interrupts,
        RunFolder(
            out,
            replace=asked.replace,
            resume=asked.request.resume is not None,
            say=lambda line: progress.note(line),  # of what is made next
        ) as folder,
        show() as progress,
    ):
        for note in (*notes, *_of_replaced(folder)):
            progress.note(note)
        goes_on = False
        try:
            with _ring(asked, folder, progress) as client, _log(asked, out) as logs:
                try:
                    client.run(
                        asked.request,
                        progress=progress,
                        folder=folder,
                        interrupts=interrupts,
                        sinks=[_place_writer(out, client.address, asked), *logs],
                        coordinator_wait_s=0.0 if asked.local else asked.coordinator_wait_s,
                    )
                finally:
                    goes_on = client.goes_on
        except (RingTuneError, KeyboardInterrupt) as error:
            if RunCheckpoints(out).steps() and not goes_on:
                if isinstance(error, DivergedError):
                    progress.note(_ONLY_A_FAULT)
                progress.note(how_to_resume(RunCheckpoints(out).steps()[0]))
            raise
        after(progress)
        progress.note(f"the run's files are in {out}")


_ONLY_A_FAULT: Final = "resuming helps only if that was a fault of a machine: the same numbers would diverge again"


def _of_replaced(folder: RunFolder) -> list[str]:
    """Say where the files of an earlier run are now, if there was one."""
    return [f"the files of the earlier run are in {folder.replaced}"] if folder.replaced else []


def _ring(asked: Submission, folder: RunFolder, progress: Progress) -> AbstractContextManager[Client]:
    if not asked.local:
        return Client(asked.coordinator, insecure=asked.insecure)
    plan = asked.request.resume.plan if asked.request.resume else None
    states = folder.checkpoints.node_states()
    progress.state(f"starting {asked.local} local node{'s' if asked.local > 1 else ''}")
    return local_ring(
        asked.request.job,
        asked.local,
        logs=folder.path / "logs",
        states=states,
        goes_on=plan,
        beside=lambda coordinator: _page(asked, coordinator, progress),
    )


@contextlib.contextmanager
def _page(asked: Submission, coordinator: Coordinator, progress: Progress) -> Iterator[None]:
    """Show a local run on a page while it is running, if that is asked for."""
    if not asked.web:
        yield
        return
    from coordinator.web.feeds import watch
    from coordinator.web.server import PageServer

    with PageServer(watch(coordinator), asked.web, token_file=asked.web_token) as page:
        for line in page.lines():
            progress.note(line)
        yield


@contextlib.contextmanager
def _log(asked: Submission, out: Path) -> Iterator[list[EventSink]]:
    """Write what else is asked for beside ``metrics.jsonl``."""
    if not asked.log:
        yield []
        return
    from coordinator.client.run_files import TensorBoardLog

    with contextlib.closing(TensorBoardLog(out)) as log:
        yield [log]


def _place_writer(out: Path, address: str, asked: Submission) -> EventSink:
    def write(event: control_pb2.RunEvent) -> None:
        if event.WhichOneof("event") == "run_id":
            _place(event.run_id, address, asked).write(out)

    return write


def _place(run_id: str, address: str, asked: Submission) -> RunPlace:
    return RunPlace(
        run_id=run_id,
        coordinator=address,
        is_local=bool(asked.local),
        pid=os.getpid(),
        local_nodes=asked.local,
    )


def submit_and_leave(asked: Submission, out: Path | None, arguments: Sequence[str], *, as_json: bool) -> None:
    """Start a detached run, and print its id and the commands for it.

    Args:
        asked: what, and where.
        out: folder of the run; None = it will be fetched into one.
        arguments: of this command, to start a local run anew in the background.
        as_json: print one JSON line.

    Raises:
        RingTuneError: the run can't be started.
    """
    say = _say_nothing if as_json else typer.echo
    if asked.local and out is not None:
        begin_in_background(asked, out, say)
        place = start_in_background(out, [word for word in arguments if word != "--replace"])[0]
    else:
        place = submit(asked, out, say=say)
    if as_json:
        typer.echo(json.dumps({"event": "detached", **dataclasses.asdict(place), "out": str(out) if out else ""}))
        return
    for line in lines_of_detached(place, out):
        typer.echo(line)


def begin_in_background(asked: Submission, out: Path, say: Callable[[str], object]) -> None:
    """Refuse a local run's folder here, and put an earlier run aside before the log of this one is opened.

    The folder has the job then; that of a run that is resumed stays as it is.

    Args:
        asked: what, and where.
        out: folder of the run.
        say: takes a line.

    Raises:
        RingTuneError: the folder can't be used.
    """
    resumes = asked.request.resume is not None
    with RunFolder(out, replace=asked.replace, resume=resumes, say=say) as folder:
        for line in _of_replaced(folder):
            say(line)
        if not resumes:
            folder.write_job(asked.request.job.to_toml())


def _say_nothing(line: str) -> None:
    """Take a line that is not to be shown."""


def submit(asked: Submission, out: Path | None, *, say: Callable[[str], object] = _say_nothing) -> RunPlace:
    """Start a run on a coordinator that keeps it, and return as soon as it trains.

    Args:
        asked: what, and where.
        out: folder of the run, which gets nothing but where the run is driven; None = none.
        say: takes a line.

    Returns:
        Where it is driven.

    Raises:
        RingTuneError: the coordinator keeps no runs, or the run failed before it trained.
    """
    resume = asked.request.resume is not None
    with Client(asked.coordinator, insecure=asked.insecure) as client, contextlib.ExitStack() as held:
        if out is not None:
            folder = held.enter_context(RunFolder(out, replace=asked.replace, resume=resume))
            for line in _of_replaced(folder):
                say(line)
        run_id = client.start(asked.request)
        place = _place(run_id, client.address, asked)
        if out is not None:
            place.write(out)
        return place


def make_submission(
    job: Job,
    out: Path | None,
    *,
    local: int,
    coordinator: str,
    insecure: bool,
    nodes: int,
    join_s: float,
    replace: bool,
    resume: bool,
    profile: Path | None,
    plan: GivenPlan | None,
    choices: Choices,
    coordinator_wait_s: float,
) -> tuple[Submission, list[str]]:
    """Put together what is to be trained, and where.

    Args:
        job: that is wanted.
        out: folder of the run; None = it will be fetched into one.
        local: nodes to start on this machine; 0 = those of ``coordinator``.
        coordinator: ``host:port``; empty with ``local``.
        insecure: whether it may be on another machine, without encryption.
        nodes: wait until so many have joined it; 0 = take those that are there.
        join_s: how long to wait for them, in seconds.
        replace: whether the files of a run in ``out`` may be put aside.
        resume: whether the run in ``out`` is resumed.
        profile: file of times that were measured before.
        plan: to be carried out; None = plan.
        choices: what the planner may choose in place of the job's values.
        coordinator_wait_s: how long to wait for a coordinator that is away, in seconds.

    Returns:
        What to submit, and sentences for the user.

    Raises:
        RingTuneError: profile, plan or folder can't be used; or with ``local`` the model or the rows.
    """
    given = read_profile(profile) if profile else None
    if plan is not None and local:
        require_members(plan.plan, [node_name(index, local) for index in range(local)])
    if out is not None:
        _require_usable(out, job, replace=replace, resume=resume)
    notes = []
    if local:  # as the nodes would read it all, before they are started and anything is written
        notes = check_rows(job.model.task, job.data) if resume else estimate(job, local).notes
    if resume and out is not None and coordinator:
        with Connection(coordinator, insecure=insecure) as client:
            notes += filter(None, [bring_up_to_date(client, out)])
    start = find_resume(out, job, notes.append) if resume and out is not None else None
    request = RunRequest(
        job=job,
        num_nodes=local or nodes,
        join_s=join_s,
        resume=start,
        profile=given,
        plan=plan,
        choices=choices,
    )
    submission = Submission(
        request=request,
        local=local,
        coordinator=coordinator,
        insecure=insecure,
        replace=replace or resume,
        coordinator_wait_s=coordinator_wait_s,
    )
    return submission, notes


def _require_usable(out: Path, job: Job, *, replace: bool, resume: bool) -> None:
    """Refuse a folder that the run can't have, before anything is started or written.

    Raises:
        UsageError: it holds something else, or a run that may not be replaced, or the job's rows or model lie where
            the run writes.
        StorageError: something else than a folder is there.
    """
    if not resume:
        require_run_folder(out)
        require_no_run(out, files_of_run(out), replace=replace)
    require_inputs_elsewhere(out, job)


PlanLike: TypeAlias = str | PathLike[str] | PlannedJob | None


def train(
    job: JobLike = None,
    *,
    local: int = 0,
    coordinator: str = "",
    out: str | PathLike[str] | None = None,
    wait: bool = True,
    progress: bool = True,
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
    **keys: Any,
) -> Run:
    """Train a job as ``ringtune train`` does, and return the run.

    Ctrl-C, in a notebook "interrupt the kernel", ends the run after the turns that are under way, with a checkpoint;
    a second one at once. Only the main thread gets it. ``Run.stop`` does the same from anywhere.

    Example: ``run = ringtune.train("job.toml", local=3, train__rounds=2)``.

    Args:
        job: a job file, a mapping of its sections, or nothing where keywords say it all.
        local: start so many nodes on this machine.
        coordinator: or train on the nodes of this one, ``host:port``.
        out: folder for the run's files; None = a new one, ``run-1``, ``run-2`` and so on.
        wait: whether to follow the run to its end. False = return as soon as it trains; it then is detached, even
            without this process, as with ``--detach``.
        progress: whether it is shown.
        resume: resume the run in ``out``, from its newest checkpoint.
        replace: put an earlier run's files aside, into ``<out>.replaced-<time>``.
        plan: carry out this plan, the result of ``ringtune.plan`` or a file that it saved.
        profile: file of times that were measured before.
        microbatches: numbers for the planner to choose from in place of the job's, such as ``2,4`` or ``auto``.
        wire: types for the planner to choose from in place of the job's, such as ``float32,bfloat16``.
        nodes: wait until so many nodes have joined the coordinator; 0 = take those that are there.
        join_s: how long to wait for them, in seconds.
        insecure: whether the coordinator may be on another machine, without encryption.
        coordinator_wait_s: how long to wait for a coordinator that is away, in seconds.
        keys: keys of the job, ``train__rounds=5`` for ``train.rounds``; they win over ``job``.

    Raises:
        RingTuneError: the job is wrong, or whatever the run failed with; ``InterruptedRunError`` if it was stopped.
    """
    with python_words():
        _check(local, coordinator, out, nodes, resume, replace, chosen=bool(microbatches or wire), plan=plan)
        if resume and job is None and out is not None:
            job = Path(out) / "job.toml"
        wanted = read_job(job, keys)
        with (
            speaking_as(None if local else speaker()),
            _folder(out) as folder,
            held_for_resume(folder) if resume and wait else contextlib.nullcontext(),
        ):
            submission, notes = make_submission(
                wanted,
                folder,
                local=local,
                coordinator=coordinator,
                insecure=insecure,
                nodes=nodes,
                join_s=join_s,
                replace=replace,
                resume=resume,
                profile=Path(profile) if profile is not None else None,
                plan=_given(plan),
                choices=read_choices(microbatches, wire, batch_size=wanted.train.batch_size),
                coordinator_wait_s=coordinator_wait_s,
            )
            if wait:
                follow_run(
                    submission,
                    folder,
                    notes,
                    how_to_resume=lambda step: _how_to_resume(step, folder),
                    show=lambda: choose_progress(progress),
                    after=lambda shown: show_sample(submission.request.job, folder, shown),
                )
                return Run(folder, insecure=insecure)
            if not local:
                submit(submission, folder)
                return Run(folder, insecure=insecure)
            words = [*_words("--profile", profile), *_words("--microbatches", microbatches), *_words("--wire", wire)]
            return _in_background(submission, folder, words, _given(plan), resume=resume)


def _check(
    local: int,
    coordinator: str,
    out: object,
    nodes: int,
    resume: bool,
    replace: bool,
    *,
    chosen: bool,
    plan: object,
) -> None:
    """Refuse options that make no sense together.

    Raises:
        UsageError: names them.
    """
    if bool(local) == bool(coordinator):
        raise UsageError("give one of local=N, nodes on this machine, and coordinator='HOST:PORT'")
    if nodes and local:
        raise UsageError("nodes= is for coordinator=; local= says how many nodes there are")
    if resume and (replace or out is None):
        raise UsageError("resume=True goes on with the run in out=DIR; replace=True would put it aside")
    if plan is not None and chosen:
        raise UsageError("a plan has its micro-batches and wire dtype; leave out microbatches= and wire=")
    if resume and (plan is not None or chosen):
        raise UsageError("resume=True goes on with the run's own plan; leave out plan=, microbatches= and wire=")


def _given(plan: PlanLike) -> GivenPlan | None:
    if isinstance(plan, PlannedJob):
        return plan.given
    return None if plan is None else read_given_plan(Path(plan))


def _words(option: str, value: object) -> list[str]:
    return [option, str(value)] if value else []


def _how_to_resume(step: int, folder: Path) -> str:
    return f"saved up to step {step}; go on with train(out={str(folder)!r}, resume=True) and the same nodes"


@contextmanager
def _folder(out: str | PathLike[str] | None) -> Iterator[Path]:
    """Give the folder of a run; a new one is removed again if it has nothing but the request."""
    if out is not None:
        yield Path(out)
        return
    folder = _new_folder()
    try:
        yield folder
    except BaseException:
        remove_if_nothing_began(folder)
        raise


def _new_folder() -> Path:
    """Make the first of ``run-1``, ``run-2`` and so on that is not there, in the current folder."""
    for number in itertools.count(1):
        with contextlib.suppress(FileExistsError):
            (folder := Path(f"run-{number}")).mkdir()
            return folder
    raise AssertionError


def _in_background(
    submission: Submission, folder: Path, words: list[str], given: GivenPlan | None, *, resume: bool
) -> Run:
    """Start ``ringtune train`` as a process of its own, which has the job from a file in the run's folder.

    ``job.toml`` of a resumed run has the job with which it began, so the job asked for now is in another file.
    """
    job = folder / (ASKED if resume else "job.toml")
    begin_in_background(submission, folder, _LOG.warning)
    if resume:
        write_durably(job, submission.request.job.to_toml().encode())
    words = ["train", str(job), "--local", str(submission.local), "--out", str(folder), *words]
    with tempfile.TemporaryDirectory(prefix="ringtune-") as name:
        if given is not None:
            path = Path(name) / "plan.json"
            write_durably(path, json.dumps(given.to_json()).encode())
            words += ["--plan", str(path)]
        _, process = start_in_background(folder, [*words, *(["--resume"] if resume else [])])
    run = Run(folder)
    run._left.process = process
    return run
