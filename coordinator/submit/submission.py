"""Carry out what ``ringtune train`` was asked for: follow a run to its end, or submit it and leave."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import typer

from coordinator.drive.requests import RunRequest
from coordinator.records.events import EventSink
from coordinator.run_folder.checkpoints import RunCheckpoints
from coordinator.run_folder.folder import LOG, RunFolder
from coordinator.run_folder.place import RunPlace
from coordinator.screen.progress import Progress
from coordinator.server.coordinator import Coordinator
from coordinator.submit.client import Client
from coordinator.submit.detached import lines_of_detached, start_in_background
from coordinator.submit.interrupts import heard_interrupts
from coordinator.submit.local.local_ring import local_ring
from ringtune.errors import DivergedError, RingTuneError
from ringtune.v1 import control_pb2


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
        how_to_resume: writes for the step of the newest checkpoint how to go on.
        show: makes what shows the run, once what is printed is guarded against a closed terminal.
        after: called once the run is done and its folder is complete.

    Raises:
        RingTuneError: whatever the run failed with.
    """
    with (
        heard_interrupts(log=out / LOG) as interrupts,
        RunFolder(out, replace=asked.replace, resume=asked.request.resume is not None) as folder,
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
    """Show a local run on a page while it goes on, if that is asked for."""
    if not asked.web:
        yield
        return
    from coordinator.web.at_coordinator import watch
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
    from coordinator.run_folder.tensorboard import TensorBoardLog

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
    """Start a run that goes on by itself, and print its id and the commands for it.

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

    Args:
        asked: what, and where.
        out: folder of the run.
        say: takes a line.

    Raises:
        RingTuneError: the folder can't be used.
    """
    with RunFolder(out, replace=asked.replace, resume=asked.request.resume is not None) as folder:
        for line in _of_replaced(folder):
            say(line)


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
