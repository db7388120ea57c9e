"""Real agents whose run decides when to unfreeze: stopped, gone on with, and equal to one process with its steps."""

from __future__ import annotations

import dataclasses

import pytest

from coordinator.run.run_text import is_step
from ringtune.job.job import Unfreeze
from ringtune.run_control.checkpoint import Resume
from ringtune.schedule.versions import depth
from tests.support.cluster import Cluster
from tests.support.results import largest_difference, reference_of, trained


@pytest.mark.thorough
def test_ring_that_decides_goes_on_with_its_decisions(cluster: Cluster) -> None:
    """From a checkpoint in its middle a run decides and trains what the whole run did: what one process does.

    Turns of three steps, two owners, and an improvement that no turn reaches: the soonest steps, 12, 18 and 24.
    """
    given = cluster.job(train__max_steps=30, train__checkpoint_every=6, train__dropout=0.1)
    job = dataclasses.replace(given, unfreeze=Unfreeze(at="auto", patience_steps=3, min_improvement=0.9))
    whole = cluster.follow(job).wait()
    assert whole.is_done and whole.plan is not None, whole.message
    steps = whole.report["unfreeze_at"]
    assert steps == [12, 18, 24]
    decided = whole.plan.decided(tuple(steps))
    trained_lines = [line for line in whole.metrics if is_step(line)]
    assert [line["depth"] for line in trained_lines] == [depth(decided.course, step) for step in range(30)]
    middle = whole.checkpoints[1]
    assert middle.step == 12
    cluster.wait_idle(*cluster.names)
    rest = cluster.follow(job, Resume(plan=whole.plan, manifests=(middle,))).wait()
    assert rest.is_done, rest.message
    assert rest.report["unfreeze_at"] == steps
    assert [line["step"] for line in rest.metrics if line.get("kind") == "unfreeze"] == steps
    settled = dataclasses.replace(whole, plan=decided)
    wanted = reference_of(cluster, job, settled)
    assert largest_difference(trained(whole), wanted.adapter() | wanted.head()) < 1e-9
    assert largest_difference(trained(rest), trained(whole)) == 0.0
