"""What the tests of the wire share: a small plan, a sink that remembers, a served node, a tap before it."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
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
from tests.support.tap import Tap

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


@contextlib.contextmanager
def wire_proxy(target: str) -> Iterator[Tap]:
    """A tap in front of ``target``, closed at the end."""
    with contextlib.closing(Tap(int(target.rpartition(":")[2]))) as tap:
        yield tap


def raw_acks(node: Receiver, messages: list[bytes]) -> list[ring_pb2.Ack]:
    """Send messages as they are, then end; the answers."""
    channel = open_channel(node.address)
    try:
        method: Any = channel.stream_stream(METHOD, response_deserializer=ring_pb2.Ack.FromString)
        return list(method(iter(messages), timeout=WAIT_S))
    finally:
        channel.close()
