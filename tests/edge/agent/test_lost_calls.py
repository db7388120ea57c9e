"""Every call of a node, to the coordinator and to other nodes, survives one lost request and one lost reply."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from coordinator.server.server import CoordinatorServer
from edge.agent.process import Membership, _peers
from edge.checkpoint.snapshot_servicer import SnapshotFetcher, SnapshotServicer, push
from edge.checkpoint.snapshots import FILE, SnapshotShelf, TurnSnapshots
from edge.checkpoint.turn_snapshots import CopySender, _Copy
from edge.transport.access import RunAccess
from ringtune import __version__
from ringtune.errors import FrameError, IntegrityError
from ringtune.schedule.migration import Source
from ringtune.schedule.turns import StartPoint
from ringtune.storage.pieces import Piece, Pieces
from ringtune.storage.tensor_files import TensorFile
from ringtune.transport.channels import Server, open_channel
from ringtune.transport.endpoints import WIRE
from ringtune.v1 import control_pb2, control_pb2_grpc
from tests.edge.checkpoint.test_snapshots import file_of
from tests.support import failpoints
from tests.support.failpoints import DONE_SUFFIX
from tests.support.plans import make_plan

WAIT_S = 30.0
RUN = "run"
FAILURES = pytest.mark.parametrize("failure", ["drop-request", "drop-reply"])


@pytest.fixture
def lose(tmp_path: Path) -> Iterator[Callable[[str, str], None]]:
    """Lets the next call of a name be lost; all that were ordered have to be lost in the end."""
    failpoints.arm("a", tmp_path)
    ordered: list[str] = []

    def order(method: str, failure: str) -> None:
        ordered.append(method)
        (tmp_path / "a").write_text(f"call {method} 1 {failure}")

    yield order
    failpoints.disarm()
    assert bool(ordered) == (tmp_path / f"a{DONE_SUFFIX}").exists(), "nothing was lost"


@FAILURES
@pytest.mark.parametrize("method", ["Join", "Heartbeat", "Leave", "Nodes"])
def test_call_to_the_coordinator_is_made_again(
    lose: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch, method: str, failure: str
) -> None:
    """A node joins, is known, finds others, and leaves, whichever of it is lost; it is one member all the time."""
    monkeypatch.setattr("edge.agent.process._LEAVE_S", WAIT_S)
    ended: list[str] = []
    with CoordinatorServer("127.0.0.1:0", lease_s=60.0) as server, open_channel(server.address) as channel:
        stub = control_pb2_grpc.CoordinatorStub(channel)
        identity = control_pb2.JoinRequest(
            node="a", address="127.0.0.1:1", version=__version__, instance="i", wire=WIRE
        )
        found = Membership(
            stub=stub,
            where="there",
            identity=identity,
            current_run=lambda: "",
            on_run_over=lambda run_id, reason: ended.append(reason),
            on_gone=lambda error: ended.append(str(error)),
            rss_bytes=lambda: 1,
        )
        lose(method, failure)
        found.join(timeout_s=WAIT_S)
        for _ in range(2):  # the one after a lost one finds the node known
            found.send_heartbeat()
        names = [node.joined.node for node in stub.Nodes(control_pb2.Empty()).nodes] if method != "Nodes" else ["a"]
        assert _peers(SimpleNamespace(name="b", coordinator="there"), stub) == ["127.0.0.1:1"]  # type: ignore[arg-type]
        found.leave()
        assert not stub.Nodes(control_pb2.Empty()).nodes
    assert (names, ended) == (["a"], [])


@pytest.fixture
def other() -> Iterator[tuple[SnapshotShelf, TurnSnapshots, str]]:
    """What node b keeps of a run, and where it is served."""
    shelf, kept = SnapshotShelf("b"), TurnSnapshots("b")
    kept.begin(RUN)
    access, plan = RunAccess("b"), make_plan([("a", 0, 3), ("b", 3, 4)], ["a"]).with_copies(True)
    access.move(RUN, plan, StartPoint.of(plan.course), 0, 4)
    access.place(RUN, plan, None)

    def add(server: Any) -> None:
        control_pb2_grpc.add_SnapshotsServicer_to_server(SnapshotServicer(shelf, kept, access), server)

    server = Server("127.0.0.1:0", add)
    yield shelf, kept, server.address
    server.stop(0.0)


@FAILURES
def test_snapshot_is_fetched_again(
    lose: Callable[[str, str], None], other: tuple[SnapshotShelf, TurnSnapshots, str], failure: str
) -> None:
    """A part that broke off is left, and all of it comes again."""
    _, kept, address = other
    kept.keep(RUN, 4, "b", file_of(1, 2))
    lose("Fetch", failure)
    deadline_s = time.monotonic() + WAIT_S
    fetcher = SnapshotFetcher("a", RUN, 0, {"b": address}, deadline_s, lambda node, at: None, lease_s=WAIT_S)
    file = fetcher.blocks(Source("b", 1, 3), 4)
    assert sorted(TensorFile(file, where="it").infos) == ["adapter/1.up", "adapter/2.up"]


def test_snapshot_that_never_ends_is_given_up(
    other: tuple[SnapshotShelf, TurnSnapshots, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages without a byte are no sign of a node that sends: the next source is asked, long before the deadline."""

    def drip(*_: object) -> Iterator[control_pb2.FileChunk]:
        while True:
            yield control_pb2.FileChunk(path="blocks-1-3.safetensors")

    monkeypatch.setattr("edge.checkpoint.snapshot_servicer.cut_pieces", drip)
    _, kept, address = other
    kept.keep(RUN, 4, "b", file_of(1, 2))
    deadline_s = time.monotonic() + WAIT_S
    fetcher = SnapshotFetcher("a", RUN, 0, {"b": address}, deadline_s, lambda node, at: None, lease_s=0.05)
    with pytest.raises(IntegrityError, match=r"node b at .* has sent 0 bytes in \d+ s, less than 8,192 a second after"):
        fetcher.blocks(Source("b", 1, 3), 4)


def sender_to(address: str, on_lost: Callable[[object], None]) -> CopySender:
    """Sends copies of node a to node b; tells what it loses, and what fails."""
    sender = CopySender(
        RUN,
        "a",
        0,
        addresses={"b": address},
        patience_s=WAIT_S,
        on_lost=lambda node, why: on_lost(why),
        on_failed=on_lost,
    )
    sender.start()
    return sender


@FAILURES
def test_copy_is_given_again_and_kept_once(
    lose: Callable[[str, str], None], other: tuple[SnapshotShelf, TurnSnapshots, str], failure: str
) -> None:
    """The turn is done once the copy is there, and nobody is called lost."""
    _, kept, address = other
    lost, done = list[object](), threading.Event()
    sender = sender_to(address, lost.append)
    lose("Keep", failure)
    sender.put(_Copy(4, lambda: Pieces.of(file_of(0, 1)), "b", False, done.set))
    assert done.wait(WAIT_S) and not lost
    sender.close()
    assert sorted(TensorFile(kept.part(RUN, 4, 0, 2), where="it").infos) == ["adapter/0.up", "adapter/1.up"]


@pytest.mark.promise("7 bounded memory")
def test_copy_that_is_held_open_ends_with_the_next_of_its_node(
    other: tuple[SnapshotShelf, TurnSnapshots, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sender has one copy in the memory of its holder that is not complete, however many calls it leaves open."""
    _, kept, address = other
    over, taken, take = threading.Event(), threading.Event(), SnapshotServicer._take

    def half() -> Iterator[control_pb2.KeepChunk]:
        file = control_pb2.FileChunk(path=FILE, chunk=file_of(0)[:9])
        yield control_pb2.KeepChunk(run_id=RUN, node="a", step=4, file=file)
        over.wait(2 * WAIT_S)

    def note_and_take(*arguments: Any) -> None:
        taken.set()
        take(*arguments)

    monkeypatch.setattr(SnapshotServicer, "_take", note_and_take)
    with open_channel(address) as channel:
        stub = control_pb2_grpc.SnapshotsStub(channel)
        held = stub.Keep.future(half(), timeout=3 * WAIT_S)
        assert taken.wait(WAIT_S)  # the holder has begun with it, before the next one comes
        held.add_done_callback(lambda _: over.set())
        push(control_pb2.KeepChunk(run_id=RUN, node="a", step=4), Pieces.of(file_of(0)), "b", address, WAIT_S)
        assert isinstance(held.exception(WAIT_S), grpc.RpcError)
    assert bytes(kept.part(RUN, 4, 0, 1))


@pytest.mark.parametrize("place", ["opened", "read"])
def test_copy_that_can_not_be_read_is_a_failure_of_its_own_node(
    other: tuple[SnapshotShelf, TurnSnapshots, str], place: str
) -> None:
    """The holder is not lost, and keeps nothing of it."""
    _, kept, address = other

    def broken() -> Iterator[Piece]:
        yield file_of(0, 1)[:9]
        raise IntegrityError("the shard can't be read")

    def content() -> Pieces:
        if place == "opened":
            raise IntegrityError("node a: the shard is damaged")
        return Pieces(len(file_of(0, 1)), broken)

    told: SimpleQueue[object] = SimpleQueue()
    sender = sender_to(address, told.put)
    sender.put(_Copy(4, content, "b", False, lambda: None))
    assert isinstance(told.get(timeout=WAIT_S), IntegrityError)
    sender.close()
    with pytest.raises(FrameError):
        kept.part(RUN, 4, 0, 2)
