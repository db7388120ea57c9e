"""A node that is told to end in mid-run, and forged frames on an open link, which a node in the middle slips in."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from edge.transport import frames, tensors
from edge.transport.frames import Hello, unpack
from ringtune.schedule.actions import TensorKey
from ringtune.transport.endpoints import CLIENT_OPTIONS, SERVER_OPTIONS
from ringtune.v1 import ring_pb2
from tests.support.cluster import RING, START_S, Cluster, Hold
from tests.support.trials import wait_until
from tests.support.wire_parts import wire_proxy

WORKERS = 32
END_S = 30.0
FOREVER_S = 1e6
LINK = "/ringtune.v1.Ring/Link"


class Meddler(grpc.GenericRpcHandler):
    """Listens on ``port``, passes every call to ``target_port``, and every answer back.

    Args:
        target_port: on loopback.

    Attributes:
        refusals: what the target refused on links of the ring.
        keeps_refusals: whether the sender of a link does not learn of them.
        forge: makes the messages that go before a frame with this header; none by default.
    """

    def __init__(self, target_port: int) -> None:
        self.refusals: list[str] = []
        self.keeps_refusals = False
        self.forge: Callable[[ring_pb2.FrameHeader], Iterable[bytes]] = lambda header: ()
        self._channel = grpc.insecure_channel(f"127.0.0.1:{target_port}", options=CLIENT_OPTIONS)
        self._pool = ThreadPoolExecutor(WORKERS)
        self._server = grpc.server(self._pool, handlers=[self], options=SERVER_OPTIONS)
        self.port: int = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def close(self) -> None:
        """End every call."""
        self._server.stop(0).wait(END_S)
        self._channel.close()
        self._pool.shutdown()

    def service(self, handler_call_details: Any) -> Any:
        """Take any call: on the wire each of them is a stream of messages in both directions."""
        method = handler_call_details.method
        own = tuple(pair for pair in handler_call_details.invocation_metadata if pair[0] != "user-agent")
        return grpc.stream_stream_rpc_method_handler(
            lambda messages, context: self._pass(method, own, messages, context)
        )

    def _pass(self, method: str, metadata: Any, messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        sent = self._with_forged(messages) if method == LINK else messages
        passed: Any = self._channel.stream_stream(method)
        call = passed(sent, metadata=metadata, timeout=_timeout_s(context))
        context.add_callback(call.cancel)
        try:
            for answer in call:
                if method != LINK or not self._is_kept(answer):
                    yield answer
        except grpc.RpcError as error:
            context.set_trailing_metadata(call.trailing_metadata())
            context.abort(call.code(), str(error))
        context.set_trailing_metadata(call.trailing_metadata())

    def _with_forged(self, messages: Iterator[bytes]) -> Iterator[bytes]:
        for message in messages:
            header, _ = unpack(message)
            if header is not None:
                yield from self.forge(header)
            yield message

    def _is_kept(self, answer: bytes) -> bool:
        refusal = ring_pb2.Ack.FromString(answer).refusal
        if refusal:
            self.refusals.append(refusal)
        return bool(refusal) and self.keeps_refusals


def _timeout_s(context: Any) -> float | None:
    """What is left of a call's time; gRPC gives a number without meaning for a call that may last for ever."""
    left_s = context.time_remaining()
    return left_s if left_s is not None and left_s < FOREVER_S else None


pytestmark = pytest.mark.slow
BOTH = (("a", 0, 2), ("b", 2, 4))
OTHER_RUN = "r20200101-000000-00000000"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.sampled(1)
def test_fault_agent_that_is_told_to_end_leaves_in_order(ring: Cluster, number: signal.Signals, code: int) -> None:
    """Mid-run: it says so, is named at once, ends with the right code, and is no member any more."""
    job = ring.job(train__max_steps=4000, train__local_iterations=50)
    follower = ring.follow(job, plan=ring.plan_on(job, RING))
    follower.wait_for_steps(5)
    ring.signal("c", number)
    assert ring.wait_exit("c") == code
    assert "error: " not in ring.log("c")
    outcome = follower.wait()
    assert (outcome.error, "c was stopped" in outcome.message) == ("PeerLostError", True), outcome.message
    ring.wait_gone("c")


def test_fault_forged_frames_on_an_open_link_are_refused(tmp_path: Path) -> None:
    """A frame between those of a member: it changes no bit; a member that learns of its refusal ends the run."""
    cluster = Cluster(tmp_path, owners=["a"], hosts=["b"])
    meddler = Meddler(cluster.ports["b"])
    cluster.advertised["b"] = meddler.port
    job = cluster.job(train__max_steps=30)  # nodes know the turn of an item for some turns after it
    with contextlib.closing(meddler), cluster.listening():
        plan = cluster.plan_on(job, BOTH)
        wanted = cluster.run(job, plan=plan)
        assert not meddler.refusals
        meddler.forge, meddler.keeps_refusals = forged_at(20), True
        found = cluster.run(job, plan=plan)
        for name in ("adapter/adapter.safetensors", "adapter/model_head.safetensors"):
            assert found.files[name] == wanted.files[name]
        # nothing in the run waits for a refusal on its way back
        wait_until(lambda: len(meddler.refusals) == 3, lambda: meddler.refusals, within_s=START_S)
        old, other_run, other_node = meddler.refusals
        assert "is of a turn that is none of turns" in old
        assert f"a frame of run '{OTHER_RUN}' arrived from node 'a'" in other_run
        assert "has the source node 'b', the link is node a's" in other_node

        meddler.forge, meddler.keeps_refusals = forged_at(20), False
        failed = cluster.follow(job, plan=plan).wait()
        assert failed.error == "FrameError"
        assert "node b refused a frame of node a: " in failed.message
        cluster.wait_idle(*cluster.names)


def test_fault_links_that_are_cut_again_and_again_change_nothing(tmp_path: Path) -> None:
    """Every connection of both nodes is reset each 200,000 bytes: no recovery, equal bits, told and counted."""
    cluster = Cluster(tmp_path, owners=["a"], hosts=["b"])
    job = cluster.job(train__max_steps=50)
    with contextlib.ExitStack() as stack:
        proxies = [stack.enter_context(wire_proxy(f"127.0.0.1:{cluster.ports[name]}")) for name in cluster.names]
        for name, proxy in zip(cluster.names, proxies, strict=True):
            cluster.advertised[name] = int(proxy.address.rpartition(":")[2])
        stack.enter_context(cluster.listening())
        plan = cluster.plan_on(job, BOTH)
        wanted = cluster.run(job, plan=plan)
        follower = cluster.follow(job, plan=plan, hold=(hold := Hold(cluster, 2)))
        follower.wait_for_steps(2)
        for proxy in proxies:
            proxy.cut_every = 200_000
        hold.let_go()
        found = follower.wait()
        for proxy in proxies:
            proxy.cut_every = 0
        cluster.wait_idle(*cluster.names)
    assert found.is_done, found.message
    for name in ("adapter/adapter.safetensors", "adapter/model_head.safetensors"):
        assert found.files[name] == wanted.files[name]
    assert not found.of_kind("recovery")
    for source, target in (("a", "b"), ("b", "a")):
        assert any(f"link from node {source} to node {target} broke, and was opened" in note for note in found.notes)
        assert found.report["nodes"][source]["links_reopened"] >= 2


def forged_at(seq: int) -> Callable[[ring_pb2.FrameHeader], list[bytes]]:
    """Three forged frames before the first one of an item: of an item long done, of another run, of another node."""
    forged: list[bytes] = []

    def forge(header: ring_pb2.FrameHeader) -> list[bytes]:
        if header.seq != seq or forged:
            return []
        good = Hello(
            run_id=header.run_id, placement_number=header.placement_number, source="a", digest="", wire_dtype="float64"
        )
        for forger in (good, replace(good, run_id=OTHER_RUN), replace(good, source="b")):
            forged.extend(forged_tensor(forger))
        return forged

    return forge


def forged_tensor(hello: Hello) -> list[bytes]:
    """A hidden state of infinities, of an item that is long done."""
    encoded = tensors.encode(torch.full((4, 8, 32), float("inf"), dtype=torch.float64), None, "float64")
    return list(frames.messages(frames.tensor_header(hello, TensorKey("h", 1, 0, 1), encoded), encoded.parts))
