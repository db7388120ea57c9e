"""The books of runs: what is known after their events, what a disk keeps, and which run is taken up again."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.planner.given_plan import GivenPlan
from coordinator.planner.limits import Choices
from coordinator.run.requests import RunRequest
from coordinator.server import run_record, run_store
from coordinator.server.restart import MAX_IN_VAIN, NODES_S, last_of, resume_request, resumed_by, run_to_resume
from coordinator.server.run_record import RunRecord, chain_of, in_order, to_drop
from coordinator.server.run_store import EventLog, RunStore, StoredRun, read_events
from ringtune.errors import BusyError, IntegrityError, InterruptedRunError, StorageError, UsageError
from ringtune.run_control.checkpoint import CheckpointManifest, Resume, Shard
from ringtune.run_control.continuation import Length, job_digest
from ringtune.schedule.operation_tables import Operations, ScheduledTable
from ringtune.storage import durable
from ringtune.storage.pieces import Pieces
from ringtune.v1 import control_pb2
from tests.support.choosing import table_of
from tests.support.fake_agents import job
from tests.support.plans import two_nodes

DAY_S = 86_400.0
NOW_S = 100 * DAY_S
ONE, TWO, THREE = (f"r20260102-00000{number}-00000000" for number in (1, 2, 3))


def record(run_id: str = ONE, **changes: Any) -> RunRecord:
    """A run that has just begun."""
    values = {
        "started_unix_s": 1.0,
        "first_run": run_id,
        "model": "tiny",
        "method": "ringada",
        "submitted_by": "ann@desk",
        **changes,
    }
    return RunRecord(run_id=run_id, **values)


def ended(run_id: str = ONE, *, days_ago: float = 0.0, **changes: Any) -> RunRecord:
    """A run that was fetched."""
    values = {"state": "done", "num_steps": 8, "is_fetched": True, "ended_unix_s": NOW_S - days_ago * DAY_S, **changes}
    return record(run_id, **values)


def event(kind: str, value: object) -> control_pb2.RunEvent:
    """An event; a table becomes JSON."""
    return control_pb2.RunEvent(**{kind: json.dumps(value) if isinstance(value, dict) else value})  # type: ignore[arg-type]


def test_record_follows_the_events_of_a_run() -> None:
    """Steps of the plan, steps done, the newest checkpoint, and the end with its time."""
    found = record()
    for entry in (
        event("plan_json", {"course": {"num_steps": 8}}),
        event("step_json", {"kind": "train", "step": 1}),
        event("step_json", {"kind": "train", "step": 4}),
        event("step_json", {"kind": "evaluate", "step": 7}),
        event("checkpoint_json", {"step": 4}),
    ):
        found = found.after(entry, 5.0)
    assert (found.num_steps, found.steps_done, found.saved_step, found.state) == (8, 4, 4, "running")
    assert not found.is_resumable
    done = found.after(event("done", True), 7.0)
    assert (done.state, done.ended_unix_s, done.is_resumable) == ("done", 7.0, False)
    # What it goes on from is done and saved already
    found = record().after(event("resumed_json", {"step": 6, "passed_over": []}), 2.0)
    assert (found.steps_done, found.saved_step) == (6, 6)


def test_record_tells_a_run_that_was_stopped_from_one_that_failed() -> None:
    """Both can go on if there is a checkpoint, and only then."""
    for error, state in [("InterruptedRunError", "stopped"), ("PeerLostError", "failed")]:
        failure = control_pb2.RunEvent(failure=control_pb2.RunFailure(error=error, message="why"))
        found = record().after(failure, 9.0)
        assert (found.state, found.message, found.ended_unix_s, found.is_resumable) == (state, "why", 9.0, False)
        assert record(saved_step=4).after(failure, 9.0).is_resumable


def test_record_comes_back_from_its_text_and_nothing_else_does() -> None:
    """Damage, a state that there is not, and an id that leaves the folder are refused."""
    whole = ended(message="x")
    assert RunRecord.parse(whole.to_text()) == whole
    for text in ("{", "[]", whole.to_text().replace("done", "asleep"), whole.to_text().replace(ONE, "../../x")):
        with pytest.raises(IntegrityError):
            RunRecord.parse(text)


def test_books_that_nobody_fetched_are_dropped_only_after_their_own_time() -> None:
    """Neither by age nor by size; those of a run that ended before its plan hold nothing to fetch."""
    old = ended(ONE, days_ago=90, is_fetched=False, size_bytes=1000)
    nothing = ended(TWO, days_ago=90, is_fetched=False, num_steps=0)
    running = record(THREE, num_steps=8)
    assert to_drop([old, nothing, running], now_unix_s=NOW_S, keep_days=7, keep_bytes=0) == (TWO,)
    # Example: with 60 days the run of 90 days ago goes; size alone drops neither, and one that goes on stays
    runs = [old, ended(TWO, days_ago=30, is_fetched=False, size_bytes=1000), running]
    assert to_drop(runs, now_unix_s=NOW_S, keep_days=7, keep_bytes=0, keep_unfetched_days=60) == (ONE,)
    assert to_drop(runs, now_unix_s=NOW_S, keep_days=7, keep_bytes=0, keep_unfetched_days=60, busy={ONE}) == ()


def test_books_go_by_age_then_by_size_oldest_first() -> None:
    """Example: 8 days with 7 kept; and of two young ones the older one, until what is left fits."""
    runs = [ended(ONE, days_ago=8, size_bytes=10), ended(TWO, days_ago=2, size_bytes=10), ended(THREE, size_bytes=10)]
    assert to_drop(runs, now_unix_s=NOW_S, keep_days=7, keep_bytes=100) == (ONE,)
    assert to_drop(runs, now_unix_s=NOW_S, keep_days=7, keep_bytes=15) == (ONE, TWO)
    assert to_drop(runs, now_unix_s=NOW_S, keep_days=90, keep_bytes=30) == ()
    assert to_drop(runs, now_unix_s=NOW_S, keep_days=7, keep_bytes=100, busy={ONE}) == ()


def test_record_of_a_user_has_bounded_texts_and_few_of_them_have_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a user's failed runs would fill the list of runs, which is one message for administrators."""
    failure = control_pb2.RunEvent(failure=control_pb2.RunFailure(error="PlanError", message="\x1b" + "y" * 10_000))
    assert len(record().after(failure, 9.0).message) < 700
    monkeypatch.setattr(run_record, "_MAX_UNPLANNED", 1)
    names = [f"r20260101-000000-0000000{number}" for number in range(5)]
    failed = [ended(name, num_steps=0, owner="bob", first_run=names[1]) for name in names[:3]]
    others = [record(names[3], owner="bob"), ended(names[4], num_steps=0, owner="alice")]
    assert to_drop([*failed, *others], now_unix_s=NOW_S, keep_days=7, keep_bytes=100) == tuple(names[:2])
    kept = to_drop([*failed, *others], now_unix_s=NOW_S, keep_days=7, keep_bytes=100, busy=names[:1])
    assert kept == (names[1],)


def test_books_of_a_run_stay_with_those_of_the_run_that_goes_on_with_it() -> None:
    """Its folder is written from both."""
    first = ended(ONE, days_ago=30)
    second = ended(TWO, days_ago=1, first_run=ONE)
    assert to_drop([first, second], now_unix_s=NOW_S, keep_days=7, keep_bytes=100) == ()
    old = replace(second, ended_unix_s=NOW_S - 8 * DAY_S)
    assert to_drop([first, old], now_unix_s=NOW_S, keep_days=7, keep_bytes=100) == (ONE, TWO)
    records = {entry.run_id: entry for entry in (first, second, ended(THREE))}
    assert [entry.run_id for entry in chain_of(records, TWO)] == [ONE, TWO]
    assert [entry.run_id for entry in chain_of(records, ONE)] == [ONE]


def test_runs_are_in_the_order_of_their_start_also_within_a_second() -> None:
    """Their ids are random below that."""
    late, early = record(ONE, started_unix_s=5.2), record(TWO, started_unix_s=5.1, first_run=ONE)
    assert in_order([late, early]) == [early, late]
    assert chain_of({ONE: late, TWO: early}, ONE) == (early, late)


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


def test_books_that_nobody_fetches_have_a_limit_with_their_initial_values(tmp_path: Path) -> None:
    """Beyond it no run begins; one that is resumed does, and after a fetch the next one."""
    kept = RunStore(tmp_path, keep_bytes=5000)
    run = kept.begin(record(ONE), initial=Pieces.of(bytes(6000)), on_saved=nobody)
    with pytest.raises(
        StorageError, match=r"the stored runs take .*, more than the .* of --keep-size.*'ringtune runs'"
    ):
        kept.begin(record(TWO), on_saved=nobody)
    run(PLAN)
    run(DONE)
    kept.begin(record(TWO, first_run=ONE), on_saved=nobody)(DONE)
    kept.fetched(TWO)
    kept.begin(record(run_id(3)), on_saved=nobody)
    assert list(kept.records()) == [run_id(3)]
    kept.close()


def test_one_user_can_not_fill_the_room_of_others(tmp_path: Path) -> None:
    """Beyond its share its own next run is refused; others begin, and keep the fetched runs within theirs."""
    with contextlib.closing(RunStore(tmp_path, keep_bytes=5000)) as kept:

        def run_of(owner: str, number: int, num_bytes: int) -> StoredRun:
            run = kept.begin(record(run_id(number), owner=owner), request=bytes(num_bytes), on_saved=nobody)
            for entry in (PLAN, DONE):
                run(entry)
            return run

        run_of("alice", 1, 6000)  # alone she has all of it
        with pytest.raises(StorageError, match=r"runs of alice take .* more than the .* of --keep-size for each user"):
            run_of("alice", 2, 1)
        run_of("bob", 3, 1500)
        kept.fetched(run_id(3))
        run_of("bob", 4, 1500)
        assert kept.prune() == (run_id(3),)  # he had 3000 bytes, his share is 2500
        run_of("carol", 5, 1500)
        kept.fetched(run_id(5))
        kept.fetched(run_id(4))
        assert list(kept.records()) == [run_id(1), run_id(4), run_id(5)]  # each has 1666 bytes
        with pytest.raises(StorageError, match="runs of alice"):
            run_of("alice", 2, 1)
        # By resuming she gets to twice her share only; the coordinator itself always goes on with a run
        resumed = record(run_id(6), owner="alice", first_run=run_id(1))
        kept.begin(resumed, request=bytes(2000), on_saved=nobody)(DONE)
        again = replace(resumed, run_id=run_id(7))
        with pytest.raises(StorageError, match=r"runs of alice take .* more than twice the .* of --keep-size"):
            kept.begin(again, on_saved=nobody)
        kept.begin(replace(again, takes_up=run_id(6)), on_saved=nobody)(DONE)
        kept.fetched(run_id(7))
        run_of("alice", 2, 1)


def test_run_whose_coordinator_crashes_while_it_begins_is_whole_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each write: the next coordinator can resume it from its request, or finds nothing and takes the rest away."""
    crashed = list[Path]()

    def crash(place: str) -> None:
        crashed.append(tmp_path / f"{len(crashed)} {place}")
        shutil.copytree(tmp_path / "state", crashed[-1])

    with contextlib.closing(RunStore(tmp_path / "state")) as kept:
        monkeypatch.setattr(durable, "failpoint", crash)
        kept.begin(record(), request=b"request", initial=Pieces.of(b"values"), on_saved=nobody)
        monkeypatch.undo()
        crash("begun")
    found = list[bool]()
    for folder in crashed:
        with contextlib.closing(RunStore(folder)) as again:
            found.append(ONE in again.records())
            assert (folder / "runs" / ONE).exists() == found[-1]
            if found[-1]:
                assert (again.request(ONE), list(again.events(ONE, wait=False))) == (b"request", [])
                assert again.initial_file(ONE).read_bytes() == b"values"
    assert found[0] < found[-1] and found == sorted(found)


def test_run_that_has_no_room_to_begin_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next coordinator would take it for one that was interrupted."""

    def write(path: Path, content: Pieces) -> None:
        raise StorageError(f"no room for {path.name}")

    monkeypatch.setattr(run_store, "write_pieces_durably", write)
    with contextlib.closing(RunStore(tmp_path)) as kept:
        with pytest.raises(StorageError, match="no room"):
            kept.begin(record(ONE), initial=Pieces.of(b"values"), on_saved=nobody)
        assert not list((tmp_path / "runs").iterdir())


def test_run_is_deleted_by_one_of_two_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one had chosen it too, or was about to ask for its size."""
    with contextlib.closing(RunStore(tmp_path, keep_days=0.0)) as kept:
        for run in [kept.begin(record(each, first_run=ONE), on_saved=nobody) for each in (ONE, TWO)]:
            run(PLAN)
            run(DONE)
            run.fetched()
        sized, chosen = kept._sized, list[str]()

        def meanwhile() -> list[RunRecord]:
            monkeypatch.setattr(kept, "_sized", sized)
            found = sized()
            chosen.extend(kept.prune())
            return found

        monkeypatch.setattr(kept, "_sized", meanwhile)
        assert kept.prune() == ()
        assert chosen == [ONE, TWO]


def test_folder_has_one_coordinator_at_a_time(tmp_path: Path) -> None:
    """A coordinator that drove none takes its empty folder away."""
    RunStore(tmp_path).close()
    assert not (tmp_path / "runs").exists()
    # A second one is told what to do
    kept = RunStore(tmp_path)
    with pytest.raises(BusyError, match="--state"):
        RunStore(tmp_path)
    kept.close()
    RunStore(tmp_path).close()


@pytest.mark.parametrize(
    "change",
    [lambda text: text.replace(b"{", b'{"of_a_newer_version": 1, ', 1), lambda text: b"\xff" + text, lambda text: b""],
    ids=["newer", "not text", "empty"],
)
def test_run_that_can_not_be_read_stays_as_it_is(
    tmp_path: Path, change: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """It does not keep the coordinator from its start, which names it, nor from others; no end of one removes it."""
    kept = RunStore(tmp_path)
    kept.begin(record(TWO), on_saved=nobody)(DONE)
    run = kept.begin(record(), on_saved=nobody)
    run(PLAN)
    run(DONE)
    kept.close()
    path = tmp_path / "runs" / ONE / "run.json"
    path.write_bytes(change(path.read_bytes()))
    before = path.read_bytes()
    again = RunStore(tmp_path)
    assert list(again.records()) == [TWO]
    assert ONE in caplog.text
    again.close()
    assert path.read_bytes() == before
    assert read(tmp_path / "runs" / ONE / "events") == [PLAN, DONE]


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


SMALL_JOB = job()
TWO_NODES = two_nodes()
RESTART_S = 1_000_000.0


def run_id(number: int) -> str:
    """The id of the n-th run."""
    return f"r20260102-00{number:04d}-00000000"


def interrupted(number: int, *, saved_step: int = 4, **changes: Any) -> RunRecord:
    """A run that was under way when its coordinator ended, ten seconds ago."""
    values: dict[str, Any] = {
        "first_run": run_id(1),
        "model": "tiny",
        "method": "ringada",
        "submitted_by": "ann@desk",
        "started_unix_s": RESTART_S - 1000 + number,
        "state": "interrupted",
        "ended_unix_s": RESTART_S - 10,
        "num_steps": 8,
        "saved_step": saved_step,
        **changes,
    }
    return RunRecord(run_id=run_id(number), **values)


def chosen(*records: RunRecord, within_s: float = 60.0) -> str:
    """The run that is taken up; empty if none is."""
    found = run_to_resume({record.run_id: record for record in records}, now_unix_s=RESTART_S, within_s=within_s)
    return found.run_id if found else ""


def test_newest_run_is_taken_up_if_it_was_interrupted() -> None:
    """One that was stopped, failed or is done ended by itself or by a word; an older one was given up by its user."""
    assert chosen() == ""
    assert chosen(interrupted(1)) == run_id(1)
    assert chosen(interrupted(1), interrupted(2)) == run_id(2)
    for state in ("done", "stopped", "failed"):
        assert chosen(interrupted(1), interrupted(2, state=state)) == ""
    # Ten seconds ago: within a minute, not within five seconds; 0 = never
    assert chosen(interrupted(1), within_s=60.0) == run_id(1)
    assert chosen(interrupted(1), within_s=5.0) == ""
    assert chosen(interrupted(1), within_s=0.0) == ""


def test_run_that_was_taken_up_is_not_taken_up_again() -> None:
    """Also if the clock went back between the two, as on a board that wakes up without one."""
    late = interrupted(2, takes_up=run_id(1), started_unix_s=1.0)
    assert chosen(interrupted(1), late) == run_id(2)
    assert chosen(interrupted(1), replace(late, state="failed")) == ""
    records = {record.run_id: record for record in (interrupted(1), late, interrupted(3, takes_up=run_id(2)))}
    assert resumed_by(records, run_id(1)) == late
    assert resumed_by(records, run_id(3)) is None
    assert last_of(records, run_id(1)) == run_id(3) == last_of(records, run_id(3))


def test_run_is_taken_up_some_times_without_a_new_checkpoint() -> None:
    """After three times in vain it may be the run that ends coordinators; a checkpoint in between counts anew.

    So does a turn that has ended, of a run without checkpoints.
    """

    def attempts(*steps: int, kept: bool = False) -> list[RunRecord]:
        reached = [{"saved_step": -1, "kept_step": step} if kept else {"saved_step": step} for step in steps]
        later = (interrupted(at, takes_up=run_id(at - 1), **each) for at, each in enumerate(reached[1:], 2))
        return [interrupted(1, **reached[0]), *later]

    assert MAX_IN_VAIN == 3
    assert chosen(*attempts(4, 4, 4)) == run_id(3)
    assert chosen(*attempts(4, 4, 4, 4)) == ""
    assert chosen(*attempts(4, 4, 4, 6)) == run_id(4)
    assert chosen(*attempts(-1, -1, -1, -1)) == "", "without checkpoints it begins anew each time"
    assert chosen(*attempts(4, 6, 8, 10, 12, kept=True)) == run_id(5)
    assert chosen(*attempts(4, 4, 4, 4, kept=True)) == ""


def manifest(step: int) -> CheckpointManifest:
    """A checkpoint."""
    return CheckpointManifest(
        run_id=run_id(1),
        plan_digest=TWO_NODES.digest,
        job_digest=job_digest(SMALL_JOB),
        model_digest="m",
        step=step,
        holder=TWO_NODES.nodes[0],
        shards=tuple(Shard(node=node, sha256="0" * 64, size_bytes=1) for node in TWO_NODES.nodes),
    )


def saved(step: int) -> control_pb2.RunEvent:
    """The event of a checkpoint."""
    return control_pb2.RunEvent(checkpoint_json=json.dumps(manifest(step).to_json()))


PLANNED = control_pb2.RunEvent(plan_json=json.dumps(TWO_NODES.to_json()))
REQUEST = RunRequest(job=SMALL_JOB, num_nodes=2, join_s=5.0, choices=Choices((2, 4), ()), submitted_by="ann@desk")


def test_run_goes_on_from_its_newest_checkpoints_with_its_own_plan() -> None:
    """The two newest; what was chosen in planning is in the plan."""
    events = [PLANNED, saved(2), saved(4), saved(6)]
    found = resume_request(REQUEST, interrupted(1), events)
    assert found.resume == Resume(plan=TWO_NODES, manifests=(manifest(6), manifest(4)))
    assert (found.plan, found.choices, found.join_s) == (None, Choices((), ()), NODES_S)
    assert (found.job, found.submitted_by) == (SMALL_JOB, "ann@desk")


def test_run_that_went_on_before_goes_on_from_what_came_before_it() -> None:
    """Until it has a checkpoint of its own; newer ones than that from which it went on were damaged."""
    lengths = (Length.of(SMALL_JOB),)
    before = REQUEST._replace(resume=Resume(plan=TWO_NODES, manifests=(manifest(6), manifest(4)), lengths=lengths))
    at_once = resume_request(before, interrupted(2), [])
    assert at_once.resume == before.resume
    resumed = control_pb2.RunEvent(resumed_json=json.dumps({"step": 4, "passed_over": ["6 is damaged"]}))
    later = resume_request(before, interrupted(2), [PLANNED, resumed, saved(8)])
    assert later.resume == Resume(plan=TWO_NODES, manifests=(manifest(8), manifest(4)), lengths=lengths)


def kept_turn(step: int, *, attempt: int = 1, **changes: Any) -> control_pb2.RunEvent:
    """The event of a turn that every node kept."""
    found = replace(manifest(step), shards=(), attempt=run_id(attempt), **changes)
    return control_pb2.RunEvent(kept_turn_json=json.dumps(found.to_json()))


def steps_of(request: RunRequest) -> list[tuple[int, bool]]:
    """The steps that a request may go on from, and whether each is a checkpoint."""
    assert request.resume is not None
    return [(one.step, bool(one.shards)) for one in request.resume.manifests]


def test_run_goes_on_from_the_newest_turn_that_all_nodes_kept() -> None:
    """As many turns as nodes keep, with the checkpoints between them; of one step the checkpoint comes first."""
    events = [PLANNED, *(kept_turn(step) for step in (1, 2, 3)), saved(3), *(kept_turn(step) for step in (4, 5))]
    found = resume_request(REQUEST, interrupted(1), [*events, kept_turn(6), saved(6)])
    assert steps_of(found) == [(6, True), (6, False), (5, False), (4, False), (3, True)]
    assert (found.plan, found.choices) == (None, Choices((), ()))
    resumed = control_pb2.RunEvent(resumed_json=json.dumps({"step": 4, "saved_step": 3, "passed_over": []}))
    later = resume_request(
        REQUEST._replace(resume=found.resume), interrupted(2), [PLANNED, resumed, kept_turn(5, attempt=2)]
    )
    assert steps_of(later) == [(5, False), (4, False), (3, True)]
    assert later.resume is not None and later.resume.manifests[0].attempt == run_id(2)


def test_turn_that_nodes_kept_goes_on_with_the_table_that_held_at_its_end() -> None:
    """The newest one that was chosen before its end: of this run, else of the one that it resumed."""
    tables = [table_of(TWO_NODES.course, seed) for seed in range(3)]

    def chosen(step: int, table: Operations) -> control_pb2.RunEvent:
        found = ScheduledTable(step=step, operations=table)
        return control_pb2.RunEvent(operations_json=json.dumps(found.to_json()))

    events = [PLANNED, chosen(0, tables[0]), kept_turn(2), chosen(2, tables[1]), kept_turn(4), chosen(4, tables[2])]
    found = resume_request(REQUEST, interrupted(1), events)
    assert in_force(found) == {4: tables[1], 2: tables[0]}
    resumed = control_pb2.RunEvent(resumed_json=json.dumps({"step": 4, "saved_step": -1, "passed_over": []}))
    again = [PLANNED, resumed, kept_turn(6, attempt=2), chosen(6, tables[2]), kept_turn(8, attempt=2)]
    later = resume_request(REQUEST._replace(resume=found.resume), interrupted(2), again)
    assert in_force(later) == {8: tables[2], 6: tables[1], 4: tables[1]}


def in_force(request: RunRequest) -> dict[int, Operations | None]:
    """The table of each step that a request may go on from."""
    assert request.resume is not None
    return {one.step: one.operations for one in request.resume.manifests}


def test_run_without_a_checkpoint_goes_on_from_its_last_turns_or_begins_as_it_was_asked_to() -> None:
    """What its nodes have lost is planned and trained anew, so what was asked stays in the request."""
    given = GivenPlan(plan=TWO_NODES)
    found = resume_request(
        REQUEST._replace(plan=given), interrupted(1, saved_step=-1), [PLANNED, kept_turn(2), kept_turn(4)]
    )
    assert steps_of(found) == [(4, False), (2, False)]
    assert (found.plan, found.choices) == (given, REQUEST.choices)


def test_run_without_a_checkpoint_begins_anew_with_its_nodes() -> None:
    """Those that were asked about themselves, or of the given plan; a number of nodes where none was there yet."""
    begun = interrupted(1, saved_step=-1, nodes=("a", "b"))
    anew = resume_request(REQUEST._replace(num_nodes=0), begun, [PLANNED])
    assert (anew.resume, anew.nodes, anew.choices, anew.join_s) == (None, ("a", "b"), REQUEST.choices, NODES_S)
    given = GivenPlan(plan=TWO_NODES)
    with_plan = resume_request(REQUEST._replace(plan=given, join_s=1e6), begun, [PLANNED])
    assert (with_plan.plan, with_plan.nodes, with_plan.join_s) == (given, (), 1e6)
    again = resume_request(anew, interrupted(2, saved_step=-1), [])
    assert again.nodes == ("a", "b"), "it was interrupted once more before they were there"
    waiting = interrupted(1, saved_step=-1)
    assert resume_request(REQUEST, waiting, []).num_nodes == 2
    with pytest.raises(UsageError, match="had no nodes yet; submit it again"):
        resume_request(REQUEST._replace(num_nodes=0), waiting, [])
