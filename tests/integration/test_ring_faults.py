"""Faults with real processes: a killed, frozen or stopped agent, a forged frame, a user who stops.

What a fault is told as says which rule has found it: a broken link, or a lease that has ended.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from edge.transport import frames, tensors
from edge.transport.frames import Hello
from ringtune.schedule.actions import TensorKey
from ringtune.v1 import ring_pb2
from tests.support.cluster import LEASE_S, Cluster, Follower, Outcome
from tests.support.meddler import Meddler
from tests.support.tap import Tap

pytestmark = pytest.mark.slow

WAIT_S = 20.0
OTHER_RUN = "r20200101-000000-00000000"
LONG = {"train__max_steps": 4000, "train__local_iterations": 50}


def begun(cluster: Cluster) -> Follower:
    """A run that would take minutes, a few steps in."""
    follower = cluster.follow(cluster.job(**LONG))
    follower.wait_for_steps(5)
    return follower


@pytest.mark.parametrize("name", ["node-1", "node-2"])
@pytest.mark.thorough
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
@pytest.mark.thorough
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
@pytest.mark.sampled(1)
def test_fault_agent_that_is_told_to_end_leaves_in_order(cluster: Cluster, number: signal.Signals, code: int) -> None:
    """Mid-run: it says so, is named at once, ends with the right code, and is no member any more."""
    follower = begun(cluster)
    cluster.signal("node-2", number)
    assert cluster.wait_exit("node-2") == code
    outcome = follower.wait()
    assert (outcome.error, "node-2 was stopped" in outcome.message) == ("PeerLostError", True), outcome.message
    assert "node-2" not in cluster.states()
    cluster.start("node-2")
    assert cluster.run(cluster.job()).is_done


@pytest.mark.promise("5 timing changes nothing")
@pytest.mark.thorough
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
    assert_equal_results(found, wanted)


@pytest.mark.promise("5 timing changes nothing")
@pytest.mark.parametrize("silent", ["hears", "speaks"])
@pytest.mark.thorough
def test_fault_silent_link_for_less_than_a_lease_changes_nothing(cluster: Cluster, silent: str) -> None:
    """What others say to a node, or what it answers, is held back for a quarter of a lease: nobody is lost."""
    with contextlib.closing(Tap(cluster.ports["node-2"])) as tap:
        restart(cluster, "node-2", advertised=tap.port)
        wanted = cluster.run(cluster.job(train__max_steps=60))
        follower = cluster.follow(cluster.job(train__max_steps=60))
        follower.wait_for_steps(10)
        passing: threading.Event = getattr(tap, silent)
        passing.clear()
        threading.Event().wait(LEASE_S / 4)
        assert follower.is_alive, "the run did not wait for what was held back"
        passing.set()
        found = follower.wait()
        assert wanted.is_done and found.is_done, found.message
        assert_equal_results(found, wanted)
        restart(cluster, "node-2", advertised=cluster.ports["node-2"])


def restart(cluster: Cluster, name: str, *, advertised: int) -> None:
    """End a node in order, and start it with another port that it tells the others."""
    cluster.signal(name, signal.SIGTERM)
    cluster.wait_exit(name)
    cluster.advertised[name] = advertised
    cluster.start(name)


@pytest.mark.thorough
def test_fault_user_stops_the_run(cluster: Cluster) -> None:
    """Stopping a run frees every node, which then does another one."""
    follower = begun(cluster)
    follower.driver.stop("the user has enough")
    outcome = follower.wait()
    assert outcome.error == "InterruptedRunError"
    cluster.wait_idle(*cluster.names)
    assert cluster.run(cluster.job()).is_done


def test_fault_forged_links_are_refused_and_the_run_goes_on(cluster: Cluster) -> None:
    """Garbage, another run, a stranger, a second node-0: refused with a reason; the result is untouched."""
    wanted = cluster.run(cluster.job(train__max_steps=60, train__local_iterations=10))
    follower = cluster.follow(cluster.job(train__max_steps=60, train__local_iterations=10))
    follower.wait_for_steps(20)
    outcome = follower.outcome
    assert outcome.plan is not None
    good = Hello(
        run_id=follower.driver.run_id,
        placement_number=0,
        source="node-0",
        digest=outcome.plan.digest,
        wire_dtype="float64",
    )
    address = f"127.0.0.1:{cluster.ports['node-2']}"
    cluster.signal("node-1", signal.SIGSTOP)  # so that the run does not end before all were tried
    try:
        assert "has a link to node node-2 already" in refusal(address, [good.message(), *forged_tensor(good)])
        assert refusal(address, [b"\xff\xfe garbage"])
        assert refusal(address, [replace(good, run_id=OTHER_RUN).message()])
        assert refusal(address, [replace(good, digest="0" * 64).message()])
        assert refusal(address, [replace(good, source="mallory").message()])
    finally:
        cluster.signal("node-1", signal.SIGCONT)
    assert follower.wait().is_done, outcome.message
    assert_equal_results(outcome, wanted)


def test_fault_forged_frames_on_an_open_link_are_refused(tmp_path: Path) -> None:
    """A frame between those of a member: it changes no bit; a member that learns of its refusal ends the run."""
    cluster = Cluster(tmp_path, owners=["node-0"], hosts=["node-1"])
    meddler = Meddler(cluster.ports["node-1"])
    cluster.advertised["node-1"] = meddler.port
    job = cluster.job(train__max_steps=30)
    with contextlib.closing(meddler), cluster.listening():
        wanted = cluster.run(job)
        assert wanted.is_done and not meddler.refusals, wanted.message
        meddler.forge, meddler.keeps_refusals = forged_at(20), True
        found = cluster.run(job)
        assert found.is_done, found.message
        assert_equal_results(found, wanted)
        old, other_run, other_node = meddler.refusals
        assert "is of a turn that is none of turns" in old
        assert f"a frame of run '{OTHER_RUN}' arrived from node 'node-0'" in other_run
        assert "has the source node 'node-1', the link is node node-0's" in other_node

        meddler.forge, meddler.keeps_refusals = forged_at(20), False
        failed = cluster.run(job)
        assert failed.error == "FrameError"
        assert "node node-1 refused a frame of node node-0: " in failed.message
        cluster.wait_idle(*cluster.names)


def forged_at(seq: int) -> Callable[[ring_pb2.FrameHeader], list[bytes]]:
    """Three forged frames before the first one of an item: of an item long done, of another run, of another node."""
    forged: list[bytes] = []

    def forge(header: ring_pb2.FrameHeader) -> list[bytes]:
        if header.seq != seq or forged:
            return []
        good = Hello(
            run_id=header.run_id,
            placement_number=header.placement_number,
            source="node-0",
            digest="",
            wire_dtype="float64",
        )
        for forger in (good, replace(good, run_id=OTHER_RUN), replace(good, source="node-1")):
            forged.extend(forged_tensor(forger))
        return forged

    return forge


def assert_equal_results(found: Outcome, wanted: Outcome) -> None:
    """Adapter and head are equal in every bit."""
    for name in ("adapter/adapter.safetensors", "adapter/model_head.safetensors"):
        assert found.files[name] == wanted.files[name]


def forged_tensor(hello: Hello) -> list[bytes]:
    """A hidden state of infinities, of an item that is long done."""
    encoded = tensors.encode(torch.full((4, 8, 32), float("inf"), dtype=torch.float64), None, "float64")
    return list(frames.messages(frames.tensor_header(hello, TensorKey("h", 1, 0, 1), encoded), encoded.parts))


def refusal(address: str, messages: list[bytes]) -> str:
    """Why a stream of these messages is refused, by an answer or by the end of the stream."""
    with grpc.insecure_channel(address) as channel:
        call: Any = channel.stream_stream("/ringtune.v1.Ring/Link", response_deserializer=ring_pb2.Ack.FromString)
        try:
            for ack in call(iter(messages), timeout=60):
                if ack.refusal:
                    return str(ack.refusal)
        except grpc.RpcError as error:
            return f"{error.code()}: {error.details()}"
    return ""
