"""The receiving end of one link: a reader thread checks and decodes frames and hands tensors to the sink.

::

    gRPC --messages--> reader: assemble, check, decode --> sink
    gRPC <----acks---- worker (one of the server's) <----- queue <-- credits, refusals
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, Protocol

import grpc
import torch

from edge.wire import tensors
from edge.wire.checks import FrameCheck, RunExpectation
from edge.wire.frames import DTYPE_NAMES, Assembler, Received, unpack
from edge.wire.kinds import NAMES, PROBE, key_of
from ringtune.errors import DeadlineError, DivergedError, FrameError, RingTuneError
from ringtune.files.pieces import Pieces
from ringtune.schedule.actions import Payload, TensorKey
from ringtune.schedule.exchanges.parcels import PARCELS
from ringtune.v1 import ring_pb2

_log = logging.getLogger(__name__)

HELLO_WAIT_S: Final = 30.0
"""Seconds that a link may take from its start to its welcome: HELLO has to come, the run has to be expected."""

_POLL_S: Final = 0.5
_JOIN_S: Final = 5.0


class Sink(Protocol):
    """Takes what arrives; called from reader threads, never after ``RingServicer.forget`` returned."""

    def on_tensor(self, key: TensorKey, source: str, tensor: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Take a whole, checked hidden state or gradient (B, T, D); ``mask`` (B, T) int64 or None."""

    def on_blob(self, kind: str, seq: int, source: str, data: Pieces) -> None:
        """Take a whole head for turn ``seq`` (kind ``Payload.HEAD``), or a probe."""

    def on_parcel(self, key: TensorKey, source: str, data: Pieces) -> None:
        """Take a whole parcel."""

    def on_link_lost(self, source: str, reason: str) -> None:
        """Hear that the link from ``source`` broke; not called when ``source`` closed it in order."""

    def on_received(self, source: str, num_bytes: int, sent_unix_s: float) -> None:
        """Hear at once that a tensor's bytes are all here, and when they were sent on the coordinator's clock."""

    def on_refused(self, source: str, error: RingTuneError) -> None:
        """Hear that a frame of ``source`` was refused and dropped; ``source`` is told as well."""


class Admission(Protocol):
    """The run of a link whose HELLO was accepted."""

    expectation: RunExpectation
    sink: Sink

    def check_of(self, source: str) -> FrameCheck:
        """Return the check of the frames of ``source``, the same one for every link of that source in a run."""


class InLink:
    """The receiving end of one link.

    Attributes:
        has_spoken: its first message is here.
        is_over: the call has ended; what had come before may still be read.
        is_done: the reader has ended: no more calls to the sink.

    Args:
        messages: from gRPC; ends or raises when the call is over.
        join: called with the link and its first frame; returns (source, admission) or raises
            :class:`FrameError`. May wait.
        changed: called when ``is_over`` or ``is_done`` became true.
        hello_wait_s: how long the link may take from its start to its welcome.
    """

    def __init__(
        self,
        messages: Iterator[bytes],
        *,
        join: Callable[[InLink, ring_pb2.FrameHeader | None], tuple[str, Admission]],
        changed: Callable[[InLink], None],
        hello_wait_s: float = HELLO_WAIT_S,
    ) -> None:
        self._messages = messages
        self._join = join
        self._changed = changed
        self._hello_wait_s = hello_wait_s
        self._acks: queue.SimpleQueue[ring_pb2.Ack | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, name="link-reader", daemon=True)
        self._is_welcome = False
        self._is_forgotten = False
        self.has_spoken = False
        self.is_over = False
        self.is_done = False

    # ---- the worker of the server ---------------------------------------------------------------------

    def acks(self, context: grpc.ServicerContext) -> Iterator[ring_pb2.Ack]:
        """Run the link until it is over; yield the acknowledgements for the sender."""
        deadline_s = time.monotonic() + self._hello_wait_s + _POLL_S
        if not context.add_callback(self._end):
            return
        self._thread.start()
        try:
            while True:
                try:
                    ack = self._acks.get(timeout=_POLL_S)
                except queue.Empty:
                    if not self._is_welcome and time.monotonic() > deadline_s:
                        yield refusal(DeadlineError(f"no HELLO came within {self._hello_wait_s:g} s; link closed"))
                        return
                    continue
                if ack is None:
                    return
                yield ack
        finally:
            self._end()

    def forget(self) -> None:
        """Take no more frames, and ask the stream to end."""
        self._is_forgotten = True
        self._end()

    def _end(self) -> None:
        self.is_over = True
        self._acks.put(None)
        self._changed(self)

    def wait(self) -> None:
        """Wait until the reader has ended, so that it calls the sink no more; for ``_JOIN_S`` at most."""
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def credit(self, boundary: int, count: int) -> None:
        """Send ``count`` credits at ``boundary`` back to the sender."""
        self._acks.put(ring_pb2.Ack(credits=count, boundary=boundary))

    # ---- the reader -----------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            self._welcome_and_take()
        except Exception:
            _log.exception("a link's reader failed")
        finally:
            self.is_done = True
            self._end()

    def _welcome_and_take(self) -> None:
        try:
            first = next(self._messages, None)
            if first is None:
                return
            self.has_spoken = True
            source, admission = self._join(self, unpack(first)[0])
        except grpc.RpcError:
            return
        except RingTuneError as error:
            self._acks.put(refusal(error))
            return
        self._is_welcome = True
        self._acks.put(ring_pb2.Ack(welcome=True))
        check = admission.check_of(source)
        assembler = Assembler(check.admit, check.revoke)
        try:
            for message in self._messages:
                if self._is_forgotten:
                    return
                fed = assembler.feed(message)
                if fed.error is not None:
                    self._refuse(source, admission, fed.error)
                if fed.received is not None:
                    self._deliver(source, admission, check, fed.received)
                if fed.is_goodbye:
                    return
        except grpc.RpcError:
            _log.debug("the link from node %s ended with an error", source)
        self._lost(source, admission)

    def _deliver(self, source: str, admission: Admission, check: FrameCheck, received: Received) -> None:
        header, payload, blob = received
        kind = NAMES[header.kind]
        if header.sent_unix_s:
            admission.sink.on_received(source, header.payload_bytes, header.sent_unix_s)
        try:
            if kind in PARCELS:
                admission.sink.on_parcel(key_of(header), source, blob)
                return
            if kind in (Payload.HEAD, PROBE):
                admission.sink.on_blob(kind, header.seq, source, blob)
                return
            tensor, mask = tensors.decode(
                payload,
                tuple(header.shape),
                DTYPE_NAMES[header.dtype],
                header.mask_bytes,
                compute_dtype=admission.expectation.compute_dtype,
                exponent=header.exponent,
            )
            admission.sink.on_tensor(key_of(header), source, tensor, mask)
        except (FrameError, DivergedError) as error:
            check.revoke(header)
            self._refuse(source, admission, check.explained(header, error))

    def _refuse(self, source: str, admission: Admission, error: RingTuneError) -> None:
        _log.debug("node %s: %s", source, error)  # the sink says it, once for many
        self._acks.put(refusal(error))
        if not self._is_forgotten:
            admission.sink.on_refused(source, error)

    def _lost(self, source: str, admission: Admission) -> None:
        if not self._is_forgotten:
            admission.sink.on_link_lost(source, f"the link from node {source} broke; see that node's log")


def refusal(error: RingTuneError) -> ring_pb2.Ack:
    """Make the message with which a link, or a frame of it, is refused."""
    return ring_pb2.Ack(refusal=str(error), error=type(error).__name__)
