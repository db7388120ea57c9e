"""An audited run of real processes: equal to one process, also after a host that computed otherwise was taken out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ringtune.job.job import Job
from ringtune.techniques.offload import helped
from tests.support.audit_trails import checked
from tests.support.cluster import RING, Cluster, Follower
from tests.support.results import largest_difference, reference_of, trained

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what nodes do wrong."""
    return tmp_path_factory.mktemp("orders")


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory, orders: Path) -> Iterator[Cluster]:
    """Owners a and b, and the host c."""
    cluster = Cluster(tmp_path_factory.mktemp("audited"), owners=["a", "b"], hosts=["c"], failpoints=orders)
    with cluster.listening():
        yield cluster


def followed(ring: Cluster) -> tuple[Job, Follower]:
    """A job of which each micro-batch is repeated, with c in the middle of the ring."""
    job = ring.job(
        train__method="all",
        train__max_steps=12,
        recovery__copies="next",
        audit__share=1.0,
    )
    return job, ring.follow(job, plan=ring.plan_on(job, RING))


@pytest.mark.promise("1 partition invariance")
def test_host_that_scales_a_gradient_is_taken_out_and_the_run_goes_on(
    audited: Cluster, orders: Path, tmp_path: Path
) -> None:
    """First nobody is wrong, and nobody is named; then c is once, by a thousandth, and what it did has no effect."""
    job, follower = followed(audited)
    outcome = follower.wait()
    assert outcome.is_done, outcome.message
    assert not outcome.of_kind("recovery") and not [note for note in outcome.notes if "audit" in note]
    wanted = reference_of(audited, job, outcome)
    assert largest_difference(trained(outcome), wanted.adapter() | wanted.head()) < 1e-9
    assert not checked(outcome, tmp_path / "honest").problems
    assert outcome.report["audit"]["drawn"] == outcome.report["audit"]["checked"] > outcome.report["audit"]["disagreed"]
    (orders / "c").write_text("after backward 9 scale")
    job, follower = followed(audited)
    outcome = follower.wait()
    assert outcome.is_done, outcome.message
    (recovery,) = outcome.of_kind("recovery")
    assert recovery["lost"] == ["c"] and recovery["step"] == 3
    assert [note for note in outcome.notes if "node c computed another result" in note]
    wanted = reference_of(audited, job, outcome)
    assert largest_difference(trained(outcome), wanted.adapter() | wanted.head()) < 1e-9
    found = checked(outcome, tmp_path / "recovered")
    assert not found.problems and found.figures["turns"] > 2 and outcome.report["audit"]["disagreed"] == 1


def test_helper_that_scales_a_fit_is_taken_out_and_hosts_fit_themselves(
    audited: Cluster, orders: Path, tmp_path: Path
) -> None:
    """C fits the adapters of a and of b; the turn before, which all did rightly, names nobody."""
    (orders / "c").write_text("after fit adapters 30 scale")
    helper_of = {"a": "c", "b": "c"}
    job = audited.job(
        train__method="all",
        train__max_steps=12,
        recovery__copies="next",
        audit__share=1.0,
        offload__mode=helper_of,
    )
    plan = helped(audited.plan_on(job, RING), helper_of)
    outcome = audited.follow(job, plan=plan).wait()
    assert outcome.is_done, outcome.message
    (recovery,) = outcome.of_kind("recovery")
    assert recovery["lost"] == ["c"] and recovery["step"] > 0
    assert [note for note in outcome.notes if "node c computed another result" in note and "(fit " in note]
    wanted = reference_of(audited, job, outcome)
    assert largest_difference(trained(outcome), wanted.adapter() | wanted.head()) < 1e-9
    assert not checked(outcome, tmp_path).problems


def test_host_that_accuses_an_honest_one_is_taken_out(audited: Cluster, orders: Path) -> None:
    """C says that a computed otherwise, and b, which repeats it too, finds nothing wrong."""
    (orders / "c").write_text("after repeat 3 scale")
    job, follower = followed(audited)
    outcome = follower.wait()
    assert outcome.is_done, outcome.message
    (recovery,) = outcome.of_kind("recovery")
    assert recovery["lost"] == ["c"]
    assert [note for note in outcome.notes if "node c says that node a computed another result" in note]
    wanted = reference_of(audited, job, outcome)
    assert largest_difference(trained(outcome), wanted.adapter() | wanted.head()) < 1e-9
