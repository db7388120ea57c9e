"""``ringtune.train`` on this machine: what a page shows, and the process in the background, without real nodes."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

import ringtune
from coordinator.api import train
from coordinator.api.arguments import typed
from coordinator.client.run_folder import RunFolder
from coordinator.client.saved_run import RunLocation
from coordinator.screen.progress import Progress
from ringtune.job.job import load_job
from tests.support.model_folder import write_model

CALL_S = 30.0


class Notes(Progress):
    """Remembers what is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def note(self, text: str) -> None:
        """Remember it."""
        self.told.append(text)

    def state(self, state: str) -> None:
        """Remember it, too."""
        self.told.append(state)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """The file of a job with a model and two rows."""
    write_model(tmp_path / "tiny")
    (tmp_path / "train.csv").write_text("text,label\na fine film,good\na bad one,bad\n")
    path = tmp_path / "job.toml"
    path.write_text('[model]\npath = "tiny"\n[data]\ntrain = "train.csv"\n[train]\nbatch_size = 4\nmax_length = 8\n')
    return path


def test_train_shows_a_local_run_on_a_page(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is there before nodes join, its address is told, and its token is in the file that was named."""
    pytest.importorskip("uvicorn")
    notes = Notes()

    def follow(request: Any, folder: RunFolder, ring: train.Ring, *_: object, **__: object) -> None:
        with folder, ring(notes):
            address = next(found[0] for text in notes.told if (found := re.search(r"http://\S+", text)))
            with urlopen(address, timeout=CALL_S) as page:  # noqa: S310 - this very machine
                assert page.status == 200

    monkeypatch.setattr(train, "_follow", follow)
    monkeypatch.setattr(train, "LocalNodes", lambda *_, **__: contextlib.nullcontext())
    ringtune.train(job, local=2, out=tmp_path / "out", web="127.0.0.1:0", web_token=tmp_path / "token")
    assert notes.told[0] == "starting 2 local nodes"


def test_train_in_the_background_is_a_command_with_the_job_in_a_file(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Python with every option that counts there; from the command line as it was typed, and no second time."""
    began: list[list[str]] = []

    def start(out: Path, words: Sequence[str]) -> tuple[RunLocation, subprocess.Popen[bytes]]:
        began.append(list(words))
        place = RunLocation(run_id="r", coordinator="127.0.0.1:1", is_local=True, pid=1)
        return place, subprocess.Popen([sys.executable, "-S", "-c", ""])

    monkeypatch.setattr(train, "start_in_background", start)
    options: dict[str, Any] = {"local": 2, "wait": False, "wire": "bfloat16", "train__rounds": 3}
    run = ringtune.train(job, out=tmp_path / "a", **options)
    assert run._process is not None and run._process.wait(CALL_S) == 0
    assert load_job(tmp_path / "a/job.toml").train.rounds == 3
    words = ["train", str(tmp_path / "a/job.toml"), "--local", "2", "--out", str(tmp_path / "a")]
    assert began == [[*words, "--wire", "bfloat16"]]
    face = train.Face(show=Progress, resume_hint=str, words=["train", "j", "--detach", "--replace"])
    run = typed(ringtune.train)(job, out=tmp_path / "b", progress=face, **options)
    assert run._process is not None and run._process.wait(CALL_S) == 0
    assert began[1:] == [["train", "j", "--detach"]]
    assert load_job(tmp_path / "b/job.toml").train.rounds == 3
