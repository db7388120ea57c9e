"""A run on agents that live on: one is killed and started again, the others stay; the run goes on."""

from __future__ import annotations

import signal

import pytest

from coordinator.run.run_text import is_step
from ringtune.run_control.checkpoint import Resume
from tests.support.cluster import Cluster
from tests.support.results import largest_difference, reference_of, trained


@pytest.mark.promise("1 partition invariance")
def test_ring_goes_on_when_a_killed_node_is_back(cluster: Cluster) -> None:
    """The node finds its shards under its name; adapters and head are those of one undisturbed process."""
    job = cluster.job(train__max_steps=24, train__checkpoint_every=3, train__dropout=0.1, runtime__lease_s=8.0)
    follower = cluster.follow(job)
    follower.wait_for(lambda outcome: len(outcome.checkpoints) >= 2)
    cluster.signal("node-2", signal.SIGKILL)
    stopped = follower.wait()
    assert stopped.error == "PeerLostError"
    cluster.wait_exit("node-2")
    cluster.start("node-2")
    cluster.wait_idle(*cluster.names)
    assert stopped.plan is not None
    manifests = tuple(reversed(stopped.checkpoints[-2:]))
    outcome = cluster.follow(job, Resume(plan=stopped.plan, manifests=manifests)).wait()
    assert outcome.is_done, outcome.message
    assert outcome.resumed_at == manifests[0].step
    steps = [line["step"] for line in outcome.metrics if is_step(line)]
    assert steps == list(range(outcome.resumed_at + 1, 25))
    wanted = reference_of(cluster, job, outcome)
    assert largest_difference(trained(outcome), wanted.adapter() | wanted.head()) < 1e-9
