"""The page over real connections: streams to a browser, tokens, its end, and the questions of its sliders."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import dataclasses
import importlib.util
import json
import re
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from coordinator.web import app, predictor, server
from coordinator.web.app import MAX_QUESTION_BYTES, STATIC, make_app
from coordinator.web.feeds import watch
from coordinator.web.page_state import PageState
from coordinator.web.predictor import answer
from coordinator.web.server import PageServer, require_web
from coordinator.web.streams import MAX_STREAMS, PageData, Streams
from coordinator.web.what_if import MAX_WAITING, SimulatorProcess, check_question, measured_s
from ringtune.costs.memory_sizes import MemorySettings
from ringtune.errors import BusyError, ConnectionFailedError, DeadlineError, RingTuneError, UsageError, needed
from ringtune.transport.endpoints import split_address
from ringtune.transport.page_access import Guard
from sim.prediction import memory_bounds
from tests.support.fake_agents import FakeCluster, run
from tests.support.page_runs import MEASURED, PLAN, RUN_ID, beginning, metrics, state_of, step_line, trained
from tests.support.plans import make_plan

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


def test_server_says_goodbye_with_the_last_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was told just before the end reaches the browser, and then the stream ends."""
    monkeypatch.setattr(app, "GOODBYE_S", WAIT_S)
    monkeypatch.setattr(server, "_END_S", WAIT_S)
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


def test_server_on_loopback_prints_no_token_and_an_address_that_it_can_not_have() -> None:
    """Nobody needs one."""
    with PageServer(PageData(), "127.0.0.1:0") as page:
        assert page.lines() == [f"page: http://{page.address}/"]
    # With the option to change
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConnectionFailedError, match=rf"can't listen on {bind} for the page.*take another --web"):
            PageServer(PageData(), bind)
    # As for every other address
    with pytest.raises(UsageError, match=r"--web 'here' is not HOST:PORT, e\.g\. 127\.0\.0\.1:7080"):
        PageServer(PageData(), "here")


@contextlib.contextmanager
def visiting() -> Iterator[tuple[PageServer, Callable[..., socket.socket]]]:
    """A page, and what opens a connection to it and sends some first bytes."""
    with PageServer(PageData(), "127.0.0.1:0") as page, contextlib.ExitStack() as stack:

        def connect(first: bytes, source: str = "127.0.0.1", room: int = 1 << 16) -> socket.socket:
            made = stack.enter_context(socket.socket())
            made.settimeout(WAIT_S)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
            made.bind((source, 0))
            made.connect(split_address(page.address, option=""))
            made.sendall(first)
            return made

        yield page, connect


def is_closed(connection: socket.socket) -> bool:
    """Whether the server ends a connection, also one that it has closed before our bytes came."""
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


def test_server_gives_no_address_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection beyond an address's share is closed unanswered; another address is served."""
    monkeypatch.setattr(app, "MAX_OF_AN_ADDRESS", 2)
    monkeypatch.setattr(app, "REQUEST_S", WAIT_S)
    with visiting() as (page, connect):
        whole = f"GET / HTTP/1.1\r\nhost: {page.address}\r\n\r\n".encode()
        for _ in range(2):  # which have not ended their requests, and are accepted in their order
            connect(b"GET / HT")
        assert is_closed(connect(whole))
        assert connect(whole, "127.0.0.2").recv(15) == b"HTTP/1.1 200 OK"


@pytest.mark.promise("6 every wait ends")
def test_server_lets_go_of_who_makes_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing, a part of a line, a part of the headers, a part of a second request: all are closed."""
    with visiting() as (page, connect):
        again, answer = connect(f"HEAD / HTTP/1.1\r\nhost: {page.address}\r\n\r\n".encode()), b""
        while not answer.endswith(b"\r\n\r\n"):
            answer += again.recv(1) or pytest.fail("its connection was closed")
        assert answer.startswith(b"HTTP/1.1 200 OK")
        monkeypatch.setattr(app, "REQUEST_S", 0.1)
        idle = [connect(b""), connect(b"GET / HT"), connect(b"GET / HTTP/1.1\r\nhost: x\r\nx:")]
        again.sendall(b"GET / HT")
        assert all(is_closed(one) for one in (*idle, again))


@pytest.mark.promise("6 every wait ends")
@pytest.mark.parametrize("last", ["", "connection: close\r\n"])
def test_server_lets_go_of_who_reads_nothing(monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    """A connection on which an answer is not read is cut off, also one that is being closed; a reader gets all."""
    monkeypatch.setattr(app, "UNREAD_S", 0.1)
    with visiting() as (page, connect):
        page._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # accepted connections have it too
        request = f"GET /static/uPlot.iife.min.js HTTP/1.1\r\nhost: {page.address}\r\n{last}\r\n".encode()
        idle, here = connect(request, room=4096), page._server.server_state.connections
        assert idle.recv(1, socket.MSG_PEEK) == b"H"
        end_s = time.monotonic() + WAIT_S
        while here and time.monotonic() < end_s:
            time.sleep(0.01)
        assert not here
        monkeypatch.setattr(app, "UNREAD_S", WAIT_S)  # of a reader on a busy machine
        assert get(f"http://{page.address}/static/uPlot.iife.min.js")[1] == (STATIC / "uPlot.iife.min.js").read_text()


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


TOKEN = "t" * 32
LOCAL = "http://127.0.0.1:7080"
FAR = "http://10.0.0.5:7080"
QUESTION = {"content-type": "application/json"}


class Answers(SimulatorProcess):
    """Answers every question with itself, or raises."""

    error: RingTuneError | None = None

    async def ask(self, value: object, address: str) -> dict[str, Any]:
        """Answer."""
        if self.error is not None:
            raise self.error
        return {"asked": value}


def page(*, far: bool = False, error: RingTuneError | None = None) -> TestClient:
    """A page of a run that is done, on this machine or beyond."""
    page_data = PageData()
    for event in trained():
        page_data.hear(event)
    page_data.tick(0.0)
    streams, asking = Streams(page_data), Answers(page_data.state)
    asking.error = error
    guard = Guard(False, TOKEN, 7080) if far else Guard(True, "", 7080)
    client = TestClient(make_app(streams, asking, guard), base_url=FAR if far else LOCAL)
    client.app_state["streams"] = streams
    return client


# ---- the page itself -------------------------------------------------------------------------------


def static_files() -> list[str]:
    """The addresses of all parts of the page."""
    return ["/", *(f"/static/{path.name}" for path in STATIC.iterdir())]


def test_app_serves_each_part_of_the_page() -> None:
    """Also to those without a token: there is nothing of a run in them. The library's licence is among them."""
    for at in static_files():
        for client in (page(), page(far=True)):
            answer = client.get(at)
            assert answer.status_code == 200
            assert answer.headers["x-content-type-options"] == "nosniff"
        assert "/static/uPlot.LICENSE.txt" in static_files()


def test_app_forbids_scripts_and_styles_from_elsewhere() -> None:
    """The policy allows files of this server, and neither inline code nor frames."""
    for at in ("/", "/api/state", "/metrics", "/nothing"):
        policy = page().get(at).headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy


class Found(HTMLParser):
    """What the page's text has in it."""

    def __init__(self) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str]] = []
        self.inline: list[str] = []
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note attributes."""
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self._inside = tag

    def handle_data(self, data: str) -> None:
        """Note text inside of scripts and styles."""
        if self._inside in ("script", "style") and data.strip():
            self.inline.append(data)


def test_page_has_no_inline_code_and_names_for_screen_readers() -> None:
    """Else the policy would break it, or it would need the internet."""
    found = Found()
    found.feed((STATIC / "index.html").read_text(encoding="utf-8"))
    assert found.inline == []
    assert [entry for entry in found.attributes if entry[1].startswith("on") or entry[1] == "style"] == []
    linked = [value for _, name, value in found.attributes if name in ("src", "href")]
    assert [value for value in linked if not value.startswith(("/", "#", "data:image"))] == []
    # Each section is named by a heading, each drawing has a role and a name, each control a label
    html = (STATIC / "index.html").read_text(encoding="utf-8")
    ids = set(re.findall(r'id="([^"]+)"', html))
    for names in re.findall(r'aria-labelledby="([^"]+)"', html):
        assert set(names.split()) <= ids
    labelled = set(re.findall(r'<label for="([^"]+)"', html))
    assert set(re.findall(r'<(?:input|select) id="([^"]+)"', html)) <= labelled
    assert 'lang="en"' in html


def test_page_scripts_write_text_only() -> None:
    """Names of nodes come from other machines: no script of ours makes HTML or code of a text, or asks elsewhere."""
    scripts = [path.read_text(encoding="utf-8") for path in STATIC.glob("*.js") if not path.name.startswith("uPlot")]
    for text in scripts:
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
        assert [url for url in re.findall(r"https?://[^\s\"'`]+", text) if "www.w3.org" not in url] == []
    # Every id that a script asks for is in the page
    asked = {name for text in scripts for name in re.findall(r'byId\("([^"]+)"\)', text)}
    assert asked
    assert asked <= set(re.findall(r'id="([^"]+)"', (STATIC / "index.html").read_text(encoding="utf-8")))


# ---- who may look ----------------------------------------------------------------------------------


def test_app_on_loopback_needs_a_loopback_name_and_elsewhere_the_token() -> None:
    """A foreign page whose name was pointed to this machine gets nothing, not even the page."""
    client = page()
    assert client.get("/api/state").status_code == 200
    for at in ("/", "/api/state", "/metrics"):
        refused = client.get(at, headers={"host": "evil.example"})
        assert refused.status_code == 421
        assert "127.0.0.1" in refused.json()["error"]
    # Without one and with a wrong one it says what is missing; neither the answer nor a header has the token
    for at in ["/api/state", "/api/stream", "/metrics", "/api/login"]:
        client = page(far=True)
        missing, wrong = client.get(at), client.get(at, headers={"authorization": "Bearer nonsense"})
        assert (missing.status_code, wrong.status_code) == (401, 401)
        assert "needs the token" in missing.json()["error"]
        assert "the token is wrong" in wrong.json()["error"]
        assert TOKEN not in wrong.text + str(wrong.headers)
    # It stands for the token from then on, is out of reach of scripts and other sites, and is not the token
    client = page(far=True)
    answer = client.get("/api/login", headers={"authorization": f"Bearer {TOKEN}"})
    cookie = answer.headers["set-cookie"]
    assert answer.status_code == 204
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert TOKEN not in cookie
    assert client.get("/api/state").status_code == 200


def test_app_is_read_only() -> None:
    """No method but GET is known, and POST for what-ifs."""
    client = page()
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        for at in ("/", "/api/state", "/api/login", "/metrics"):
            assert client.request(method, at).status_code == 405
    assert client.get("/api/what-if").status_code == 405
    # Sections and curves of the run, and nobody keeps a copy
    answer = page().get("/api/state", params={"run": RUN_ID})
    assert answer.json()["run"]["phase"] == "done"
    assert len(answer.json()["curves"]["loss"]["points"]) == 7
    assert answer.headers["cache-control"] == "no-store"
    # One more is told to close another one
    client = page()
    client.app_state["streams"].open = MAX_STREAMS
    answer = client.get("/api/stream")
    assert answer.status_code == 503
    assert "close one" in answer.json()["error"]
    # So is an address that has its half of them; another one has a place
    client.app_state["streams"].open = MAX_STREAMS // 2
    client.app_state["streams"].open_of["testclient"] = MAX_STREAMS // 2
    answer = client.get("/api/stream")
    assert (answer.status_code, "of your address" in answer.json()["error"]) == (503, True)
    assert client.app_state["streams"].has_place("127.0.0.2")
    # A form of a foreign page can't send that type; a page that says it is foreign is refused, too
    client = page()
    assert client.post("/api/what-if", json={"speeds": {}}).json() == {"asked": {"speeds": {}}}
    form = client.post("/api/what-if", content=b"{}", headers={"content-type": "text/plain"})
    foreign = client.post("/api/what-if", content=b"{}", headers={**QUESTION, "sec-fetch-site": "cross-site"})
    assert (form.status_code, foreign.status_code) == (415, 403)


# ---- what it answers -------------------------------------------------------------------------------


def test_app_says_that_a_run_is_gone() -> None:
    """With the run that there is now, and the way to an older one; a hostile id is quoted."""
    for at in ["/api/state", "/api/stream"]:
        answer = page().get(at, params={"run": "r<b>\x1b"})
        assert answer.status_code == 404
        assert "is gone" in answer.json()["error"]
        assert RUN_ID in answer.json()["error"]
        assert "\x1b" not in answer.json()["error"]


def test_app_refuses_a_what_if_that_is_none() -> None:
    """With a sentence, whatever was sent."""
    for body, status in [(b"{", 400), (b"\xff", 400), (b"[" * 5000, 400), (b" " * (MAX_QUESTION_BYTES + 1), 413)]:
        answer = page().post("/api/what-if", content=body, headers=QUESTION)
        assert answer.status_code == status
        assert answer.json()["error"]


def test_app_says_why_a_what_if_is_not_answered() -> None:
    """Others ask, or the simulator takes too long."""
    rows: list[tuple[RingTuneError, int]] = [(BusyError("x"), 429), (DeadlineError("x"), 504)]
    for error, status in rows:
        assert page(error=error).post("/api/what-if", json={}).status_code == status


def luminance(colour: str) -> float:
    """The relative luminance of a colour, as WCAG 2 defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_page_texts_stand_out() -> None:
    """Every text has a contrast of 4.5 to 1 with what is behind it, the two colours of blocks one that is seen."""
    blocks = re.findall(r":root \{(.*?)\}", (STATIC / "page.css").read_text(encoding="utf-8"), re.DOTALL)
    light, dark = (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in blocks)
    texts = [("ink", "card"), ("ink", "bg"), ("muted", "card"), ("muted", "bg"), ("accent", "card"), ("red", "card")]
    texts += [("frozen-ink", "frozen"), ("trained-ink", "trained"), ("ink", "soft"), ("ink", "red-soft")]
    # Dark has its own colours where it names them
    for palette in (light, light | dark):
        for least, pairs in ((4.5, texts), (1.3, [("frozen", "trained")])):
            for pair in pairs:
                low, high = sorted(luminance(palette[name]) for name in pair)
                assert (high + 0.05) / (low + 0.05) >= least, pair


ECHO = (
    sys.executable,
    "-c",
    "import sys, json\nfor line in sys.stdin: print(json.dumps({'steps': json.loads(line)['steps']}), flush=True)",
)
SILENT = (sys.executable, "-c", "import sys\nfor line in sys.stdin: pass")
GONE = (sys.executable, "-c", "")


def asked(test: Callable[[SimulatorProcess], Awaitable[Any]], command: tuple[str, ...], **options: Any) -> Any:
    """What a test returns that asks about a run that is done."""

    async def run() -> Any:
        asking = SimulatorProcess(state_of(trained()), command=command, **options)
        try:
            return await test(asking)
        finally:
            await asking.close()

    return asyncio.run(run())


def test_check_question_refuses() -> None:
    """Whatever is no factor in range, or no whole number; the message says what is expected."""
    rows: list[object] = [
        None,
        [],
        "x",
        {"unknown": 1},
        {"speeds": 1},
        {"speeds": {"a": "2"}},
        {"speeds": {"a": True}},
        {"speeds": {"a": float("nan")}},
        {"speeds": {"a": 0}},
        {"rates": {"a>b": 1e9}},
        {"rates": {"a>b": 10**400}},
        {"rates": {"x" * 300: 2}},
        {"speeds": {str(index): 2 for index in range(17)}},
        {"microbatches": -1},
        {"microbatches": 1.5},
        {"microbatches": True},
    ]
    for value in rows:
        with pytest.raises(UsageError):
            check_question(value)


def test_check_question_leaves_out_what_changes_nothing() -> None:
    """So that equal questions are equal."""
    assert check_question({"speeds": {"a": 1, "b": 2}}) == {"speeds": {"b": 2.0}, "rates": {}, "microbatches": 0}


def test_asking_remembers_answers() -> None:
    """A slider that goes back and forth asks once; what was measured stands beside."""

    async def test(asking: SimulatorProcess) -> list[dict[str, Any]]:
        first = await asking.ask({}, "here")
        await asking.close()
        asking._command = GONE
        return [first, await asking.ask({}, "here")]

    assert asked(test, ECHO) == [{"steps": 8, "measured_s": 4.0}] * 2


def test_asking_passes_on_why_the_simulator_has_no_answer() -> None:
    """Such an answer has no steps to measure."""
    refusal = (
        *ECHO[:2],
        "import sys, json\nfor line in sys.stdin: print(json.dumps({'error': 'no room'}), flush=True)",
    )

    async def test(asking: SimulatorProcess) -> dict[str, Any]:
        return await asking.ask({}, "here")

    assert asked(test, refusal) == {"error": "no room"}


def test_asking_has_a_deadline() -> None:
    """The process that did not answer is ended, and the next question gets a new one."""

    async def test(asking: SimulatorProcess) -> dict[str, Any]:
        with pytest.raises(DeadlineError, match="has not answered"):
            await asking.ask({}, "here")
        asking._command, asking._deadline_s = ECHO, 30.0
        return await asking.ask({}, "here")

    assert asked(test, SILENT, deadline_s=0.2)["steps"] == 8


def test_asking_says_when_the_simulator_has_ended() -> None:
    """And does not wait for the deadline."""

    async def test(asking: SimulatorProcess) -> None:
        with pytest.raises(RingTuneError, match="has ended"):
            await asking.ask({}, "here")

    asked(test, GONE)


def test_asking_lets_few_wait() -> None:
    """Many questions at once are not queued without end, and no address has all places."""

    async def test(asking: SimulatorProcess) -> list[type]:
        addresses = ["a"] * (MAX_WAITING + 3) + ["b", "c", "c", "d"]
        questions = [asking.ask({"speeds": {"a": 2 + at}}, address) for at, address in enumerate(addresses)]
        return [type(found) for found in await asyncio.gather(*questions, return_exceptions=True)]

    found = asked(test, ECHO)
    assert found == [dict] * 2 + [BusyError] * 5 + [dict] * 2 + [BusyError] * 2
    assert found.count(dict) == MAX_WAITING


def test_asking_needs_a_plan() -> None:
    """Before there is one it says so."""

    async def run() -> None:
        with pytest.raises(UsageError, match="no plan with measured times yet"):
            await SimulatorProcess(PageState()).ask({}, "here")

    asyncio.run(run())


def test_measured_seconds_of_some_steps() -> None:
    """The sum of their seconds; none before they are done, and none of a run that went on from a checkpoint."""
    state = state_of(trained(8))
    assert [measured_s(state, steps) for steps in (1, 8, 9)] == [0.5, 4.0, None]
    resumed = PageState()
    resumed.take(metrics(step_line(5)), None)
    assert measured_s(resumed, 5) is None
    # They grow evenly
    state = PageState()
    for step in range(1, 5001):
        state.take(metrics(step_line(step)), None)
    assert measured_s(state, 2503) == pytest.approx(2503 * 0.5)


def question(**changes: Any) -> dict[str, Any]:
    """A question about the small run."""
    texts = {"plan": json.dumps(PLAN.to_json()), "profile": json.dumps(MEASURED.to_json())}
    return {
        **texts,
        "settings": {},
        "steps": 0,
        "speeds": {},
        "rates": {},
        "microbatches": 0,
        **changes,
    }


def test_predictor_compares_whole_turns_with_and_without_changes() -> None:
    """Without a change twice the same seconds, for all steps."""
    found = answer(question())
    assert found["steps"] == 8
    assert found["before_s"] == found["after_s"] > 0
    # Each change alone, and both together more
    after_s = [
        answer(question(**changes))["after_s"]
        for changes in (
            {},
            {"rates": {"a>b": 0.1}},
            {"speeds": {"a": 0.1}},
            {"rates": {"a>b": 0.1}, "speeds": {"a": 0.1}},
        )
    ]
    assert after_s[0] < after_s[1] < after_s[3]
    assert after_s[0] < after_s[2] < after_s[3]
    # Of five steps that are done with turns of two: four; and the whole run beside
    found = answer(question(steps=5))
    assert found["steps"] == 4
    assert found["whole_before_s"] > found["before_s"]
    # Another number of them is another pipeline
    found = answer(question(microbatches=1))
    assert found["after_s"] != found["before_s"]
    # A hundred thousand steps are predicted by their first ones
    long = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"], num_steps=100_000, every_steps=1000, local_iterations=50)
    found = answer(question(plan=json.dumps(long.to_json()), steps=400))
    assert found["steps"] == 400
    assert "whole_before_s" not in found


def test_predictor_has_a_limit_of_actions_with_more_micro_batches_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer steps are compared: else the many actions of small micro-batches took all of the simulator's time."""
    monkeypatch.setattr(predictor, "MAX_ACTIONS", 2000)
    long = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"], num_steps=1000)
    found = [answer(question(plan=json.dumps(long.to_json()), microbatches=number))["steps"] for number in (0, 1, 4)]
    assert found == [2000 // 18 // 2 * 2, 2000 // 18 // 2 * 2, 2000 // 34 // 2 * 2]  # 8 actions a micro-batch, 2 a step


def test_predictor_says_what_makes_no_sense() -> None:
    """As an answer, not by ending."""
    rows: list[tuple[dict[str, Any], str]] = [
        ({"speeds": {"zz": 2.0}}, "no node 'zz'"),
        ({"rates": {"b>zz": 2.0}}, "was not measured"),
        ({"microbatches": 99}, "micro-batches do not fit"),
    ]
    for changes, message in rows:
        assert message in answer(question(**changes))["error"]


def test_predictor_counts_the_memory_of_an_audit() -> None:
    """Nodes with room for their parts alone have none for what an audited run keeps and repeats."""
    state = state_of(trained())
    job = needed(state.job, "a run has a job").with_overrides({"recovery.copies": "next"})
    bounds = memory_bounds(PLAN, MEASURED, MemorySettings.of_job(job))
    tight = tuple(dataclasses.replace(node, memory_bytes=bounds[node.node].total_bytes) for node in MEASURED.nodes)
    state.profile = dataclasses.replace(MEASURED, nodes=tight)
    errors = []
    for changes in ({}, {"audit.share": 0.5}):
        state.job = job.with_overrides(changes)
        errors.append(answer({**check_question({}), **SimulatorProcess(state)._of_run()}).get("error", ""))
    assert errors[0] == ""
    assert re.search("node a needs .* but has", errors[1])
