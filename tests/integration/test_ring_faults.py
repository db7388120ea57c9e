"""Faults with real processes: a killed, frozen or stopped agent, a forged frame, a user who stops.

What a fault is told as says which rule has found it: a broken link, or a lease that has ended. How many seconds that
takes is measured by ``python -m tests.bench.faults``.
"""

from __future__ import annotations

import signal
import threading
from dataclasses import replace
from typing import Any

import grpc
import pytest
import torch

from edge.wire import frames, tensors
from edge.wire.frames import Hello
from ringtune.schedule.actions import TensorKey
from ringtune.v1 import ring_pb2
from tests.support.cluster import Cluster, Follower

pytestmark = pytest.mark.slow

WAIT_S = 20.0
LONG = {"train__max_steps": 4000, "train__local_iterations": 50}


def begun(cluster: Cluster) -> Follower:
    """A run that would take minutes, a few steps in."""
    follower = cluster.follow(cluster.job(**LONG))
    follower.wait_for_steps(5)
    return follower


@pytest.mark.parametrize("name", ["node-1", "node-2"])
def test_fault_killed_agent_is_named_and_the_others_are_free(cluster: Cluster, name: str) -> None:
    """SIGKILL of an owner or a host: the run fails with its links and names it; it can come back at once."""
    follower = begun(cluster)
    cluster.signal(name, signal.SIGKILL)
    outcome = follower.wait()
    assert outcome.error == "PeerLostError"
    assert name in outcome.message
    cluster.wait_exit(name)
    cluster.wait_idle(*(other for other in cluster.names if other != name))
    cluster.start(name)
    assert cluster.run(cluster.job()).is_done


@pytest.mark.promise("6 every wait ends")
def test_fault_frozen_agent_is_named_and_comes_back(cluster: Cluster) -> None:
    """SIGSTOP: nothing is closed, so the lease decides; after SIGCONT the node gives the run up and joins again."""
    follower = begun(cluster)
    cluster.signal("node-2", signal.SIGSTOP)
    try:
        outcome = follower.wait()
        assert outcome.error == "PeerLostError"
        assert "node-2" in outcome.message
        cluster.wait_idle("node-0", "node-1")
    finally:
        cluster.signal("node-2", signal.SIGCONT)
    cluster.wait_idle(*cluster.names)
    assert cluster.run(cluster.job()).is_done


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_fault_agent_that_is_told_to_end_leaves_in_order(cluster: Cluster, number: signal.Signals, code: int) -> None:
    """Mid-run: it says so, is named at once, ends with the right code, and is no member any more."""
    follower = begun(cluster)
    cluster.signal("node-2", number)
    assert cluster.wait_exit("node-2") == code
    outcome = follower.wait()
    assert (outcome.error, "node-2 was stopped" in outcome.message) == ("PeerLostError", True)
    assert "node-2" not in cluster.states()
    cluster.start("node-2")
    assert cluster.run(cluster.job()).is_done


@pytest.mark.promise("5 timing changes nothing")
def test_fault_stuttering_node_changes_nothing(cluster: Cluster) -> None:
    """One node runs 20 ms of every 40: slower, and the same adapter and head to the last bit."""
    wanted = cluster.run(cluster.job())
    over = threading.Event()

    def stutter() -> None:
        while not over.wait(0.02):
            cluster.signal("node-1", signal.SIGSTOP)
            over.wait(0.02)
            cluster.signal("node-1", signal.SIGCONT)

    helper = threading.Thread(target=stutter)
    helper.start()
    found = cluster.run(cluster.job())
    over.set()
    helper.join(WAIT_S)
    assert found.is_done, found.message
    for name in ("adapter/adapter.safetensors", "adapter/model_head.safetensors"):
        assert found.files[name] == wanted.files[name]


def test_fault_user_stops_the_run(cluster: Cluster) -> None:
    """Stopping a run frees every node, which then does another one."""
    follower = begun(cluster)
    follower.driver.stop("the user has enough")
    outcome = follower.wait()
    assert outcome.error == "InterruptedRunError"
    cluster.wait_idle(*cluster.names)
    assert cluster.run(cluster.job()).is_done


def test_fault_forged_frames_are_refused_and_the_run_goes_on(cluster: Cluster) -> None:
    """Garbage, another run, a stranger, a second node-0: refused with a reason; the result is untouched."""
    wanted = cluster.run(cluster.job(train__max_steps=300, train__local_iterations=10))
    follower = cluster.follow(cluster.job(train__max_steps=300, train__local_iterations=10))
    follower.wait_for_steps(20)
    outcome = follower.outcome
    assert outcome.plan is not None
    good = Hello(
        run_id=follower.driver.run_id,
        epoch=0,
        source="node-0",
        digest=outcome.plan.digest,
        wire_dtype="float64",
    )
    address = f"127.0.0.1:{cluster.ports['node-2']}"
    assert refusal(address, [b"\xff\xfe garbage"])
    assert refusal(address, [replace(good, run_id="r20200101-000000-00000000").message()])
    assert refusal(address, [replace(good, digest="0" * 64).message()])
    assert refusal(address, [replace(good, source="mallory").message()])
    assert refusal(address, [good.message(), *forged_tensor(good)])
    assert follower.wait().is_done, outcome.message
    for name in ("adapter/adapter.safetensors", "adapter/model_head.safetensors"):
        assert outcome.files[name] == wanted.files[name]


def forged_tensor(hello: Hello) -> list[bytes]:
    """A hidden state of infinities for the item that is due next."""
    encoded = tensors.encode(torch.full((4, 8, 32), float("inf"), dtype=torch.float64), None, "float64")
    return list(frames.messages(frames.tensor_header(hello, TensorKey("h", 1, 0, 1), encoded), encoded.parts))


def refusal(address: str, messages: list[bytes]) -> str:
    """Why a stream of these messages is refused, by an answer or by the end of the stream."""
    with grpc.insecure_channel(address) as channel:
        call: Any = channel.stream_stream("/ringtune.v1.Ring/Link", response_deserializer=ring_pb2.Ack.FromString)
        try:
            for ack in call(iter(messages), timeout=20):
                if ack.refusal:
                    return str(ack.refusal)
        except grpc.RpcError as error:
            return f"{error.code()}: {error.details()}"
    return ""
