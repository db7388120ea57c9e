"""An audited run of real processes: equal to one process after a node that computed otherwise was taken out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ringtune.techniques.offload import helped
from tests.support.audit_trails import checked
from tests.support.cluster import RING, Cluster
from tests.support.failpoints import order_failure
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


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize(
    ("order", "helper_of", "steps"),
    [("after backward 9 scale", {}, {3}), ("after fit adapters 30 scale", {"a": "c", "b": "c"}, {3, 6, 9})],
    ids=["host", "helper"],
)
def test_node_that_scales_its_work_is_taken_out_and_the_run_goes_on(
    audited: Cluster, orders: Path, tmp_path: Path, order: str, helper_of: dict[str, str], steps: set[int]
) -> None:
    """C, once, by a thousandth, a gradient or a fit of the others' adapters: what it did has no effect.

    All is repeated: the turns before it, and those after the way back, which all did rightly, name nobody.
    """
    order_failure(orders, "c", order)
    job = audited.job(
        train__method="all",
        train__max_steps=12,
        recovery__copies="next",
        audit__share=1.0,
        **{"offload__mode": helper_of} if helper_of else {},
    )
    plan = helped(audited.plan_on(job, RING), helper_of)
    outcome = audited.follow(job, plan=plan).wait()
    assert outcome.is_done, outcome.message
    (recovery,) = outcome.of_kind("recovery")
    assert recovery["lost"] == ["c"] and recovery["step"] in steps
    assert outcome.plan is not None and not outcome.plan.placements[-1].helpers
    (note,) = [note for note in outcome.notes if "computed another result" in note]
    assert "node c computed another result" in note and ("(fit " in note) == bool(helper_of)
    wanted = reference_of(audited, job, outcome)
    assert largest_difference(trained(outcome), wanted.adapter() | wanted.head()) < 1e-9
    found = checked(outcome, tmp_path)
    assert not found.problems and found.figures["turns"] > 2
    assert outcome.report["audit"]["disagreed"] >= 1  # two fits may be under way, each with its own answer
