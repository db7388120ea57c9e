"""``ringtune serve`` with a script in place of the model: address, token, end, and what it needs."""

from __future__ import annotations

import importlib.util
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from coordinator.api import text_process
from coordinator.api.text_process import Ready
from coordinator.server.coordinator import ShutdownSignals
from coordinator.web import completions
from ringtune.errors import PeerLostError
from tests.support.saved_runs import write_run
from tests.support.typed import run_alone

WAIT_S = 20.0


class Script:
    """A process whose model says one word, or is lost."""

    ready = Ready(has_template=False, longest=64, reads=64, cache_bytes=0, temperature=0.0, told="a note")

    def __init__(self, *_: object, **__: object) -> None:
        return

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def answer(self, request: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Answer a prompt."""
        if request["prompt"] == "lost":
            raise PeerLostError("the process was ended by SIGKILL")
        yield {"began": {"prompt_tokens": 1, "forgotten": 0}}
        yield {"piece": "word"}
        yield {"ended": {"why": "end", "tokens": 1}}


@pytest.fixture
def statuses(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Ask the served API for its model without a token and with ``token``, or for ``prompt``, and then end it."""
    asked: dict[str, Any] = {"token": "", "prompt": "", "found": []}
    servers: list[completions.CompletionsServer] = []

    class Noted(completions.CompletionsServer):
        def __enter__(self) -> Noted:
            super().__enter__()
            servers.append(self)
            return self

    def wait(self: ShutdownSignals) -> bool:
        address, headers = servers[-1].address.replace("0.0.0.0", "127.0.0.1"), {"content-type": "application/json"}  # noqa: S104
        if asked["prompt"]:
            body = json.dumps({"prompt": asked["prompt"]}).encode()
            asked["found"].append(status(f"http://{address}/v1/completions", headers, body))
            return False
        for token in ("", asked["token"] or servers[-1]._completions._name):
            headers["authorization"] = f"Bearer {token}"
            asked["found"].append(status(f"http://{address}/v1/models", headers))
        self.by_ctrl_c = True
        return True

    monkeypatch.setattr(text_process, "TextProcess", Script)
    monkeypatch.setattr(completions, "CompletionsServer", Noted)
    monkeypatch.setattr(ShutdownSignals, "wait", wait)
    return asked


def status(url: str, headers: Mapping[str, str], body: bytes | None = None) -> int:
    """Status of an answer."""
    request = urllib.request.Request(url, body, dict(headers))  # noqa: S310 - our own address
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:  # noqa: S310
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_address_is_told_and_ctrl_c_ends_it(tmp_path: Path, statuses: dict[str, Any]) -> None:
    """On this machine nobody is asked for a token."""
    done = run_alone("serve", write_run(tmp_path / "june"), "--bind", "127.0.0.1:0")
    assert (done.returncode, statuses["found"]) == (130, [200, 200])
    first, note, served = done.stdout.splitlines()
    assert first.startswith("texts of at most 64 tokens, no keys and values are kept") and note == "a note"
    assert served.startswith("model 'june' at http://127.0.0.1:") and "one request at a time" in served


def test_token_is_asked_for_beyond_this_machine_or_if_it_is_given(tmp_path: Path, statuses: dict[str, Any]) -> None:
    """A new one is printed; one in a file, made if it is not there, is not."""
    run, file = write_run(tmp_path / "june"), tmp_path / "token"
    done = run_alone("serve", run, "--bind", "0.0.0.0:0", "--json")
    told = json.loads(done.stdout.splitlines()[0])
    assert (told["event"], told["model"], statuses["found"]) == ("serving", "june", [401, 401])
    assert len(told["token"]) > 20 and "//0." not in told["url"]
    done = run_alone("serve", run, "--bind", "127.0.0.1:0", "--token", file)
    statuses["token"] = file.read_text()
    assert statuses["token"] not in done.stdout
    done = run_alone("serve", run, "--bind", "127.0.0.1:0", "--token", file)
    assert statuses["found"][-2:] == [401, 200] and "token:" not in done.stdout
    assert "'localhost' is not HOST:PORT, e.g. 127.0.0.1:8080" in run_alone("serve", run, "--bind", "localhost").stderr


def test_process_that_is_lost_ends_the_command(tmp_path: Path, statuses: dict[str, Any]) -> None:
    """With its error, after whoever asked has got it."""
    statuses["prompt"] = "lost"
    done = run_alone("serve", write_run(tmp_path / "june"), "--bind", "127.0.0.1:0")
    assert (done.returncode, statuses["found"]) == (4, [500])
    assert "the process was ended by SIGKILL" in done.stderr


def test_extra_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a model is loaded."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = run_alone("serve", tmp_path)
    assert done.returncode == 2 and "the API needs starlette, uvicorn" in done.stderr and "[web]" in done.stderr
