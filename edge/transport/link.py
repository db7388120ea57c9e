"""The sending end of a link: one long-lived stream to one node, with its own threads.

``send_tensor``, ``send_parcel`` and ``send_head`` only queue; a sender thread encodes and writes, so that sending
overlaps compute. The engine's credits bound the queue; gradients and heads have none, so the loop asks what is
``waiting``. A second thread reads the acknowledgements::

    compute thread --queue--> sender (encode, chunk) ==stream==> peer
    on_ack <------------------ reader <==============stream===== peer

A connection that breaks is opened again for ``reopen_s`` seconds. Frames have numbers from 0 on; the sender keeps those
that the peer has not counted yet, and sends them again after the last one that arrived. Credits travel as totals, so
that lost acknowledgements are made up for::

    sender    keeps 5, 6, 7 (counted: below 5)  --X     HELLO again --------------> 6, 7, 8 ...
    receiver  has counted below 6                       welcome, "counted below 6", totals of credits

Where nothing listens at the peer's address any more, or the peer refuses, its process or its run is gone, and the link
is broken at once.
"""

from __future__ import annotations

import enum
import functools
import logging
import queue
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import grpc
import torch

from edge.transport import frames, tensors
from edge.transport.frames import Ack, Hello
from ringtune.engine.events import Span
from ringtune.errors import (
    ConnectionFailedError,
    FrameError,
    PeerLostError,
    RingTuneError,
    TrustError,
    error_from_name,
    internal_error,
)
from ringtune.quantities import format_seconds
from ringtune.schedule import actions
from ringtune.schedule.actions import Action, Op, Payload, TensorKey
from ringtune.schedule.lowering import PARCELS
from ringtune.storage.pieces import Pieces
from ringtune.transport.channels import open_channel
from ringtune.transport.endpoints import WINDOW_BYTES, split_address
from ringtune.transport.parties import node_party
from ringtune.transport.status import error_of_call
from ringtune.v1 import ring_pb2

_log = logging.getLogger(__name__)

METHOD: Final = "/ringtune.v1.Ring/Link"
ORDERLY_END_S: Final = 2.0
"""Seconds that ``close`` waits for the peer to end the stream before it is cancelled."""

KEPT_BYTES: Final = WINDOW_BYTES + 2 * frames.CHUNK_BYTES
"""Most bytes of frames that wait to be counted by the peer: a full window, and as much while its answer travels."""

_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0
_CONNECT_S: Final = 4.0
_POLL_S: Final = 1.0
_JOIN_S: Final = 5.0
_CLOSE_S: Final = 1.0
_SHORT_ANSWERS: Final = (("grpc.max_receive_message_length", 1 << 16),)
_MAX_ACKS: Final = 1024
"""Acknowledgements of a connection beyond four of each frame: a peer gives credits, counts, and refusals for frames."""
_MAX_BOUNDARIES: Final = 1 << 16
"""Most boundaries of which a peer gives credits: more blocks than any model has."""


class _State(enum.Enum):
    OPENING = enum.auto()
    OPEN = enum.auto()
    BROKEN = enum.auto()
    CLOSED = enum.auto()


class _Entry(NamedTuple):
    """A queued payload: the action of its sending, and what encodes it as frames."""

    action: Action
    encode: Callable[[], Iterator[bytes]]


class _Encoding(NamedTuple):
    """The payload that is being sent, with its remaining frames."""

    action: Action
    frames: Iterator[bytes]
    began_s: float


class OutLink:
    """The sending end of a link to the node ``target``.

    Args:
        on_ack: called with (target, ack) for every credit and refusal, by the link's reader thread.
        on_broken: called with (target, reason) once if the link breaks before ``close``, by a thread of the link.
        on_reopened: called with (target, seconds) each time that the link was opened again, by its reader thread.
        reopen_s: seconds for which a broken connection is opened again; 0 = the link breaks with it.
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
        on_reopened: Callable[[str, float], None] = lambda target, seconds: None,
        reopen_s: float = 0.0,
        now_unix_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._now_unix_s, self.target, self.address = now_unix_s, target, address
        self._hello, self._on_ack, self._on_broken = hello, on_ack, on_broken
        self._on_sent, self._on_reopened, self._reopen_s = on_sent, on_reopened, reopen_s
        self._peer = f"node {target} at {address}"
        self._id = secrets.token_hex(8) if reopen_s else ""
        self._welcome: queue.SimpleQueue[RingTuneError | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._changed = threading.Condition()
        self._state = _State.OPENING
        self._reason = ""
        self._channel: grpc.Channel | None = None
        self._call: Any = None
        self._reader: threading.Thread | None = None
        self._sender: threading.Thread | None = None
        # of the sender
        self._queue: deque[_Entry] = deque()
        self._encoding: _Encoding | None = None
        self._is_encoding = False  # a thread takes the next frame of it
        self._num_calls = 0
        self._is_welcome = self._counts = False  # of the newest call
        self._kept: deque[bytes] = deque()  # the first one has number self._first
        self._kept_bytes = 0
        self._first = self._next = 0  # the frame that the newest call sends next
        self._credits: dict[int, int] = {}  # boundary -> total
        # of the reader
        self._arrived = 0  # frames that the peer had counted when the link was opened last
        self._stuck_s = 0.0  # of opening the link again, since a frame has arrived or none was waiting

    # ---- interface ----------------------------------------------------------------------------------

    def open(self, timeout_s: float) -> None:
        """Connect, and wait until the peer accepts the link; raises ``ConnectionFailedError`` or ``FrameError``."""
        self._channel = open_channel(self.address, _SHORT_ANSWERS, peer=node_party(self.target))
        if self._begin_call() is None:
            raise PeerLostError(f"the link to {self._peer} was closed")
        self._reader = threading.Thread(target=self._read, name=f"link-acks-{self.target}", daemon=True)
        self._reader.start()
        try:
            failure = self._welcome.get(timeout=timeout_s)
        except queue.Empty:
            failure = ConnectionFailedError(
                f"{self._peer} did not answer within {format_seconds(timeout_s)}; check that it runs"
            )
        if failure is not None:
            self.close()
            raise failure

    def send_tensor(self, key: TensorKey, tensor: torch.Tensor, mask: torch.Tensor | None) -> int:
        """Queue a hidden state or gradient, which must not change until it is sent; raises ``PeerLostError``.

        The tensor is (B, T, D), of any float type and device; the mask (B, T) of a hidden state that enters a block,
        otherwise None.

        Returns:
            Payload bytes on the wire.
        """
        sent_unix_s = self._now_unix_s()

        def encode() -> Iterator[bytes]:
            encoded = tensors.encode(tensor, mask, self._hello.wire_dtype)
            header = frames.tensor_header(self._hello, key, encoded)
            header.sent_unix_s = sent_unix_s
            return frames.messages(header, encoded.parts)

        self._put(_Entry(actions.message(Op.SEND, key, self.target), encode))
        return tensors.wire_bytes(tensor.shape, self._hello.wire_dtype, 0 if mask is None else mask.numel())

    def send_head(self, turn: int, data: Pieces) -> int:
        """Queue the head for a turn; the rest as for ``send_parcel``."""
        action = Action(Op.SEND, 0, -1, turn, 0, self.target, Payload.HEAD)  # of a turn instead of an item
        header = functools.partial(frames.blob_header, self._hello, Payload.HEAD, turn, data)
        self._put(_Entry(action, lambda: frames.messages(header(), data)))
        return data.size_bytes

    def send_parcel(self, key: TensorKey, data: Pieces) -> int:
        """Queue a parcel, which must not change until it is sent; raises ``PeerLostError``.

        Returns:
            Payload bytes on the wire.
        """
        action = actions.message(Op.SEND, key, self.target)
        self._put(_Entry(action, lambda: frames.messages(frames.parcel_header(self._hello, key, data), data)))
        return data.size_bytes

    @property
    def waiting(self) -> Action | None:
        """The oldest message of which nothing is sent yet; not of parcels, which credits limit."""
        with self._changed:
            actions_ = (entry.action for entry in self._queue)
            return next((action for action in actions_ if action.payload not in PARCELS), None)

    def close(self) -> None:
        """Drop the queue, end the stream and all threads of the link; may be called twice.

        Takes at most a few seconds. If the peer is frozen and the socket is full, gRPC keeps its connection until its
        own watchdog ends it (``ringtune.transport.endpoints``).
        """
        with self._changed:
            was_open = self._state is _State.OPEN and self._is_welcome
            self._state = _State.CLOSED
            self._queue.clear()
            self._changed.notify_all()
        self._closing.set()
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
        with self._changed:
            if self._state is not _State.OPEN:
                lost = PeerLostError(self._reason or f"the link to {self._peer} is not open")
                lost.peer = self.target
                raise lost
            self._queue.append(entry)
            self._changed.notify_all()

    # ---- the sender: gRPC's own thread for each call, which pulls the messages ----------------------

    def _begin_call(self) -> Any:
        """Call the peer in place of the call before; return the call, or None if the link is closed."""
        channel = self._channel
        with self._changed:
            if channel is None or self._state is _State.CLOSED:
                return None
            self._num_calls, self._is_welcome = self._num_calls + 1, False
            self._changed.notify_all()
            method: Any = channel.stream_stream(METHOD, response_deserializer=ring_pb2.Ack.FromString)
            self._call = method(self._messages(self._num_calls))
            return self._call

    def _messages(self, number: int) -> Iterator[bytes]:
        self._sender = threading.current_thread()
        yield self._hello.message(self._id, is_reopened=number > 1)
        while message := self._next_message(number):
            yield message

    def _next_message(self, number: int) -> bytes | None:
        """Wait for the next message of a call; None if that is over, or another one has replaced it."""
        called_s = time.monotonic()
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._has_next(number), _POLL_S)
                    if number != self._num_calls or self._state is _State.BROKEN:
                        return None
                    if not self._has_next(number):
                        continue
                    if self._is_welcome and self._next < self._first + len(self._kept):
                        message = self._kept[self._next - self._first]
                        self._next += 1
                        if not self._counts:
                            self._forget_below(self._next)
                        return message
                    if not self._is_welcome or (self._encoding is None and not self._queue):
                        self._num_calls += 1
                        return self._hello.goodbye()
                    self._is_encoding = True
                    if self._encoding is None:
                        entry = self._queue.popleft()
                        self._encoding = _Encoding(entry.action, entry.encode(), time.monotonic())
                    encoding = self._encoding
                self._encode_next(encoding, called_s)
        except Exception as error:
            _log.exception("encoding for node %s failed", self.target)
            self._break(f"encoding for node {self.target} failed: {internal_error(error)}")
            return None

    def _has_next(self, number: int) -> bool:
        """Whether a call has something to send, or is over; the lock is held."""
        is_closed = self._state is _State.CLOSED
        if number != self._num_calls or self._state is _State.BROKEN:
            return True
        if not self._is_welcome:
            return is_closed
        if self._next < self._first + len(self._kept):
            return True
        if self._is_encoding:
            return False
        has_room = self._kept_bytes < KEPT_BYTES - frames.CHUNK_BYTES
        return (self._encoding is not None or bool(self._queue) or is_closed) and (has_room or is_closed)

    def _encode_next(self, encoding: _Encoding, asked_s: float) -> None:
        """Keep the next frame of an entry; or end the entry, whose last byte had left at ``asked_s``."""
        message = None
        try:
            message = next(encoding.frames, None)
        finally:
            with self._changed:
                self._is_encoding = False
                if message is None:
                    self._encoding = None
                else:
                    self._kept.append(message)
                    self._kept_bytes += len(message)
                self._changed.notify_all()
        if message is None:
            self._on_sent(Span(encoding.action, encoding.began_s, max(asked_s, encoding.began_s)))

    def _forget_below(self, number: int) -> None:
        """Forget the frames before ``number``, which the peer has; the lock is held."""
        while self._first < number and self._kept:
            self._kept_bytes -= len(self._kept.popleft())
            self._first += 1

    # ---- the reader of acknowledgements -------------------------------------------------------------

    def _read(self) -> None:
        call = self._call
        while True:
            opened_s = time.monotonic()
            failure, in_order = self._follow(call)
            with self._changed:
                self._is_welcome = False
                if in_order or not self._counts or self._state is not _State.OPEN:
                    break
            call = self._open_again(failure, opened_s)
            if isinstance(call, RingTuneError):
                failure = call
                break
        self._welcome.put(failure)
        self._break(str(failure), in_order=in_order)

    def _follow(self, call: Any) -> tuple[RingTuneError, bool]:
        """Take the acknowledgements of a call until it ends; return its failure, and whether it ended in order."""
        first = self._next
        try:
            for number, ack in enumerate(call):
                if number > _MAX_ACKS + 4 * (self._next - first):
                    self._counts = False
                    call.cancel()
                    text = f"{self._peer} sent {number:,} acknowledgements of {self._next - first:,} messages"
                    return PeerLostError(f"{text}; the link is closed"), False
                self._take(ack)
        except grpc.RpcError as error:
            return error_of_call(error, peer=self._peer), False
        except Exception as error:
            _log.exception("taking an acknowledgement of node %s failed", self.target)
            self._counts = False
            text = f"taking an acknowledgement of {self._peer} failed: {internal_error(error)}"
            return PeerLostError(text), False
        return PeerLostError(f"{self._peer} closed the link; see its log"), True

    def _take(self, ack: ring_pb2.Ack) -> None:
        if self._state is not _State.OPENING:
            credits_ = ack.credits
            with self._changed:
                if ack.received:
                    self._forget_below(min(ack.received, self._next))  # a forged frame is counted, too
                    self._changed.notify_all()
                if ack.total_credits and (ack.boundary in self._credits or len(self._credits) < _MAX_BOUNDARIES):
                    credits_ = max(0, ack.total_credits - self._credits.get(ack.boundary, 0))
                    self._credits[ack.boundary] = self._credits.get(ack.boundary, 0) + credits_
            if credits_ or ack.refusal:
                self._on_ack(self.target, Ack(credits_, ack.boundary, ack.refusal, ack.error))
        elif ack.welcome:
            with self._changed:
                if self._state is _State.OPENING:
                    self._state, self._is_welcome = _State.OPEN, True
                    self._counts = bool(self._id) and ack.counts
                    self._changed.notify_all()
            self._welcome.put(None)
        else:
            self._welcome.put(self._refused(ack))

    def _refused(self, ack: ring_pb2.Ack) -> RingTuneError:
        """Return the error with which the peer does not accept the link."""
        if not ack.refusal:
            return FrameError(f"{self._peer} does not welcome the link; use one version on all machines")
        return error_from_name(ack.error, ack.refusal)

    def _open_again(self, failure: RingTuneError, opened_s: float) -> Any:
        """Open the link again within ``reopen_s``; return the new call, or the error with which the link ends.

        Times between which frames waited and none arrived count as one, with a quarter of ``reopen_s`` at most of each
        connection between them, from ``opened_s`` on: the frames may be younger.
        """
        began_s, pause_s = time.monotonic(), _FIRST_PAUSE_S
        _log.info("the link to node %s broke and is opened again: %s", self.target, failure)
        while not self._closing.wait(pause_s):
            left_s = began_s + self._reopen_s - time.monotonic()
            if left_s <= 0:
                break
            try:
                call = self._call_again(left_s)
            except ConnectionFailedError as error:
                _log.debug("the link to node %s is not open yet: %s", self.target, error)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            except RingTuneError as error:
                return error
            tried_s = time.monotonic() - began_s
            lasted_s = min(began_s - opened_s, self._reopen_s / 4)
            self._stuck_s = self._stuck_s + lasted_s + tried_s if self._is_stuck() else 0.0
            if self._stuck_s >= self._reopen_s:
                return PeerLostError(
                    f"{self._peer} gets no frame although the link is opened again and again: {failure}"
                )
            self._on_reopened(self.target, tried_s)
            return call
        return failure

    def _is_stuck(self) -> bool:
        """Whether frames wait, and none has arrived between the last two times that the link was opened again."""
        with self._changed:
            before, self._arrived = self._arrived, self._first
            return self._first == before and bool(self._kept or self._queue)

    def _call_again(self, left_s: float) -> Any:
        """Make one attempt to open the link again; raises ``ConnectionFailedError`` or ``RingTuneError``."""
        host, port = split_address(self.address, option="the address of a node")
        try:
            socket.create_connection((host, port), timeout=min(left_s, _CONNECT_S)).close()
        except ConnectionRefusedError as error:
            raise PeerLostError(f"{self._peer} is gone: nothing listens there any more") from error
        except OSError as error:
            raise ConnectionFailedError(f"{self._peer} can't be reached: {error}") from error
        call = self._begin_call()
        if call is None:
            raise PeerLostError(f"the link to {self._peer} was closed")
        timer = threading.Timer(left_s, call.cancel)
        timer.start()
        try:
            ack = next(call, None)
        except grpc.RpcError as error:
            failure = error_of_call(error, peer=self._peer)
            raise failure if isinstance(failure, TrustError) else ConnectionFailedError(str(failure)) from error
        finally:
            timer.cancel()
        if ack is None:
            raise ConnectionFailedError(f"{self._peer} ended the call")
        if not ack.welcome:
            raise self._refused(ack)
        with self._changed:
            if not self._first <= ack.received <= self._next:
                raise PeerLostError(f"{self._peer} has counted {ack.received} frames of this link, it can't go on")
            self._forget_below(ack.received)
            self._next, self._is_welcome = ack.received, True
            self._changed.notify_all()
        return call

    def _break(self, reason: str, *, in_order: bool = False) -> None:
        """Note the end of the link once, and call ``on_broken`` if the link was open.

        A peer that ends the link in order is lost only if there is something left to send.
        """
        with self._changed:
            was_open = self._state is _State.OPEN
            if was_open:
                self._state, self._reason = _State.BROKEN, reason
            is_idle = not self._queue
            self._changed.notify_all()
        if was_open and not (in_order and is_idle):
            self._on_broken(self.target, reason)


def _join(thread: threading.Thread | None, timeout_s: float) -> None:
    if thread is not None and thread is not threading.current_thread():
        thread.join(timeout_s)
