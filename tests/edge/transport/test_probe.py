"""Links between real sockets, and windows over arrivals of a shaper that lets bursts through."""

from __future__ import annotations

import contextlib
import itertools
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import grpc
import pytest

from edge.transport import probe
from edge.transport.access import RunAccess
from edge.transport.probe import BRIEF, Probe, Windows, add_probe_sink, measure_link
from ringtune.errors import BusyError, ConnectionFailedError, DeadlineError
from ringtune.transport.channels import Server
from ringtune.transport.parties import node_party
from ringtune.v1 import control_pb2

WAIT_S = 30.0


@pytest.fixture
def sink() -> Iterator[Server]:
    """A node that only takes probes."""
    server = Server("127.0.0.1:0", lambda made: add_probe_sink(made, RunAccess("b")), max_workers=4)
    yield server
    server.stop()


@pytest.mark.parametrize("message_bytes", [2_000, 300_000, 9_000_000])
@pytest.mark.sampled(1)
def test_probe_measures_a_link(sink: Server, message_bytes: int) -> None:
    """A rate with its quartiles, and a latency, for messages of any size; no thread stays."""
    before = {thread for thread in threading.enumerate() if thread.name.startswith("probe")}
    began_s = time.monotonic()
    found = measure_link("a", "b", sink.address, message_bytes=message_bytes, timeout_s=WAIT_S)
    lasted_s = time.monotonic() - began_s  # longer than each window, of a million bytes at least, and each message
    assert 1e6 / lasted_s < found.rate_low_bytes_per_s <= found.rate_bytes_per_s <= found.rate_high_bytes_per_s
    assert 0 < found.latency_s < lasted_s
    assert found.samples >= 3 and found.sent_bytes > 4_000_000
    assert {thread for thread in threading.enumerate() if thread.name.startswith("probe")} == before


def test_link_is_measured_by_nodes_of_the_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their certificates; a member beside the run is refused, with the reason, before it sends anything."""
    access = RunAccess("b")
    access.inspect("r", ["a"])
    with contextlib.ExitStack() as stack:
        server = Server("127.0.0.1:0", lambda made: add_probe_sink(made, access), max_workers=4)
        stack.callback(server.stop)
        for name in ("z", "a"):
            caller = SimpleNamespace(party=node_party(name))
            monkeypatch.setattr(probe, "caller_of", lambda context, caller=caller: caller)
            refused = pytest.raises(ConnectionFailedError, match=r"node b refuses Probe\.Link of node 'z'")
            with refused if name == "z" else contextlib.nullcontext():
                measure_link(name, "b", server.address, message_bytes=2_000, timeout_s=WAIT_S)


class SlowArrivals:
    """A node behind a link of some bytes a second, as its answers show it: none comes before its bytes could."""

    def __init__(self, rate_bytes_per_s: float) -> None:
        self._rate = rate_bytes_per_s
        self.longest_bytes = 0
        self._over = threading.Event()

    def add(self, server: grpc.Server) -> None:
        """Answer probes."""
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self._answers)
        service = grpc.method_handlers_generic_handler("ringtune.v1.Probe", {"Link": handler})
        server.add_generic_rpc_handlers((service,))

    def _answers(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        free_s = time.monotonic()
        for message in messages:
            self.longest_bytes = max(self.longest_bytes, len(message))
            free_s = max(free_s, time.monotonic()) + len(message) / self._rate
            self._over.wait(max(0.0, free_s - time.monotonic()))
            if message.startswith(b"\x08\x01"):
                yield control_pb2.ProbeArrival(at_s=time.monotonic()).SerializeToString()


def test_probe_sends_shorter_messages_over_a_slow_link() -> None:
    """2 MB/s and hidden states of 4 MB: after a look of half a second, messages of about a third of a second."""
    slow = SlowArrivals(2e6)
    server = Server("127.0.0.1:0", slow.add, max_workers=4)
    try:
        with contextlib.closing(Probe(server.address, 4_000_000, WAIT_S, BRIEF, busy_target=False)) as probe:
            probe.look()
            assert 16_384 <= probe.message_bytes < 700_000
            assert probe.sent_bytes < 2_000_000
            assert probe.alone() > 0.0
            assert slow.longest_bytes < 1_100_000
    finally:
        server.stop()


def test_probe_names_both_ends_of_a_link_that_nobody_answers() -> None:
    """The port is closed."""
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{busy.getsockname()[1]}"
        with pytest.raises(ConnectionFailedError, match=f"link a -> b can't be measured: .*{address}"):
            measure_link("a", "b", address, message_bytes=1000, timeout_s=WAIT_S)


@pytest.mark.promise("6 every wait ends")
def test_probe_of_one_caller_keeps_no_other_one_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member has one place of two, however many it asks for; in plain text nobody knows whose a probe is."""
    monkeypatch.setattr(probe, "_TURN_S", 0.0)
    places = probe._Places()
    with places.taken("node a"):
        with pytest.raises(BusyError, match="2 links to this node are measured already"), places.taken("node a"):
            pass
        with places.taken("node b"), pytest.raises(BusyError), places.taken("node c"):
            pass
    with places.taken("node a"), places.taken(""):
        pass
    with places.taken(""), places.taken(""), pytest.raises(BusyError), places.taken(""):
        pass


def test_probe_gives_up_at_its_deadline() -> None:
    """The other end takes the call and never answers."""
    ended = threading.Event()

    def add(server: grpc.Server) -> None:
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(
            lambda messages, context: iter(lambda: ended.wait(WAIT_S), True)
        )
        service = grpc.method_handlers_generic_handler("ringtune.v1.Probe", {"Link": handler})
        server.add_generic_rpc_handlers((service,))

    server = Server("127.0.0.1:0", add, max_workers=4)
    try:
        with pytest.raises(DeadlineError, match="link a -> b can't be measured"):
            measure_link("a", "b", server.address, message_bytes=1000, timeout_s=0.5)
    finally:
        ended.set()
        server.stop()


def arrivals(message_bytes: int, *, rate: float, burst: float, speed: float = 1e9) -> Iterator[tuple[int, float]]:
    """When messages come through a token bucket that is full at first, over a medium of ``speed`` bytes a second."""
    tokens, now_s, total = burst, 0.0, 0
    while True:
        took_s = message_bytes / speed
        tokens = min(burst, tokens + took_s * rate) - message_bytes
        if tokens < 0:
            took_s += -tokens / rate
            tokens = 0.0
        now_s, total = now_s + took_s, total + message_bytes
        yield total, now_s


def windows_of(source: Iterator[tuple[int, float]], latency_s: float = 0.0) -> tuple[list[float], float]:
    """The rates that count, and the time that they took."""
    windows = Windows(latency_s)
    for total, at_s in source:
        windows.add(total, at_s)
        if windows.are_enough:
            return windows.rates, at_s
    raise AssertionError("there are always more arrivals")


def test_probe_windows_see_through_the_burst_of_a_shaper() -> None:
    """1, 10 and 100 Mbit/s with bursts up to 10 MB: the median is the rate, not what the burst promised."""
    for rate, burst, message_bytes in itertools.product(
        (125_000.0, 1_250_000.0, 12_500_000.0), (32_000.0, 1_000_000.0, 10_000_000.0), (20_000, 790_000)
    ):
        rates, took_s = windows_of(arrivals(message_bytes, rate=rate, burst=burst))
        assert statistics.median(rates) == pytest.approx(rate, rel=0.01), (rate, burst, message_bytes)
        assert len(rates) >= 3 and took_s >= 0.5, (rate, burst, message_bytes)


@pytest.mark.parametrize("rate", [62_500.0, 375_000.0])
def test_probe_windows_of_a_brief_look_at_a_slow_link_take_seconds(rate: float) -> None:
    """A run that waits for the figure gets it from fewer bytes, behind the burst that the look before them used up."""
    windows = Windows(0.0, BRIEF, rate_bytes_per_s=rate)
    for total, at_s in arrivals(round(0.3 * rate), rate=rate, burst=32_000.0):
        windows.add(total, at_s)
        if windows.are_enough:
            break
    assert statistics.median(windows.rates) == pytest.approx(rate, rel=0.01)
    assert at_s < 5.0


def test_probe_windows_drop_what_a_long_link_needs_to_speed_up() -> None:
    """Ten round trips of 100 ms are not counted."""
    source = ((1_000_000 * (index + 1), 0.05 * (index + 1)) for index in range(10**6))
    rates, took_s = windows_of(source, latency_s=0.05)
    assert took_s >= 1.0 + 0.3
    assert statistics.median(rates) == pytest.approx(20e6)
