"""The books of runs on a disk: torn, full, damaged, found again, followed while they grow."""

from __future__ import annotations

import errno
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.server import run_store
from coordinator.server.run_store import EventLog, RunStore, read_events
from ringtune.errors import BusyError, IntegrityError, InterruptedRunError, StorageError, UsageError
from ringtune.v1 import control_pb2
from tests.coordinator.server.test_run_record import ONE, TWO, event, record

PLAN = event("plan_json", {"course": {"num_steps": 8}})
DONE = control_pb2.RunEvent(done=True)


def nobody(_step: int) -> None:
    """Nobody waits for manifests."""


def step(number: int) -> control_pb2.RunEvent:
    """A step that is done."""
    return event("step_json", {"kind": "train", "step": number})


def read(path: Path) -> list[control_pb2.RunEvent]:
    """All events of a file."""
    return [entry.event for entry in read_events(path)]


def test_event_log_passes_over_a_torn_end_and_names_damage(tmp_path: Path) -> None:
    """However much of the last event a crash left, those before it come; a flipped bit is no event."""
    path = tmp_path / "events"
    log = EventLog(path)
    for number in range(3):
        log.append(step(number))
    log.close()
    whole = path.read_bytes()
    ends = [entry.end for entry in read_events(path)]
    assert ends[-1] == len(whole) == log.size_bytes
    for length in range(ends[1], len(whole)):
        path.write_bytes(whole[:length])
        assert read(path) == [step(0), step(1)]
    path.write_bytes(whole[: ends[1] - 1] + bytes([whole[ends[1] - 1] ^ 1]) + whole[ends[1] :])
    with pytest.raises(IntegrityError, match="is damaged at byte"):
        read(path)


def full_disk(monkeypatch: pytest.MonkeyPatch, *, after_bytes: int) -> None:
    """Let a disk take so many bytes of an event, and no more."""

    def write(self: EventLog, content: bytes) -> None:
        os.write(self._file.fileno(), content[:after_bytes])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_store.EventLog, "_write", write)


def test_full_disk_ends_the_run_and_leaves_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half an event is taken back, the error is that of a disk, and who follows hears how the run ended."""
    kept = RunStore(tmp_path)
    run = kept.begin(record(), on_saved=nobody)
    run(PLAN)
    full_disk(monkeypatch, after_bytes=5)
    with pytest.raises(StorageError, match="No space left"):
        run(step(0))
    run(step(1))  # ignored: it would leave a gap
    failure = control_pb2.RunEvent(failure=control_pb2.RunFailure(error="StorageError", message="full"))
    run(failure)
    assert list(kept.events(ONE, wait=True)) == [PLAN, failure]
    assert read(tmp_path / "runs" / ONE / "events") == [PLAN]
    kept.close()


def test_follower_reads_the_disk_while_the_run_goes_on(tmp_path: Path) -> None:
    """It gets every event in order, also those that came before it, and ends with the run."""
    kept = RunStore(tmp_path)
    run = kept.begin(record(), on_saved=nobody)
    run(PLAN)
    found: list[control_pb2.RunEvent] = []
    first = threading.Event()

    def follow() -> None:
        for entry in kept.events(ONE, wait=True):
            found.append(entry)
            first.set()

    reader = threading.Thread(target=follow)
    reader.start()
    assert first.wait(30.0)
    steps = [step(number) for number in range(8)]
    for entry in (*steps, DONE):
        run(entry)
    reader.join(30.0)
    assert found == [PLAN, *steps, DONE]
    assert list(kept.events(ONE, wait=False)) == found
    kept.close()


def test_follower_that_is_gone_ends(tmp_path: Path) -> None:
    """A run that says nothing holds nobody who has left."""
    kept = RunStore(tmp_path)
    kept.begin(record(), on_saved=nobody)
    assert list(kept.events(ONE, wait=True, is_over=lambda: True)) == []
    kept.close()


def test_run_that_was_under_way_is_found_as_interrupted(tmp_path: Path) -> None:
    """A coordinator that starts again lists it with its steps and its checkpoint; a run that was over stays so."""
    before = RunStore(tmp_path)
    saved: list[int] = []
    run = before.begin(record(ONE), on_saved=saved.append)
    for entry in (PLAN, step(4), event("checkpoint_json", {"step": 4})):
        run(entry)
    assert saved == [4]
    over = before.begin(record(TWO), on_saved=nobody)
    over(PLAN)
    over(DONE)
    before.close()
    again = RunStore(tmp_path)
    first, second = again.records().values()
    assert (first.state, first.steps_done, first.saved_step, first.is_resumable) == ("interrupted", 4, 4, True)
    assert (second.state, second.is_fetched) == ("done", False)
    again.fetched(TWO)
    again.close()
    third = RunStore(tmp_path)
    assert [entry.is_fetched for entry in third.records().values()] == [False, True]
    third.close()


def test_run_that_goes_on_when_its_books_are_closed_is_interrupted(tmp_path: Path) -> None:
    """What it says from then on is refused: with a gap before its end the books would pass for whole."""
    kept = RunStore(tmp_path)
    run = kept.begin(record(), on_saved=nobody)
    run(PLAN)
    kept.close()
    for late in (step(0), DONE):
        with pytest.raises(InterruptedRunError, match=f"books of run {ONE} are closed"):
            run(late)
    again = RunStore(tmp_path)
    assert [entry.state for entry in again.records().values()] == ["interrupted"]
    assert list(again.events(ONE, wait=True)) == [PLAN]
    again.close()


def test_books_that_were_fetched_go_when_their_time_is_over(tmp_path: Path) -> None:
    """With no day to keep them they go at once; a run that goes on can't be fetched away."""
    kept = RunStore(tmp_path, keep_days=0.0)
    run = kept.begin(record(), on_saved=nobody)
    run(PLAN)
    kept.fetched(ONE)
    assert list(kept.records()) == [ONE]
    run(DONE)
    kept.fetched(ONE)
    assert list(kept.records()) == []
    assert not (tmp_path / "runs" / ONE).exists()
    with pytest.raises(UsageError, match="is not stored here"):
        list(kept.events(ONE, wait=False))
    kept.close()


def test_books_that_nobody_fetches_go_with_a_line_if_their_time_is_set(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next coordinator names the run; without a time for them they stay."""
    before = RunStore(tmp_path)
    run = before.begin(record(), on_saved=nobody)
    run(PLAN)
    run(DONE)
    before.close()
    for days, names in ((math.inf, [ONE]), (0.0, [])):
        again = RunStore(tmp_path, keep_unfetched_days=days)
        assert list(again.records()) == names
        again.close()
    assert f"run {ONE} is deleted: it was not fetched for 0 days" in caplog.text
    assert not (tmp_path / "runs").exists()


def test_folder_has_one_coordinator_at_a_time(tmp_path: Path) -> None:
    """A second one is told what to do."""
    kept = RunStore(tmp_path)
    with pytest.raises(BusyError, match="--state"):
        RunStore(tmp_path)
    kept.close()
    RunStore(tmp_path).close()


def test_damaged_record_costs_only_its_run(tmp_path: Path, caplog: Any) -> None:
    """The others are listed; what can't be used is named in the log."""
    kept = RunStore(tmp_path)
    for name in (ONE, TWO):
        kept.begin(record(name), on_saved=nobody)(DONE)
    kept.close()
    (tmp_path / "runs" / ONE / "run.json").write_text("{")
    again = RunStore(tmp_path)
    assert list(again.records()) == [TWO]
    assert ONE in caplog.text
    again.close()


@pytest.mark.parametrize(
    "change",
    [lambda text: text.replace(b"{", b'{"of_a_newer_version": 1, ', 1), lambda text: b"\xff" + text, lambda text: b""],
    ids=["newer", "not text", "empty"],
)
def test_run_that_can_not_be_read_stays_as_it_is(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    """It does not keep the coordinator from its start, and no end of a coordinator removes it."""
    kept = RunStore(tmp_path)
    run = kept.begin(record(), on_saved=nobody)
    run(PLAN)
    run(DONE)
    kept.close()
    path = tmp_path / "runs" / ONE / "run.json"
    path.write_bytes(change(path.read_bytes()))
    before = path.read_bytes()
    again = RunStore(tmp_path)
    assert list(again.records()) == []
    again.close()
    assert path.read_bytes() == before
    assert read(tmp_path / "runs" / ONE / "events") == [PLAN, DONE]


def test_folder_of_no_runs_leaves_nothing_behind(tmp_path: Path) -> None:
    """A coordinator that drove none takes its empty folder away."""
    RunStore(tmp_path).close()
    assert not (tmp_path / "runs").exists()


def test_events_before_damage_are_kept_and_the_run_counts_as_interrupted(tmp_path: Path) -> None:
    """After a power cut the last event may have its length but not its bytes; its checkpoint can be gone on from."""
    kept = RunStore(tmp_path)
    run = kept.begin(record(), on_saved=nobody)
    whole = [PLAN, step(4), event("checkpoint_json", {"step": 4})]
    for entry in (*whole, step(5)):
        run(entry)
    kept.close()
    path = tmp_path / "runs" / ONE / "events"
    path.write_bytes(path.read_bytes()[:-4] + bytes(4))
    for _ in range(2):
        again = RunStore(tmp_path)
        (found,) = again.records().values()
        assert (found.state, found.steps_done, found.saved_step, found.is_resumable) == ("interrupted", 4, 4, True)
        assert list(again.events(ONE, wait=True)) == whole
        again.close()
