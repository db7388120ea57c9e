"""A link between two nodes over real sockets: what is sent arrives, and every end of it is told."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from edge.transport import frames
from edge.transport.link import KEPT_BYTES, METHOD, _State
from ringtune.engine.events import HeadArrived
from ringtune.errors import ConnectionFailedError, DivergedError, FrameError, PeerLostError, TrustError
from ringtune.schedule.actions import Payload, TensorKey, format_action
from ringtune.schedule.run_shape import Owner
from ringtune.schedule.turns import turn_sequence
from ringtune.storage.pieces import Pieces
from ringtune.transport import channels
from ringtune.transport.channels import Server, open_channel
from ringtune.transport.endpoints import CLIENT_OPTIONS, WINDOW_BYTES
from ringtune.v1 import ring_pb2
from tests.support.plans import make_plan
from tests.support.wire_parts import (
    WAIT_S,
    LinkSender,
    Lost,
    Refused,
    TensorCame,
    expectation,
    hello,
    hidden,
    plan,
    raw_acks,
    receiver,
    sender,
    wire_proxy,
)


def test_link_delivers_hidden_state_with_mask() -> None:
    """A float32 hidden state and its mask arrive bit for bit, with their place in the schedule.

    A trace shows each message as an action of its sender, from encoding to the last byte; a credit comes back with
    its boundary and the name of the node that gave it.
    """
    tensor, mask = hidden()
    before_s = time.monotonic()
    with receiver(expectation()) as node, sender(node.address) as out:
        sent_bytes = out.link.send_tensor(TensorKey(Payload.HIDDEN, 0, 1, 2), tensor, mask)
        span = out.sent.get(timeout=WAIT_S)
        came = node.sink.next()
        node.servicer.ack("a", 2)
        assert out.acks.get(timeout=WAIT_S) == ("b", frames.Ack(1, 2))
    assert format_action(span.action, 4) == ">h0.1#2@b"
    assert before_s <= span.start_s <= span.end_s <= time.monotonic()
    assert isinstance(came, TensorCame)
    assert (came.key, came.source) == (TensorKey("h", 0, 1, 2), "a")
    assert torch.equal(came.tensor, tensor)
    assert came.mask is not None
    assert came.mask.dtype == torch.int64
    assert torch.equal(came.mask, mask)
    assert sent_bytes == tensor.numel() * 4 + mask.numel()


def test_links_of_130_owners_leave_a_node_able_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host at the end of the ring has a link from every owner; all are open, and the next call is answered.

    Each has a connection of its own, as from a process of its own.
    """
    monkeypatch.setattr(channels, "CLIENT_OPTIONS", (*CLIENT_OPTIONS, ("grpc.use_local_subchannel_pool", 1)))
    owners = [f"node-{index}" for index in range(130)]
    of = make_plan([("b", 0, 4)], owners, num_steps=12, max_length=6, hidden_size=8, labels=())
    with receiver(expectation(of)) as node, contextlib.ExitStack() as links:
        outs = [links.enter_context(sender(node.address, hello(of, source=owner))) for owner in owners]
        outs[0].link.send_tensor(TensorKey(Payload.HIDDEN, 0, 0, 0), *hidden())
        assert isinstance(node.sink.next(), TensorCame)
        with pytest.raises(TrustError, match=r"refuses Ring\.Link of node 'stranger'"):
            LinkSender(node.address, hello(of, source="stranger")).link.open(WAIT_S)
        assert all(out.broken.empty() for out in outs)


def test_link_names_the_peer_that_can_not_be_opened() -> None:
    """A closed port fails at once with node and address; where something else answers is told apart from a node."""
    server = Server("127.0.0.1:0", lambda server: None)
    with pytest.raises(ConnectionFailedError, match="another version"):
        LinkSender(server.address).link.open(WAIT_S)
    server.stop(grace_s=0.0)
    with receiver() as node:
        address = node.address
    with pytest.raises(ConnectionFailedError, match=f"node b at {address}"):
        LinkSender(address).link.open(WAIT_S)


def test_link_with_a_silent_opener_is_closed() -> None:
    """Who opens a link and says nothing holds a worker for a bounded time only."""
    with receiver(expectation(), hello_wait_s=0.0) as node:
        silence = threading.Event()
        channel = open_channel(node.address)
        method: Any = channel.stream_stream(METHOD, response_deserializer=ring_pb2.Ack.FromString)
        acks = list(method((message for message in (b"",) if silence.wait(WAIT_S)), timeout=WAIT_S))
        silence.set()
        channel.close()
        assert [ack.error for ack in acks] == ["DeadlineError"]
        assert "no HELLO arrived" in acks[0].refusal


def test_link_goes_on_after_a_refusal() -> None:
    """A bad frame is refused at both ends and dropped; the next good one arrives."""
    tensor, mask = hidden()
    with receiver(expectation()) as node, sender(node.address) as out:
        out.link.send_tensor(TensorKey(Payload.HIDDEN, 0, 0, 2), torch.zeros(3, 6, 8), torch.ones(3, 6))
        refused = node.sink.next()
        assert isinstance(refused, Refused)
        assert "shape [3, 6, 8], expected [2, 1..6, 8]" in str(refused.error)
        _, ack = out.acks.get(timeout=WAIT_S)
        assert (ack.error, ack.refusal) == ("FrameError", str(refused.error))
        out.link.send_tensor(TensorKey(Payload.HIDDEN, 0, 0, 2), tensor, mask)
        assert isinstance(node.sink.next(), TensorCame)
        assert out.broken.empty()


def test_link_refuses_nan_and_takes_the_same_frame_again() -> None:
    """NaN never reaches the sink; the credit it took is free again."""
    tensor, mask = hidden()
    with receiver(expectation(plan(credits=1))) as node, sender(node.address, hello(plan(credits=1))) as out:
        out.link.send_tensor(TensorKey(Payload.HIDDEN, 0, 0, 2), tensor * float("nan"), mask)
        refused = node.sink.next().error
        assert isinstance(refused, DivergedError)
        assert "diverged at step 1, a batch of owner c: " in str(refused)
        assert "the hidden state of item 0, micro-batch 0, block 2, from node " in str(refused)
        assert "(micro-batch 0, training rows " in str(refused)
        _, ack = out.acks.get(timeout=WAIT_S)
        assert (ack.error, ack.refusal) == ("DivergedError", str(refused))
        out.link.send_tensor(TensorKey(Payload.HIDDEN, 0, 0, 2), tensor, mask)
        assert isinstance(node.sink.next(), TensorCame)


@pytest.mark.promise("6 every wait ends")
def test_link_open_ends_at_its_deadline() -> None:
    """A peer that never answers the HELLO costs the deadline, not more."""
    with receiver() as node:  # expects no run, so it keeps us waiting
        out = LinkSender(node.address)
        with pytest.raises(ConnectionFailedError, match="did not answer within 200 ms; check"):
            out.link.open(0.2)


def test_link_waits_for_a_peer_that_still_prepares() -> None:
    """A HELLO that comes before the peer expects the run is welcomed as soon as it does."""
    with receiver() as node:
        out = LinkSender(node.address)
        thread = threading.Thread(target=out.link.open, args=(WAIT_S,))
        thread.start()
        node.servicer.expect(expectation(), node.sink)
        thread.join(WAIT_S)
        out.link.send_tensor(TensorKey(Payload.HIDDEN, 0, 0, 2), *hidden())
        assert isinstance(node.sink.next(), TensorCame)
        out.link.close()


def test_link_of_another_run_is_refused() -> None:
    """Another run, placement, plan or stranger is turned away at the door, with the reason; an owner is not."""
    with receiver(expectation()) as node:
        for changes, message in (
            ({"run_id": "run-0"}, "run 'run-0'"),
            ({"placement_number": 2}, "placement 2"),
            ({"digest": "0" * 64}, "has plan 000000000000"),
            ({"source": "z"}, r"refuses Ring\.Link of node 'z'"),
        ):
            with pytest.raises((FrameError, TrustError), match=message):
                LinkSender(node.address, hello(**changes)).link.open(WAIT_S)
        with sender(node.address, hello(source="d")):
            pass


def test_link_is_the_only_one_of_its_source_and_can_be_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node has one link to another node at a time; closing in order frees the place, and nobody is called lost."""
    monkeypatch.setattr("edge.transport.link.ORDERLY_END_S", WAIT_S)
    with receiver(expectation()) as node:
        with sender(node.address):
            second = LinkSender(node.address)
            with monkeypatch.context() as patch:
                patch.setattr("edge.transport.server._OLD_LINK_WAIT_S", 0.0)
                with pytest.raises(FrameError, match="has a link to node b already"):
                    second.link.open(WAIT_S)
        with sender(node.address) as out:
            out.link.send_tensor(TensorKey(Payload.HIDDEN, 0, 0, 2), *hidden())
            assert isinstance(node.sink.next(), TensorCame)


def test_link_that_breaks_is_told_at_both_ends() -> None:
    """When the connection dies, sender and receiver each learn it once, and sending fails."""
    with receiver(expectation()) as node, wire_proxy(node.address) as proxy, sender(proxy.address) as out:
        proxy.cut()
        target, reason = out.broken.get(timeout=WAIT_S)
        assert target == "b"
        assert f"node b at {proxy.address}" in reason
        lost = node.sink.next()
        assert isinstance(lost, Lost)
        assert lost.source == "a"
        with pytest.raises(PeerLostError, match="node b") as caught:
            out.link.send_tensor(TensorKey(Payload.HIDDEN, 0, 0, 2), *hidden())
        assert caught.value.peer == "b"
        assert out.broken.empty()


def test_link_that_ends_without_goodbye_is_lost() -> None:
    """A stream that just ends is not taken for an orderly end: gRPC can report a dead peer that way."""
    with receiver(expectation()) as node:
        assert [ack.welcome for ack in raw_acks(node, [hello().message()])] == [True]
        assert node.sink.next().source == "a"
        assert [ack.welcome for ack in raw_acks(node, [hello().message(), hello().goodbye()])] == [True]
    assert node.sink.came.empty()


def test_link_whose_receiver_fails_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure of our own at the receiver, as without memory, is told to its run with the error."""
    with receiver(expectation()) as node, sender(node.address) as out:
        monkeypatch.setattr(node.sink, "on_arrival", lambda *_: 1 / 0)
        out.link.send_tensor(TensorKey(Payload.HIDDEN, 0, 0, 2), *hidden())
        lost = node.sink.next()
        assert isinstance(lost, Lost) and "taking a message of node a failed: " in lost.reason


def test_link_to_a_node_that_forgot_the_run_ends_in_order() -> None:
    """A peer that has ended its run is no broken link, until we still want to send to it."""
    with receiver(expectation()) as node, sender(node.address) as out:
        node.servicer.forget()
        for thread in threading.enumerate():
            if thread.name == "link-acks-b":
                thread.join(WAIT_S)
        assert out.broken.empty()
        with pytest.raises(PeerLostError, match="closed the link"):
            out.link.send_head(0, Pieces.of(b"x"))
        assert node.sink.came.empty()


def test_link_sink_hears_nothing_after_forget() -> None:
    """Once ``forget`` has returned, the sink of the old run is not called."""
    with receiver(expectation()) as node, sender(node.address) as out:
        for micro in (0, 1):
            out.link.send_tensor(TensorKey(Payload.HIDDEN, 0, micro, 2), *hidden())
        node.servicer.forget()
        count = node.sink.came.qsize()
        out.link.close()
        assert node.sink.came.qsize() == count


def test_link_to_a_peer_that_answers_without_end_is_lost() -> None:
    """Acknowledgements far beyond the frames, and a long one, close the link, which is not opened again."""
    for acks, reopen_s, why in (
        ([ring_pb2.Ack(credits=1)] * 1026, WAIT_S, "sent 1,025 acknowledgements of 0 messages; the link is closed"),
        ([ring_pb2.Ack(refusal="no " * 40_000)], 0.0, "larger than max"),
    ):
        with receiver(expectation(reopen_s=reopen_s)) as node, sender(node.address, reopen_s=reopen_s) as out:
            run = node.servicer._run
            assert run is not None
            link = run.sources["a"].link
            assert link is not None
            for ack in acks:
                link.answer(ack)
            assert why in out.broken.get(timeout=WAIT_S)[1]
            assert out.reopened.empty()


def test_link_close_is_quick_with_a_frozen_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing does not wait for a peer that does not move, whatever is queued: it ends while the peer is frozen."""
    for name in ("ORDERLY_END_S", "_CLOSE_S"):
        monkeypatch.setattr(f"edge.transport.link.{name}", 0.05)
    big = plan(hidden_size=2048, max_length=512)
    with receiver(expectation(big)) as node, wire_proxy(node.address) as proxy:
        out = LinkSender(proxy.address, hello(big))
        out.link.open(WAIT_S)
        proxy.freeze()
        for micro in (0, 1):
            out.link.send_tensor(TensorKey(Payload.HIDDEN, 0, micro, 2), *hidden(2, 512, 2048))
        out.link.close()
        assert out.broken.empty()


@pytest.mark.promise("7 bounded memory")
def test_link_slow_receiver_holds_the_sender_back() -> None:
    """While the sink is busy, no more than the window and a few chunks leave: nothing piles up at the receiver."""
    big = plan(hidden_size=512, max_length=1024, credits=8, num_steps=40, local_iterations=20)
    release = threading.Event()
    with (
        receiver(expectation(big), hook=lambda: release.wait(WAIT_S)) as node,
        wire_proxy(node.address) as proxy,
        sender(proxy.address, hello(big)) as out,
    ):
        tensor, mask = hidden(2, 1024, 512)
        places = [(seq, micro) for seq in range(4) for micro in range(2)]
        total_bytes = sum(out.link.send_tensor(TensorKey(Payload.HIDDEN, *place, 2), tensor, mask) for place in places)
        sent_bytes = _when_still(lambda: len(proxy.sent))
        assert 0 < sent_bytes < total_bytes / len(places) + WINDOW_BYTES + 2 * frames.CHUNK_BYTES
        release.set()
        came = [node.sink.next() for _ in places]
        assert [(tensor.key.seq, tensor.key.micro) for tensor in came] == places


def test_link_sends_the_bytes_of_a_tensor_once_and_leaves_no_thread() -> None:
    """On the socket they are neither compressed nor doubled; after the end gRPC's threads are gone too."""
    tensor, mask = hidden()
    before = set(threading.enumerate())
    with receiver(expectation()) as node, wire_proxy(node.address) as proxy, sender(proxy.address) as out:
        out.link.send_tensor(TensorKey(Payload.HIDDEN, 0, 0, 2), tensor, mask)
        node.sink.next()
        payload = tensor.numpy().tobytes() + mask.to(torch.uint8).numpy().tobytes()
        assert proxy.sent.count(payload) == 1
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        thread.join(WAIT_S)
    assert [thread.name for thread in left if thread.is_alive()] == []


@pytest.mark.promise("5 timing changes nothing")
@pytest.mark.parametrize(("cut_every", "blob_bytes"), [(2_300, 1_000), (3_100, 1_000), (5_000_000, 9_000_000)])
def test_link_that_is_cut_anywhere_loses_nothing(cut_every: int, blob_bytes: int) -> None:
    """Cut after each so many bytes, between frames and inside them: all payloads arrive once, equal in bits, in order.

    The credits that come back are as many as were given, whichever acknowledgement was lost.
    """
    owners = (Owner(node="b", train_rows=8), Owner(node="a", train_rows=8))
    of = plan(owners=owners, num_steps=400, local_iterations=1, credits=400)
    blob = random.Random(0).randbytes(blob_bytes)
    keys = [TensorKey(Payload.HIDDEN, seq, micro, 2) for seq in range(3) for micro in range(2)]
    with (
        receiver(expectation(of, reopen_s=WAIT_S)) as node,
        wire_proxy(node.address) as proxy,
        sender(proxy.address, hello(of), reopen_s=WAIT_S) as out,
    ):
        proxy.cut_every = cut_every
        node.servicer.granted(itertools.islice(turn_sequence(of.course), 2 * len(keys) + 1))
        for seed, key in enumerate(keys):
            out.link.send_tensor(key, *hidden(seed=seed))
            out.link.send_head(2 * seed + 2, Pieces.of(blob))
            came = node.sink.next()
            assert (came.key, came.source) == (key, "a")
            assert torch.equal(came.tensor, hidden(seed=seed)[0])
            for _ in range(100):
                node.servicer.ack("a", 2)
            assert node.sink.next() == (HeadArrived(2 * seed + 2, "a"), blob)
            assert out.link._kept_bytes <= KEPT_BYTES
        proxy.cut_every = 0
        given = 0
        while given < 100 * len(keys):
            given += out.acks.get(timeout=WAIT_S)[1].credits
        assert given == 100 * len(keys)
        assert proxy.num_cuts > 3
        assert out.reopened.get(timeout=WAIT_S)[0] == "b"
    assert out.broken.empty()
    assert node.sink.came.empty()


@pytest.mark.promise("7 bounded memory")
def test_link_names_the_oldest_message_that_waits() -> None:
    """Of those that no credits limit, or that the peer may give credits for without reading them."""
    link = LinkSender("127.0.0.1:9", hello()).link
    link._state = _State.OPEN
    link.send_parcel(TensorKey(Payload.PAIRS, 0, 0, 2), Pieces.of(b"pairs"))
    assert link.waiting is None
    link.send_tensor(TensorKey(Payload.GRAD, 3, 1, 2), hidden()[0], None)
    link.send_head(2, Pieces.of(b"head"))
    waits = link.waiting
    assert waits is not None and waits.key == TensorKey(Payload.GRAD, 3, 1, 2)


def test_link_keeps_a_frame_that_is_counted_before_it_is_sent() -> None:
    """A peer counts a forged frame, too, and so one more than it got from here; the next frame is sent all the same."""
    link = LinkSender("127.0.0.1:9", hello()).link
    link._state, link._is_welcome, link._counts = _State.OPEN, True, True
    link._kept.append(b"frame")
    link._take(ring_pb2.Ack(received=1))
    assert link._next_message(link._num_calls) == b"frame"
    link._take(ring_pb2.Ack(received=2))
    assert not link._kept


def test_link_to_a_peer_that_is_gone_breaks_at_once() -> None:
    """Where nothing listens any more, or the run is another one, the link is not opened again for a lease."""
    with receiver(expectation(reopen_s=WAIT_S)) as node, wire_proxy(node.address) as proxy:
        for changed, why in (
            (None, "expected no run"),
            (expectation(placement_number=2), "the current one is 2"),
            (expectation(), "does not know the link"),
        ):
            node.servicer.expect(expectation(reopen_s=WAIT_S), node.sink)
            with sender(proxy.address, reopen_s=10 * WAIT_S) as out:
                node.servicer._run = None  # as in a new process
                if changed is not None:
                    node.servicer.expect(changed, node.sink)
                proxy.cut()
                assert why in out.broken.get(timeout=WAIT_S)[1]
        node.servicer.expect(expectation(reopen_s=WAIT_S), node.sink)
        with sender(proxy.address, reopen_s=10 * WAIT_S) as out:
            proxy.close()
            assert "nothing listens there any more" in out.broken.get(timeout=WAIT_S)[1]


def test_link_that_stays_broken_is_lost_after_its_time() -> None:
    """A peer that can't be reached for ``reopen_s`` is told as lost, at both ends."""
    with (
        receiver(expectation(reopen_s=0.2)) as node,
        wire_proxy(node.address) as proxy,
        sender(proxy.address, reopen_s=0.2) as out,
    ):
        proxy.target_port = 1
        proxy.cut()
        assert out.broken.get(timeout=WAIT_S)[0] == "b"
        lost = node.sink.next()
        assert isinstance(lost, Lost)
        assert "was not opened again within 0.2 s" in lost.reason


@pytest.mark.promise("6 every wait ends")
def test_link_that_breaks_again_and_again_without_progress_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame that never passes between two breaks: opening the link anew does not begin its time anew.

    An idle link, or one whose frames pass, is opened again however often it breaks. The link's clock goes on with each
    look at it, so that no busy machine uses its time up.
    """
    now_s = itertools.count(0.0, 0.25)
    monkeypatch.setattr("edge.transport.link.time", SimpleNamespace(monotonic=lambda: next(now_s)))
    with (
        receiver(expectation(reopen_s=WAIT_S)) as node,
        wire_proxy(node.address) as proxy,
        sender(proxy.address, reopen_s=WAIT_S) as out,
    ):
        for _ in range(3):
            proxy.cut()
            assert out.reopened.get(timeout=WAIT_S)[0] == "b"
        assert out.link._stuck_s == 0.0
        proxy.cut_every = 20_000
        out.link.send_head(0, Pieces.of(bytes(100_000)))
        assert "gets no frame although" in out.broken.get(timeout=WAIT_S)[1]


def _when_still(read: Callable[[], int]) -> int:
    """The value once it has not changed for a fifth of a second."""
    still, value = 0, -1
    pause = threading.Event()
    while still < 10:
        pause.wait(0.02)
        still, value = (still + 1 if (now := read()) == value else 0), now
    return value


def test_link_returns_credits_a_quarter_at_a_time() -> None:
    """With 8 credits they travel in pairs, so that the sender never lacks more than one."""
    of = plan(credits=8)
    with receiver(expectation(of)) as node, sender(node.address, hello(of)) as out:
        for micro in (0, 1):
            out.link.send_tensor(TensorKey(Payload.HIDDEN, 0, micro, 2), *hidden())
            node.sink.next()
            assert out.acks.empty()
            node.servicer.ack("a", 2)
        assert out.acks.get(timeout=WAIT_S) == ("b", frames.Ack(2, 2))
