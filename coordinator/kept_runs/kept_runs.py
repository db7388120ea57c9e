"""Keep the books of runs on the coordinator's disk until they are fetched, then for some days.

::

    STATE/lock                    held by the coordinator that writes here
    STATE/runs/<run id>/run.json  what is known of the run
    STATE/runs/<run id>/request   with what it began: ``RunRequest`` as it came
    STATE/runs/<run id>/events    its events, of which its folder can be written again

A run that was under way when the coordinator ended is found as interrupted when it starts again, and taken up.
"""

from __future__ import annotations

import logging
import math
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from platformdirs import user_state_path

from coordinator.kept_runs.kept_run import KeptRun
from coordinator.kept_runs.record import RunRecord, chain_of, in_order, to_drop
from ringtune.errors import IntegrityError, UsageError
from ringtune.files.durable import make_folder, remove_partial_files, storage_errors, write_durably
from ringtune.files.owned import FileLock, make_private_folder
from ringtune.ids import RUN_ID
from ringtune.rpc.addresses import split_address
from ringtune.v1 import control_pb2

_LOG = logging.getLogger(__name__)
KEEP_DAYS = 7.0
KEEP_BYTES = 10 << 30
_LOCK, _RUNS, _RECORD, _REQUEST, _EVENTS = "lock", "runs", "run.json", "request", "events"


class KeptRuns:
    """The runs in a folder, which is locked; safe to call from any thread.

    Args:
        folder: made if it is missing.
        keep_days: how long the books of a run stay after they were fetched.
        keep_bytes: how much all books may take; those that nobody has fetched are never dropped for it.
        keep_unfetched_days: how long books stay that nobody fetches; infinite = for ever.

    Raises:
        BusyError: another coordinator has the folder.
        StorageError: it can't be made or written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_days: float = KEEP_DAYS,
        keep_bytes: int = KEEP_BYTES,
        keep_unfetched_days: float = math.inf,
    ) -> None:
        self.folder = folder
        self._keep_days, self._keep_bytes = keep_days, keep_bytes
        self._keep_unfetched_days = keep_unfetched_days
        self._lock = threading.Lock()
        self._readers: Counter[str] = Counter()
        self._runs: dict[str, KeptRun] = {}
        make_private_folder(folder, is_ours=(_LOCK, _RUNS).__contains__)
        with storage_errors(folder):
            make_folder(folder / _RUNS)
        self._held = FileLock(
            folder / _LOCK,
            busy=f"another coordinator, {{holder}}, keeps its runs in {folder}; end it or give this one its own folder "
            "with --state",
        )
        self._held.acquire()
        self._find()
        self.prune()

    def close(self) -> None:
        """Let another process have the folder."""
        for run in self._runs.values():
            run.close()
        with suppress(OSError):  # one that is not empty stays: this version may not have been able to read all
            (self.folder / _RUNS).rmdir()
        self._held.release()

    def _find(self) -> None:
        for folder in sorted((self.folder / _RUNS).iterdir()):
            if not RUN_ID.fullmatch(folder.name):
                continue
            remove_partial_files(folder)
            try:
                run = KeptRun.found(folder / _RECORD, folder / _EVENTS)
            except Exception as error:  # whatever is in its files, the other runs are served
                _LOG.warning("the run in %s can't be used, and stays as it is: %s", folder, error)
            else:
                self._runs[folder.name] = run

    # ---- runs -------------------------------------------------------------------------------------

    def begin(self, record: RunRecord, *, request: bytes = b"", on_saved: Callable[[int], None]) -> KeptRun:
        """Begin to keep a run.

        Args:
            record: of the run.
            request: with what it began, as a message.
            on_saved: called with the step when the manifest of a checkpoint is on disk.

        Raises:
            StorageError: no room.
        """
        self.prune()
        folder = self.folder / _RUNS / record.run_id
        run = KeptRun.begun(record, folder / _RECORD, folder / _EVENTS, on_saved=on_saved)
        write_durably(folder / _REQUEST, request)
        with self._lock:
            self._runs[record.run_id] = run
        return run

    def request(self, run_id: str) -> bytes:
        """Return with what a run began, as a message.

        Raises:
            UsageError: there is no such run.
            IntegrityError: it was not kept.
        """
        self._run(run_id)
        path = self.folder / _RUNS / run_id / _REQUEST
        try:
            return path.read_bytes()
        except OSError as error:
            raise IntegrityError(f"{path} can't be read: {error.strerror}; submit the run again") from error

    def records(self) -> dict[str, RunRecord]:
        """What is known of every run, by its id, oldest first."""
        with self._lock:
            return {record.run_id: record for record in in_order(run.record for run in self._runs.values())}

    def require(self, run_id: str) -> RunRecord:
        """Return what is known of a run.

        Raises:
            UsageError: there is no such run.
        """
        return self._run(run_id).record

    def fetched(self, run_id: str) -> None:
        """Note that somebody has all events of a run and of those that it goes on with.

        Raises:
            UsageError: there is no such run.
        """
        for record in self._chain(run_id):
            self._run(record.run_id).fetched()
        self.prune()

    def events(
        self, run_id: str, *, wait: bool, whole: bool = False, is_over: Callable[[], bool] = lambda: False
    ) -> Iterator[control_pb2.RunEvent]:
        """Yield the events of a run.

        Args:
            run_id: of the run.
            wait: go on until the run is over; else end with what is there.
            whole: first the events of the runs that it goes on with.
            is_over: asked now and then while there is nothing new; true ends the waiting.

        Raises:
            UsageError: there is no such run.
        """
        for record in self._chain(run_id) if whole else self._chain(run_id)[-1:]:
            with self._reading(record.run_id):
                yield from self._run(record.run_id).events(wait=wait, is_over=is_over)

    def _chain(self, run_id: str) -> tuple[RunRecord, ...]:
        self._run(run_id)
        return chain_of(self.records(), run_id)

    def _run(self, run_id: str) -> KeptRun:
        with self._lock:
            run = self._runs.get(run_id)
        if run is None:
            raise UsageError(f"run {run_id} is not kept here; 'ringtune runs' lists those that are")
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

    def prune(self) -> tuple[str, ...]:
        """Drop books that are too old, and those that were fetched if they are too many; return whose."""
        records = self.records()
        with self._lock:
            busy = {name for name, count in self._readers.items() if count}
            names = to_drop(
                records.values(),
                now_unix_s=time.time(),
                keep_days=self._keep_days,
                keep_bytes=self._keep_bytes,
                keep_unfetched_days=self._keep_unfetched_days,
                busy=busy,
            )
            for name in names:
                self._runs.pop(name).close()
        for name in names:
            shutil.rmtree(self.folder / _RUNS / name, ignore_errors=True)
            if records[name].has_books and not records[name].is_fetched:
                _LOG.warning("run %s is dropped: nobody fetched it for %g days", name, self._keep_unfetched_days)
        return names


def default_folder(address: str) -> Path:
    """Return the folder in which the coordinator at an address keeps its runs, as this system has it."""
    return user_state_path("ringtune-coordinator") / str(split_address(address, option="--bind")[1])
