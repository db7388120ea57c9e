"""How fast the ring's channel is, against a bare gRPC stream on the same machine.

Both run between this process and a child over 127.0.0.1. *Bare* sends 4 MiB ``bytes`` on a stream with the
same channel options, without protobuf, and does nothing with them. *Ring* sends 4 MiB float32 hidden states
through ``OutLink`` to ``RingServicer``: encoding, chunks, all checks, decoding into a tensor, credits. All ends
of both keep freed memory as every agent does, or none (``--plain-allocator``). The two are measured in turn,
many times, and the median of the ratios of neighbours counts, so that other load on the machine hits both alike.

    python -m tests.bench.channel
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import grpc
import torch

from edge.machine.resources import keep_freed_memory
from edge.transport import tensors
from edge.transport.frames import Ack, Hello
from edge.transport.link import OutLink
from edge.transport.server import RingServicer, RunExpectation
from ringtune.errors import RingTuneError
from ringtune.schedule.actions import Payload, TensorKey
from ringtune.schedule.placement import CREDITS
from ringtune.schedule.plan import Plan
from ringtune.storage.pieces import Pieces
from ringtune.transport.channels import Server, open_channel
from tests.support.plans import make_plan
from tests.support.wire_parts import WireProxy

MESSAGE_BYTES: Final = 4 * 1024 * 1024
GROUPS: Final = 4  # of receiving processes
PAIRS: Final = 8  # of each group
MESSAGES: Final = 48  # of one measurement: about 0.2 s
BARE_METHOD: Final = "/ringtune.bench.Bare/Stream"
WAIT_S: Final = 60.0
_ROWS, _TOKENS, _WIDTH = 8, 128, 1024  # 4 MiB of float32


def bench_plan(dtype: str, tokens: int = _TOKENS, width: int = _WIDTH) -> Plan:
    """Node a sends every hidden state to node b; one micro-batch an item."""
    return make_plan(
        [("a", 0, 1), ("b", 1, 2)],
        ["a"],
        method="all",
        num_blocks=2,
        train_rows=_ROWS,
        eval_rows=0,
        num_steps=1 << 20,
        local_iterations=1 << 20,
        batch_size=_ROWS,
        microbatches=1,
        credits_per_channel=CREDITS,
        max_length=tokens,
        hidden_size=width,
        wire_dtype=dtype,
    )


# ---- the receiving process -------------------------------------------------------------------------


class _AckingSink:
    """Returns a credit for every tensor at once."""

    def __init__(self, servicer: RingServicer) -> None:
        self._servicer = servicer

    def on_tensor(self, key: TensorKey, source: str, tensor: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Give the credit back."""
        self._servicer.ack(source, key.boundary)

    def on_blob(self, kind: str, seq: int, source: str, data: Pieces) -> None:
        """Not used."""

    def on_parcel(self, key: TensorKey, source: str, data: Pieces) -> None:
        """Not used."""

    def on_link_lost(self, source: str, reason: str) -> None:
        """Not used."""

    def on_received(self, source: str, num_bytes: int, sent_unix_s: float) -> None:
        """Ignore how long it took."""

    def on_refused(self, source: str, error: RingTuneError) -> None:
        """A refusal spoils the measurement."""
        sys.stderr.write(f"refused: {error}\n")


def _count(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    yield b"ready"
    yield sum(len(message) for message in messages).to_bytes(8, "little")


@contextlib.contextmanager
def serving(plan: Plan) -> Iterator[str]:
    """Serve both ends in this process; gives their address."""
    servicer = RingServicer()
    bare: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(_count)

    def add(server: grpc.Server) -> None:
        servicer.add_to(server)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("ringtune.bench.Bare", {"Stream": bare}),)
        )

    server = Server("127.0.0.1:0", add)
    expected = RunExpectation(run_id="bench", placement_number=1, plan=plan, digest=plan.digest, node="b")
    servicer.expect(expected, _AckingSink(servicer))
    try:
        yield server.address
    finally:
        servicer.forget()
        server.stop()


def serve(plan: Plan, *, as_agent: bool) -> None:
    """Serve both ends until stdin closes; prints the address."""
    torch.set_num_threads(1)
    if as_agent:
        keep_freed_memory()
    with serving(plan) as address:
        sys.stdout.write(address + "\n")
        sys.stdout.flush()
        sys.stdin.read()


@contextlib.contextmanager
def receiver(plan: Plan, *, as_agent: bool = True) -> Iterator[str]:
    """A child process that serves; gives its address."""
    command = [sys.executable, "-m", "tests.bench.channel", "--serve", json.dumps(plan.to_json())]
    if not as_agent:
        command.append("--plain-allocator")
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603
    if child.stdin is None or child.stdout is None:
        raise RuntimeError("the child has no pipes")
    try:
        yield child.stdout.readline().strip()
    finally:
        child.stdin.close()
        try:
            child.wait(WAIT_S)
        finally:
            child.kill()
            child.wait()
            child.stdout.close()


# ---- the sending process ---------------------------------------------------------------------------


class RingSender:
    """A link that keeps to its credits: each one that comes back sends the next tensor."""

    def __init__(self, address: str, plan: Plan) -> None:
        self._num_credits = plan.placement.credits
        self._seq = self._end = self._left = 0
        self._tensors: Sequence[torch.Tensor] = ()
        self._mask = torch.empty(0)
        self._lock = threading.Lock()
        self._done: queue.SimpleQueue[str] = queue.SimpleQueue()
        hello = Hello(
            run_id="bench", placement_number=1, source="a", digest=plan.digest, wire_dtype=plan.course.wire_dtype
        )
        self.link = OutLink("b", address, hello, on_ack=self._on_ack, on_broken=self._on_broken)
        self.link.open(WAIT_S)

    def _on_ack(self, source: str, ack: Ack) -> None:
        with self._lock:
            self._left -= ack.credits
            if ack.refusal or self._left == 0:
                self._done.put(ack.refusal)
            for _ in range(min(ack.credits, self._end - self._seq)):
                self._send()

    def _on_broken(self, target: str, reason: str) -> None:
        self._done.put(reason)

    def _send(self) -> None:
        self._seq += 1
        tensor = self._tensors[self._seq % len(self._tensors)]
        self.link.send_tensor(TensorKey(Payload.HIDDEN, self._seq, 0, 1), tensor, self._mask)

    def run(self, hidden: Sequence[torch.Tensor], mask: torch.Tensor, count: int) -> float:
        """Send ``count`` tensors, in turn; seconds until the last credit is back."""
        self._tensors, self._mask = hidden, mask
        self._end, self._left = self._seq + count, count
        began_s = time.perf_counter()
        with self._lock:
            for _ in range(min(count, self._num_credits)):
                self._send()
        reason = self._done.get(timeout=WAIT_S)
        if reason:
            raise RuntimeError(reason)
        return time.perf_counter() - began_s


def run_bare(channel: grpc.Channel, messages: Sequence[bytes], count: int) -> float:
    """Send ``count`` messages, in turn, on one stream; seconds until the receiver has counted all."""
    method: Any = channel.stream_stream(BARE_METHOD)
    ready = threading.Event()

    def produce() -> Iterator[bytes]:
        ready.wait(WAIT_S)
        for index in range(count):
            yield messages[index % len(messages)]

    call = method(produce(), timeout=WAIT_S)
    next(call)
    began_s = time.perf_counter()
    ready.set()
    received_bytes = int.from_bytes(next(call), "little")
    took_s = time.perf_counter() - began_s
    if received_bytes != len(messages[0]) * count:
        raise RuntimeError(f"{received_bytes} bytes arrived of {len(messages[0]) * count}")
    return took_s


def channel_ratio(
    pairs: int = PAIRS, messages: int = MESSAGES, dtype: str = "float32", *, as_agent: bool = True
) -> dict[str, float]:
    """Rate of the ring's channel over that of a bare stream, in payload bytes of float32.

    Args:
        pairs: measurements of each, with the same two receiving processes; ``GROUPS`` times over with new
            ones, because how a process happens to lay out its memory changes either rate.
        messages: of one measurement; rounded down to whole batches of credits.
        dtype: of the ring's wire.
        as_agent: whether the receivers of both keep freed memory, as an agent does.

    Returns:
        ``ratio``: median over neighbouring pairs; ``ratio_low``, ``ratio_high``: their quartiles;
        ``ring_bytes_per_s``, ``bare_bytes_per_s``: medians; ``message_bytes``; ``pairs``.
    """
    plan = bench_plan(dtype)
    generator = torch.Generator().manual_seed(0)
    hidden = [torch.randn(_ROWS, _TOKENS, _WIDTH, generator=generator) for _ in range(plan.placement.credits)]
    messages -= messages % plan.placement.credits
    times: list[tuple[float, float]] = []
    for _ in range(GROUPS):
        times += _pairs(plan, hidden, pairs, messages, as_agent=as_agent)
    low, ratio, high = statistics.quantiles((bare_s / ring_s for ring_s, bare_s in times), n=4)
    total_bytes = MESSAGE_BYTES * messages
    return {
        "ratio": ratio,
        "ratio_low": low,
        "ratio_high": high,
        "ring_bytes_per_s": total_bytes / statistics.median(ring_s for ring_s, _ in times),
        "bare_bytes_per_s": total_bytes / statistics.median(bare_s for _, bare_s in times),
        "message_bytes": MESSAGE_BYTES,
        "pairs": len(times),
    }


def _pairs(
    plan: Plan, hidden: Sequence[torch.Tensor], pairs: int, messages: int, *, as_agent: bool
) -> list[tuple[float, float]]:
    """Seconds of (ring, bare), measured next to each other, either one first in turn."""
    mask = torch.ones(_ROWS, _TOKENS, dtype=torch.int64)
    payloads = [bytes(tensors.bytes_of(tensor)) for tensor in hidden]
    times = []
    with receiver(plan, as_agent=as_agent) as address, receiver(plan, as_agent=as_agent) as bare_address:
        channel = open_channel(bare_address)
        sender = RingSender(address, plan)
        try:
            for index in range(pairs + 1):
                if index % 2:
                    ring_s = sender.run(hidden, mask, messages)
                    bare_s = run_bare(channel, payloads, messages)
                else:
                    bare_s = run_bare(channel, payloads, messages)
                    ring_s = sender.run(hidden, mask, messages)
                times.append((ring_s, bare_s))
        finally:
            sender.link.close()
            channel.close()
    return times[1:]  # the first pair warms up


def bf16_bytes_ratio(tokens: int = 64, width: int = 384, count: int = 24) -> float:
    """Bytes on the socket with bfloat16 over those with float32, all framing included.

    The default is a MiniLM hidden state of 8 x 64 tokens: 0.79 MB in float32, 0.39 MB in bfloat16.
    """
    return _socket_bytes("bfloat16", tokens, width, count) / _socket_bytes("float32", tokens, width, count)


def _socket_bytes(dtype: str, tokens: int, width: int, count: int) -> int:
    plan = bench_plan(dtype, tokens, width)
    tensor = torch.randn(_ROWS, tokens, width, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(_ROWS, tokens, dtype=torch.int64)
    with receiver(plan) as address:
        tap = WireProxy(address)
        try:
            sender = RingSender(tap.address, plan)
            try:
                before_bytes = len(tap.sent)
                sender.run([tensor], mask, count)
                return len(tap.sent) - before_bytes
            finally:
                sender.link.close()
        finally:
            tap.stop()


def main() -> None:
    """Print the figures as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", metavar="PLAN_JSON", help="be the receiving process")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--messages", type=int, default=MESSAGES)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--plain-allocator", action="store_true")
    arguments = parser.parse_args()
    as_agent = not arguments.plain_allocator
    if arguments.serve:
        serve(Plan.from_json(json.loads(arguments.serve)), as_agent=as_agent)
        return
    torch.set_num_threads(1)
    if as_agent:
        keep_freed_memory()
    figures = channel_ratio(arguments.pairs, arguments.messages, arguments.dtype, as_agent=as_agent)
    found = {"channel_ratio": figures["ratio"], "bf16_bytes_ratio": bf16_bytes_ratio(), "channel": figures}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
