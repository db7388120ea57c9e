"""The server of a node's incoming links, for one run at a time, with a reader thread for each link.

::

    gRPC --messages--> reader: assemble, check, decode --> sink
    gRPC <----acks---- worker (one of the server's) <----- queue <-- credits, refusals

A frame that is not in the plan is refused (sender and sink are notified) and dropped; the ring continues. A link of
another run or plan is refused as a whole. A broken connection is waited for (``RunExpectation.reopen_s``) if its sender
can open the link again (``edge.transport.link``): frames of the link continue where they ended.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Protocol

import grpc

from edge.transport import tensors
from edge.transport.admission import FrameCheck, RunExpectation, check_hello
from edge.transport.frames import CHUNK_BYTES, DTYPE_NAMES, NAMES, Assembler, Received, key_of, unpack
from ringtune.engine.events import Arrival, HeadArrived, ParcelArrived, TensorArrived
from ringtune.errors import (
    ConnectionFailedError,
    DeadlineError,
    DivergedError,
    FrameError,
    RingTuneError,
    internal_error,
)
from ringtune.schedule.actions import Payload
from ringtune.schedule.lowering import PARCELS
from ringtune.schedule.turns import Turn
from ringtune.transport.channels import caller_of
from ringtune.transport.parties import Party
from ringtune.v1 import ring_pb2

__all__ = ["RingServicer", "RunExpectation", "Sink"]

_log = logging.getLogger(__name__)

HELLO_WAIT_S: Final = 30.0
"""Seconds from the start of a link to its acceptance: its HELLO must arrive, and its run must be expected."""

COUNTED_BYTES: Final = CHUNK_BYTES
"""Bytes after which the sender is told at the latest how many frames have arrived."""

_MAX_UNREAD: Final = 64
"""Refusals that wait for their sender; one that reads none, and sends more, is told no more of them."""

_MAX_UNREAD_ACKS: Final = 1 << 14
"""Acknowledgements that wait for their sender; the connection of one that reads none, and sends more, is ended."""

_MAX_USELESS: Final = 1024
"""Messages of a node that are refused or dropped in one placement: of an honest one the rest of a payload, no more."""

_POLL_S: Final = 0.5
_JOIN_S: Final = 5.0


class Sink(Protocol):
    """Receives payloads; called by reader threads, never after ``RingServicer.forget`` has returned."""

    def on_arrival(self, event: Arrival, content: Any) -> None:
        """Receive a whole payload: ``Pieces`` of a head or parcel; of a tensor a pair, checked.

        The pair is a hidden state or gradient (B, T, D), and its mask (B, T) int64 or None.
        """

    def on_link_lost(self, source: str, reason: str) -> None:
        """Handle a link from ``source`` that broke for good; not called if ``source`` closed it in order."""

    def on_received(self, source: str, num_bytes: int, sent_unix_s: float) -> None:
        """Note that all bytes of a tensor have arrived, and their sending time on the coordinator's clock."""

    def on_refused(self, source: str, error: RingTuneError) -> None:
        """Handle a refused and dropped frame of ``source``, which also gets the refusal."""


class InLink:
    """The receiving end of one link.

    Attributes:
        is_over: whether the call has ended; earlier messages may still be read.
        is_done: whether the reader has ended, so that the sink is not called any more.

    Args:
        join: called with the link and its first frame; welcomes the link and returns its source, or raises
            :class:`FrameError`. May block.
        changed: called when ``is_over`` or ``is_done`` becomes true.
    """

    def __init__(
        self,
        messages: Iterator[bytes],
        *,
        join: Callable[[InLink, ring_pb2.FrameHeader | None], _Source],
        changed: Callable[[InLink], None],
        hello_wait_s: float = HELLO_WAIT_S,
    ) -> None:
        self._messages, self._join, self._changed = messages, join, changed
        self._hello_wait_s = hello_wait_s
        self._acks: queue.SimpleQueue[ring_pb2.Ack | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, name="link-reader", daemon=True)
        self._cancel: Callable[[], object] = self._end
        self._is_welcome = False
        self._is_forgotten = False
        self.has_spoken = False
        self.is_over = False
        self.is_done = False

    # ---- the worker of the server ---------------------------------------------------------------------

    def acks(self, context: grpc.ServicerContext) -> Iterator[ring_pb2.Ack]:
        """Run the link until it is over; yield the acknowledgements for the sender."""
        deadline_s = time.monotonic() + self._hello_wait_s + _POLL_S
        self._cancel = context.cancel
        if not context.add_callback(self._end):
            return
        self._thread.start()
        try:
            while True:
                try:
                    ack = self._acks.get(timeout=_POLL_S)
                except queue.Empty:
                    if not self._is_welcome and time.monotonic() > deadline_s:
                        yield refusal(DeadlineError(f"no HELLO arrived within {self._hello_wait_s:g} s; link closed"))
                        return
                    continue
                if ack is None:
                    return
                yield ack
        finally:
            self._end()

    def forget(self) -> None:
        """Ignore further frames, and end the stream."""
        self._is_forgotten = True
        self._end()

    def _end(self) -> None:
        self.is_over = True
        self._acks.put(None)
        self._changed(self)

    def wait(self) -> None:
        """Wait up to ``_JOIN_S`` until the reader has ended, after which the sink is not called."""
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def answer(self, ack: ring_pb2.Ack) -> None:
        """Send an acknowledgement."""
        if self._acks.qsize() < _MAX_UNREAD_ACKS:
            self._acks.put(ack)
        else:
            self._cancel()

    # ---- the reader -----------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            self._accept_link()
        except Exception:
            _log.exception("a link's reader failed")
        finally:
            self.is_done = True
            self._end()

    def _accept_link(self) -> None:
        try:
            first = next(self._messages, None)
            if first is None:
                return
            self.has_spoken = True
            source = self._join(self, unpack(first)[0])
        except grpc.RpcError:
            return
        except RingTuneError as error:
            self._acks.put(refusal(error))
            return
        self._is_welcome = True
        try:
            for message in self._messages:
                if self._is_forgotten:
                    return
                fed = source.assembler.feed(message)
                if fed.error is not None:
                    self._refuse(source, fed.error)
                is_useless = fed.error is not None or fed.is_dropped
                if fed.received is not None:
                    is_useless |= not self._deliver(source, fed.received)
                if fed.is_goodbye:
                    return
                if is_useless and source.has_sent_enough():
                    return
                source.count(len(message))
        except grpc.RpcError:
            _log.debug("the link from node %s ended with an error", source.name)
        except Exception as error:
            if not source.run.is_over:
                text = f"taking a message of node {source.name} failed: {internal_error(error)}"
                source.run.sink.on_link_lost(source.name, text)
            raise
        if not self._is_forgotten:
            source.broke()

    def _deliver(self, source: _Source, received: Received) -> bool:
        """Pass a payload to the sink; return whether it was taken, and not refused for its values."""
        header, payload, blob = received
        kind, sink = NAMES[header.kind], source.run.sink
        if header.sent_unix_s:
            sink.on_received(source.name, header.payload_bytes, header.sent_unix_s)
        try:
            if kind in PARCELS:
                sink.on_arrival(ParcelArrived(key_of(header), source.name), blob)
                return True
            if kind == Payload.HEAD:
                sink.on_arrival(HeadArrived(header.seq, source.name), blob)
                return True
            tensor, mask = tensors.decode(
                payload,
                tuple(header.shape),
                DTYPE_NAMES[header.dtype],
                header.mask_bytes,
                compute_dtype=source.run.expectation.compute_dtype,
                exponent=header.exponent,
                packed=source.run.expectation.plan.course.packed,
            )
            sink.on_arrival(TensorArrived(key_of(header), source.name), (tensor, mask))
        except (FrameError, DivergedError) as error:
            source.check.revoke(header)
            self._refuse(source, source.check.explained(header, error))
            return False
        return True

    def _refuse(self, source: _Source, error: RingTuneError) -> None:
        _log.debug("node %s: %s", source.name, error)  # the sink logs it, once for many
        source.refusal = refusal(error)
        if self._acks.qsize() < _MAX_UNREAD:
            self._acks.put(source.refusal)
        if not self._is_forgotten:
            source.run.sink.on_refused(source.name, error)


def refusal(error: RingTuneError) -> ring_pb2.Ack:
    """Return the message that refuses a link, or a frame of it."""
    return ring_pb2.Ack(refusal=str(error), error=type(error).__name__)


_OLD_LINK_WAIT_S: Final = 2.0
_MAX_WAITING: Final = 64
"""Most links that wait for their HELLO or their run, each with two threads.

Beyond this the oldest one without a message is ended, so that silent links do not block others.
"""


class _Source:
    """A node that sends to this one: its link, and what is kept of it while its connection is opened again.

    Attributes:
        check: of all its links in the run.
        credits: given in all on this link, by boundary.
        refusal: the last one on this link.
    """

    def __init__(self, name: str, run: _Run, lock: threading.Condition) -> None:
        self.name, self.run, self._lock = name, run, lock
        self.check = FrameCheck(run.expectation, name, run.turns)
        self.link: InLink | None = None
        self._timer: threading.Timer | None = None
        self._num_useless = 0
        self._begin("")

    def _begin(self, link_id: str) -> None:
        self._id = link_id
        self.assembler = Assembler(self.check.admit, self.check.revoke)
        self._num_frames = self._uncounted_bytes = 0
        self.credits = Counter[int]()
        self.refusal: ring_pb2.Ack | None = None

    def require(self, link_id: str) -> None:
        """Refuse to open a link again that is not known here; end its old connection."""
        if not link_id or link_id != self._id:
            node = self.run.expectation.node
            raise FrameError(f"node {node} does not know the link of node {self.name} that is opened again")
        if self.link is not None:
            self.link.forget()

    def welcome(self, link: InLink, header: ring_pb2.FrameHeader) -> None:
        """Take ``link`` as the open one, and tell its sender what has arrived of it; the lock is held."""
        if not header.is_reopened:
            self._begin(header.link)
        self.stop_waiting()
        self.link = link
        link.answer(ring_pb2.Ack(welcome=True, counts=bool(self._id), received=self._num_frames))
        for boundary, total in self.credits.items() if self._id else ():
            link.answer(ring_pb2.Ack(boundary=boundary, total_credits=total))
        if self.refusal is not None:
            link.answer(self.refusal)

    def has_sent_enough(self) -> bool:
        """Count a message of no use; tell the sink, and return True, once there are too many to read on."""
        self._num_useless += 1
        if self._num_useless <= _MAX_USELESS:
            return False
        last = f", the last one as: {self.refusal.refusal}" if self.refusal is not None else ""
        text = f"node {self.name} sent {self._num_useless:,} messages that are refused{last}; its link is closed"
        self._id = ""
        self.run.sink.on_link_lost(self.name, text)
        return True

    def count(self, num_bytes: int) -> None:
        """Count a frame that was taken; tell the sender now and then."""
        self._num_frames += 1
        self._uncounted_bytes += num_bytes
        link = self.link
        if self._id and self._uncounted_bytes >= COUNTED_BYTES and link is not None:
            link.answer(ring_pb2.Ack(received=self._counted()))

    def _counted(self) -> int:
        self._uncounted_bytes = 0
        return self._num_frames

    def credit(self, boundary: int, count: int) -> None:
        """Return ``count`` credits at ``boundary`` to the sender; the lock is held."""
        self.check.credit_returned(boundary, count)
        self.credits[boundary] += count
        if self.link is not None:
            ack = ring_pb2.Ack(credits=count, boundary=boundary)
            if self._id:
                ack.total_credits, ack.received = self.credits[boundary], self._counted()
            self.link.answer(ack)

    def broke(self) -> None:
        """Wait until the sender opens the link again, or tell the sink at the end that it is lost."""
        wait_s = self.run.expectation.reopen_s
        if not self._id or not wait_s:
            self.run.sink.on_link_lost(self.name, f"the link from node {self.name} broke; see that node's log")
            return
        with self._lock:
            if not self.run.is_over:
                self._timer = threading.Timer(wait_s, self._give_up)
                self._timer.daemon = True
                self._timer.start()

    def stop_waiting(self) -> None:
        """Wait no more for a broken link; the lock is held."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        with self._lock:
            if self._timer is not threading.current_thread() or self.run.is_over:
                return
            self._timer, self._id = None, ""
            wait_s = self.run.expectation.reopen_s
            why = f"the link from node {self.name} broke, and was not opened again within {wait_s:g} s"
            self.run.sink.on_link_lost(self.name, f"{why}; see that node's log")


class _Run:
    """The sources, known turns and credits of one run at this node."""

    def __init__(self, expectation: RunExpectation, sink: Sink, lock: threading.Condition) -> None:
        self.expectation, self.sink = expectation, sink
        self.is_over = False
        self.turns = expectation.known_turns()
        self.sources: dict[str, _Source] = {}
        self._lock = lock
        self._held: dict[tuple[str, int], int] = {}
        self._batch = max(1, expectation.plan.placement.credits // 4)

    def source(self, name: str) -> _Source:
        """Return the source of this name; the lock is held."""
        return self.sources.get(name) or self.sources.setdefault(name, _Source(name, self, self._lock))

    def credits_due(self, source: str, boundary: int) -> int:
        """Return the number of credits to send now, with a new one: all that were held back once they are a batch.

        A batch is a quarter of the plan's credits, so that the sender always has the rest: with 8 credits the first one
        gives 0, the next one 2. Those of unit gradients are few, and are sent at once.
        """
        held = self._held.pop((source, boundary), 0) + 1
        if held >= self._batch or boundary > self.expectation.plan.course.head:
            return held
        self._held[source, boundary] = held
        return 0


class RingServicer:
    """Serves ``ringtune.v1.Ring``: ``add_to(server)`` once, then ``expect`` and ``forget`` per run. Safe for threads.

    ``hello_wait_s``: seconds that a link waits for its HELLO and until its run is expected.
    """

    def __init__(self, *, hello_wait_s: float = HELLO_WAIT_S) -> None:
        self._hello_wait_s = hello_wait_s
        self._changed = threading.Condition()
        self._run: _Run | None = None
        self._waiting: dict[InLink, None] = {}

    def add_to(self, server: grpc.Server) -> None:
        """Register the service with a gRPC server.

        Incoming messages stay bytes, which ``edge.transport.frames`` reads without protobuf's copy.
        """
        link: grpc.RpcMethodHandler[bytes, ring_pb2.Ack] = grpc.stream_stream_rpc_method_handler(
            self._link, request_deserializer=None, response_serializer=ring_pb2.Ack.SerializeToString
        )
        service = ring_pb2.DESCRIPTOR.services_by_name["Ring"].full_name
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Link": link}),))

    def expect(self, expectation: RunExpectation, sink: Sink) -> None:
        """Accept links of this run from now on, and forget the former run."""
        self.forget()
        with self._changed:
            self._run = _Run(expectation, sink, self._changed)
            self._changed.notify_all()

    def forget(self, sink: Sink | None = None) -> None:
        """Forget the run and end its links; its sink is not called after this has returned.

        With ``sink`` only the run of this sink is forgotten, as another run may have begun meanwhile.
        """
        with self._changed:
            if sink is not None and self._run is not None and self._run.sink is not sink:
                return
            run, self._run = self._run, None
            links = []
            if run is not None:
                run.is_over = True
                for source in run.sources.values():
                    source.stop_waiting()
                links = [source.link for source in run.sources.values() if source.link is not None]
        for link in links:
            link.forget()
        for link in links:
            link.wait()

    def granted(self, turns: Iterable[Turn]) -> None:
        """Admit frames of these turns from now on."""
        with self._changed:
            run = self._run
        if run is not None:
            for turn in turns:
                run.turns.granted(turn)

    def done_before(self, index: int) -> None:
        """Admit no more frames of turns before ``index``, which this node has done."""
        with self._changed:
            run = self._run
        if run is not None:
            run.turns.done_before(index)

    def ack(self, source: str, boundary: int) -> None:
        """Return a credit for a hidden state of ``source`` at ``boundary``; ignored if it never had a link."""
        with self._changed:
            run = self._run
            sender = run.sources.get(source) if run else None
            if run is None or sender is None:
                return
            due = run.credits_due(source, boundary)
            if due:
                sender.credit(boundary, due)

    # ---- one link -------------------------------------------------------------------------------------

    def _link(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[ring_pb2.Ack]:
        caller = caller_of(context)

        def join(link: InLink, header: ring_pb2.FrameHeader | None) -> _Source:
            return self._join(link, header, caller.party if caller else None)

        link = InLink(messages, join=join, changed=self._on_changed, hello_wait_s=self._hello_wait_s)
        with self._changed:
            silent = [waiting for waiting in self._waiting if not waiting.has_spoken]
            is_full = len(self._waiting) >= _MAX_WAITING
            if is_full and not silent:
                return iter([refusal(FrameError(f"{_MAX_WAITING} links wait here for their run; try again"))])
            self._waiting[link] = None
            if is_full:
                del self._waiting[silent[0]]
        if is_full:
            silent[0].forget()
        return self._acks(link, context)

    def _acks(self, link: InLink, context: grpc.ServicerContext) -> Iterator[ring_pb2.Ack]:
        try:
            yield from link.acks(context)
        finally:
            with self._changed:
                self._waiting.pop(link, None)

    def _join(self, link: InLink, header: ring_pb2.FrameHeader | None, caller: Party | None) -> _Source:
        header = header or ring_pb2.FrameHeader()
        with self._changed:
            wait_s = 0.0 if header.is_reopened else self._hello_wait_s
            self._changed.wait_for(lambda: self._run is not None or link.is_over, wait_s)
            run = self._run
            if run is None:
                raise DeadlineError(f"this node expected no run within {wait_s:g} s; start the run again")
            name = check_hello(run.expectation, header)
            run.expectation.require_link(name, caller)
            source = run.source(name)
            if header.is_reopened:
                source.require(header.link)
            if not self._changed.wait_for(lambda: source.link is None, _OLD_LINK_WAIT_S):
                if header.is_reopened:
                    raise ConnectionFailedError(f"the link of node {name} has not ended here yet; try again")
                raise FrameError(f"node {name} has a link to node {run.expectation.node} already; close it first")
            if self._run is not run:
                raise FrameError(f"run {run.expectation.run_id!r} has ended at node {run.expectation.node}")
            source.welcome(link, header)
            self._waiting.pop(link, None)
            return source

    def _on_changed(self, link: InLink) -> None:
        with self._changed:
            for source in self._run.sources.values() if self._run is not None and link.is_done else ():
                if source.link is link:
                    source.link = None
            self._changed.notify_all()
