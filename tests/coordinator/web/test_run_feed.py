"""A page of a run that a coordinator keeps: all of it, also while it goes on, and one sentence where it is gone."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from typer.testing import CliRunner

from coordinator.submit.client import Client
from coordinator.web.page_state import PageState
from coordinator.web.run_feed import RunFeed
from coordinator.web.watching import Watching
from ringtune import cli
from tests.support.fake_agents import CALL_S, job
from tests.support.kept_runs import Gate, ended, keeping, start

GONE = "r20260101-000000-00000000"


def followed(client: Client, run_id: str) -> RunFeed:
    """The feed of a kept run, as the command makes it."""
    return RunFeed(lambda: client.events(run_id, wait=True, whole=True, with_files=False))


def until(watching: Watching, is_shown: Callable[[PageState], bool]) -> None:
    """Look until something is shown."""
    deadline_s, now_s = time.monotonic() + CALL_S, 0.0
    while not is_shown(watching.state):
        assert time.monotonic() < deadline_s
        now_s += 1.0
        watching.tick(now_s)
        time.sleep(0.01)


def test_page_of_a_kept_run_shows_what_it_did_and_what_comes(tmp_path: Path) -> None:
    """One that goes on is followed, and left when the page ends; a finished one is all there."""
    gate = Gate()
    with keeping(tmp_path / "kept", gate) as cluster, Client(cluster.server.address) as client:
        run_id = start(client, job())
        assert gate.reached.wait(CALL_S)
        with followed(client, run_id) as feed:
            watching = Watching(feed=feed)
            until(watching, lambda state: state.plan is not None)
            assert watching.state.steps_done == 0
            gate.open.set()
            until(watching, lambda state: state.steps_done == 8)
        assert not feed._thread.is_alive()
        ended(client, run_id)
        with followed(client, run_id) as feed:
            until(Watching(feed=feed), lambda state: state.section("run")["phase"] == "done" and state.steps_done == 8)


def test_page_says_why_nothing_more_comes(tmp_path: Path) -> None:
    """As a note on the page, which stays as it was."""
    with (
        keeping(tmp_path / "kept") as cluster,
        Client(cluster.server.address) as client,
        followed(client, GONE) as feed,
    ):
        feed._thread.join(CALL_S)
        (told,) = feed()
    assert told.note.startswith(f"nothing more comes: run {GONE} is not kept")


def test_page_of_a_run_that_is_gone_is_refused(tmp_path: Path) -> None:
    """One sentence, with the command that lists what is there; nothing is served."""
    with keeping(tmp_path / "kept") as cluster:
        found = CliRunner().invoke(cli.app, ["page", GONE, "--coordinator", cluster.server.address])
    assert found.exit_code == 2
    told = " ".join(found.output.split())
    assert f"run {GONE} is not kept there; 'ringtune runs' lists those that are" in told
