"""What the tests of the wire share: a small plan, a sink that remembers, a served node, a tapping proxy."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from edge.transport import frames, tensors
from edge.transport.frames import Ack, Hello
from edge.transport.link import METHOD, OutLink
from edge.transport.server import RingServicer, RunExpectation
from ringtune.engine.events import Arrival, Span, TensorArrived
from ringtune.errors import RingTuneError
from ringtune.schedule.actions import TensorKey
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import Owner
from ringtune.transport.channels import Server, open_channel
from ringtune.v1 import ring_pb2
from tests.support.plans import changed, make_plan

RUN = "run-1"
WAIT_S = 30.0


def plan(**changes: Any) -> Plan:
    """Hosts a [0,2) and b [2,4), owners c and d; 4 rows in 2 micro-batches, at most 6 tokens, width 8."""
    owners = (Owner(node="c", train_rows=8, eval_rows=5), Owner(node="d", train_rows=8))
    slices = [("a", 0, 2), ("b", 2, 4)]
    made = make_plan(slices, ["c", "d"], num_steps=12, max_length=6, hidden_size=8, labels=())
    return changed(made, **{"owners": owners, **changes})


def expectation(of: Plan | None = None, node: str = "b", **changes: Any) -> RunExpectation:
    """What ``node`` expects in run ``RUN``."""
    of = of or plan()
    made = RunExpectation(run_id=RUN, placement_number=1, plan=of, node=node)
    return dataclasses.replace(made, **changes)


def hello(of: Plan | None = None, source: str = "a", **changes: Any) -> Hello:
    """How ``source`` introduces itself for run ``RUN``."""
    of = of or plan()
    made = Hello(run_id=RUN, placement_number=1, source=source, digest=of.digest, wire_dtype=of.course.wire_dtype)
    return dataclasses.replace(made, **changes)


def hidden(rows: int = 2, tokens: int = 6, width: int = 8, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A random hidden state (B, T, D) and its mask (B, T)."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(rows, tokens, dtype=torch.int64)
    mask[-1, tokens // 2 :] = 0
    return torch.randn(rows, tokens, width, generator=generator), mask


def tensor_header(of: Plan, source: str, key: TensorKey, rows: int) -> ring_pb2.FrameHeader:
    """The header of a tensor of three tokens that ``source`` sends, with a mask where the plan foresees one."""
    mask = torch.ones(rows, 3) if key.is_hidden and key.boundary < of.course.num_blocks else None
    width = of.course.width(key.boundary, is_gradient=not key.is_hidden)
    encoded = tensors.encode(torch.zeros(rows, 3, width), mask, of.course.wire_dtype)
    return frames.tensor_header(hello(of, source), key, encoded)


class TensorCame(NamedTuple):
    """A tensor that the sink was given."""

    key: TensorKey
    source: str
    tensor: torch.Tensor
    mask: torch.Tensor | None


class Lost(NamedTuple):
    """A link that the sink was told is lost."""

    source: str
    reason: str


class Refused(NamedTuple):
    """A refusal that the sink was told."""

    source: str
    error: RingTuneError


class RecordingSink:
    """A sink that remembers; ``hook`` runs first, on the reader's thread."""

    def __init__(self, hook: Callable[[], None] = lambda: None) -> None:
        self._hook = hook
        self.came: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def on_arrival(self, event: Arrival, content: Any) -> None:
        """Remember a tensor, or the event with the bytes of a head or parcel."""
        self._hook()
        is_tensor = isinstance(event, TensorArrived)
        self.came.put(TensorCame(*event, *content) if is_tensor else (event, bytes(content)))

    def on_link_lost(self, source: str, reason: str) -> None:
        """Remember a lost link."""
        self.came.put(Lost(source, reason))

    def on_received(self, source: str, num_bytes: int, sent_unix_s: float) -> None:
        """Ignore how long it took."""

    def on_refused(self, source: str, error: RingTuneError) -> None:
        """Remember a refusal."""
        self.came.put(Refused(source, error))

    def next(self) -> Any:
        """What came next; fails after ``WAIT_S``."""
        return self.came.get(timeout=WAIT_S)


class Receiver:
    """A node that receives, on a free port of this machine."""

    def __init__(self, hook: Callable[[], None] = lambda: None, hello_wait_s: float = WAIT_S) -> None:
        self.servicer = RingServicer(hello_wait_s=hello_wait_s)
        self.sink = RecordingSink(hook)
        self.server = Server("127.0.0.1:0", self.servicer.add_to)
        self.address = self.server.address

    def stop(self) -> None:
        """End everything."""
        self.servicer.forget()
        self.server.stop(grace_s=0.1)


@contextlib.contextmanager
def receiver(expected: RunExpectation | None = None, **changes: Any) -> Iterator[Receiver]:
    """A served node, stopped at the end; without ``expected`` it expects no run."""
    node = Receiver(**changes)
    try:
        if expected is not None:
            node.servicer.expect(expected, node.sink)
        yield node
    finally:
        node.stop()


class LinkSender:
    """A link with what it was told."""

    def __init__(self, address: str, by: Hello | None = None, target: str = "b", reopen_s: float = 0.0) -> None:
        self.reopened: queue.SimpleQueue[tuple[str, float]] = queue.SimpleQueue()
        self.acks: queue.SimpleQueue[tuple[str, Ack]] = queue.SimpleQueue()
        self.broken: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self.sent: queue.SimpleQueue[Span] = queue.SimpleQueue()
        self.link = OutLink(
            target,
            address,
            by or hello(),
            on_ack=lambda source, ack: self.acks.put((source, ack)),
            on_broken=lambda target, reason: self.broken.put((target, reason)),
            on_sent=self.sent.put,
            on_reopened=lambda target, seconds: self.reopened.put((target, seconds)),
            reopen_s=reopen_s,
        )


@contextlib.contextmanager
def sender(address: str, by: Hello | None = None, target: str = "b", reopen_s: float = 0.0) -> Iterator[LinkSender]:
    """An open link, closed at the end."""
    made = LinkSender(address, by, target, reopen_s)
    try:
        made.link.open(WAIT_S)
        yield made
    finally:
        made.link.close()


class WireProxy:
    """A proxy on a free port that copies bytes between a client and ``target`` and keeps the client's.

    ``cut()`` closes all connections at once, as a dying peer does; ``freeze()`` stops copying but keeps
    the connections, as a frozen peer does; with ``cut_every`` all are closed each time that so many bytes of clients
    have passed.
    """

    def __init__(self, target: str, cut_every: int = 0) -> None:
        self.cut_every, self.num_cuts, self._uncut_bytes = cut_every, 0, 0
        host, _, port = target.rpartition(":")
        self.target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._peers: dict[socket.socket, socket.socket] = {}
        self._upward: set[socket.socket] = set()
        self._upward_bytes = bytearray()
        self._lock = threading.Lock()
        self._over, self._is_frozen = threading.Event(), False
        self._thread = threading.Thread(target=self._copy, name="wire_proxy")
        self._thread.start()

    @property
    def sent(self) -> bytes:
        """Everything that clients sent so far."""
        with self._lock:
            return bytes(self._upward_bytes)

    def cut(self) -> None:
        """Close all connections."""
        with self._lock:
            self._cut()

    def _cut(self) -> None:
        self.num_cuts += 1
        for side in list(self._peers):
            self._close(side)

    def freeze(self) -> None:
        """Copy nothing more, close nothing."""
        self._is_frozen = True

    def stop(self) -> None:
        """End the proxy."""
        self._over.set()
        self._thread.join(WAIT_S)
        self.cut()
        self._listener.close()
        self._selector.close()

    def _copy(self) -> None:
        while not self._over.is_set():
            if self._is_frozen:
                self._over.wait(0.05)
                continue
            for key, _ in self._selector.select(timeout=0.05):
                with self._lock:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif not self._is_frozen and key.fileobj in self._peers:
                        self._pass_on(key.fileobj)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            server = socket.create_connection(self.target, timeout=WAIT_S)
        except OSError:  # nobody listens there, or it ends just now
            client.close()
            return
        for side, other in ((client, server), (server, client)):
            side.settimeout(WAIT_S)
            self._peers[side] = other
            self._selector.register(side, selectors.EVENT_READ)
        self._upward.add(client)

    def _pass_on(self, side: socket.socket) -> None:
        try:
            data = side.recv(1 << 16)
            if self.cut_every and side in self._upward:
                data = data[: self.cut_every - self._uncut_bytes]
                self._uncut_bytes += len(data)
            self._peers[side].sendall(data)
        except OSError:
            data = b""
        if side in self._upward:
            self._upward_bytes += data
        if not data:
            self._close(side)
        elif self.cut_every and self._uncut_bytes >= self.cut_every:
            self._uncut_bytes = 0
            self._cut()

    def _close(self, side: socket.socket) -> None:
        for end in (side, self._peers.get(side)):
            if end is not None and end in self._peers:
                self._selector.unregister(end)
                del self._peers[end]
                end.close()


@contextlib.contextmanager
def wire_proxy(target: str, cut_every: int = 0) -> Iterator[WireProxy]:
    """A tapping proxy in front of ``target``, ended at the end."""
    made = WireProxy(target, cut_every)
    try:
        yield made
    finally:
        made.stop()


def raw_acks(node: Receiver, messages: list[bytes]) -> list[ring_pb2.Ack]:
    """Send messages as they are, then end; the answers."""
    channel = open_channel(node.address)
    try:
        method: Any = channel.stream_stream(METHOD, response_deserializer=ring_pb2.Ack.FromString)
        return list(method(iter(messages), timeout=WAIT_S))
    finally:
        channel.close()
