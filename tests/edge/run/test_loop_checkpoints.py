"""Saving in the middle of a run: durable before it is reported, named when it fails, replayable afterwards."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from edge.run import reporter as rp
from edge.run.partners import ShardSink
from edge.run.recorder import record_line
from edge.shards.saver import Saver
from ringtune.engine.handled import Handled
from ringtune.errors import StorageError
from ringtune.rounds.checkpoint import Shard
from ringtune.schedule.turns.turns import StartPoint, StepKind, turn_sequence
from tests.support.fakes import FakeRing, KeptReports
from tests.support.plans import make_plan
from tests.support.replay import replay

RUN = "r20260101-000000-00000000"
PLAN = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"], num_steps=8, checkpoint_every=2)


@pytest.fixture
def savers(tmp_path: Path) -> Iterator[dict[str, Saver]]:
    """Folders of both nodes; let go in the end."""
    made = {node: Saver(tmp_path / node, RUN, PLAN, node) for node in PLAN.nodes}
    yield made
    for saver in made.values():
        saver.close()


class FullDisk:
    """Saves nothing."""

    def save(self, step: int, executor: object, *, with_head: bool) -> Shard:
        """There is no room."""
        raise StorageError(f"node b did not save step {step}: No space left on device")

    def keep_from(self, step: int) -> None:
        """Nothing to drop."""


def failure_of(reports: KeptReports) -> rp.Failed:
    """What a node failed with."""
    assert reports.wait_for(lambda entries: any(isinstance(entry, rp.Failed) for entry in entries))
    (failed,) = reports.of(rp.Failed)
    assert isinstance(failed, rp.Failed)
    return failed


def test_run_reports_a_turn_as_done_after_its_shard_is_on_disk(tmp_path: Path, savers: dict[str, Saver]) -> None:
    """Each node saves each checkpoint once, the owner of the turn with the head."""
    ring = FakeRing(PLAN, savers=savers)
    ring.start()
    turns = ring.grant_all()
    assert ring.wait_done(len(turns))
    checkpoints = [turn for turn in turns if turn.kind is StepKind.CHECKPOINT]
    for node, reports in ring.reports.items():
        entries = list(reports.entries)
        saved = reports.of(rp.ShardSaved)
        assert [(entry.turn, entry.step) for entry in saved] == [(turn.index, turn.first_step) for turn in checkpoints]
        for entry, turn in zip(saved, checkpoints, strict=True):
            assert entries.index(entry) < entries.index(rp.TurnDone(turn.index))
            content = (tmp_path / node / RUN / f"step-{entry.step}.safetensors").read_text()
            assert f'"head": {str(turn.owner == node).lower()}' in content
            assert entry.shard.size_bytes == len(content)
    assert ring.close()


def test_run_frees_the_state_of_a_head_that_went_but_never_before_it_is_saved(savers: dict[str, Saver]) -> None:
    """A head may be sent ahead of the checkpoint that its last owner still has to write with it."""
    ring = FakeRing(PLAN, savers=savers)
    ring.start()
    assert ring.wait_done(len(ring.grant_all()))
    assert ring.close()
    logs = [ring.executors[node].head_log for node in PLAN.nodes]
    assert all("dropped" in log and "saved" in log for log in logs)
    for log in logs:
        is_whole = True
        for entry in log:
            assert is_whole or entry != "saved", log
            is_whole = {"came": True, "dropped": False}.get(entry, is_whole)


def test_run_drops_shards_when_it_is_told(savers: dict[str, Saver]) -> None:
    """Not before: only the coordinator knows which checkpoints are complete."""
    saver = savers["a"]
    ring = FakeRing(PLAN, savers=savers)
    ring.start()
    assert ring.wait_done(len(ring.grant_all()))
    assert saver.open().steps() == (2, 4, 6, 8)
    ring.runs["a"].keep_shards_from(6)
    seen = threading.Event()
    ring.runs["a"].call(seen.set, timeout_s=5.0, what="the shards to be dropped")
    assert saver.open().steps() == (6, 8)
    assert ring.close()


@pytest.mark.parametrize(
    ("theirs", "message"),
    [({"b": FullDisk()}, "did not save step 2: No space left"), ({}, r"node b has no folder for checkpoints.*--state")],
)
def test_run_that_can_not_save_fails_with_a_name_of_its_own(
    savers: dict[str, Saver], theirs: Mapping[str, ShardSink], message: str
) -> None:
    """The coordinator hears which node, which step and why, and ends with the exit code of a full disk."""
    ring = FakeRing(PLAN, savers={"a": savers["a"], **theirs})
    ring.start()
    ring.grant_all()
    failed = failure_of(ring.reports["b"])
    assert failed.error == StorageError.__name__
    assert re.search(message, failed.message)
    assert not ring.reports["b"].of(rp.ShardSaved)
    assert ring.close()


def test_recording_of_a_resumed_run_replays(savers: dict[str, Saver]) -> None:
    """The start point is part of the recording."""
    start = StartPoint.of(PLAN.course, step=4, holder="b")
    ring = FakeRing(PLAN, savers=savers, start=start, record=True)
    ring.start()
    assert ring.wait_done(len(ring.grant_all()))
    assert ring.close()
    for node, reports in ring.reports.items():
        lines = [entry.line for entry in reports.of(rp.HeaderLine)]
        lines += [record_line(*entry) for entry in reports.of(Handled)]
        assert replay(lines, PLAN, node) > len(list(turn_sequence(PLAN.course, start=start)))
