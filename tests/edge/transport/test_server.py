"""The receiving end of a node's links: which runs and turns it takes, and what it refuses."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from edge.transport import frames, tensors
from edge.transport import server as ring_server
from edge.transport.server import InLink, RingServicer
from ringtune.errors import ConnectionFailedError, DeadlineError, FrameError, RingTuneError
from ringtune.schedule.actions import Payload, TensorKey
from ringtune.schedule.turns import turn_sequence
from ringtune.transport.channels import Server
from ringtune.v1 import ring_pb2
from tests.support.wire_parts import (
    WAIT_S,
    LinkSender,
    Lost,
    RecordingSink,
    TensorCame,
    expectation,
    hello,
    hidden,
    plan,
    raw_acks,
    receiver,
    sender,
)


def test_server_forgets_only_the_run_of_the_sink_that_asks() -> None:
    """The end of a former run, which took long, does not touch the one that began meanwhile."""
    with receiver(expectation()) as node:
        former = RecordingSink()
        node.servicer.forget(former)
        with sender(node.address) as opened:
            opened.link.send_tensor(TensorKey(Payload.HIDDEN, 0, 1, 2), *hidden())
            assert isinstance(node.sink.next(), TensorCame)
        node.servicer.forget(node.sink)
        assert node.servicer._run is None


def test_server_admits_the_turns_that_are_granted_and_not_done() -> None:
    """A frame of a turn far ahead is refused before its grant and taken after it; one of a turn that is done is not."""
    of = plan(num_steps=400, local_iterations=1)
    far, done = TensorKey(Payload.HIDDEN, 200, 0, 2), TensorKey(Payload.HIDDEN, 3, 0, 2)
    with receiver(expectation(of)) as node, sender(node.address, hello(of)) as out:
        out.link.send_tensor(far, *hidden())
        assert "are accepted now" in str(node.sink.next().error)
        node.servicer.granted(itertools.islice(turn_sequence(of.course), 200))
        out.link.send_tensor(far, *hidden())
        assert node.sink.next().key == far
        node.servicer.done_before(200)
        out.link.send_tensor(done, *hidden())
        assert "are accepted now" in str(node.sink.next().error)


@pytest.mark.parametrize("packed", [False, True])
def test_server_takes_masks_of_packed_rows_where_the_plan_packs(packed: bool) -> None:
    """Elsewhere a node could make others attend to numbers that no mask has."""
    of = plan(packed=packed)
    tensor, mask = hidden()
    with receiver(expectation(of)) as node, sender(node.address, hello(of)) as out:
        out.link.send_tensor(TensorKey(Payload.HIDDEN, 0, 1, 2), tensor, mask * 2)
        came = node.sink.next()
        assert isinstance(came, TensorCame) is packed
        assert packed or "holds other values than 0 and 1" in str(came.error)


def test_server_second_one_on_a_port_fails() -> None:
    """Two servers never share a port: the second one says so."""
    with receiver() as node, pytest.raises(ConnectionFailedError, match=f"can't listen on {node.address}"):
        Server(node.address, RingServicer().add_to)


def test_server_without_a_run_refuses_after_its_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link to a node that never prepares ends with a reason."""
    monkeypatch.setattr(ring_server, "_POLL_S", WAIT_S)  # its HELLO is no late one, on a busy machine either
    with receiver(hello_wait_s=0.1) as node:
        out = LinkSender(node.address)
        with pytest.raises(DeadlineError, match=r"expected no run within 0\.1 s"):
            out.link.open(WAIT_S)


def test_silent_links_keep_no_other_link_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more links without HELLO than may wait the oldest ends; a link that speaks is welcome at once."""
    monkeypatch.setattr(ring_server, "_MAX_WAITING", 3)
    with receiver(expectation()) as node, contextlib.ExitStack() as stack:
        ended, over = threading.Semaphore(0), queue.SimpleQueue[None]()
        for _ in range(12):
            channel = stack.enter_context(grpc.insecure_channel(node.address))
            method: Any = channel.stream_stream("/ringtune.v1.Ring/Link")
            call = method(iter(over.get, None))
            stack.callback(call.cancel)
            stack.callback(over.put, None)  # else a thread would stay
            if not call.add_callback(ended.release):  # it has ended already
                ended.release()
        assert all(ended.acquire(timeout=WAIT_S) for _ in range(12 - 3))
        with sender(node.address):
            pass


def test_server_survives_garbage() -> None:
    """Bytes that are no frame are refused, at the start of a link and in its midst, and the node goes on."""
    with receiver(expectation()) as node:
        for messages in ([b"\xff" * 100], [b""], [frames.pack(ring_pb2.FrameHeader(), ())]):
            (refused,) = raw_acks(node, messages)
            assert refused.error == "FrameError"
        assert "the first frame of a link is no HELLO" in refused.refusal
        garbage = [b"\xff" * 100, b"", b"\x12\x01x", b"\x0a\xff\xff\xff\xff\x0f"]
        acks = raw_acks(node, [hello().message(), *garbage, hello().goodbye()])
        assert [ack.welcome for ack in acks] == [True, False, False]
        with sender(node.address) as out:
            out.link.send_tensor(TensorKey(Payload.HIDDEN, 0, 0, 2), *hidden())
            while not isinstance(came := node.sink.next(), TensorCame):
                assert isinstance(came.error, RingTuneError)


def test_server_closes_the_link_of_a_node_that_sends_what_nobody_can_use() -> None:
    """Refused frames, and chunks of them, are read up to a number in a run; then the link is lost, with the reason."""
    with receiver(expectation(reopen_s=WAIT_S)) as node:
        for link, count in (("1", 600), ("2", 425)):  # a link that is opened anew has no more
            raw_acks(node, [hello().message(link), *[b"\xff" * 10, b"\x12\x01x"] * (count // 2), b"\x12\x01x"])
        while not isinstance(came := node.sink.next(), Lost):
            pass
        assert came.reason.startswith("node a sent 1,025 messages that are refused, the last one as: ")
        (refused,) = raw_acks(node, [hello().message("2", is_reopened=True)])
        assert "does not know the link of node a that is opened again" in refused.refusal


def test_server_closes_the_link_of_a_node_with_values_that_nobody_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole frame that is refused for what it holds may be sent again, and counts as other useless messages do."""
    monkeypatch.setattr(ring_server, "_MAX_USELESS", 10)
    of, (tensor, mask) = plan(), hidden()
    key = TensorKey(Payload.HIDDEN, 0, 0, 2)
    odd = tensors.encode(tensor, 2 * mask, of.course.wire_dtype)
    frame = b"".join(frames.messages(frames.tensor_header(hello(of), key, odd), odd.parts))
    with receiver(expectation(of)) as node:
        raw_acks(node, [hello(of).message(), *[frame] * 12])
        while not isinstance(came := node.sink.next(), Lost):
            assert "holds other values than 0 and 1" in str(came.error)
        assert came.reason.startswith("node a sent 11 messages that are refused, the last one as: ")


def test_server_ends_the_connection_of_a_node_that_reads_no_acknowledgements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credits would wait without end for one that sends on, such as the guest of a prediction over the ring."""
    monkeypatch.setattr(ring_server, "_MAX_UNREAD_ACKS", 1000)
    still = (("grpc.http2.bdp_probe", 0),)  # else gRPC makes the window larger while answers come
    with receiver(expectation()) as node, grpc.insecure_channel(node.address, options=still) as channel:
        messages = queue.SimpleQueue[bytes | None]()
        messages.put(hello().message())
        method: Any = channel.stream_stream("/ringtune.v1.Ring/Link")
        call = method(iter(messages.get, None))
        next(call)
        run = node.servicer._run
        assert run is not None
        link = run.sources["a"].link
        assert link is not None
        for _ in range(100_000):  # of which the connection itself takes some
            if not node.sink.came.empty():
                break
            link.answer(ring_pb2.Ack(credits=1, boundary=2))
        assert node.sink.next() == Lost("a", "the link from node a broke; see that node's log")
        assert link._acks.qsize() < 1000 + 10  # each that sees the link end wakes its worker
        call.cancel()


def test_refusals_that_nobody_reads_take_no_memory() -> None:
    """The sink hears of each bad frame; of their sender, who reads no answer, some are kept."""
    sink, link = RecordingSink(), InLink(iter(()), join=lambda *_: pytest.fail("no HELLO"), changed=lambda _: None)
    source: Any = SimpleNamespace(name="a", run=SimpleNamespace(sink=sink))
    for _ in range(1000):
        link._refuse(source, FrameError("of a turn that is none"))
    assert (link._acks.qsize(), sink.came.qsize()) == (ring_server._MAX_UNREAD, 1000)


def test_server_refuses_a_message_above_the_limit() -> None:
    """A message longer than 8 MiB is refused by gRPC itself; the node goes on."""
    with receiver(expectation()) as node:
        with pytest.raises(grpc.RpcError) as caught:
            raw_acks(node, [b"\0" * (9 << 20)])
        assert isinstance(caught.value, grpc.Call)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with sender(node.address):
            pass
