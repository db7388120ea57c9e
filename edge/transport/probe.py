"""The probe of a link: its rate, its latency, and the compute time that its messages cost both nodes.

Messages of the size of a run's are timed at the target. The source requests the arrival times of some of them; all
times are the target's, so no clocks are compared. Latency is half a round trip of a small message. For the rate,
messages are streamed with a bounded number in flight (a tenth of a second's worth plus the latency, at least two, at
most half of the bytes that have arrived), and the bytes between two answers are divided by the time between them::

    source  m m m m? m m m m? ...        ? = requests its arrival time
    target        |a       |a            a window: at least 1 MB (less in a brief measurement of a slow link) and 0.1 s
              ------>|  dropped          the first window: a token bucket lets its burst through at full speed

A shaper with a bucket (``tc ... tbf``) passes a burst much faster than its rate, also after each pause. So the first
window is dropped, and at least three windows and half a second are measured; by then the burst is over, because it
passes at the speed of the medium.

Sending and receiving also take CPU time, which a node with one core or a smaller quota loses for computing. Both ends
report the CPU seconds of their process, which does nothing but stream. On such a node a message also waits for the CPU
at every step. So long messages are sent one by one: with both ends idle, while the source computes, and while the
target computes. The additional time, without that of a small message's half round trip (the answer's), is the delay by
computing.

A link of 0.5 Mbit/s takes 50 s for a hidden state of 3 MB. So messages of growing size first estimate the rate, and on
a slow link shorter messages are sent.

The loss of computing is measured while every node of a ring computes and sends. Threads that send and receive, the
kernel's work for each packet, and shared caches slow the computing down, and no clock of a process shows all of that.
So the measure is how much less a node computes while it sends to its successor and receives from its predecessor, per
byte of both::

    hashes  |##########|#######___|      first alone, then with messages: 30 % less for so many bytes

A node with an idle core loses nothing.

Source: tc-tbf(8).
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import queue
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import grpc

from edge.transport.access import RunAccess
from ringtune.errors import BusyError, ConnectionFailedError, DeadlineError, PeerLostError, RingTuneError
from ringtune.schedule.access import NodeCall
from ringtune.transport.channels import caller_of, open_channel
from ringtune.transport.parties import Party, node_party
from ringtune.transport.status import answer, error_of_call
from ringtune.v1 import control_pb2

METHOD: Final = "/ringtune.v1.Probe/Link"
LONGEST_MESSAGE_BYTES: Final = 4 << 20
"""Most bytes of a probe's message; a longer hidden state is also sent in several messages."""

_ASKS: Final = control_pb2.ProbeMessage(wants_arrival=True).SerializeToString()
_BURN_IN_PINGS: Final = 5
_BUSY: Final = ("ringtune-busy", "1")
_ON_THE_WAY_S: Final = 0.1
_MIN_ON_THE_WAY: Final = 2
_ASKS_ON_THE_WAY: Final = 4
_TRIPS_ON_THE_WAY: Final = 2
_JOIN_S: Final = 5.0
_LAST_WORD_S: Final = 0.5
_LOOK_BYTES: Final = 1 << 14
_LOOK_S: Final = 0.2
"""``look`` ends with the first message that takes this long, seconds."""


class _Received:
    """Bytes of probes that this process has received from all nodes."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes += num_bytes


RECEIVED: Final = _Received()


_MAX_PROBES: Final = 2
_TURN_S: Final = 5.0
_LONGEST_S: Final = 600.0


class _Places:
    """Probes that are answered at a time: ``_MAX_PROBES``, and one of a caller with a certificate.

    So a member that ends no probe keeps no other one from measuring its link.
    """

    def __init__(self) -> None:
        self._callers: list[str] = []
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def taken(self, caller: str) -> Iterator[None]:
        """Take a place in the context; raises ``BusyError`` after ``_TURN_S``."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_free(caller), _TURN_S):
                raise BusyError(f"{_MAX_PROBES} links to this node are measured already; measure them later")
            self._callers.append(caller)
        try:
            yield
        finally:
            with self._changed:
                self._callers.remove(caller)
                self._changed.notify_all()

    def _is_free(self, caller: str) -> bool:
        return len(self._callers) < _MAX_PROBES and not (caller and caller in self._callers)


_PLACES: Final = _Places()


def add_probe_sink(server: grpc.Server, access: RunAccess) -> None:
    """Register the service by which other nodes measure their links to this node, before the server starts."""

    def arrivals(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[control_pb2.ProbeArrival]:
        caller = caller_of(context)
        answer(context, lambda: access.require_member(NodeCall.PROBE, caller.party if caller else None))
        too_long = threading.Timer(_LONGEST_S, context.cancel)
        too_long.daemon = True
        with contextlib.ExitStack() as stack:
            place = _PLACES.taken(str(caller.party) if caller else "")
            answer(context, lambda: stack.enter_context(place))
            stack.callback(too_long.cancel)
            too_long.start()
            yield from _answers(messages, context)

    link: grpc.RpcMethodHandler[bytes, control_pb2.ProbeArrival] = grpc.stream_stream_rpc_method_handler(
        arrivals, request_deserializer=None, response_serializer=control_pb2.ProbeArrival.SerializeToString
    )
    service = control_pb2.DESCRIPTOR.services_by_name["Probe"].full_name
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Link": link}),))


def _answers(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[control_pb2.ProbeArrival]:
    wants_busy = _BUSY in context.invocation_metadata()
    with contextlib.suppress(grpc.RpcError), contextlib.ExitStack() as stack:  # the caller ends the probe by cancelling
        if wants_busy:
            stack.enter_context(CpuLoad())
        for message in messages:
            RECEIVED.add(len(message))
            if message.startswith(_ASKS):
                yield control_pb2.ProbeArrival(at_s=time.monotonic(), cpu_s=time.process_time())


def measure_link(
    source: str, target: str, address: str, *, message_bytes: int, timeout_s: float, brief: bool = False
) -> control_pb2.MeasureLinkReply:
    """Measure one direction of one link; raises ``ConnectionFailedError``, ``DeadlineError`` or ``PeerLostError``.

    ``message_bytes`` is the size of a hidden state; with ``brief`` fewer messages are sent.
    """
    deadline_s = time.monotonic() + timeout_s
    effort, peer = BRIEF if brief else THOROUGH, node_party(target)

    def opened(longest_bytes: int, *, busy_target: bool = False) -> contextlib.closing[Probe]:
        left_s = deadline_s - time.monotonic()
        return contextlib.closing(Probe(address, longest_bytes, left_s, effort, busy_target=busy_target, peer=peer))

    with _naming_both(source, target, address):
        with opened(message_bytes) as probe:
            latency_s = probe.ping()
            probe.look()
            idle_s = probe.alone()
            with CpuLoad():
                busy_source_s = probe.alone() - idle_s - (probe.ping() - latency_s)
            windows = probe.stream(latency_s)
        with opened(probe.message_bytes, busy_target=True) as other:
            busy_target_s = other.alone() - idle_s - (other.ping() - latency_s)
    low, median, high = statistics.quantiles(windows, n=4, method="inclusive")
    return control_pb2.MeasureLinkReply(
        rate_bytes_per_s=median,
        rate_low_bytes_per_s=low,
        rate_high_bytes_per_s=high,
        latency_s=latency_s,
        samples=len(windows),
        sent_bytes=probe.sent_bytes,
        send_cpu_s_per_byte=probe.send_cpu_s_per_byte,
        receive_cpu_s_per_byte=probe.receive_cpu_s_per_byte,
        busy_source_s=max(0.0, busy_source_s),
        busy_target_s=max(0.0, busy_target_s),
    )


@contextlib.contextmanager
def _naming_both(source: str, target: str, address: str) -> Iterator[None]:
    try:
        yield
    except (grpc.RpcError, RingTuneError) as raised:
        error = raised
        if isinstance(error, grpc.RpcError):
            error = error_of_call(error, peer=f"node {target} at {address}")
        kind = type(error) if isinstance(error, ConnectionFailedError | PeerLostError) else ConnectionFailedError
        raise kind(f"the link {source} -> {target} can't be measured: {error}") from raised


class Probe:
    """One stream of messages to the target, with the thread that reads the answers.

    Args:
        message_bytes: of a long message.
        busy_target: whether the target computes meanwhile.
        peer: the target in its certificate; None = any member.

    Attributes:
        message_bytes: of a long message as sent: at most the argument, less on a slow link.
        sent_bytes: in all.
        send_cpu_s_per_byte, receive_cpu_s_per_byte: of the processes at both ends, while messages are streamed.
    """

    def __init__(
        self,
        address: str,
        message_bytes: int,
        timeout_s: float,
        effort: ProbePlan,
        *,
        busy_target: bool,
        peer: Party | None = None,
    ) -> None:
        self._effort = effort
        self._shape(min(max(1, message_bytes), LONGEST_MESSAGE_BYTES))
        self._small = _asking(16)
        self._deadline_s = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._arrived: queue.SimpleQueue[control_pb2.ProbeArrival | BaseException] = queue.SimpleQueue()
        self._rate = math.inf
        self.sent_bytes = 0
        self.send_cpu_s_per_byte = self.receive_cpu_s_per_byte = 0.0
        self._channel = open_channel(address, peer=peer)
        method: Any = self._channel.stream_stream(METHOD, response_deserializer=control_pb2.ProbeArrival.FromString)
        metadata = (_BUSY,) if busy_target else ()
        self._call = method(iter(self._outgoing.get, None), timeout=timeout_s, metadata=metadata)
        self._reader = threading.Thread(target=self._read, name="probe-arrivals", daemon=True)
        self._reader.start()

    def close(self) -> None:
        """End the stream and its threads."""
        self._outgoing.put(None)
        self._reader.join(_LAST_WORD_S)  # the target ends its stream after the end of this one
        self._call.cancel()
        self._reader.join(_JOIN_S)
        self._channel.close()

    def ping(self) -> float:
        """Return half the median round trip of a small message, in seconds."""
        trips = [self._trip(self._small) for _ in range(_BURN_IN_PINGS + self._effort.pings)]
        return statistics.median(trips[_BURN_IN_PINGS:]) / 2

    def look(self) -> None:
        """Send messages of growing size until one takes ``_LOOK_S``; on a slow link shorten long messages."""
        num_bytes, taken_s = _LOOK_BYTES, 0.0
        while num_bytes < self.message_bytes and taken_s < _LOOK_S:
            taken_s = self._trip(_asking(num_bytes))
            num_bytes *= 2
        if taken_s >= _LOOK_S:
            self._rate = num_bytes / 2 / taken_s
            self._shape(min(self.message_bytes, max(_LOOK_BYTES, round(self._rate * self._effort.alone_s))))

    def alone(self) -> float:
        """Return the median seconds from sending a long message, with no others in flight, to its answer.

        The first one is dropped unless it took so long that it is the only one.
        """
        trips: list[float] = []
        max_s = 2 * self._effort.alone * self._effort.alone_s
        while len(trips) < self._effort.alone and sum(trips) < max_s:
            trips.append(self._trip(self._asking))
        return statistics.median(trips[1:] or trips)

    def _trip(self, message: bytes) -> float:
        """Return the seconds from sending a message to its answer."""
        started_s = time.monotonic()
        self._put(message)
        self._next_arrival()
        return time.monotonic() - started_s

    def _shape(self, message_bytes: int) -> None:
        self.message_bytes = message_bytes
        self._quiet = control_pb2.ProbeMessage(payload=bytes(message_bytes)).SerializeToString()
        self._asking = _asking(message_bytes)

    def stream(self, latency_s: float) -> list[float]:
        """Stream messages until there are enough windows; return the bytes per second of each but the first."""
        windows = Windows(latency_s, self._effort, rate_bytes_per_s=self._rate)
        asked_bytes: deque[int] = deque()  # cumulative bytes at each message that requests its arrival time
        sent_bytes = arrived_bytes = last_asked_bytes = 0
        size = len(self._quiet)
        on_the_way_s = _ON_THE_WAY_S + 2 * _TRIPS_ON_THE_WAY * latency_s
        first: tuple[int, float, float] | None = None
        while not windows.are_enough:
            # at most half of the arrived bytes: after a burst the measured rate is too high
            room = max(_MIN_ON_THE_WAY * size, min(windows.rate_bytes_per_s * on_the_way_s, arrived_bytes / 2))
            while sent_bytes + size - arrived_bytes <= room:
                sent_bytes += size
                is_last = sent_bytes + size - arrived_bytes > room
                if is_last or sent_bytes - last_asked_bytes >= room / _ASKS_ON_THE_WAY:
                    asked_bytes.append(sent_bytes)
                    last_asked_bytes = sent_bytes
                    self._put(self._asking)
                else:
                    self._put(self._quiet)
            arrival = self._next_arrival()
            arrived_bytes = asked_bytes.popleft()
            windows.add(arrived_bytes, arrival.at_s)
            here_cpu_s = time.process_time()
            if first is None:
                first = (arrived_bytes, here_cpu_s, arrival.cpu_s)
            elif arrived_bytes > first[0]:
                self.send_cpu_s_per_byte = (here_cpu_s - first[1]) / (arrived_bytes - first[0])
                self.receive_cpu_s_per_byte = (arrival.cpu_s - first[2]) / (arrived_bytes - first[0])
        return windows.rates

    def keep_sending(self, seconds: float) -> None:
        """Send long messages for ``seconds``, a few in flight, and wait for the last answer."""
        end_s, on_the_way = time.monotonic() + seconds, 0
        while on_the_way or time.monotonic() < end_s:
            while on_the_way < _ASKS_ON_THE_WAY and time.monotonic() < end_s:
                self._put(self._asking)
                on_the_way += 1
            self._next_arrival()
            on_the_way -= 1

    def _put(self, message: bytes) -> None:
        self.sent_bytes += len(message)
        self._outgoing.put(message)

    def _next_arrival(self) -> control_pb2.ProbeArrival:
        left_s = self._deadline_s - time.monotonic()
        try:
            arrived = self._arrived.get(timeout=max(0.0, left_s))
        except queue.Empty:
            raise DeadlineError(f"no answer arrived within {self._timeout_s:g} s; is the link very slow?") from None
        if isinstance(arrived, BaseException):
            raise arrived
        return arrived

    def _read(self) -> None:
        try:
            for arrival in self._call:
                self._arrived.put(arrival)
            self._arrived.put(PeerLostError("the other node ended the measurement; start it again"))
        except BaseException as error:
            self._arrived.put(error)


def _asking(num_bytes: int) -> bytes:
    return control_pb2.ProbeMessage(wants_arrival=True, payload=bytes(num_bytes)).SerializeToString()


_WINDOW_BYTES: Final = 1_000_000
_MIN_WINDOW_BYTES: Final = 1 << 16
_WINDOW_S: Final = 0.1
_MAX_WINDOWS: Final = 9
_TRIPS_TO_SPEED_UP: Final = 10


class ProbePlan(NamedTuple):
    """Amounts of messages of a measurement.

    Attributes:
        alone_s: about the most seconds of one of them; on slower links they are shorter.
        window_s: about the most seconds of a window.
    """

    pings: int
    alone: int
    alone_s: float
    min_windows: int
    min_s: float
    window_s: float


THOROUGH: Final = ProbePlan(pings=20, alone=9, alone_s=1.0, min_windows=3, min_s=0.5, window_s=math.inf)
BRIEF: Final = ProbePlan(pings=8, alone=4, alone_s=0.3, min_windows=2, min_s=0.2, window_s=0.5)
"""For a run that waits for it; the run's own times correct these figures."""


class Windows:
    """Groups arrivals into windows and drops the first one.

    Args:
        latency_s: of the link; with a long one both ends need some round trips to reach full speed.
        rate_bytes_per_s: estimate; infinite if the link is not known to be slow.

    Attributes:
        rates: of the counted windows, bytes per second.
        rate_bytes_per_s: of the last arrivals; 0 before the second message.
    """

    def __init__(self, latency_s: float, effort: ProbePlan = THOROUGH, *, rate_bytes_per_s: float = math.inf) -> None:
        self._effort = effort
        self._min_bytes = min(_WINDOW_BYTES, max(_MIN_WINDOW_BYTES, rate_bytes_per_s * effort.window_s))
        self._first_s = max(_WINDOW_S, 2 * _TRIPS_TO_SPEED_UP * latency_s)
        self.rates: list[float] = []
        self.rate_bytes_per_s = 0.0
        self._start: tuple[int, float] | None = None
        self._last = (0, 0.0)
        self._counted_s = 0.0
        self._is_first = True

    @property
    def are_enough(self) -> bool:
        """Whether the windows suffice for a median: ``min_windows`` and either ``min_s`` or nine windows."""
        if len(self.rates) < self._effort.min_windows:
            return False
        return self._counted_s >= self._effort.min_s or len(self.rates) >= _MAX_WINDOWS

    def add(self, arrived_bytes: int, at_s: float) -> None:
        """Note that ``arrived_bytes`` in total had arrived at ``at_s`` of the target's clock."""
        if self._start is None:
            self._start = self._last = (arrived_bytes, at_s)
            return
        taken_s = at_s - self._last[1]
        if taken_s > 0:
            self.rate_bytes_per_s = (arrived_bytes - self._last[0]) / taken_s
        self._last = (arrived_bytes, at_s)
        window_bytes, window_s = arrived_bytes - self._start[0], at_s - self._start[1]
        if window_bytes < self._min_bytes or window_s < (self._first_s if self._is_first else _WINDOW_S):
            return
        self._start = self._last
        if self._is_first:
            self._is_first = False
            return
        self.rates.append(window_bytes / window_s)
        self._counted_s += window_s


_SHARE_ALONE = 1 / 3


def computing_lost_s_per_byte(
    source: str, target: str, address: str, message_bytes: int, computing_s: float, *, timeout_s: float
) -> float:
    """Compute for ``computing_s``, the last two thirds of it while messages are sent and received.

    All nodes of the ring are asked at the same moment. ``message_bytes`` is the size of a hidden state.

    Returns:
        Seconds of computing lost per byte sent or received.

    Raises:
        ConnectionFailedError: nothing answers there.
    """
    with _naming_both(source, target, address):
        probe = Probe(address, message_bytes, timeout_s, BRIEF, busy_target=False, peer=node_party(target))
        with contextlib.closing(probe):
            probe.ping()
            probe.look()
            with CpuLoad() as burner:
                alone = _rate(burner, lambda: time.sleep(_SHARE_ALONE * computing_s))
                before = probe.sent_bytes + RECEIVED.num_bytes
                started_s = time.monotonic()
                beside = _rate(burner, lambda: probe.keep_sending((1 - _SHARE_ALONE) * computing_s))
                taken_s = time.monotonic() - started_s
                num_bytes = probe.sent_bytes + RECEIVED.num_bytes - before
    return max(0.0, 1 - beside / alone) * taken_s / num_bytes if num_bytes and alone else 0.0


def _rate(burner: CpuLoad, work: Callable[[], object]) -> float:
    """Return the pieces a second that the load hashed during ``work``."""
    pieces, started_s = burner.pieces, time.monotonic()
    work()
    return (burner.pieces - pieces) / (time.monotonic() - started_s)


_PIECE = bytes(1 << 19)  # about a millisecond a piece; hashing more than 2 kB releases the interpreter's lock
_BURNER_JOIN_S = 5.0


class CpuLoad:
    """A thread that hashes zeros outside the interpreter's lock while a ``with`` block runs."""

    def __init__(self) -> None:
        self.pieces = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._burn, name="probe-burner", daemon=True)

    def __enter__(self) -> CpuLoad:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop after the current piece, about a millisecond."""
        self._stop.set()
        self._thread.join(_BURNER_JOIN_S)

    def _burn(self) -> None:
        while not self._stop.is_set():
            hashlib.sha256(_PIECE).digest()
            self.pieces += 1
