"""``ringtune page`` and ``--web``: what is refused at once, and a page that is served by real processes."""

from __future__ import annotations

import json
import signal
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ringtune import cli
from tests.coordinator.web.test_feeds import begun
from tests.support.fake_agents import JOB_TEXT
from tests.support.processes import start_ringtune

WAIT_S = 60.0


def told(*words: str, code: int = 2) -> str:
    """What a command says that ends with a code."""
    result = CliRunner().invoke(cli.app, list(words))
    assert result.exit_code == code, result.output
    return result.output


def test_page_of_a_folder_that_is_gone_is_refused(tmp_path: Path) -> None:
    """In one sentence."""
    assert "the run is gone, or never was there" in told("page", str(tmp_path / "gone")).replace("\n", " ")


def test_page_at_a_wrong_address_is_refused(tmp_path: Path) -> None:
    """As everywhere."""
    assert "is not HOST:PORT" in told("page", str(begun(tmp_path / "run", 1)), "--web", "nowhere")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--coordinator", "127.0.0.1:1", "--web", "127.0.0.1:0"), "--web is for --local"),
        (("--local", "2", "--log", "wandb"), "is not one of tensorboard"),
        (("--coordinator", "127.0.0.1:1", "--detach", "--log", "tensorboard"), "leave out --detach"),
    ],
)
def test_train_refuses_pages_and_logs_that_can_not_be_had(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    """Before anything is started, and before the coordinator is asked."""
    job = tmp_path / "job.toml"
    job.write_text(JOB_TEXT)
    assert message in told("train", str(job), "--out", str(tmp_path / "run"), *words)


def test_page_of_a_folder_is_served_until_it_is_stopped(tmp_path: Path) -> None:
    """The printed address answers with the run; SIGTERM ends it in order."""
    process = start_ringtune("page", begun(tmp_path / "run", 3), "--web", "127.0.0.1:0", "--json")
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        with urllib.request.urlopen(f"{url}api/state", timeout=WAIT_S) as answer:  # noqa: S310 - our own address
            state = json.load(answer)
        assert state["run"]["num_steps"] == 8
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.communicate()
