"""Runs on the coordinator's disk: their events with checksums, kept until fetched and some days longer.

::

    STATE/lock                    held by the coordinator that writes here
    STATE/runs/<run id>/run.json  the record of the run
    STATE/runs/<run id>/request   the ``RunRequest`` with which it began
    STATE/runs/<run id>/initial.safetensors   initial values, of a run with ``adapter.from``
    STATE/runs/<run id>/events    its events, from which its folder can be written again

With a database (``coordinator.server.database``) these are copies, written after what is there.

Every follower of a run, its submitter included, reads the growing file, so a slow follower costs no memory and delays
no other. A crash leaves at most one incomplete event at the end, which readers skip. A run that was running when the
coordinator ended is marked as interrupted at the next start, and may be resumed.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import shutil
import struct
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from platformdirs import user_state_path

from coordinator.server.run_record import (
    RunRecord,
    bytes_by_owner,
    chain_of,
    exceeds_share,
    families_of,
    in_order,
    to_drop,
)
from ringtune.errors import IntegrityError, InterruptedRunError, StorageError, UsageError
from ringtune.ids import RUN_ID
from ringtune.quantities import format_bytes
from ringtune.storage.durable import (
    FileLock,
    make_folder,
    make_private_folder,
    remove_partial_files,
    storage_errors,
    sync_folder,
    write_durably,
    write_pieces_durably,
)
from ringtune.storage.pieces import Pieces
from ringtune.techniques.initial_adapter import INITIAL_FILE
from ringtune.transport.endpoints import split_address
from ringtune.v1 import control_pb2

if TYPE_CHECKING:
    from coordinator.server.database import Database

_LOG = logging.getLogger(__name__)
_HEAD: Final = struct.Struct(">II")
_MAX_BYTES: Final = 1 << 30


class EventLog:
    """Appends events to a new file; makes its folder.

    Args:
        before: called with the position and the bytes of each event, before they are written.

    Raises:
        StorageError: it can't be made.
    """

    def __init__(self, path: Path, before: Callable[[int, bytes], object] = lambda position, content: None) -> None:
        self._path, self._before = path, before
        self.size_bytes = 0
        with storage_errors(path):
            make_folder(path.parent)
            self._file = path.open("xb", buffering=0)
            sync_folder(path.parent)

    def append(self, event: control_pb2.RunEvent) -> None:
        """Write one event; without room for it the file stays unchanged.

        Raises:
            StorageError: no room.
            InterruptedRunError: another coordinator has taken over.
        """
        content = event.SerializeToString()
        whole = _HEAD.pack(len(content), zlib.crc32(content)) + content
        self._before(self.size_bytes, whole)
        with storage_errors(self._path):
            try:
                self._write(whole)
            except OSError:
                os.ftruncate(self._file.fileno(), self.size_bytes)
                self._file.seek(self.size_bytes)
                raise
        self.size_bytes += len(whole)

    def _write(self, content: bytes) -> None:
        left = memoryview(content)
        while left:
            left = left[self._file.write(left) :]

    def force(self) -> None:
        """Force the written events to the disk; raises ``StorageError``."""
        with storage_errors(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Entry(NamedTuple):
    """An event, and the position of the next one."""

    event: control_pb2.RunEvent
    end: int


def read_events(path: Path, *, start: int = 0, stop: int | None = None, to_damage: bool = False) -> Iterator[Entry]:
    """Yield the complete events of a file; an incomplete last one is left out; raises ``IntegrityError``.

    ``start`` and ``stop`` are positions in the file. With ``to_damage`` a damaged event is the end, with a warning, and
    no error.
    """
    try:
        with path.open("rb") as file:
            file.seek(start)
            while stop is None or file.tell() < stop:
                head = file.read(_HEAD.size)
                if len(head) < _HEAD.size:
                    return
                length, checksum = _HEAD.unpack(head)
                content = file.read(length) if length <= _MAX_BYTES else b""
                if len(content) < length:
                    return
                if zlib.crc32(content) != checksum:
                    damage = f"{path} is damaged at byte {file.tell() - length}; earlier events can be read"
                    if not to_damage:
                        raise IntegrityError(damage)
                    _LOG.warning(damage)
                    return
                yield Entry(control_pb2.RunEvent.FromString(content), file.tell())
    except OSError as error:
        raise IntegrityError(f"can't read {path}: {error.strerror}") from error


_ASK_S = 0.5
_ENDS = ("failure", "done")
_LOCK, _RUNS, _RECORD, _REQUEST, _EVENTS = "lock", "runs", "run.json", "request", "events"


class StoredRun:
    """A run on the disk; one thread writes, any thread reads.

    Args:
        database: the folder is a copy of it; None = no copy.
        on_saved: called with the step when the manifest of a checkpoint is on disk.
    """

    def __init__(
        self,
        record: RunRecord,
        folder: Path,
        database: Database | None,
        *,
        on_saved: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.record = record
        self._folder, self._events, self._database = folder, folder / _EVENTS, database
        self._log: EventLog | None = None
        self._on_saved = on_saved
        self._is_full = False
        self._last_word: control_pb2.RunEvent | None = None
        self._changed = threading.Condition()

    @staticmethod
    def found(folder: Path, database: Database | None) -> StoredRun:
        """Read a run of an earlier coordinator process; one that was running is marked as interrupted.

        Events from the first damaged one on are ignored. Raises ``IntegrityError``.
        """
        record, events = RunRecord.parse((folder / _RECORD).read_text(encoding="utf-8")), folder / _EVENTS
        if record.state != "running":
            return StoredRun(record, folder, database)
        record = _replayed(record, events)
        if record.state == "running":
            written = events if events.exists() else folder / _RECORD
            record = record.interrupted(written.stat().st_mtime)
        run = StoredRun(record, folder, database)
        with suppress(StorageError):  # the next start tries again
            run.write_record()
        return run

    # ---- writing ----------------------------------------------------------------------------------

    def open_log(self) -> None:
        """Make the file of events; raises ``StorageError``."""
        database = self._database
        before = [functools.partial(database.append, self.record.run_id)] if database is not None else []
        self._log = EventLog(self._events, *before)

    def write_record(self) -> None:
        """Replace the record; raises ``StorageError`` or ``InterruptedRunError``."""
        content = self.record.to_text().encode()
        if self._database is not None:
            self._database.put(self.record.run_id, _RECORD, [content])
        write_durably(self._folder / _RECORD, content)

    def __call__(self, event: control_pb2.RunEvent) -> None:
        """Write one event. After a failed write further events are ignored, except the last, which is kept in memory.

        Raises:
            StorageError: no room; the events before are intact.
            InterruptedRunError: the file is closed, because the coordinator ends.
        """
        is_last = event.WhichOneof("event") in _ENDS
        if self._is_full and not is_last:
            return
        with self._changed:
            try:
                self._write(event)
            except StorageError:
                self._is_full = True
                if not is_last:
                    raise
                self._last_word = event
            self.record = replace(self.record.after(event, time.time()), size_bytes=self._whole_bytes())
            if is_last:
                self._end()
            self._changed.notify_all()
        if event.WhichOneof("event") == "checkpoint_json":
            self._on_saved(self.record.saved_step)

    def _write(self, event: control_pb2.RunEvent) -> None:
        if self._log is None:  # events with a gap would look like a complete run
            raise InterruptedRunError(f"the books of run {self.record.run_id} are closed; the coordinator ends")
        self._log.append(event)
        if event.WhichOneof("event") == "checkpoint_json":
            self._log.force()

    def _end(self) -> None:
        try:
            if self._log is not None:
                self._log.force()
            self.write_record()
        except StorageError:
            self._is_full = True  # the next start marks it as interrupted
        self.close()

    def interrupt(self, message: str) -> None:
        """End the run without a last event; another run takes it up."""
        with self._changed:
            self.record = self.record.interrupted(time.time(), message)
            self._end()
            self._changed.notify_all()

    def fetched(self) -> None:
        """Note that a user has all events; ignored while the run is running."""
        with self._changed:
            if self.record.state == "running" or self.record.is_fetched:
                return
            self.record = replace(self.record, is_fetched=True)
            try:
                self.write_record()
            except StorageError:
                self._is_full = True  # the only effect is that it stays longer

    def disown(self) -> None:
        """Leave the run to the administrators; raises ``StorageError``."""
        with self._changed:
            self.record = replace(self.record, owner="")
            self.write_record()

    def close(self) -> None:
        """Close the file; a running run can write no more, and is marked as interrupted at the next start."""
        with self._changed:
            if self._log is not None:
                self._log.close()
                self._log = None

    # ---- reading ----------------------------------------------------------------------------------

    def events(self, *, wait: bool, is_over: Callable[[], bool] = lambda: False) -> Iterator[control_pb2.RunEvent]:
        """Yield the events; with ``wait`` until the run is over, or until ``is_over`` returns true."""
        position = 0
        while True:
            with self._changed:
                size_bytes, goes_on = self._whole_bytes(), self.record.state == "running"
            for entry in read_events(self._events, start=position, stop=size_bytes):
                position = entry.end
                yield entry.event
            if not goes_on or not wait:
                break
            with self._changed:
                self._changed.wait_for(
                    lambda at=position: self.record.state != "running" or self._whole_bytes() > at,  # type: ignore[misc]
                    _ASK_S,
                )
            if is_over():
                return
        if self._last_word is not None:
            yield self._last_word

    def _whole_bytes(self) -> int:
        return self.record.size_bytes if self._log is None else self._log.size_bytes


def _replayed(record: RunRecord, events_path: Path) -> RunRecord:
    size_bytes = 0
    if events_path.exists():
        written_unix_s = events_path.stat().st_mtime
        for entry in read_events(events_path, to_damage=True):
            record, size_bytes = record.after(entry.event, written_unix_s), entry.end
    return replace(record, size_bytes=size_bytes)


KEEP_DAYS = 7.0
KEEP_BYTES = 10 << 30


class RunStore:
    """The runs in a folder, which is locked; safe for threads.

    Args:
        folder: made if it is missing.
        database: the folder is a copy of it; None = no copy.
        keep_days: days for fetched runs, since their end.
        keep_bytes: limit of all runs together, of which users have equal shares (``exceeds_share``); runs that were not
            fetched are never deleted for it, but no run begins of a user that exceeds its share, and none is resumed by
            one that exceeds twice its share.
        keep_unfetched_days: days for runs that were not fetched; infinite = for ever.

    Raises:
        BusyError: another coordinator has the folder.
        StorageError: it can't be made or written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        database: Database | None = None,
        keep_days: float = KEEP_DAYS,
        keep_bytes: int = KEEP_BYTES,
        keep_unfetched_days: float = math.inf,
    ) -> None:
        self.folder, self._database = folder, database
        self._keep_days, self._keep_bytes = keep_days, keep_bytes
        self._keep_unfetched_days = keep_unfetched_days
        self._lock = threading.Lock()
        self._readers: Counter[str] = Counter()
        self._runs: dict[str, StoredRun] = {}
        make_private_folder(folder, is_ours=(_LOCK, _RUNS).__contains__)
        with storage_errors(folder):
            make_folder(folder / _RUNS)
        self._held = FileLock(
            folder / _LOCK,
            busy=f"another coordinator, {{holder}}, stores its runs in {folder}; end it or give this one its own "
            "folder with --state",
        )
        self._held.acquire()
        if database is not None:
            copy_runs(database, folder)
        self._find()
        self.prune()

    def close(self) -> None:
        """Close the files and release the lock."""
        for run in self._runs.values():
            run.close()
        with suppress(OSError):  # a folder with runs stays
            (self.folder / _RUNS).rmdir()
        self._held.release()

    def _find(self) -> None:
        for folder in sorted((self.folder / _RUNS).iterdir()):
            if not RUN_ID.fullmatch(folder.name):
                continue
            remove_partial_files(folder)
            events = folder / _EVENTS
            if not (folder / _RECORD).exists() and not (events.exists() and events.stat().st_size):  # it never began
                shutil.rmtree(folder, ignore_errors=True)
                continue
            try:
                run = StoredRun.found(folder, self._database)
            except Exception as error:  # a damaged run must not hide the others
                _LOG.warning("the run in %s can't be used, and stays as it is: %s", folder, error)
            else:
                self._runs[folder.name] = run

    # ---- runs -------------------------------------------------------------------------------------

    def begin(
        self, record: RunRecord, *, request: bytes = b"", initial: Pieces | None = None, on_saved: Callable[[int], None]
    ) -> StoredRun:
        """Begin to store a run; raises ``StorageError``.

        ``request`` is the serialized ``RunRequest``, ``initial`` its file of initial values; ``on_saved`` is called
        with the step when the manifest of a checkpoint is on disk.
        """
        self.prune()
        stored_bytes = bytes_by_owner(families_of(self._sized()))
        is_resumed = record.first_run != record.run_id
        keep_bytes = 2 * self._keep_bytes if is_resumed else self._keep_bytes
        if not record.takes_up and exceeds_share(stored_bytes, record.owner, keep_bytes):
            whose = f" of {record.owner}" if record.owner else ""
            share = f"{'twice ' if is_resumed else ''}the {format_bytes(self._keep_bytes // len(stored_bytes))}"
            raise StorageError(
                f"the stored runs{whose} take {format_bytes(stored_bytes[record.owner])}, more than {share} of "
                "--keep-size for each user, and were not fetched: fetch them ('ringtune runs' lists them), or "
                "have the coordinator allow more"
            )
        folder = self.folder / _RUNS / record.run_id
        run = StoredRun(record, folder, self._database, on_saved=on_saved)
        with ExitStack() as undo:  # else the next start would find it, and resume it in place of another run
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
            if self._database is not None:
                undo.callback(self._database.remove, record.run_id)
                self._database.put(record.run_id, _REQUEST, [request])
                self._database.put(record.run_id, INITIAL_FILE, initial or ())
            run.open_log()
            undo.callback(run.close)
            write_durably(folder / _REQUEST, request)
            if initial is not None:
                write_pieces_durably(self.initial_file(record.run_id), initial)
            run.write_record()  # the last one: with it the run counts
            undo.pop_all()
        with self._lock:
            self._runs[record.run_id] = run
        return run

    def remove(self, run_id: str) -> None:
        """Delete a run that can't begin after all; one that is not stored is no error."""
        with self._lock:
            run = self._runs.pop(run_id, None)
        if run is not None:
            run.close()
            self._delete(run_id)

    def initial_file(self, run_id: str) -> Path:
        """Return the path of a run's file of initial values, which only a run with ``adapter.from`` has."""
        return self.folder / _RUNS / run_id / INITIAL_FILE

    def request(self, run_id: str) -> bytes:
        """Return the serialized ``RunRequest`` with which a run began; raises ``UsageError`` or ``IntegrityError``."""
        self._run(run_id)
        path = self.folder / _RUNS / run_id / _REQUEST
        try:
            return path.read_bytes()
        except OSError as error:
            raise IntegrityError(f"{path} can't be read: {error.strerror}; submit the run again") from error

    def records(self) -> dict[str, RunRecord]:
        """Return the record of every run by its id, oldest first."""
        with self._lock:
            return {record.run_id: record for record in in_order(run.record for run in self._runs.values())}

    def require(self, run_id: str) -> RunRecord:
        """Return the record of a run; raises ``UsageError``."""
        return self._run(run_id).record

    def interrupt(self, run_id: str, message: str) -> None:
        """End a run that another run takes up; raises ``UsageError``."""
        self._run(run_id).interrupt(message)

    def disown(self, user: str) -> None:
        """Leave a removed user's runs to administrators, not a later user of this name; raises ``StorageError``."""
        with self._lock:
            users_runs = [run for run in self._runs.values() if run.record.owner == user]
        for run in users_runs:
            run.disown()

    def fetched(self, run_id: str) -> None:
        """Note that a user has all events of a run and of those that it resumes; raises ``UsageError``."""
        for record in self._chain(run_id):
            self._run(record.run_id).fetched()
        self.prune()

    def events(
        self, run_id: str, *, wait: bool, whole: bool = False, is_over: Callable[[], bool] = lambda: False
    ) -> Iterator[control_pb2.RunEvent]:
        """Yield the events of a run; raises ``UsageError``.

        With ``wait`` until the run is over, or ``is_over`` returns true; with ``whole`` first those of the runs that it
        resumes.
        """
        for record in self._chain(run_id) if whole else self._chain(run_id)[-1:]:
            with self._reading(record.run_id):
                yield from self._run(record.run_id).events(wait=wait, is_over=is_over)

    def _chain(self, run_id: str) -> tuple[RunRecord, ...]:
        self._run(run_id)
        return chain_of(self.records(), run_id)

    def _run(self, run_id: str) -> StoredRun:
        with self._lock:
            run = self._runs.get(run_id)
        if run is None:
            raise UsageError(f"run {run_id} is not stored here; 'ringtune runs' lists the stored runs")
        return run

    @contextmanager
    def _reading(self, run_id: str) -> Iterator[None]:
        with self._lock:
            self._readers[run_id] += 1
        try:
            yield
        finally:
            with self._lock:
                self._readers[run_id] -= 1

    # ---- room -------------------------------------------------------------------------------------

    def _sized(self) -> list[RunRecord]:
        """Return the records with the bytes of all files of a run, the initial values included."""
        records = []
        for record in self.records().values():
            size_bytes = record.size_bytes
            for path in (self.initial_file(record.run_id), self.folder / _RUNS / record.run_id / _REQUEST):
                with suppress(OSError):  # most runs have no initial values, and another call may delete the run
                    size_bytes += path.stat().st_size
            records.append(replace(record, size_bytes=size_bytes))
        return records

    def prune(self) -> tuple[str, ...]:
        """Delete the runs that ``to_drop`` chooses; return their ids."""
        records = self.records()
        sized = self._sized()
        with self._lock:
            busy = {name for name, count in self._readers.items() if count}
            chosen = to_drop(
                sized,
                now_unix_s=time.time(),
                keep_days=self._keep_days,
                keep_bytes=self._keep_bytes,
                keep_unfetched_days=self._keep_unfetched_days,
                busy=busy,
            )
            names = tuple(name for name in chosen if name in self._runs)  # another call may have deleted some
            for name in names:
                self._runs.pop(name).close()
        for name in names:
            self._delete(name)
            if records[name].has_books and not records[name].is_fetched:
                _LOG.warning("run %s is deleted: it was not fetched for %g days", name, self._keep_unfetched_days)
        return names

    def _delete(self, run_id: str) -> None:
        if self._database is not None:
            self._database.remove(run_id)
        shutil.rmtree(self.folder / _RUNS / run_id, ignore_errors=True)


def copy_runs(database: Database, folder: Path) -> None:
    """Complete the copy of a database's runs in a store's folder, which has no other runs; raises ``StorageError``."""
    with storage_errors(folder):
        make_folder(folder / _RUNS)
    database.copy_to(folder / _RUNS, record=_RECORD, log=_EVENTS)


def default_folder(address: str) -> Path:
    """Return this user's state folder for the coordinator at an address."""
    return user_state_path("ringtune-coordinator") / str(split_address(address, option="--bind")[1])
