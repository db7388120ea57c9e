"""Feeds of the page: a run's folder and a run that a coordinator keeps, also while they grow."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.client.submit import Client
from coordinator.run.trace import TraceText
from coordinator.web.feeds import FolderFeed, RunFeed, trace_tail
from coordinator.web.page_state import PageState
from coordinator.web.streams import PageData
from ringtune import cli
from ringtune.engine.events import Span
from ringtune.errors import UsageError
from ringtune.schedule.actions import Action, Op
from tests.support.fake_agents import CALL_S, FakeCluster, job
from tests.support.fake_runs import run
from tests.support.kept_runs import Gate, ended, keeping, start
from tests.support.page_runs import PLAN, profile, step_line


def state_of(folder: Path) -> PageState:
    """The state that a folder makes."""
    state = PageState()
    for event in FolderFeed(folder)():
        state.take(event, None)
    return state


def begun(folder: Path, steps: int) -> Path:
    """The folder of a run that has done some steps."""
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps(PLAN.to_json()))
    (folder / "profile.json").write_text(json.dumps(profile().to_json()))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step_line(step)) + "\n" for step in range(1, steps + 1)))
    return folder


def test_folder_feed_of_a_finished_run_shows_it_as_it_was(tmp_path: Path) -> None:
    """The losses are those of metrics.jsonl, the slices those of the plan, and the run is done."""
    with FakeCluster("a", "b") as cluster:
        done = run(cluster, tmp_path / "run")
    state = state_of(tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"]
    assert steps
    assert state.curves["loss"].points() == steps
    assert state.plan == done.plan
    assert state.section("run")["phase"] == "done"


def test_folder_feed_goes_on_with_a_run(tmp_path: Path) -> None:
    """Lines that are added are shown at the next look; one that is written in part waits for its rest."""
    folder = begun(tmp_path / "run", 2)
    page_data = PageData(feed=FolderFeed(folder))
    page_data.tick(0.0)
    assert page_data.state.steps_done == 2
    text = json.dumps(step_line(3)) + "\n"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(text[:20])
    page_data.tick(2.0)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(text[20:])
    page_data.tick(4.0)
    assert page_data.state.curves["loss"].points()[-1] == (3, 1.0 + 1.0 / 3)
    assert page_data.state.section("run")["phase"] == "not finished"


def test_folder_feed_of_a_resumed_run_goes_back(tmp_path: Path) -> None:
    """Steps after the checkpoint are done again, and are there once."""
    folder = begun(tmp_path / "run", 6)
    page_data = PageData(feed=FolderFeed(folder))
    page_data.tick(0.0)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step_line(step)) + "\n" for step in (1, 2)))
    page_data.tick(2.0)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(step_line(3, loss=7.0)) + "\n")
    page_data.tick(4.0)
    state = page_data.state
    assert state.curves["loss"].points() == [(1, 2.0), (2, 1.5), (3, 7.0)]
    assert state.curves["seconds"].last == (3, 3 * step_line(1)["seconds"])
    assert state.plan is not None


def write_trace(folder: Path) -> None:
    """A trace of two items; of the last one each node has an action."""
    text = TraceText(["a", "b"], num_blocks=4, started_unix_s=100.0)
    spans = {
        "a": [Span(Action(Op.FORWARD, 0, 0, 0, 2), 100.0, 101.0), Span(Action(Op.BACKWARD, 1, 0, 0, 2), 103.0, 104.0)],
        "b": [
            Span(Action(Op.SEND, 1, 0, 2, 0, "a", "h"), 101.0, 102.0),
            Span(Action(Op.UPDATE, 1, -1, 2, 4), 102.0, 104.0),
        ],
    }
    pieces = [text.begin(), *(text.spans(node, found) for node, found in spans.items()), text.end()]
    (folder / "trace.json").write_text("".join(pieces))


def test_folder_feed_reads_the_last_step_of_a_trace(tmp_path: Path) -> None:
    """Its actions and the shares of the nodes over what the trace has."""
    folder = begun(tmp_path / "run", 8)
    write_trace(folder)
    (folder / "report.json").write_text("{}")
    state = state_of(folder)
    gantt = state.section("gantt")
    assert [span[:2] for span in gantt["spans"]] == [["b", "U"], ["a", "B"]]
    assert gantt["step"] == 8
    assert state.shares["b"] == [0.5, 0.0, 0.5]


def test_trace_tail_reads_the_end_of_a_long_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands before is left out, and the first line that is cut, too."""
    folder = begun(tmp_path / "run", 1)
    write_trace(folder)
    assert len(list(trace_tail(folder / "trace.json", 4))) == 4
    monkeypatch.setattr("coordinator.web.feeds.MAX_TRACE_BYTES", 300)
    assert [span.action.op for _, span in trace_tail(folder / "trace.json", 4)] == [Op.UPDATE]


def test_folder_feed_refuses_what_is_no_run(tmp_path: Path) -> None:
    """A folder that is gone, and one without a plan, each with a sentence of its own."""
    with pytest.raises(UsageError, match="is no folder: the run is gone"):
        FolderFeed(tmp_path / "gone")
    with pytest.raises(UsageError, match=r"has no plan\.json"):
        FolderFeed(tmp_path)


def test_folder_feed_says_once_that_its_folder_is_gone(tmp_path: Path) -> None:
    """The page stays as it was, and nothing is told again and again."""
    folder = begun(tmp_path / "run", 2)
    feed = FolderFeed(folder)
    assert len(list(feed())) > 2
    shutil.rmtree(folder)
    (told,) = feed()
    assert told.note == f"no further updates: {folder} can't be read any more (No such file or directory)"
    assert list(feed()) == []


GONE = "r20260101-000000-00000000"


def followed(client: Client, run_id: str) -> RunFeed:
    """The feed of a kept run, as the command makes it."""
    return RunFeed(lambda: client.events(run_id, wait=True, whole=True, with_files=False))


def until(page_data: PageData, is_shown: Callable[[PageState], bool]) -> None:
    """Look until something is shown."""
    deadline_s, now_s = time.monotonic() + CALL_S, 0.0
    while not is_shown(page_data.state):
        assert time.monotonic() < deadline_s
        now_s += 1.0
        page_data.tick(now_s)
        time.sleep(0.01)


def test_page_of_a_kept_run_shows_what_it_did_and_what_comes(tmp_path: Path) -> None:
    """One that goes on is followed, and left when the page ends; a finished one is all there."""
    gate = Gate()
    with keeping(tmp_path / "kept", gate) as cluster, Client(cluster.server.address) as client:
        run_id = start(client, job())
        assert gate.reached.wait(CALL_S)
        with followed(client, run_id) as feed:
            page_data = PageData(feed=feed)
            until(page_data, lambda state: state.plan is not None)
            assert page_data.state.steps_done == 0
            gate.open.set()
            until(page_data, lambda state: state.steps_done == 8)
        assert not feed._thread.is_alive()
        ended(client, run_id)
        with followed(client, run_id) as feed:
            until(PageData(feed=feed), lambda state: state.section("run")["phase"] == "done" and state.steps_done == 8)


def test_page_says_why_nothing_more_comes(tmp_path: Path) -> None:
    """As a note on the page, which stays as it was."""
    with (
        keeping(tmp_path / "kept") as cluster,
        Client(cluster.server.address) as client,
        followed(client, GONE) as feed,
    ):
        feed._thread.join(CALL_S)
        (told,) = feed()
    assert told.note.startswith(f"no further updates: run {GONE} is not stored")


def test_page_of_a_run_that_is_gone_is_refused(tmp_path: Path) -> None:
    """One sentence, with the command that lists what is there; nothing is served."""
    with keeping(tmp_path / "kept") as cluster:
        found = CliRunner().invoke(cli.app, ["page", GONE, "--coordinator", cluster.server.address])
    assert found.exit_code == 2
    told = " ".join(found.output.split())
    assert f"run {GONE} is not stored there; 'ringtune runs' lists the stored runs" in told
