"""A node that is told to end in mid-run, and forged frames on an open link."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from edge.transport import frames, tensors
from edge.transport.frames import Hello
from ringtune.schedule.actions import TensorKey
from ringtune.v1 import ring_pb2
from tests.support.cluster import RING, START_S, Cluster, Hold
from tests.support.meddler import Meddler
from tests.support.trials import wait_until
from tests.support.wire_parts import wire_proxy

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
