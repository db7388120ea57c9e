"""Real processes on loopback give the result of one process, and their recordings replay."""

from __future__ import annotations

import operator
import time

import pytest

from coordinator.run.run_text import is_step
from ringtune.run_control.checkpoint import Resume
from tests.support.cluster import Cluster
from tests.support.replay import replay
from tests.support.results import datasets_of, largest_difference, reference_of, trained
from tests.support.stale_reference import train_stale

pytestmark = pytest.mark.slow
SETTLE_S = 30.0


@pytest.mark.promise("1 partition invariance")
def test_ring_equals_one_process_and_replays(cluster: Cluster) -> None:
    """Float64, two owners, unfreezing, hand-overs: equal to 1e-9; every engine's recording gives the very commands."""
    job = cluster.job(runtime__record=True)
    outcome = cluster.run(job)
    assert outcome.is_done, outcome.message
    wanted = reference_of(cluster, job, outcome)
    assert largest_difference(trained(outcome), {**wanted.adapter(), **wanted.head()}) < 1e-9
    losses = {line["step"]: line["loss"] for line in outcome.metrics if is_step(line)}
    assert [losses[step] for step in sorted(losses)] == pytest.approx(wanted.losses, abs=1e-9)
    assert outcome.plan is not None
    for node in outcome.plan.nodes:
        lines = outcome.files[f"recordings/{node}.jsonl"].decode().splitlines()
        assert replay(lines, outcome.plan, node) == len(lines) - 1 > 0


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("method", ["all", "single"])
@pytest.mark.sampled(1)
def test_ring_other_methods_equal_one_process(cluster: Cluster, method: str) -> None:
    """The same agents, run after run, with other methods."""
    job = cluster.job(train__method=method, train__max_steps=6, train__optimizer="sgd")
    outcome = cluster.run(job)
    assert outcome.is_done, outcome.message
    wanted = reference_of(cluster, job, outcome)
    assert largest_difference(trained(outcome), {**wanted.adapter(), **wanted.head()}) < 1e-9


@pytest.mark.promise("2 right version")
def test_ring_of_pipeadapter_equals_its_rule_in_one_process(cluster: Cluster) -> None:
    """Stale on purpose, on real processes: equal to the rule written out, with as many versions as it needs."""
    job = cluster.job(
        train__method="pipeadapter",
        train__local_iterations=5,
        train__max_steps=13,
        train__checkpoint_every=5,
        runtime__lease_s=8.0,
    )
    outcome = cluster.run(job)
    assert outcome.is_done, outcome.message
    assert outcome.plan is not None
    wanted, losses = train_stale(job, outcome.plan, cluster.model, datasets_of(cluster, job))
    assert largest_difference(trained(outcome), wanted) < 1e-9
    assert [line["loss"] for line in outcome.metrics if is_step(line)] == pytest.approx(losses, abs=1e-9)
    hosts = [piece.node for piece in outcome.plan.placement.slices if piece.num_blocks]
    stored = [outcome.report["nodes"][node]["peak_versions"] for node in hosts]
    assert stored == list(range(len(hosts), 0, -1)) != [1]
    resume = Resume(plan=outcome.plan, manifests=(outcome.checkpoints[-2],))
    again = cluster.follow(job, resume).wait()
    assert (again.message, again.resumed_at) == ("", 10)
    assert largest_difference(trained(again), trained(outcome)) == 0.0, "a resumed run ends with the very bits"


def test_ring_agents_keep_nothing_of_a_run(cluster: Cluster) -> None:
    """After run upon run an idle agent has the threads, connections and (nearly) the memory that it had before."""
    cluster.run(cluster.job())
    before = {name: usage(cluster, name) for name in cluster.names}
    for _ in range(3):
        assert cluster.run(cluster.job()).is_done
    for name in cluster.names:
        threads, files, rss_bytes = before[name]
        # a server keeps a few idle workers, as many as calls once came at a time
        limits = (threads + 2, files, rss_bytes + (24 << 20))
        # gRPC closes sockets and ends workers a moment after the call that used them
        deadline_s = time.monotonic() + SETTLE_S
        while not all(map(operator.le, found := usage(cluster, name), limits)):
            assert time.monotonic() < deadline_s, f"{name}: (threads, files, bytes) {found}, at most {limits}"
            time.sleep(0.05)


def usage(cluster: Cluster, name: str) -> tuple[int, int, int]:
    """Threads, open files and resident bytes of an agent that has become idle."""
    import psutil

    cluster.wait_idle(name)
    process = psutil.Process(cluster.agents[name].pid)
    return process.num_threads(), process.num_fds(), process.memory_info().rss
