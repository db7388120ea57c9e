"""The process that answers, played by a script: what it is sent, how it ends, and what is told when it fails."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from coordinator.api import text_process
from coordinator.api.text_process import Ready, TextProcess, without_oldest
from coordinator.client.saved_run import SavedRun, read_run
from ringtune.errors import DeadlineError, InvalidInputError, PeerLostError, UsageError
from tests.support.cases import cases
from tests.support.saved_runs import texts_instead, write_run

READY = Ready(has_template=True, longest=64, reads=64, cache_bytes=3 << 20, temperature=0.5, told="a note")
HEAD = f"""
import json, select, sys, time
def say(**event): print(json.dumps(event), flush=True)
def take(): return json.loads(sys.stdin.readline())
say(ready={READY._asdict()})
"""
ECHO = """
while True:
    asked = take()
    say(id=asked["id"], began={})
    while not (stopped := bool(select.select([sys.stdin], [], [], 0)[0])) and asked["prompt"] == "on":
        say(id=asked["id"], piece="x")
    if stopped:
        assert take() == {"stop": asked["id"]}
    say(id=asked["id"], ended={"why": "stopped" if stopped else asked["prompt"]})
"""


@pytest.fixture
def run(tmp_path: Path) -> SavedRun:
    """A run that learned to write."""
    return read_run(texts_instead(write_run(tmp_path / "run")))


def ctrl_c() -> None:
    """Ctrl-C by the user."""
    raise KeyboardInterrupt


def played(code: str, run: SavedRun, monkeypatch: pytest.MonkeyPatch, wait_s: float = 60.0) -> TextProcess:
    """The process, with some code in place of a model."""
    monkeypatch.setattr(text_process, "command_of", lambda *_: [sys.executable, "-S", "-c", code])
    process = TextProcess(run)
    process._wait_s = wait_s
    return process


def test_answer_that_is_left_ends_before_the_next_one(run: SavedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its next token, or after it if a second Ctrl-C does not wait for that; afterwards no process is left."""
    with played(HEAD + ECHO, run, monkeypatch) as process:
        assert process.ready == READY
        for _ in range(3):
            left = process.answer({"prompt": "on"})
            assert [next(left)["id"], next(left)["piece"]] == [process._count, "x"]
            left.close()  # type: ignore[attr-defined]
            *_, last = process.answer({"prompt": "once"})
            assert last["ended"] == {"why": "once"}
        with monkeypatch.context() as twice:
            left = process.answer({"prompt": "on"})
            assert "began" in next(left)
            twice.setattr(process, "_next", ctrl_c)
            with pytest.raises(KeyboardInterrupt):
                next(left)
        *_, last = process.answer({"prompt": "once"})
        assert last["ended"] == {"why": "once"}
    lines = process._process
    assert lines._process.returncode is not None and not lines._log.parent.exists()
    assert process.ready.lines() == ["texts of at most 64 tokens, keys and values of at most 3.0 MiB", "a note"]


@cases(
    ("code", "kind", "told"),
    [
        ("import sys; sys.stderr.write('error: no tensor x\\n'); sys.exit(5)", InvalidInputError, "no tensor x"),
        ("import os; os.kill(os.getpid(), 9)", PeerLostError, "SIGKILL"),
        ("import time; time.sleep(600)", DeadlineError, r"waited 0\.5 s .* raise runtime\.wait_s"),
    ],
)
def test_model_that_can_not_be_loaded_is_told(
    code: str, kind: type[Exception], told: str, run: SavedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the error of the process; none is left."""
    process = played(code, run, monkeypatch, 0.5 if kind is DeadlineError else 60.0)
    with pytest.raises(kind, match=told):
        process.__enter__()
    assert process._process._process.returncode is not None


def test_process_that_ends_in_an_answer_is_told_each_time(run: SavedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """To whoever waits, and to whoever asks later."""
    with played(HEAD + "asked = take(); say(id=1, began={})", run, monkeypatch) as process:
        for _ in range(2):
            with pytest.raises(PeerLostError, match="the process that writes texts has ended"):
                list(process.answer({"prompt": "once"}))


def test_run_that_writes_no_text_is_refused(tmp_path: Path) -> None:
    """With what it did learn, and the command for it."""
    with pytest.raises(UsageError, match="learned sequence-classification, which writes no text; 'ringtune predict'"):
        TextProcess(read_run(write_run(tmp_path / "run")))


def test_oldest_messages_are_those_behind_the_system_message() -> None:
    """As many as the process has left out."""
    messages: list[Any] = [{"role": role} for role in ("system", "user", "assistant", "user")]
    assert without_oldest(messages, 2) == [messages[0], messages[3]]
    assert without_oldest(messages[1:], 2) == [messages[3]]
    assert without_oldest(messages, 0) == messages
