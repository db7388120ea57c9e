"""The API of completions in front of answers that a script gives: its forms, its refusals, its turns, its end."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from starlette.testclient import TestClient

from coordinator.api.text_process import Ready
from coordinator.web import completions
from coordinator.web.completions import MAX_BODY_BYTES, Completions, CompletionsServer, make_app
from ringtune.errors import ConnectionFailedError, PeerLostError, RingTuneError, UsageError
from ringtune.transport.page_access import Guard
from tests.support.cases import cases

WAIT_S = 20.0
TOKEN = "a-token-of-twenty-letters"  # noqa: S105 - of a test
HELLO = [{"role": "user", "content": "hi"}]


class Script:
    """Gives the same answer to each request."""

    def __init__(self, *pieces: str, why: str = "end", has_template: bool = True) -> None:
        self.ready = Ready(has_template=has_template, longest=64, reads=64, cache_bytes=0, temperature=0.0, told="")
        self.requests: list[Mapping[str, Any]] = []
        self._pieces, self._why, self.left = pieces, why, 0
        self.going, self.may_go, self.has_left = threading.Semaphore(0), threading.Semaphore(0), threading.Event()

    def answer(self, request: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Yield the events of an answer."""
        self.requests.append(request)
        asked = request.get("prompt") or request["messages"][-1]["content"]
        if asked == "too long":
            yield {"refused": "the text has 80 tokens, and the model reads at most 64 with its answer; shorten it"}
            return
        yield {"began": {"prompt_tokens": 7, "forgotten": 0}}
        if asked == "defect":
            raise ZeroDivisionError
        if asked == "lost":
            raise PeerLostError("the process was ended by SIGKILL")
        if asked == "slow":
            self.going.release()
            assert self.may_go.acquire(timeout=WAIT_S)
        try:
            for piece in self._pieces:
                yield {"piece": piece}
        except GeneratorExit:
            self.left += 1
            self.has_left.set()
            raise
        yield {"ended": {"why": self._why, "tokens": 5}}


def client(script: Script, *, token: str = "", is_local: bool = True) -> TestClient:
    """A client of the API on this machine."""
    app = make_app(Completions(script, "run"), Guard(is_local, token))
    return TestClient(app, base_url="http://127.0.0.1:8080", raise_server_exceptions=False)


def events(text: str) -> list[Any]:
    """The data of server-sent events."""
    return [line.removeprefix("data: ") for line in text.split("\n\n") if line]


def test_answers_have_the_form_of_the_api() -> None:
    """A conversation and a text, whole; the model is named as the run."""
    here = client(script := Script("Hel", "lo"))
    found = here.post("/v1/chat/completions", json={"model": "run", "messages": HELLO, "seed": 3, "user": "me"}).json()
    assert found["id"].startswith("chatcmpl-") and isinstance(found["created"], int)
    message = {"role": "assistant", "content": "Hello"}
    assert {**found, "id": "", "created": 0} == {
        "id": "",
        "created": 0,
        "object": "chat.completion",
        "model": "run",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12},
    }
    assert script.requests[0] == {
        "messages": HELLO,
        "max_new_tokens": 4096,
        "temperature": None,
        "top_p": None,
        "top_k": None,
        "seed": 3,
        "stops": [],
        "seconds": 600.0,
    }
    here = client(script := Script("a", why="length"))
    more = {"max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": -1, "stop": "\n", "n": 1}
    found = here.post("/v1/completions", json={"prompt": ["once"], **more}).json()
    assert (found["object"], found["id"][:5]) == ("text_completion", "cmpl-")
    assert found["choices"] == [{"index": 0, "text": "a", "logprobs": None, "finish_reason": "length"}]
    assert script.requests[0] == {
        "prompt": "once",
        "max_new_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "seed": (1 << 31) - 1,
        "stops": ["\n"],
        "seconds": 600.0,
    }
    (model,) = here.get("/v1/models").json()["data"]
    assert model == here.get("/v1/models/run").json() and (model["id"], model["object"]) == ("run", "model")


def test_stream_sends_pieces_and_then_the_reason() -> None:
    """Server-sent events up to [DONE]; the counts where they are asked for."""
    here = client(Script("Hel", "lo é"))
    body = {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
    answer = here.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(answer.text)
    found = [json.loads(chunk) for chunk in chunks]
    assert done == "[DONE]" and {one["object"] for one in found} == {"chat.completion.chunk"}
    assert len({one["id"] for one in found}) == 1
    deltas = [one["choices"][0]["delta"] for one in found[:-1]]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "Hel"}, {"content": "lo é"}, {}]
    assert [one["choices"][0]["finish_reason"] for one in found[:-1]] == [None, None, None, "stop"]
    assert found[-1]["choices"] == [] and found[-1]["usage"]["total_tokens"] == 12
    *chunks, done = events(here.post("/v1/completions", json={"prompt": "once", "stream": True}).text)
    found = [json.loads(chunk) for chunk in chunks]
    assert [one["choices"][0]["text"] for one in found] == ["Hel", "lo é", ""] and "usage" not in found[0]
    assert found[-1]["choices"][0]["finish_reason"] == "stop" and found[0]["object"] == "text_completion"


@cases(
    ("body", "status", "param", "told"),
    [
        ({"messages": HELLO, "model": "gpt-4"}, 404, "model", "the model 'gpt-4' is not here; this server has 'run'"),
        ({"messages": HELLO, "model": "\ud83d"}, 404, "model", "is not here"),
        ({"messages": []}, 400, "messages", "a list with at least one message"),
        ({"messages": "hi"}, 400, "messages", "a list with at least one message"),
        ({"messages": HELLO, "n": 2}, 400, "n", "n is not built here; leave it out"),
        ({"messages": HELLO, "tools": [{}]}, 400, "tools", "tools is not built"),
        ({"messages": HELLO, "logit_bias": {"5": 1}}, 400, "logit_bias", "is not built"),
        ({"messages": HELLO, "temperature": 3}, 400, "temperature", "has to be a number in [0, 2]"),
        ({"messages": HELLO, "temperature": True}, 400, "temperature", "has to be a number"),
        ({"messages": HELLO, "temperature": 10**400}, 400, "temperature", "has to be a number"),
        ({"messages": HELLO, "temperature": math.nan}, 400, "temperature", "has to be a number"),
        ({"messages": HELLO, "top_p": "1"}, 400, "top_p", "has to be a number in [0, 1]"),
        ({"messages": HELLO, "max_tokens": 0}, 400, "max_tokens", "a whole number in [1,"),
        ({"messages": HELLO, "max_completion_tokens": 1.5}, 400, "max_completion_tokens", "a whole number"),
        ({"messages": HELLO, "seed": 1 << 70}, 400, "seed", "a whole number"),
        ({"messages": HELLO, "stop": ["a", ""]}, 400, "stop", "a text of at most 256 characters"),
        ({"messages": HELLO, "stop": list("abcde")}, 400, "stop", "at most 4 are looked for"),
        ({"messages": HELLO, "stream": "yes"}, 400, "stream", "true or false"),
        ({"messages": HELLO, "stream_options": []}, 400, "stream_options", "an object"),
        ({"messages": [{"role": "user", "content": "too long"}]}, 400, None, "80 tokens, and the model reads at most"),
        ({"messages": [{"role": "user", "content": "too long"}], "stream": True}, 400, None, "80 tokens"),
        ([], 400, None, "a JSON object"),
    ],
)
def test_wrong_request_is_refused_in_the_form_of_the_api(body: Any, status: int, param: str | None, told: str) -> None:
    """With the field and a remedy; the next one is answered."""
    here = client(Script("a"))
    answer = here.post("/v1/chat/completions", content=json.dumps(body), headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert told in error["message"]
    assert here.post("/v1/completions", json={"prompt": "once"}).status_code == 200


def test_bodies_and_paths_that_are_none_are_refused() -> None:
    """By the statuses of HTTP; null stands for nothing, and the role developer for system."""
    here = client(script := Script("a"))
    kind = {"content-type": "application/json"}
    post: Callable[..., Any] = here.post
    for content, status in ((b"{", 400), (b"\xff", 400), (b"[" * 100_000, 400), (b" " * (MAX_BODY_BYTES + 1), 413)):
        answer = post("/v1/completions", content=content, headers=kind)
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, "invalid_request_error")
    assert post("/v1/completions", content=b"{}").status_code == 415
    assert post("/v1/completions", data={"prompt": "x"}).status_code == 415
    for method, path, status in (("GET", "/", 404), ("GET", "/v1/completions", 405), ("GET", "/v1/models/x/y", 404)):
        answer = here.request(method, path)
        assert (answer.status_code, list(answer.json())) == (status, ["error"])
    for prompt in ("", [], ["a", "b"], [1, 2], None):
        assert post("/v1/completions", json={"prompt": prompt}).json()["error"]["param"] == "prompt"
    developer = [{"role": "developer", "content": "be w1"}, *HELLO]
    assert post("/v1/chat/completions", json={"messages": developer, "n": None, "stop": None}).status_code == 200
    assert script.requests[-1]["messages"] == [{"role": "system", "content": "be w1"}, *HELLO]
    plain = client(Script("a", has_template=False)).post("/v1/chat/completions", json={"messages": HELLO})
    assert plain.status_code == 400 and "use /v1/completions" in plain.json()["error"]["message"]


def test_foreign_pages_and_wrong_tokens_are_refused() -> None:
    """A name that is not this machine's, a page of another one, and beyond this machine whoever has no token."""
    here = client(Script("a"))
    assert here.get("/v1/models", headers={"host": "evil.example:8080"}).status_code == 421
    assert here.get("/v1/models", headers={"origin": "https://evil.example"}).status_code == 403
    assert here.get("/v1/models", headers={"origin": "null"}).status_code == 403
    assert here.get("/v1/models", headers={"origin": "http://localhost:3000"}).status_code == 200
    for one in (client(Script("a"), token=TOKEN), client(Script("a"), token=TOKEN, is_local=False)):
        for wrong in ({}, {"authorization": TOKEN}, {"authorization": "Bearer x"}, {"authorization": "Bearer "}):
            answer = one.get("/v1/models", headers=wrong)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer" and TOKEN not in answer.text
        assert one.get("/v1/models", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
    with pytest.raises(ValueError, match="needs a token"):
        client(Script("a"), is_local=False)


@contextlib.contextmanager
def connection(server: CompletionsServer, prompt: str, *, stream: bool = False) -> Iterator[http.client.HTTPConnection]:
    """A connection with a request for a text."""
    host, port = server.address.rsplit(":", 1)
    made = http.client.HTTPConnection(host, int(port), timeout=WAIT_S)
    body = json.dumps({"prompt": prompt, "stream": stream})
    made.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    try:
        yield made
    finally:
        made.close()


def test_one_request_is_answered_at_a_time_and_more_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order in which they came; beyond the queue, or after a time in it, it is 429."""
    monkeypatch.setattr(completions, "MAX_WAITING", 1)
    script = Script("a")
    with CompletionsServer(script, "run", "127.0.0.1:0") as server, contextlib.ExitStack() as stack:
        first = stack.enter_context(connection(server, "slow"))
        assert script.going.acquire(timeout=WAIT_S)
        monkeypatch.setattr(completions, "QUEUE_S", 0.01)
        with connection(server, "late") as late:
            answer = late.getresponse()
            assert (answer.status, answer.headers["retry-after"]) == (429, "5")
            assert "was not done within 0.01 s" in answer.read().decode()
        monkeypatch.setattr(completions, "QUEUE_S", WAIT_S)
        second = stack.enter_context(connection(server, "next"))
        end_s = time.monotonic() + WAIT_S
        while not server._completions._waiting and time.monotonic() < end_s:
            pass
        with connection(server, "more") as more:
            answer = more.getresponse()
            assert answer.status == 429 and "1 requests wait already" in answer.read().decode()
        assert len(script.requests) == 1
        script.may_go.release()
        for one in (first, second):
            assert json.loads(one.getresponse().read())["choices"][0]["text"] == "a"
    assert [request["prompt"] for request in script.requests] == ["slow", "next"]


@cases("stream", [False, True])
def test_who_leaves_ends_the_answer(stream: bool) -> None:
    """The next request is answered; a server that ends closes what is open."""
    script = Script(*"a" * 200_000)
    with CompletionsServer(script, "run", "127.0.0.1:0") as server:
        with connection(server, "slow", stream=stream) as left:
            assert script.going.acquire(timeout=WAIT_S)
            if stream:
                script.may_go.release()
                assert b"data" in left.getresponse().read(100)
        script.may_go.release()
        assert script.has_left.wait(WAIT_S) and script.left == 1
        with connection(server, "too long") as again:
            assert again.getresponse().status == 400


def test_defect_is_in_the_log_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever asked gets no more than that there is one; the next request is answered."""
    here = client(Script("a"))
    answer = here.post("/v1/completions", json={"prompt": "defect"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert "ZeroDivisionError" in caplog.text and "Zero" not in answer.text
    assert here.post("/v1/completions", json={"prompt": "once"}).status_code == 200


def test_who_leaves_the_queue_is_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed for it, and others have its place, also while the answer before goes on."""
    monkeypatch.setattr(completions, "_LOOK_S", 0.01)
    script = Script("a")
    with CompletionsServer(script, "run", "127.0.0.1:0") as server, connection(server, "slow") as first:
        assert script.going.acquire(timeout=WAIT_S)
        open_here, end_s = server._server.server_state.connections, time.monotonic() + WAIT_S
        with connection(server, "left"):
            while not server._completions._waiting and time.monotonic() < end_s:
                pass
        while (len(open_here) > 1 or server._completions._waiting) and time.monotonic() < end_s:
            pass
        assert not server._completions._waiting
        script.may_go.release()
        assert first.getresponse().status == 200
        with connection(server, "next") as after:
            assert after.getresponse().status == 200
    assert [request["prompt"] for request in script.requests] == ["slow", "next"]


def test_reader_that_takes_nothing_ends_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """And does not hold up the next one."""
    monkeypatch.setattr(completions, "SEND_S", 0.1)
    script = Script(*["a" * (1 << 20)] * 64)
    script.may_go.release()
    with CompletionsServer(script, "run", "127.0.0.1:0") as server, connection(server, "slow", stream=True):
        assert script.has_left.wait(WAIT_S)
        with connection(server, "too long") as again:
            assert again.getresponse().status == 400


def test_process_that_is_lost_is_told_to_all() -> None:
    """To whoever asked, in a stream as its last event, and to the command."""
    with CompletionsServer(Script(), "run", "127.0.0.1:0") as server:
        assert server.lost is None
        with connection(server, "lost") as asked:
            answer = asked.getresponse()
            error = json.loads(answer.read())["error"]
            assert (answer.status, error["type"]) == (500, "server_error") and "SIGKILL" in error["message"]
        with connection(server, "lost", stream=True) as asked:
            (last,) = events(asked.getresponse().read().decode())
            assert "SIGKILL" in json.loads(last)["error"]["message"]
        assert isinstance(server.lost, PeerLostError)


@cases(("bind", "kind"), [("8080", UsageError), ("127.0.0.1:x", UsageError), ("203.0.113.9:1", ConnectionFailedError)])
def test_address_that_can_not_be_bound_is_told(bind: str, kind: type[RingTuneError]) -> None:
    """With the option."""
    with pytest.raises(kind, match="--bind"):
        CompletionsServer(Script(), "run", bind, token=TOKEN)
