"""The sending end of a link: one long-lived stream to one node, with its own threads.

``send_tensor`` and ``send_blob`` only queue; a sender thread encodes and writes, so that sending overlaps
compute. What may be queued is bounded by the credits that the engine keeps. A second thread reads the
acknowledgements::

    compute thread --queue--> sender (encode, chunk) ==stream==> peer
    on_ack <------------------ reader <==============stream===== peer
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import grpc
import torch

from edge.wire import frames, tensors
from edge.wire.frames import Ack, Hello
from edge.wire.options import error_of_call, open_channel
from ringtune.errors import ConnectionFailedError, FrameError, PeerLostError, error_from_name
from ringtune.v1 import ring_pb2

_log = logging.getLogger(__name__)

METHOD: Final = "/ringtune.v1.Ring/Link"
ORDERLY_END_S: Final = 0.5
"""How long ``close`` lets the peer end the stream before it cancels."""

_POLL_S: Final = 1.0
_JOIN_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class _Tensor:
    kind: str
    seq: int
    micro: int
    boundary: int
    tensor: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Blob:
    kind: str
    seq: int
    data: bytes


class OutLink:
    """A link to ``target``; open it, send, close it.

    Args:
        target: node at the other end.
        address: its ``host:port``.
        hello: who we are and for which run.
        on_ack: told (target, ack) for every credit and refusal; called from the link's reader thread.
        on_broken: told (target, reason) at most once when the link breaks; never once ``close`` began.
            Called from a thread of the link.
    """

    def __init__(
        self,
        target: str,
        address: str,
        hello: Hello,
        *,
        on_ack: Callable[[str, Ack], None],
        on_broken: Callable[[str, str], None],
    ) -> None:
        self.target = target
        self.address = address
        self._hello = hello
        self._on_ack = on_ack
        self._on_broken = on_broken
        self._queue: queue.SimpleQueue[_Tensor | _Blob | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closing = False
        self._is_over = False
        self._broken = ""
        self._channel: grpc.Channel | None = None
        self._call: Any = None
        self._answer: queue.SimpleQueue[ring_pb2.Ack | Exception] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None
        self._sender: threading.Thread | None = None

    # ---- from outside -------------------------------------------------------------------------------

    def open(self, timeout_s: float) -> None:
        """Connect and wait until the peer welcomes us.

        Raises:
            ConnectionFailedError: nobody answers at the address within ``timeout_s``.
            FrameError: the peer refuses: it has another run or plan.
        """
        self._channel = open_channel(self.address)
        method = self._channel.stream_stream(METHOD, response_deserializer=ring_pb2.Ack.FromString)
        self._call = method(self._messages())
        self._reader = threading.Thread(target=self._read, name=f"link-acks-{self.target}", daemon=True)
        self._reader.start()
        try:
            answer = self._answer.get(timeout=timeout_s)
        except queue.Empty:
            answer = ConnectionFailedError(
                f"node {self.target} at {self.address} did not answer within {timeout_s:g} s; check that it runs"
            )
        error = answer if isinstance(answer, Exception) else self._refusal(answer)
        if error is not None:
            self.close()
            raise error

    def send_tensor(
        self, kind: str, seq: int, micro: int, boundary: int, tensor: torch.Tensor, mask: torch.Tensor | None
    ) -> int:
        """Queue a hidden state or gradient; it must not change until it is sent.

        Args:
            kind: ``Payload.HIDDEN`` or ``Payload.GRAD``.
            seq: item.
            micro: micro-batch.
            boundary: block that the hidden state enters.
            tensor: (B, T, D), any float type and device.
            mask: (B, T) for a hidden state that enters a block, otherwise None.

        Returns:
            Payload bytes that go over the wire for it.

        Raises:
            PeerLostError: the link is broken or closed.
        """
        self._check_open()
        self._queue.put(_Tensor(kind, seq, micro, boundary, tensor, mask))
        return tensors.wire_bytes(tensor.shape, self._hello.wire_dtype, 0 if mask is None else mask.numel())

    def send_blob(self, kind: str, seq: int, data: bytes) -> int:
        """Queue opaque bytes: the head at a hand-over (``seq``: the turn), or a probe.

        Returns:
            Payload bytes that go over the wire for it.

        Raises:
            PeerLostError: the link is broken or closed.
        """
        self._check_open()
        self._queue.put(_Blob(kind, seq, data))
        return len(data)

    def close(self) -> None:
        """Drop what is queued, end the stream and every thread of the link. May be called twice."""
        with self._lock:
            self._is_closing = True
        self._drain()
        self._queue.put(None)
        deadline_s = time.monotonic() + ORDERLY_END_S
        self._join(self._reader, ORDERLY_END_S)
        if self._call is not None:
            self._call.cancel()
        self._join(self._reader, _JOIN_S)
        self._join(self._sender, max(0.0, deadline_s - time.monotonic()) + _JOIN_S)
        if self._channel is not None:
            self._channel.close()

    # ---- the sender thread (gRPC's own, which pulls the messages) --------------------------------------

    def _messages(self) -> Iterator[bytes]:
        self._sender = threading.current_thread()
        yield self._hello.message()
        while not self._is_over:
            try:
                entry = self._queue.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if entry is None:
                return
            try:
                yield from self._encode(entry)
            except Exception as error:
                _log.exception("node %s: encoding failed", self.target)
                self._break(f"encoding for node {self.target} failed: {type(error).__name__}: {error}")
                return

    def _encode(self, entry: _Tensor | _Blob) -> Iterator[bytes]:
        if isinstance(entry, _Blob):
            header = frames.blob_header(self._hello, entry.kind, entry.seq, entry.data)
            return frames.messages(header, (memoryview(entry.data),))
        encoded = tensors.encode(entry.tensor, entry.mask, self._hello.wire_dtype)
        header = frames.tensor_header(self._hello, entry.kind, entry.seq, entry.micro, entry.boundary, encoded)
        return frames.messages(header, encoded.parts)

    # ---- the reader thread ----------------------------------------------------------------------------

    def _read(self) -> None:
        reason = f"node {self.target} closed the link"
        try:
            for ack in self._call:
                self._take(ack)
        except grpc.RpcError as error:
            failure = error_of_call(error, peer=f"node {self.target} at {self.address}")
            self._answer.put(failure)
            reason = str(failure)
        else:
            self._answer.put(PeerLostError(f"node {self.target} at {self.address} closed the link; see its log"))
        self._break(reason)

    def _take(self, ack: ring_pb2.Ack) -> None:
        if ack.welcome or not self._is_welcome():
            self._answer.put(ack)
            return
        self._on_ack(self.target, Ack(ack.credits, ack.boundary, ack.refusal, ack.error))

    def _is_welcome(self) -> bool:
        raise NotImplementedError

    def _refusal(self, ack: ring_pb2.Ack) -> Exception | None:
        if ack.welcome:
            return None
        return error_from_name(ack.error or FrameError.__name__, ack.refusal)

    # ---- both -----------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        raise NotImplementedError

    def _drain(self) -> None:
        raise NotImplementedError

    def _break(self, reason: str) -> None:
        raise NotImplementedError

    def _join(self, thread: threading.Thread | None, timeout_s: float) -> None:
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
