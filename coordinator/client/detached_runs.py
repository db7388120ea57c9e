"""Detached runs, which continue without the command that submitted them: start, find, stop, fetch.

::

    DIR/fetching/    the files that have arrived; removed if the others do not arrive
    DIR/             gets them when all have arrived: first run.json, last the checkpoints and report.json

A folder is up to date if its checkpoints and report are. They are written last, so an interrupted fetch is repeated.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from coordinator.client.checkpoints import FOLDER, RunCheckpoints
from coordinator.client.connection import Connection, submitter_name
from coordinator.client.run_files import FOLDER as PARTS
from coordinator.client.run_files import PART
from coordinator.client.run_folder import (
    FETCHING,
    KIND,
    LOG,
    OF_COMMAND,
    WRITTEN,
    RunFolder,
    files_of_run,
    is_as_written,
    lock_of,
    put_run_aside,
    read_written,
    remove_unused_folder,
    require_no_links,
    require_no_run,
)
from coordinator.client.saved_run import PLACE, RunLocation, read_place, read_run_file
from coordinator.server.restart import last_of, resumed_by
from coordinator.server.run_record import RunRecord, chain_of
from ringtune.errors import BusyError, ConnectionFailedError, DeadlineError, IntegrityError, RingTuneError, UsageError
from ringtune.hints import hint
from ringtune.ids import RUN_ID
from ringtune.machine.process import exit_error
from ringtune.storage.durable import (
    claim,
    drop_file,
    is_claimed,
    is_plain_file,
    itself,
    marker,
    remove_folder,
    rename_durably,
    storage_errors,
)
from ringtune.texts import listed
from ringtune.v1 import control_pb2

_LOG = logging.getLogger(__name__)
_LAST = (FOLDER, "report.json")
_MAX_NAMED = 3


@contextmanager
def fetched_folder(
    out: Path, *, replace: bool, goes_on: bool, is_same: bool = False, say: Callable[[str], object] = lambda line: None
) -> Iterator[RunFolder]:
    """Yield a folder; its files replace those of a run in ``out`` when the context ends without an error.

    Args:
        out: folder of the run; made if it is missing.
        replace: whether files of a run there may be replaced.
        goes_on: begin with a copy of the present files; else empty.
        is_same: the present files are of the same run, and are removed once all have arrived. Files of another run, and
            files that the run has not written like that, are put aside.
        say: takes a line about files that were put aside.

    Raises:
        UsageError: there is a run already that may not be replaced; or other files.
        BusyError: another process writes there.
        StorageError: the folder can't be used, or there is no room; the former files are unchanged.
    """
    is_new = not out.exists()
    claim(out, KIND)
    with lock_of(out):
        require_no_links(out)
        before = tuple(name for name in files_of_run(out) if name != FETCHING)
        coming = out / FETCHING
        if is_claimed(coming, KIND):
            remove_folder(coming)
        if not goes_on:
            require_no_run(out, before, replace=replace)
        is_same = is_same or goes_on
        replaced = tuple(name for name in before if not is_same or name not in OF_COMMAND)
        written = read_written(out)
        try:
            claim(coming, KIND)
            for name in (*replaced, *([WRITTEN] if written else [])) if goes_on else ():
                with storage_errors(coming):
                    copy = shutil.copytree if (out / name).is_dir() else shutil.copy2
                    copy(out / name, coming / name)
            with RunFolder(coming, resume=True, is_copy=True) as folder:
                yield folder
        except BaseException:
            if is_claimed(coming, KIND):
                shutil.rmtree(coming, ignore_errors=True)
            if is_new:
                remove_unused_folder(out)
            raise
        aside = _take_over(coming, out, replaced)
        if aside is None:
            return
        if not is_same:
            say(f"the files of the earlier run are in {aside}")
        elif others := _others(aside, out, written):
            say(f"files that were changed after the run wrote them are in {aside}: {listed(others, _MAX_NAMED)}")


def _take_over(coming: Path, out: Path, replaced: Iterable[str]) -> Path | None:
    """Replace the old files, so that no interruption leaves a folder that seems complete; return their folder."""
    aside = put_run_aside(out, sorted(replaced, key=_LAST.__contains__, reverse=True))
    if (coming / PLACE).exists():
        rename_durably(coming / PLACE, out / PLACE)
    for name in sorted(files_of_run(coming), key=_LAST.__contains__):
        rename_durably(coming / name, out / name)
    if (coming / WRITTEN).exists():
        rename_durably(coming / WRITTEN, out / WRITTEN)
    remove_folder(coming)
    return aside


def _others(aside: Path, out: Path, written: Mapping[str, list[int]]) -> list[str]:
    """Remove the files that the same run wrote earlier; list the others, such as a user's notes or changed job.

    Removed are files as the run wrote them, and the books of its checkpoints and parts.
    """
    checkpoints = RunCheckpoints(aside)
    for step in checkpoints.steps():
        drop_file(checkpoints.path(step))
    parts = [out, *(out / PARTS).glob("*")]  # what an earlier part has left is there
    for name, _folders, files in os.walk(aside, topdown=False):
        folder = Path(name)
        place = folder.relative_to(aside)
        for file in filter(lambda file: is_plain_file(folder / file), files):
            now = [part / place / file.removesuffix(PART) for part in parts]
            is_book = place.parts[:1] in ((FOLDER,), (PARTS,)) and is_plain_file(now[0])
            is_marker = folder == aside and file == marker(KIND)
            if is_book or is_marker or is_as_written(folder / file, written.get(str(place / file)), now):
                drop_file(folder / file)
        if not any(folder.iterdir()):
            folder.rmdir()
    left = (path for path in aside.rglob("*") if not path.is_dir() or path.is_symlink())
    return sorted(str(path.relative_to(aside)) for path in left)


class ResolvedRun(NamedTuple):
    """The run that the user named.

    Attributes:
        run_id: empty = the only one at the coordinator.
        place: from the folder; None = no folder was given.
        folder: of the run; None = no folder was given.
    """

    run_id: str
    coordinator: str
    place: RunLocation | None = None
    folder: Path | None = None

    @property
    def is_local(self) -> bool:
        """Whether its coordinator ends with it."""
        return self.place is not None and self.place.is_local

    def connect(self, *, insecure: bool) -> Connection:
        """Connect to its coordinator; ``insecure`` as in ``Connection``."""
        return Connection(self.coordinator, insecure=None if self.is_local else insecure)


def find_run(text: str, coordinator: str) -> ResolvedRun:
    """Resolve an id, a folder, or an empty text to a run; ``coordinator`` is asked unless the folder names one.

    Raises ``UsageError``: it is neither an id nor the folder of a run.
    """
    if not text or RUN_ID.fullmatch(text):
        return ResolvedRun(text, coordinator)
    folder = Path(text)
    if not folder.is_dir():
        raise UsageError(f"{text} is neither the id of a run nor its folder; 'ringtune runs' lists ids")
    place = read_place(folder)
    if place is None:
        raise UsageError(f"{text} has no record of where its run is driven; name the run by its id")
    return ResolvedRun(place.run_id, place.coordinator, place, folder)


def only_run(records: Mapping[str, RunRecord], may: Callable[[RunRecord], bool], what: str) -> RunRecord:
    """Choose the only run with ``may`` true that no other run resumes; ``what`` names the kind for the message.

    Raises ``UsageError``: there is none, or more than one.
    """
    last_runs = [record for run_id, record in records.items() if may(record) and resumed_by(records, run_id) is None]
    if not last_runs:
        raise UsageError(f"there is no {what} at this coordinator; 'ringtune runs' lists its runs")
    if len(last_runs) > 1:
        names = ", ".join(record.run_id for record in last_runs)
        raise UsageError(f"there is more than one {what} at this coordinator: {names}; name one")
    return last_runs[0]


def kept_record(client: Connection, run_id: str) -> RunRecord:
    """Find the run to fetch: the last one of those that resume ``run_id`` (empty = the only new run).

    Raises ``UsageError``: the coordinator does not keep it, or there is not exactly one new run.
    """
    records = client.records()
    if not run_id:
        run_id = only_run(records, lambda record: record.has_books and not record.is_fetched, "new run").run_id
    if run_id not in records:
        raise UsageError(f"run {run_id} is not stored there; 'ringtune runs' lists the stored runs")
    return records[last_of(records, run_id)]


def fetch_run(
    client: Connection, record: RunRecord, out: Path, *, replace: bool, say: Callable[[str], object] = _LOG.warning
) -> None:
    """Write the stored events of a run into a folder, and confirm that to the coordinator.

    A run that resumes another one gets the files of both. Of a run that is under way the folder gets the files so far;
    it can be fetched again. Present files stay until all have arrived; those of another run are then put aside.

    ``replace`` allows to replace files of a run in ``out``, which is made if it is missing; ``say`` takes a line
    about files that were put aside.

    Raises ``RingTuneError``: the folder holds another run, can't be written, or the connection is lost.
    """
    events = client.events(record.run_id, wait=False, whole=True, with_files=True)
    first = next(events, control_pb2.RunEvent())
    has_beginning = first.run_id == record.first_run
    place = RunLocation(run_id=record.run_id, coordinator=client.address, is_local=False, pid=os.getpid())
    before = read_place(out) if out.is_dir() else None
    chain = chain_of(client.records(), record.run_id)
    is_same = before is not None and before.run_id in {known.run_id for known in chain}
    goes_on = not has_beginning
    with fetched_folder(out, replace=replace, goes_on=goes_on, is_same=is_same, say=say) as folder:
        place.write(folder.path)
        folder.take(first)
        for event in events:
            folder.take(event)
    client.fetched(record.run_id)


def update_run_folder(client: Connection, out: Path) -> str:
    """Fetch the later part of a folder's run before it is resumed; return a description, empty = nothing was fetched.

    Raises:
        BusyError: the run is not over.
        RingTuneError: it can't be fetched.
    """
    place = read_place(out) if out.is_dir() else None
    try:
        records = client.records()
    except UsageError:  # the coordinator keeps none
        return ""
    if place is None or place.run_id not in records:
        return ""
    record = records[last_of(records, place.run_id)]
    if record.state == "running":
        follow = hint("logs", record.run_id, "--follow", coordinator=client.address)
        raise BusyError(f"run {record.run_id} of {out} is running; follow it with '{follow}'")
    if _is_up_to_date(record, out):
        return ""
    said = [f"fetched the events of run {record.run_id} that this folder lacked, up to step {record.steps_done}"]
    fetch_run(client, record, out, replace=True, say=said.append)
    return "; ".join(said)


def _is_up_to_date(record: RunRecord, out: Path) -> bool:
    """Whether a folder has the final report of a run that is done, else its last checkpoint."""
    if record.state != "done":
        return record.saved_step < 0 or record.saved_step in RunCheckpoints(out).steps()[:1]
    try:
        is_its_report = read_run_file(out / "report.json").get("run_id") == record.run_id
    except IntegrityError:  # there is none
        return False
    return is_its_report and not (out / "trace.json.part").exists()


_POLL_S = 0.2


def stop_run(client: Connection, run_id: str, *, now: bool, wait_s: float) -> str:
    """Stop a run (empty = the present one) and wait for its end; return how it ended.

    ``now``: at once, without a further checkpoint.

    Raises:
        UsageError: no run is driven, or another one.
        DeadlineError: it has not ended after ``wait_s``.
    """
    driven = client.status().run
    if run_id and run_id != driven.run_id:
        run_id = last_of(client.records(), run_id)
    if not driven.run_id or driven.is_over or (run_id and run_id != driven.run_id):
        raise UsageError(f"run {run_id} is not driven there now" if run_id else "no run is driven there now")
    client.stop_run(driven.run_id, f"stopped by {submitter_name()}", now=now)
    run_id, status = driven.run_id, driven
    deadline_s = time.monotonic() + wait_s
    while time.monotonic() < deadline_s:
        try:
            status = client.status().run
        except ConnectionFailedError:  # the coordinator of a local run ends with it
            return f"run {run_id} is over"
        if status.is_over or status.run_id != run_id:
            return f"run {run_id}: {status.message or status.phase}"
        time.sleep(_POLL_S)
    raise DeadlineError(
        f"run {run_id} has not ended within {wait_s:g} s (it is {status.phase}); it ends when its turns are done, "
        "or stop it with --now"
    )


DETACH, WHO = "--detach", "the detached run"
BEGIN_S = 300.0
_LATER_PHASES = ("training", "collecting")


def start_in_background(out: Path, arguments: Sequence[str]) -> tuple[RunLocation, subprocess.Popen[bytes]]:
    """Start the command in a session of its own, and wait until its run trains; return its location and process.

    Its output goes to the log in the run's folder. Closing the terminal does not end it. ``arguments`` are those of
    ``ringtune`` with ``--detach``.

    Raises:
        DeadlineError: it does not train after ``BEGIN_S``.
        RingTuneError: it ended before; its own error.
    """
    log = out / LOG
    process = _start(log, [argument for argument in arguments if argument != DETACH])
    deadline_s = time.monotonic() + BEGIN_S
    try:
        while time.monotonic() < deadline_s:
            code = process.poll()
            place = read_place(out)
            if place is not None and place.pid == process.pid and (code == 0 or _trains(place)):
                return place, process
            if code is not None:
                raise exit_error(WHO, code, log=log)
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        raise
    raise DeadlineError(f"the detached run does not train after {BEGIN_S:g} s; see {log}, or end process {process.pid}")


def _start(log: Path, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab", opener=itself) as output:
            return subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-P", "-m", "ringtune.cli", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
    except OSError as error:
        raise UsageError(f"can't use {log.parent} for the run's files: {error.strerror}; choose another") from error


def _trains(place: RunLocation) -> bool:
    try:
        with Connection(place.coordinator) as client:
            status = client.status().run
    except RingTuneError:  # it has ended meanwhile
        return False
    return status.run_id == place.run_id and status.phase in _LATER_PHASES


def lines_of_detached(place: RunLocation, out: Path | None) -> list[str]:
    """List the commands for a detached run."""
    coordinator = "" if place.is_local else place.coordinator
    name = str(out) if place.is_local and out is not None else place.run_id
    lines = [
        f"run {place.run_id} continues without this command",
        f"follow it:        {hint('logs', name, '--follow', coordinator=coordinator)}",
        f"stop and save it: {hint('stop', name, coordinator=coordinator)}",
    ]
    if place.is_local:
        return [*lines, f"its files are in {out}"]
    return [*lines, f"get its files:    {hint('fetch', name, '--out', str(out or 'DIR'), coordinator=coordinator)}"]
