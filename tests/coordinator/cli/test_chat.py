"""``ringtune chat`` and ``serve`` in front of answers that a script gives: what is asked, shown, kept and told."""

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
from coordinator.cli.chat import MAX_CHARACTERS, ChatSession
from coordinator.server.coordinator import ShutdownSignals
from coordinator.web import completions
from ringtune.errors import DataError, PeerLostError, UsageError
from tests.support.cases import cases
from tests.support.saved_runs import write_run
from tests.support.typed import run_alone

HOW = {"max_new_tokens": 9, "temperature": None, "seed": 5}


class Script:
    """Answers from a list: pieces, a reason of refusal, or Ctrl-C after the pieces."""

    def __init__(self, *answers: Any, has_template: bool = True, **ended: Any) -> None:
        self.ready = Ready(has_template=has_template, longest=64, reads=64, cache_bytes=0, temperature=0.0, told="")
        self.requests: list[Mapping[str, Any]] = []
        self._answers, self._ended = iter(answers), {"why": "end", "forgotten": 0, **ended}

    def answer(self, request: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Yield the events of the next answer."""
        self.requests.append(request)
        pieces = next(self._answers)
        if isinstance(pieces, str):
            yield {"refused": pieces}
            return
        yield {"began": {"prompt_tokens": 3, "forgotten": self._ended["forgotten"]}}
        for piece in pieces:
            if piece is KeyboardInterrupt:
                raise KeyboardInterrupt
            yield {"piece": piece}
        yield {"ended": {"why": self._ended["why"], "tokens": len(pieces)}}


def talk(script: Script, system: str = "") -> tuple[ChatSession, list[str]]:
    """A conversation, and what it shows."""
    shown: list[str] = []
    return ChatSession(script, HOW, system, show=shown.append), shown


def asked(user: str, *before: str, system: str = "") -> list[dict[str, str]]:
    """Messages up to a question."""
    head = [{"role": "system", "content": system}] if system else []
    turns = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate([*before, user])]
    return head + turns


def test_answers_appear_in_pieces_and_stay_in_the_conversation() -> None:
    """Until it is begun anew, or a command ends it; blank lines ask nothing, and each answer has draws of its own."""
    script = Script(["hel", "lo "], ["yes"], ["no"])
    conversation, shown = talk(script, "be w1")
    found = conversation.take("hi\n", is_lenient=True)
    assert found == {"text": "hello ", "tokens": 2, "why": "end", "forgotten": 0, "prompt_tokens": 3}
    assert shown == ["hel", "lo ", "\n"]
    assert conversation.take("  \n", is_lenient=True) == {}
    conversation.take("and?", is_lenient=True)
    assert conversation.take("/reset", is_lenient=True) == {}
    conversation.take("anew", is_lenient=True)
    assert [request["messages"] for request in script.requests] == [
        asked("hi", system="be w1"),
        asked("and?", "hi", "hello", system="be w1"),
        asked("anew", system="be w1"),
    ]
    assert [request["seed"] for request in script.requests] == [5, 6, 7]
    assert all(request["may_forget"] and request["max_new_tokens"] == 9 for request in script.requests)
    assert conversation.take("/exit", is_lenient=True) is None


def test_stopped_answer_stays_as_far_as_it_went(capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C before the first piece leaves nothing; a filter ends with it."""
    script = Script(["so ", "far", KeyboardInterrupt], [KeyboardInterrupt], ["x"])
    conversation, _ = talk(script)
    for line in ("one", "two", "three"):
        conversation.take(line, is_lenient=True)
    assert script.requests[-1]["messages"] == asked("three", "one", "so far")
    assert capsys.readouterr().err == "(stopped)\n(stopped)\n"
    with pytest.raises(KeyboardInterrupt):
        talk(Script(["so ", KeyboardInterrupt]))[0].take("one", is_lenient=False)


def test_messages_that_were_left_out_are_told_and_not_asked_again(capsys: pytest.CaptureFixture[str]) -> None:
    """The system message stays; so is an answer that was cut, and an empty one."""
    script = Script(["1"], ["2"], ["3"], [" "], forgotten=2, why="length")
    conversation, _ = talk(script, "be w1")
    conversation.messages += asked("b", "a")[:1] + asked("b", "a")[1:]
    conversation.take("c", is_lenient=True)
    assert conversation.messages == [*asked("c", system="be w1"), {"role": "assistant", "content": "1"}]
    assert capsys.readouterr().err == "(the conversation no longer fits: its 2 oldest messages were left out)\n"
    script = Script(["1"], [" "], why="length")
    conversation, _ = talk(script)
    conversation.take("c", is_lenient=True)
    conversation.take("d", is_lenient=True)
    assert conversation.messages == [*asked("c"), {"role": "assistant", "content": "1"}]
    assert "the answer was cut: --max-new-tokens" in capsys.readouterr().err


def test_line_that_can_not_be_answered_is_forgotten_or_ends_a_filter(capsys: pytest.CaptureFixture[str]) -> None:
    """With the reason; a line without end is not read by the model."""
    script = Script("too long; shorten it", ["x"], "too long; shorten it")
    conversation, _ = talk(script)
    assert conversation.take("a", is_lenient=True) == {}
    assert capsys.readouterr().err == "(too long; shorten it)\n"
    conversation.take("b", is_lenient=True)
    assert script.requests[-1]["messages"] == asked("b")
    with pytest.raises(DataError, match="too long; shorten it"):
        conversation.take("c", is_lenient=False)
    with pytest.raises(DataError, match="a line has 1,048,577 characters"):
        conversation.take("x" * (MAX_CHARACTERS + 1), is_lenient=False)


@cases(
    ("piece", "shown"),
    [
        ("\x1b[2J", "\\x1b[2J"),
        ("a\tb\nc", "a\tb\nc"),
        ("\x9b1m\r\x07", "\\x9b1m\\r\\x07"),
        ("\u202eabc", "\\u202eabc"),
        ("\U0001f468\u200d\U0001f469 é", "\U0001f468\u200d\U0001f469 é"),
    ],
)
def test_terminal_obeys_no_sign_of_an_answer(piece: str, shown: str) -> None:
    """Escape sequences are shown as text; the conversation has them as they are."""
    conversation, found = talk(Script([piece]))
    conversation.take("a", is_lenient=True)
    assert found == [shown, "\n"]
    assert conversation.messages[-1]["content"] == piece.strip()


def test_model_without_template_continues_each_line() -> None:
    """By itself; a system message has no place."""
    script = Script(["a"], ["b"], has_template=False)
    conversation, _ = talk(script)
    for line in ("once upon", " a time"):
        conversation.take(line, is_lenient=True)
    assert [request["prompt"] for request in script.requests] == ["once upon", " a time"]
    with pytest.raises(UsageError, match="no chat template, so that --system"):
        talk(script, "be w1")


WAIT_S = 20.0


class Served:
    """A process whose model says one word, or is lost."""

    ready = Ready(has_template=False, longest=64, reads=64, cache_bytes=0, temperature=0.0, told="a note")

    def __init__(self, *_: object, **__: object) -> None:
        return

    def __enter__(self) -> Served:
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

    monkeypatch.setattr(text_process, "TextProcess", Served)
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
