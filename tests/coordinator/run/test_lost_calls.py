"""Every call of the coordinator to a node survives one lost request and one lost reply, and is carried out once."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from coordinator.run.node_client import AgentCalls
from ringtune.schedule.turns import turn_sequence
from ringtune.storage.chunks import CHUNK_BYTES, cut_pieces
from ringtune.storage.pieces import Pieces
from ringtune.transport.channels import Server
from ringtune.v1 import control_pb2, control_pb2_grpc
from tests.support import failpoints
from tests.support.failpoints import DONE_SUFFIX
from tests.support.plans import make_plan

WAIT_S = 30.0
TURNS = tuple(turn_sequence(make_plan([("a", 0, 4)], ["a"]).course))
FILE = Pieces.of(bytes(3 * CHUNK_BYTES))
_SAYS = Callable[[object], None]


class Node(control_pb2_grpc.AgentServicer):
    """Does at once what it is told, and counts what it has done."""

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()

    def __getattribute__(self, name: str) -> Any:
        """Count the calls that have an answer of one message."""
        replies: dict[str, Any] = {
            "Inspect": control_pb2.InspectReply(facts_json="facts"),
            "MeasureLink": control_pb2.MeasureLinkReply(samples=3),
            "Prepare": control_pb2.PrepareReply(hosted_bytes=7),
            "FetchAhead": control_pb2.FetchAheadReply(fetched_bytes=9),
            "Rest": control_pb2.RestReply(totals_json="{}"),
            "Move": control_pb2.MoveReply(fetched_bytes=8),
            "Grant": control_pb2.Empty(),
            "Release": control_pb2.Empty(),
        }
        if name not in replies:
            return super().__getattribute__(name)

        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            self.done[name] += 1
            return replies[name]

        return answer

    def Load(self, request_iterator: Iterator[Any], context: grpc.ServicerContext) -> control_pb2.Empty:
        """Take a file."""
        sizes = [len(message.file.chunk) for message in request_iterator]
        self.done["Load"] += sum(sizes) == FILE.size_bytes
        return control_pb2.Empty()

    def Collect(self, request: Any, context: grpc.ServicerContext) -> Iterator[control_pb2.FileChunk]:
        """Send a file of several messages."""
        self.done["Collect"] += 1
        yield from cut_pieces("totals.json", [bytes(3 * CHUNK_BYTES)])


def _inspect(calls: AgentCalls, say: _SAYS, _: Path) -> None:
    calls.inspect("", measure=True, timeout_s=WAIT_S, on_result=lambda reply: say(reply.facts_json))


def _measure_link(calls: AgentCalls, say: _SAYS, _: Path) -> None:
    calls.measure_link("b", "b:1", 9, timeout_s=WAIT_S, on_result=lambda reply: say(reply.samples))


def _prepare(calls: AgentCalls, say: _SAYS, _: Path) -> None:
    calls.prepare("{}", "", {}, timeout_s=WAIT_S, on_result=say)


def _load(calls: AgentCalls, say: _SAYS, _: Path) -> None:
    calls.prepare("{}", "", {}, timeout_s=WAIT_S, on_result=say, saved={"adapter.safetensors": FILE})


def _fetch_ahead(calls: AgentCalls, say: _SAYS, _: Path) -> None:
    calls.fetch_ahead(control_pb2.PrepareRequest(), timeout_s=WAIT_S, on_result=say, on_failed=say)


def _rest(calls: AgentCalls, say: _SAYS, _: Path) -> None:
    calls.rest(0, timeout_s=WAIT_S, on_result=lambda reply: say(reply.totals_json), on_failed=say)


def _halt(calls: AgentCalls, say: _SAYS, _: Path) -> None:
    calls.halt(timeout_s=WAIT_S, on_result=lambda: say("halted"), on_failed=say)


def _move(calls: AgentCalls, say: _SAYS, _: Path) -> None:
    request = control_pb2.MoveRequest(prepare=control_pb2.PrepareRequest())
    calls.move(request, timeout_s=WAIT_S, on_result=lambda reply: say(reply.fetched_bytes), on_failed=say)


def _grant(calls: AgentCalls, say: _SAYS, _: Path) -> None:
    calls.grant(TURNS[:1])
    calls.halt(timeout_s=WAIT_S, on_result=lambda: say("after it"), on_failed=say)


def _collect(calls: AgentCalls, say: _SAYS, folder: Path) -> None:
    calls.collect(
        folder,
        with_head=False,
        with_private=False,
        max_bytes=4 * CHUNK_BYTES,
        on_result=lambda files: say(bytes(files["totals.json"]) == bytes(3 * CHUNK_BYTES)),
    )


def _release(calls: AgentCalls, say: _SAYS, _: Path) -> None:
    calls.release("over").add_done_callback(lambda done: say(done.exception()))


CASES: Final[dict[str, tuple[str, Callable[[AgentCalls, _SAYS, Path], None], object]]] = {
    "inspect": ("Inspect", _inspect, "facts"),
    "measure_link": ("MeasureLink", _measure_link, 3),
    "prepare": ("Prepare", _prepare, 7),
    "load": ("Load", _load, 7),
    "fetch_ahead": ("FetchAhead", _fetch_ahead, 9),
    "rest": ("Rest", _rest, "{}"),
    "halt": ("Rest", _halt, "halted"),
    "move": ("Move", _move, 8),
    "grant": ("Grant", _grant, "after it"),
    "collect": ("Collect", _collect, True),
    "release": ("Release", _release, None),
}
MAY_COME_TWICE: Final = ("Load", "Grant", "Collect", "Release")
"""What a node may do twice: it says which turns, files or run it is about, and changes nothing the second time."""


@pytest.fixture
def orders(tmp_path: Path) -> Iterator[Path]:
    """The folder of this process's failpoints."""
    folder = tmp_path / "orders"
    folder.mkdir()
    failpoints.arm("coordinator", folder)
    yield folder
    failpoints.disarm()


def test_every_call_is_tried() -> None:
    """A new call of the service is lost in a test, too."""
    assert {method for method, _, _ in CASES.values()} == {
        method.name for method in control_pb2.DESCRIPTOR.services_by_name["Agent"].methods
    }


@pytest.mark.parametrize("failure", ["drop-request", "drop-reply"])
@pytest.mark.parametrize("name", list(CASES))
def test_lost_call_is_made_again(orders: Path, tmp_path: Path, name: str, failure: str) -> None:
    """The caller gets the answer, and a node does nothing twice that it may not."""
    method, ask, wanted = CASES[name]
    node, heard, failed = Node(), queue.SimpleQueue[object](), queue.SimpleQueue[Exception]()
    (orders / "coordinator").write_text(f"call {method} 1 {failure}")
    folder = tmp_path / "came"
    folder.mkdir()
    server = Server("127.0.0.1:0", lambda made: control_pb2_grpc.add_AgentServicer_to_server(node, made))
    calls = AgentCalls("pi", server.address, "r", lease_s=60.0, on_failure=lambda _, error: failed.put(error))
    try:
        ask(calls, heard.put, folder)
        assert heard.get(timeout=WAIT_S) == wanted
    finally:
        calls.close()
        server.stop(0.0)
    assert failed.empty()
    assert (orders / f"coordinator{DONE_SUFFIX}").exists(), "nothing was lost"
    lost_later = failure == "drop-reply" and method in MAY_COME_TWICE
    assert node.done[method] == 1 + lost_later


def test_halt_calls_off_a_call_that_is_being_repeated(orders: Path) -> None:
    """A move that is lost is not made again after the node was told to stop."""
    node, heard = Node(), queue.SimpleQueue[object]()
    server = Server("127.0.0.1:0", lambda made: control_pb2_grpc.add_AgentServicer_to_server(node, made))
    calls = AgentCalls("pi", server.address, "r", lease_s=60.0, on_failure=lambda *_: None)
    lost = threading.Event()
    (orders / "coordinator").write_text("call Move 1 drop-request")
    try:
        _move(calls, heard.put, orders)
        while not (orders / f"coordinator{DONE_SUFFIX}").exists():
            lost.wait(0.001)
        _halt(calls, heard.put, orders)
        assert heard.get(timeout=WAIT_S) == "halted"
    finally:
        calls.close()
        server.stop(0.0)
    assert node.done == {"Rest": 1}
