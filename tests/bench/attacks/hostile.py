"""What a hostile process does to a node or a coordinator: one attack, again and again.

``python -m tests.bench.attacks.hostile`` reads what to do as a line of JSON, attacks until its input ends, and prints
the answers that it got with their counts. ``tests.bench.attacks`` starts it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import socket
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from edge.wire.frames import Hello
from ringtune.rpc.channel_options import CLIENT_OPTIONS
from ringtune.rpc.connections import open_channel
from ringtune.trust.certificates import make_key, make_request
from ringtune.trust.identity import read_identity
from ringtune.trust.parties import COORDINATOR, Party, node_party
from ringtune.trust.speaking import Speaker, speaking_as
from ringtune.v1 import (
    control_pb2,
    control_pb2_grpc,
    ring_pb2,
    trust_pb2,
    trust_pb2_grpc,
    weights_pb2,
    weights_pb2_grpc,
)

CALL_S: Final = 5.0
LINK: Final = "/ringtune.v1.Ring/Link"
EVALUATE: Final = "/ringtune.v1.Coordinator/Evaluate"
PROBE: Final = "/ringtune.v1.Probe/Link"
_PAUSE_S: Final = 0.01
_THREADS: Final = 4
_CONNECTIONS: Final = 300
_STREAMS: Final = 190
_MOST_TEXT: Final = 200
_EXPIRED_S: Final = 39 * 86400.0
"""How long ago the expired certificate still held."""

_MEMBER, _USER = "node-9", "alice"


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What to do.

    Attributes:
        attack: a key of ``ATTACKS``.
        address: of the target.
        target: name of the node; empty = the coordinator.
        identities: folder of folders with certificates: of a member that is in no plan, an expired one, and others.
        run_id: that the target works on.
        digest: of its plan.
        secret: of a token that was used.
    """

    attack: str
    address: str
    target: str
    identities: str
    run_id: str
    digest: str
    secret: str

    @property
    def place(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.address.rpartition(":")
        return host, int(port)

    def speaker(self, name: str) -> Speaker:
        """Somebody whose certificate is in the folder, whether it holds or not."""
        held_s = time.time() - (_EXPIRED_S if name == "expired" else 0.0)
        return Speaker(read_identity(Path(self.identities) / name, held_s))

    @property
    def party(self) -> Party:
        """The target."""
        return node_party(self.target) if self.target else COORDINATOR

    @contextlib.contextmanager
    def channel(self, name: str = _MEMBER) -> Iterator[grpc.Channel]:
        """A channel to the target, as somebody."""
        with speaking_as(self.speaker(name)):
            opened = open_channel(self.address, peer=self.party)
        with opened:
            yield opened


Attack = Callable[[Orders], str]
"""Does it once, and says what the answer was."""


def answered(call: Callable[[], object]) -> str:
    """Make a call; what came of it."""
    try:
        return f"answered: {type(call()).__name__}"
    except grpc.RpcError as error:
        if not isinstance(error, grpc.Call):
            raise
        return f"{error.code().name}: {error.details()}"
    except OSError as error:
        return f"{type(error).__name__}"


def _beat(channel: grpc.Channel, orders: Orders, node: str) -> str:
    """A heartbeat at the coordinator, the first words of a link at a node."""
    if orders.target:
        return _link(
            channel, [Hello(run_id=orders.run_id, placement_number=0, source=node, digest=orders.digest).message()]
        )
    request = control_pb2.HeartbeatRequest(node=node, run_id=orders.run_id)
    return answered(lambda: control_pb2_grpc.CoordinatorStub(channel).Heartbeat(request, timeout=CALL_S))


def _link(channel: grpc.Channel, messages: list[bytes], path: str = LINK) -> str:
    """Open a link, send messages, and end it."""
    call: Any = channel.stream_stream(path, response_deserializer=ring_pb2.Ack.FromString)

    def first() -> object:
        for ack in call(iter(messages), timeout=CALL_S):
            if ack.refusal:
                raise _RefusedError(f"refused: {ack.error}: {ack.refusal}")
        return ring_pb2.Ack()

    try:
        return answered(first)
    except _RefusedError as refused:
        return str(refused)


class _RefusedError(Exception):
    """A link says why it is refused."""


# ---- who may not come in ----------------------------------------------------------------------------


def plain_text(orders: Orders) -> str:
    """Call without encryption."""
    with grpc.insecure_channel(orders.address, options=CLIENT_OPTIONS) as channel:
        return _beat(channel, orders, "node-0")


def no_certificate(orders: Orders) -> str:
    """Call over TLS, believing the right authority, with no certificate of one's own."""
    authority = orders.speaker(_MEMBER).identity.authority_pem
    options = (*CLIENT_OPTIONS, ("grpc.ssl_target_name_override", orders.party.server_name))
    with grpc.secure_channel(orders.address, grpc.ssl_channel_credentials(authority), options=options) as channel:
        return _beat(channel, orders, "node-0")


def as_somebody(name: str, node: str) -> Attack:
    """Call as somebody, in the name of a node."""

    def attack(orders: Orders) -> str:
        with orders.channel(name) as channel:
            return _beat(channel, orders, node)

    return attack


def used_token(orders: Orders) -> str:
    """Ask for a certificate with a token that was used, and with one that is made up."""
    leaf = ssl.get_server_certificate(orders.place).encode()
    options = (*CLIENT_OPTIONS, ("grpc.ssl_target_name_override", COORDINATOR.server_name))
    secret = orders.secret if time.time_ns() % 2 else "x" * 43
    with grpc.secure_channel(orders.address, grpc.ssl_channel_credentials(leaf), options=options) as channel:
        request = trust_pb2.CertifyRequest(secret=secret, request_pem=make_request(make_key()))
        return answered(lambda: trust_pb2_grpc.JoiningStub(channel).Certify(request, timeout=CALL_S))


# ---- who is in, and may not do this ------------------------------------------------------------------


def other_role(orders: Orders) -> str:
    """Give a node orders, or the coordinator those of a user."""
    with orders.channel() as channel:
        if orders.target:
            release = control_pb2.ReleaseRequest(run_id=orders.run_id)
            return answered(lambda: control_pb2_grpc.AgentStub(channel).Release(release, timeout=CALL_S))
        drain = control_pb2.DrainRequest(run_id=orders.run_id)
        return answered(lambda: control_pb2_grpc.CoordinatorStub(channel).Drain(drain, timeout=CALL_S))


def hostile_report(orders: Orders) -> str:
    """Report numbers without end, in one's own name, to a run that one is not in."""
    request = control_pb2.ReportRequest(run_id=orders.run_id, node=_MEMBER, number=1 << 60, error="x" * 1_000_000)
    with orders.channel() as channel:
        return answered(lambda: control_pb2_grpc.CoordinatorStub(channel).Report(request, timeout=CALL_S))


def wrong_run(orders: Orders) -> str:
    """Introduce oneself with the plan of another run."""
    with orders.channel() as channel:
        hello = Hello(run_id="r20200101-000000-00000000", placement_number=7, source=_MEMBER, digest="0" * 64)
        return _link(channel, [hello.message()])


def no_frames(orders: Orders) -> str:
    """Open a link with bytes that are no frame."""
    with orders.channel() as channel:
        return _link(channel, [os.urandom(1000), b"\xff" * 100, b""])


def oversized(orders: Orders) -> str:
    """Send messages above the limit, which the sender itself does not have."""
    with _without_limit(orders) as channel:
        return _big(channel, 9 << 20, grpc.Compression.NoCompression)


def bomb(orders: Orders) -> str:
    """Send 256 MiB of zeros, compressed to 256 KiB."""
    with _without_limit(orders) as channel:
        return _big(channel, 256 << 20, grpc.Compression.Gzip)


def _big(channel: grpc.Channel, size: int, compression: grpc.Compression) -> str:
    call: Any = channel.unary_unary("/ringtune.v1.Weights/Manifest")
    return answered(lambda: call(bytes(size), timeout=4 * CALL_S, compression=compression))


def _without_limit(orders: Orders) -> grpc.Channel:
    """A channel of a member that sends messages of any length."""
    who = orders.speaker(_MEMBER).identity
    credentials = grpc.ssl_channel_credentials(who.authority_pem, who.key_pem, who.certificate_pem)
    options = (("grpc.max_send_message_length", -1), ("grpc.ssl_target_name_override", orders.party.server_name))
    return grpc.secure_channel(orders.address, credentials, options=options)


def long_metadata(orders: Orders) -> str:
    """Send metadata of a megabyte."""
    with orders.channel() as channel:
        call: Any = channel.unary_unary("/ringtune.v1.Weights/Manifest")
        return answered(lambda: call(b"", timeout=CALL_S, metadata=[("x", "y" * 1_000_000)]))


def paths(orders: Orders) -> str:
    """Ask for runs, and send files, whose names are paths."""
    with orders.channel() as channel:
        if not orders.target:
            manifest = weights_pb2.ManifestRequest(run_id="../../etc")
            return answered(lambda: weights_pb2_grpc.WeightsStub(channel).Manifest(manifest, timeout=CALL_S))
        stub = control_pb2_grpc.SnapshotsStub(channel)
        file = control_pb2.FileChunk(path="../../../evil", chunk=b"x", last=True)
        kept = control_pb2.KeepChunk(run_id="../../evil", step=4, node="../evil", file=file)
        return answered(lambda: stub.Keep(iter([kept]), timeout=CALL_S))


def far_snapshots(orders: Orders) -> str:
    """Ask for the snapshot of another placement and of blocks that there are not."""
    with orders.channel() as channel:
        request = control_pb2.SnapshotRequest(run_id=orders.run_id, placement_number=1 << 31, start=0, stop=1 << 31)
        return answered(lambda: list(control_pb2_grpc.SnapshotsStub(channel).Fetch(request, timeout=CALL_S)))


# ---- who wants to be in the way ----------------------------------------------------------------------


def many_calls(orders: Orders) -> str:
    """Call as fast as it goes."""
    with orders.channel() as channel:
        weights, coordinator = weights_pb2_grpc.WeightsStub(channel), control_pb2_grpc.CoordinatorStub(channel)
        request = weights_pb2.ManifestRequest(run_id="r")

        def once() -> object:
            if orders.target:
                return weights.Manifest(request, timeout=CALL_S)
            return coordinator.Status(control_pb2.Empty(), timeout=CALL_S)

        for _ in range(200):
            last = answered(once)
    return last


def silent_streams(orders: Orders, path: str = LINK) -> str:
    """Open as many streams as one connection may, and say nothing; at the coordinator as a user who evaluates."""
    with orders.channel(_MEMBER if orders.target else _USER) as channel:
        method: Any = channel.stream_stream(path if orders.target else EVALUATE)
        calls = [method(iter(queue.SimpleQueue().get, None), timeout=2.0) for _ in range(_STREAMS)]
        answers = [answered(functools.partial(next, call, None)) for call in calls]
    return answers[-1]


def silent_probes(orders: Orders) -> str:
    """Open streams of probes, and say nothing."""
    return silent_streams(orders, PROBE)


def slow_body(orders: Orders) -> str:
    """Send a body a byte at a time."""

    def slowly() -> Iterator[bytes]:
        for _ in range(20):
            yield b"\x0a"
            time.sleep(0.1)

    with orders.channel(_MEMBER if orders.target else _USER) as channel:
        method: Any = channel.stream_stream(LINK if orders.target else EVALUATE)
        calls = [method(slowly(), timeout=CALL_S) for _ in range(50)]
        return [answered(functools.partial(next, call, None)) for call in calls][-1]


def many_connections(orders: Orders) -> str:
    """Open connections, begin no handshake, and hold them."""
    with contextlib.ExitStack() as stack:
        for _ in range(_CONNECTIONS):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_connection(orders.place, CALL_S))
        time.sleep(1.0)
    return "connections are held"


def no_handshakes(orders: Orders) -> str:
    """Begin with something else than a handshake: HTTP/1, an HTTP/2 preface, random bytes, a handshake that is cut."""
    texts = (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", os.urandom(4096))
    last = ""
    for text in (*texts, b"\x16\x03\x01\xff\xff\x01" + bytes(100)):
        try:
            with socket.create_connection(orders.place, CALL_S) as end:
                end.sendall(text)
                end.settimeout(0.5)
                last = f"{len(end.recv(1000))} bytes, then closed"
        except OSError as error:
            last = type(error).__name__
    return last


ATTACKS: Final[dict[str, Attack]] = {
    "plain text": plain_text,
    "no certificate": no_certificate,
    "certificate of another authority": as_somebody("stranger", "node-0"),
    "expired certificate": as_somebody("expired", "node-0"),
    "another node's name": as_somebody(_MEMBER, "node-0"),
    "a user's certificate": as_somebody(_USER, "node-0"),
    "a link that the plan has not": as_somebody(_MEMBER, _MEMBER),
    "orders of another role": other_role,
    "used and made-up tokens": used_token,
    "a report to a run of others": hostile_report,
    "a plan of another run": wrong_run,
    "bytes that are no frames": no_frames,
    "messages above the limit": oversized,
    "a compressed bomb": bomb,
    "metadata of a megabyte": long_metadata,
    "names that are paths": paths,
    "snapshots that there are not": far_snapshots,
    "calls without a pause": many_calls,
    "190 silent streams": silent_streams,
    "190 silent probes": silent_probes,
    "50 slow bodies": slow_body,
    "1,200 connections": many_connections,
    "no handshakes": no_handshakes,
}
"""By what a report calls them."""


def main() -> int:
    """Attack until the input ends."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    orders = Orders(**json.loads(sys.stdin.readline()))
    over = threading.Event()
    answers: Counter[str] = Counter()
    lock = threading.Lock()

    def attack() -> None:
        while not over.is_set():
            answer = ATTACKS[orders.attack](orders)[:_MOST_TEXT]
            with lock:
                answers[answer] += 1
            over.wait(_PAUSE_S)

    threads = [threading.Thread(target=attack, daemon=True) for _ in range(_THREADS)]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    over.set()
    for thread in threads:
        thread.join(2 * CALL_S)
    sys.stdout.write(json.dumps(answers) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
