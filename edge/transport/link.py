"""The sending end of a link: one long-lived stream to one node, with its own threads.

``send_tensor``, ``send_parcel`` and ``send_blob`` only queue; a sender thread encodes and writes, so that sending
overlaps compute. The engine's credits bound the queue. A second thread reads the acknowledgements::

    compute thread --queue--> sender (encode, chunk) ==stream==> peer
    on_ack <------------------ reader <==============stream===== peer
"""

from __future__ import annotations

import contextlib
import enum
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import grpc
import torch

from edge.transport import frames, tensors
from edge.transport.frames import Ack, Hello
from ringtune.engine.events import Span
from ringtune.errors import ConnectionFailedError, PeerLostError, RingTuneError, error_from_name, internal_error
from ringtune.schedule.actions import Action, Op, TensorKey, message
from ringtune.storage.pieces import Pieces
from ringtune.transport.channels import open_channel
from ringtune.transport.parties import node_party
from ringtune.transport.status import error_of_call
from ringtune.v1 import ring_pb2

_log = logging.getLogger(__name__)

METHOD: Final = "/ringtune.v1.Ring/Link"
ORDERLY_END_S: Final = 2.0
"""Seconds that ``close`` waits for the peer to end the stream before it is cancelled."""

_POLL_S: Final = 1.0
_JOIN_S: Final = 5.0
_CLOSE_S: Final = 1.0


class _State(enum.Enum):
    OPENING = enum.auto()
    OPEN = enum.auto()
    BROKEN = enum.auto()
    CLOSED = enum.auto()


@dataclass(frozen=True, slots=True)
class _Tensor:
    key: TensorKey
    tensor: torch.Tensor
    mask: torch.Tensor | None
    sent_unix_s: float

    def action(self, target: str) -> Action:
        return message(Op.SEND, self.key, target)


@dataclass(frozen=True, slots=True)
class _Parcel:
    key: TensorKey
    data: Pieces

    def action(self, target: str) -> Action:
        return message(Op.SEND, self.key, target)


@dataclass(frozen=True, slots=True)
class _Blob:
    kind: str
    seq: int
    data: Pieces

    def action(self, target: str) -> Action:
        """The send action; a head belongs to a turn instead of an item."""
        return Action(Op.SEND, 0, -1, self.seq, 0, target, self.kind)


_Entry = _Tensor | _Parcel | _Blob


class OutLink:
    """The sending end of a link to the node ``target``.

    Args:
        on_ack: called with (target, ack) for every credit and refusal, by the link's reader thread.
        on_broken: called with (target, reason) once if the link breaks before ``close``, by a thread of the link.
        on_sent: called by the sender thread with each sent message: from the start of its encoding until the connection
            has its last byte, monotonic seconds.
        now_unix_s: the coordinator's clock, for the sending time of tensors; 0 = unknown.
    """

    def __init__(
        self,
        target: str,
        address: str,
        hello: Hello,
        *,
        on_ack: Callable[[str, Ack], None],
        on_broken: Callable[[str, str], None],
        on_sent: Callable[[Span], None] = lambda span: None,
        now_unix_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._now_unix_s = now_unix_s
        self.target = target
        self.address = address
        self._hello = hello
        self._on_ack = on_ack
        self._on_broken = on_broken
        self._on_sent = on_sent
        self._peer = f"node {target} at {address}"
        self._queue: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._welcome: queue.SimpleQueue[RingTuneError | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._state = _State.OPENING
        self._reason = ""
        self._channel: grpc.Channel | None = None
        self._call: Any = None
        self._reader: threading.Thread | None = None
        self._sender: threading.Thread | None = None

    # ---- interface ----------------------------------------------------------------------------------

    def open(self, timeout_s: float) -> None:
        """Connect, and wait until the peer accepts the link.

        Raises:
            ConnectionFailedError: nothing answers at the address within ``timeout_s``.
            FrameError: the peer refuses, as it has another run or plan.
        """
        self._channel = open_channel(self.address, peer=node_party(self.target))
        method: Any = self._channel.stream_stream(METHOD, response_deserializer=ring_pb2.Ack.FromString)
        self._call = method(self._messages())
        self._reader = threading.Thread(target=self._read, name=f"link-acks-{self.target}", daemon=True)
        self._reader.start()
        try:
            failure = self._welcome.get(timeout=timeout_s)
        except queue.Empty:
            failure = ConnectionFailedError(f"{self._peer} did not answer within {timeout_s:g} s; check that it runs")
        if failure is not None:
            self.close()
            raise failure

    def send_tensor(self, key: TensorKey, tensor: torch.Tensor, mask: torch.Tensor | None) -> int:
        """Queue a hidden state or gradient, which must not change until it is sent.

        Args:
            key: of the tensor.
            tensor: (B, T, D), any float type and device.
            mask: (B, T) for a hidden state that enters a block, otherwise None.

        Returns:
            Payload bytes on the wire.

        Raises:
            PeerLostError: the link is broken or closed.
        """
        self._put(_Tensor(key, tensor, mask, self._now_unix_s()))
        return tensors.wire_bytes(tensor.shape, self._hello.wire_dtype, 0 if mask is None else mask.numel())

    def send_blob(self, kind: str, seq: int, data: Pieces) -> int:
        """Queue the head for turn ``seq``, or a probe; the bytes must not change until they are sent.

        Returns:
            Payload bytes on the wire.

        Raises:
            PeerLostError: the link is broken or closed.
        """
        self._put(_Blob(kind, seq, data))
        return data.size_bytes

    def send_parcel(self, key: TensorKey, data: Pieces) -> int:
        """Queue a parcel, which must not change until it is sent.

        Returns:
            Payload bytes on the wire.

        Raises:
            PeerLostError: the link is broken or closed.
        """
        self._put(_Parcel(key, data))
        return data.size_bytes

    def close(self) -> None:
        """Drop the queue, end the stream and all threads of the link; may be called twice.

        Takes at most a few seconds. If the peer is frozen and the socket is full, gRPC keeps its connection until its
        own watchdog ends it (``ringtune.transport.endpoints``).
        """
        with self._lock:
            was_open, self._state = self._state is _State.OPEN, _State.CLOSED
        with contextlib.suppress(queue.Empty):  # the sender takes from it too
            while True:
                self._queue.get_nowait()
        self._queue.put(None)
        if was_open:
            _join(self._reader, ORDERLY_END_S)
        if self._call is not None:
            self._call.cancel()
        _join(self._reader, _JOIN_S)
        _join(self._sender, _JOIN_S)
        if self._channel is not None:
            closer = threading.Thread(target=self._channel.close, name=f"link-close-{self.target}", daemon=True)
            closer.start()
            _join(closer, _CLOSE_S)

    def _put(self, entry: _Entry) -> None:
        with self._lock:
            if self._state is not _State.OPEN:
                lost = PeerLostError(self._reason or f"the link to {self._peer} is not open")
                lost.peer = self.target
                raise lost
            self._queue.put(entry)

    # ---- the sender: gRPC's own thread, which pulls the messages ------------------------------------

    def _messages(self) -> Iterator[bytes]:
        self._sender = threading.current_thread()
        yield self._hello.message()
        while self._state is not _State.BROKEN:
            try:
                entry = self._queue.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if entry is None:
                yield self._hello.goodbye()
                return
            began_s = time.monotonic()
            try:
                yield from self._encode(entry)
                self._on_sent(Span(entry.action(self.target), began_s, time.monotonic()))
            except Exception as error:
                _log.exception("encoding for node %s failed", self.target)
                self._break(f"encoding for node {self.target} failed: {internal_error(error)}")
                return

    def _encode(self, entry: _Entry) -> Iterator[bytes]:
        if isinstance(entry, _Blob):
            header = frames.blob_header(self._hello, entry.kind, entry.seq, entry.data)
            return frames.messages(header, entry.data)
        if isinstance(entry, _Parcel):
            header = frames.parcel_header(self._hello, entry.key, entry.data)
            return frames.messages(header, entry.data)
        encoded = tensors.encode(entry.tensor, entry.mask, self._hello.wire_dtype)
        header = frames.tensor_header(self._hello, entry.key, encoded)
        header.sent_unix_s = entry.sent_unix_s
        return frames.messages(header, encoded.parts)

    # ---- the reader of acknowledgements -------------------------------------------------------------

    def _read(self) -> None:
        failure: RingTuneError = PeerLostError(f"{self._peer} closed the link; see its log")
        in_order = False
        try:
            for ack in self._call:
                self._take(ack)
            in_order = True
        except grpc.RpcError as error:
            failure = error_of_call(error, peer=self._peer)
        except Exception as error:
            _log.exception("taking an acknowledgement of node %s failed", self.target)
            failure = PeerLostError(f"taking an acknowledgement of {self._peer} failed: {internal_error(error)}")
        self._welcome.put(failure)
        self._break(str(failure), in_order=in_order)

    def _take(self, ack: ring_pb2.Ack) -> None:
        if self._state is not _State.OPENING:
            self._on_ack(self.target, Ack(ack.credits, ack.boundary, ack.refusal, ack.error))
        elif ack.welcome:
            with self._lock:
                if self._state is _State.OPENING:
                    self._state = _State.OPEN
            self._welcome.put(None)
        else:
            self._welcome.put(error_from_name(ack.error, ack.refusal))

    def _break(self, reason: str, *, in_order: bool = False) -> None:
        """Note the end of the link once, and call ``on_broken`` if the link was open.

        A peer that ends the link in order is lost only if there is something left to send.
        """
        with self._lock:
            was_open = self._state is _State.OPEN
            if was_open:
                self._state, self._reason = _State.BROKEN, reason
        if was_open and not (in_order and self._queue.empty()):
            self._on_broken(self.target, reason)


def _join(thread: threading.Thread | None, timeout_s: float) -> None:
    if thread is not None and thread is not threading.current_thread():
        thread.join(timeout_s)
