"""The prefix cache as processes: the result of one process, and files only while the run goes on."""

from __future__ import annotations

import pytest

from ringtune.run_control.checkpoint import Resume
from tests.support.cluster import Cluster, Outcome
from tests.support.replay import replay
from tests.support.results import largest_difference, reference_of, trained

pytestmark = pytest.mark.slow


def num_reads(outcome: Outcome) -> int:
    """Micro-batches that entered where they were kept."""
    return sum(int(node["cache_reads"]) for node in outcome.report["nodes"].values())


@pytest.mark.promise("1 partition invariance")
@pytest.mark.thorough
def test_ring_with_a_cache_equals_one_process_and_resumes(cluster: Cluster) -> None:
    """Float64: equal to 1e-9; recordings replay; resumed with an empty cache: the same bits; no file stays."""
    job = cluster.job(
        cache__prefix="auto",
        unfreeze__every_steps=24,
        train__max_steps=48,
        train__eval_every=12,
        train__checkpoint_every=24,
        runtime__record=True,
    )
    outcome = cluster.run(job)
    assert outcome.is_done and outcome.plan is not None, outcome.message
    assert outcome.plan.placement.cache is not None and num_reads(outcome) > 0
    wanted = reference_of(cluster, job, outcome)
    assert largest_difference(trained(outcome), wanted.adapter() | wanted.head()) < 1e-9
    for node in outcome.plan.nodes:
        lines = outcome.files[f"recordings/{node}.jsonl"].decode().splitlines()
        assert replay(lines, outcome.plan, node) == len(lines) - 1 > 0
    again = cluster.follow(job, Resume(plan=outcome.plan, manifests=(outcome.checkpoints[0],))).wait()
    assert (again.message, again.resumed_at) == ("", 24)
    assert largest_difference(trained(again), trained(outcome)) == 0.0
    assert list((cluster.folder / "state").rglob("hidden")) == []
