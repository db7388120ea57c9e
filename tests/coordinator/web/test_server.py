"""The page over real connections: a coordinator's runs, streams to a browser, tokens, and its end."""

from __future__ import annotations

import builtins
import contextlib
import importlib.util
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.web import app
from coordinator.web.feeds import watch
from coordinator.web.server import PageServer, require_web
from coordinator.web.streams import PageData
from ringtune.errors import ConnectionFailedError, UsageError
from ringtune.transport.endpoints import split_address
from tests.support.fake_agents import FakeCluster
from tests.support.fake_runs import run
from tests.support.page_runs import RUN_ID, beginning

WAIT_S = 30.0


def get(url: str, **headers: str) -> tuple[int, str]:
    """Status and text of an answer."""
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - our own address
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:  # noqa: S310
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def frames(page: PageServer) -> Any:
    """An open stream of frames."""
    return urllib.request.urlopen(f"http://{page.address}/api/stream", timeout=WAIT_S)


def next_frame(stream: Any) -> dict[str, Any]:
    """The next frame of a stream."""
    for line in stream:
        if line.startswith(b"data: {"):
            found: dict[str, Any] = json.loads(line[6:])
            return found
    raise AssertionError("the stream has ended")


def test_server_shows_the_runs_of_a_coordinator() -> None:
    """A browser that is there before the run sees it begin, its members, its losses and its end; so do the figures."""
    with (
        FakeCluster("a", "b") as cluster,
        PageServer(watch(cluster.server.coordinator), "127.0.0.1:0") as page,
        frames(page) as stream,
    ):
        assert next_frame(stream)["whole"] == ""
        done = run(cluster)
        phase = ""
        while phase != "done":
            frame = next_frame(stream)
            phase = frame.get("run", {}).get("phase", phase)
        state = json.loads(get(f"http://{page.address}/api/state")[1])
        assert done.plan is not None
        assert state["run"]["id"] == done.run_id
        assert [one["node"] for one in state["plan"]["nodes"]] == list(done.plan.nodes)
        assert set(state["members"]) == {"a", "b"}
        loss = state["curves"]["loss"]
        assert [point[0] for point in [*loss["points"], *loss["open"]]] == list(
            range(1, done.plan.course.num_steps + 1)
        )
        text = get(f"http://{page.address}/metrics")[1]
        assert f"ringtune_steps_done {float(done.plan.course.num_steps)}" in text


def test_server_says_goodbye_with_the_last_state() -> None:
    """What was told just before the end reaches the browser, and then the stream ends."""
    page_data = PageData()
    with PageServer(page_data, "127.0.0.1:0") as page:
        stream = frames(page)
        next_frame(stream)
        for event in beginning():
            page_data.hear(event)
    with stream:
        text = stream.read().decode()
    assert RUN_ID in text
    assert text.endswith("event: bye\ndata: over\n\n")


def test_server_elsewhere_prints_its_token_once_and_asks_for_it(tmp_path: Path) -> None:
    """The printed address has the token behind the #, which no browser sends; a file gives the same one again."""
    file = tmp_path / "token"
    with PageServer(PageData(), "0.0.0.0:0", token_file=file) as page:
        token = page.url.partition("#token=")[2]
        at = f"http://127.0.0.1:{page.address.rpartition(':')[2]}/api/state"
        assert token == file.read_text()
        assert "plain HTTP" in " ".join(page.lines())
        assert get(at)[0] == 401
        assert get(at, Authorization=f"Bearer {token}")[0] == 200


def test_server_on_loopback_prints_no_token() -> None:
    """Nobody needs one."""
    with PageServer(PageData(), "127.0.0.1:0") as page:
        assert page.lines() == [f"page: http://{page.address}/"]


@contextlib.contextmanager
def visiting() -> Iterator[tuple[PageServer, Callable[..., socket.socket]]]:
    """A page, and what opens a connection to it and sends some first bytes."""
    with PageServer(PageData(), "127.0.0.1:0") as page, contextlib.ExitStack() as stack:

        def connect(first: bytes, source: str = "127.0.0.1") -> socket.socket:
            place = split_address(page.address, option="")
            made = stack.enter_context(socket.create_connection(place, WAIT_S, source_address=(source, 0)))
            made.sendall(first)
            return made

        yield page, connect


def test_server_gives_no_address_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection beyond an address's share is closed unanswered; another address is served."""
    monkeypatch.setattr(app, "MAX_OF_AN_ADDRESS", 2)
    with visiting() as (page, connect):
        whole = f"GET / HTTP/1.1\r\nhost: {page.address}\r\n\r\n".encode()
        first, _ = connect(whole), connect(whole)
        assert first.recv(15) == b"HTTP/1.1 200 OK"
        with contextlib.suppress(ConnectionResetError):
            assert connect(whole).recv(1) == b""
        assert connect(whole, "127.0.0.2").recv(15) == b"HTTP/1.1 200 OK"


@pytest.mark.promise("6 every wait ends")
def test_server_lets_go_of_who_makes_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing, a part of a line, a part of the headers, a part of a second request: all are closed."""
    monkeypatch.setattr(app, "REQUEST_S", 0.1)
    with visiting() as (page, connect):
        idle = [connect(b""), connect(b"GET / HT"), connect(b"GET / HTTP/1.1\r\nhost: x\r\nx:")]
        again, answer = connect(f"HEAD / HTTP/1.1\r\nhost: {page.address}\r\n\r\n".encode()), b""
        while not answer.endswith(b"\r\n\r\n"):
            answer += again.recv(1)
        assert answer.startswith(b"HTTP/1.1 200 OK")
        again.sendall(b"GET / HT")
        assert [one.recv(1) for one in (*idle, again)] == [b""] * 4


def test_server_at_a_taken_address_says_so() -> None:
    """With the option to change."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConnectionFailedError, match=rf"can't listen on {bind} for the page.*take another --web"):
            PageServer(PageData(), bind)


def test_server_at_no_address_says_so() -> None:
    """As for every other address."""
    with pytest.raises(UsageError, match="--web 'here' is not HOST:PORT"):
        PageServer(PageData(), "here")


def test_server_without_its_libraries_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no part of the core."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    with pytest.raises(UsageError, match=r"needs uvicorn.*\[web\]"):
        require_web()


def test_server_refuses_at_once_what_it_can_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the web is imported by a coordinator that shows no page."""
    real, asked = builtins.__import__, []

    def note(name: str, *rest: Any, **more: Any) -> Any:
        asked.append(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", note)
    with FakeCluster("a", "b") as cluster:
        run(cluster)
    assert [name for name in asked if name.startswith(("starlette", "uvicorn", "prometheus"))] == []
