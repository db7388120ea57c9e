"""The books of one run: its events go to the disk as they come, and whoever follows it reads them from there.

The one who submitted it reads the same file, so a submitter that is slow, asleep or gone holds nothing up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from coordinator.kept_runs.event_log import EventLog, read_events
from coordinator.kept_runs.record import RunRecord
from ringtune.errors import InterruptedRunError, StorageError
from ringtune.files.durable import write_durably
from ringtune.v1 import control_pb2

_ASK_S = 0.5
_ENDS = ("failure", "done")


class KeptRun:
    """A run that is or was written to the disk; one thread writes, any thread reads.

    Args:
        record: what is known of it.
        record_path: where that is written.
        events_path: of the file of its events.
        log: to append to; None = the run is over.
        on_saved: called with the step when the manifest of a checkpoint is on disk.
    """

    def __init__(
        self,
        record: RunRecord,
        record_path: Path,
        events_path: Path,
        *,
        log: EventLog | None,
        on_saved: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.record = record
        self._record_path, self._events_path = record_path, events_path
        self._log = log
        self._on_saved = on_saved
        self._is_full = False
        self._last_word: control_pb2.RunEvent | None = None
        self._changed = threading.Condition()

    @staticmethod
    def begun(record: RunRecord, record_path: Path, events_path: Path, *, on_saved: Callable[[int], None]) -> KeptRun:
        """Begin to write a run.

        Raises:
            StorageError: no room.
        """
        write_durably(record_path, record.to_text().encode())
        return KeptRun(record, record_path, events_path, log=EventLog(events_path), on_saved=on_saved)

    @staticmethod
    def found(record_path: Path, events_path: Path) -> KeptRun:
        """Read a run of an earlier coordinator; one that was under way then counts as interrupted now.

        Of its events those before the first damaged one count.

        Raises:
            IntegrityError: its record is damaged, or its events can't be read.
        """
        record = RunRecord.parse(record_path.read_text(encoding="utf-8"))
        if record.state == "running":
            record = _replayed(record, events_path)
            if record.state == "running":
                written = events_path if events_path.exists() else record_path
                record = record.interrupted(written.stat().st_mtime)
            with suppress(StorageError):  # the next start finds it again
                write_durably(record_path, record.to_text().encode())
        return KeptRun(record, record_path, events_path, log=None)

    # ---- writing ----------------------------------------------------------------------------------

    def __call__(self, event: control_pb2.RunEvent) -> None:
        """Write one event. After a failure to write only the last event counts, which then is kept in memory.

        Raises:
            StorageError: no room; what was written before is intact.
            InterruptedRunError: the books are closed, because the coordinator ends.
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
            self.record = self._after(event)
            if is_last:
                self._end()
            self._changed.notify_all()
        if event.WhichOneof("event") == "checkpoint_json":
            self._on_saved(self.record.saved_step)

    def _write(self, event: control_pb2.RunEvent) -> None:
        if self._log is None:  # a gap would pass for a whole run
            raise InterruptedRunError(f"the books of run {self.record.run_id} are closed; the coordinator ends")
        self._log.append(event)
        if event.WhichOneof("event") == "checkpoint_json":
            self._log.force()

    def _after(self, event: control_pb2.RunEvent) -> RunRecord:
        size_bytes = self._log.size_bytes if self._log else self.record.size_bytes
        return replace(self.record.after(event, time.time()), size_bytes=size_bytes)

    def _end(self) -> None:
        try:
            if self._log is not None:
                self._log.force()
            write_durably(self._record_path, self.record.to_text().encode())
        except StorageError:
            self._is_full = True  # the next start finds it as interrupted
        self.close()

    def fetched(self) -> None:
        """Note that somebody has all events; a run that goes on is not fetched yet."""
        with self._changed:
            if self.record.state == "running" or self.record.is_fetched:
                return
            self.record = replace(self.record, is_fetched=True)
            try:
                write_durably(self._record_path, self.record.to_text().encode())
            except StorageError:
                self._is_full = True  # it only stays longer

    def close(self) -> None:
        """Close the file; a run that goes on can write no more, and is found as interrupted."""
        with self._changed:
            if self._log is not None:
                self._log.close()
                self._log = None

    # ---- reading ----------------------------------------------------------------------------------

    def events(self, *, wait: bool, is_over: Callable[[], bool] = lambda: False) -> Iterator[control_pb2.RunEvent]:
        """Yield the events; with ``wait`` until the run is over, or ``is_over`` says that nobody reads any more."""
        position = 0
        while True:
            with self._changed:
                size_bytes, goes_on = self._whole_bytes(), self.record.state == "running"
            for entry in read_events(self._events_path, start=position, stop=size_bytes):
                position = entry.end
                yield entry.event
            if not goes_on or not wait:
                break
            with self._changed:
                self._changed.wait_for(lambda at=position: self._has_more(at), _ASK_S)  # type: ignore[misc]
            if is_over():
                return
        if self._last_word is not None:
            yield self._last_word

    def _whole_bytes(self) -> int:
        return self.record.size_bytes if self._log is None else self._log.size_bytes

    def _has_more(self, position: int) -> bool:
        return self.record.state != "running" or (self._log is not None and self._log.size_bytes > position)


def _replayed(record: RunRecord, events_path: Path) -> RunRecord:
    """Return what is known of a run after those of its events that are whole."""
    size_bytes = 0
    if events_path.exists():
        written_unix_s = events_path.stat().st_mtime
        for entry in read_events(events_path, to_damage=True):
            record, size_bytes = record.after(entry.event, written_unix_s), entry.end
    return replace(record, size_bytes=size_bytes)
