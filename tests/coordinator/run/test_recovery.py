"""Reports of nodes: each counts once, nothing grows without bound, and which complaint about a link is believed."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest

from coordinator.run.checkpoint import CheckpointManager
from coordinator.run.recovery import GRACE_S, PeerSuspicions, Reports, with_role
from coordinator.run.report import RunLedger
from ringtune.errors import IntegrityError
from ringtune.run_control import events as rd
from ringtune.schedule.placement import Helper
from ringtune.schedule.plan import Plan
from ringtune.techniques.replicas import CopyDigest
from ringtune.v1 import control_pb2
from tests.support.fake_agents import job
from tests.support.plans import make_plan


def complaint(node: str) -> rd.NodeFailed:
    """What a node says that lost a link."""
    return rd.NodeFailed(node, "PeerLostError", f"node {node} lost a link")


def test_blame_waits_for_the_accused_to_speak() -> None:
    """A complaint is believed only after a moment."""
    suspicions = PeerSuspicions()
    suspicions.add(complaint("a"), "b", 10.0)
    assert suspicions.verdict(10.0 + GRACE_S / 2) is None
    assert suspicions.verdict(10.0 + GRACE_S) == complaint("a")
    assert suspicions.verdict(10.0 + GRACE_S) is None, "it is told once"


def test_blame_prefers_who_kept_silent() -> None:
    """If a complains about b and b about c, it is c who is gone, though a was first."""
    suspicions = PeerSuspicions()
    suspicions.add(complaint("a"), "b", 10.0)
    suspicions.add(complaint("b"), "c", 10.1)
    assert suspicions.verdict(10.2 + GRACE_S) == complaint("b")


def test_blame_believes_the_first_if_all_complain() -> None:
    """A cable that is cut between two nodes makes both complain."""
    suspicions = PeerSuspicions()
    suspicions.add(complaint("a"), "b", 10.0)
    suspicions.add(complaint("b"), "a", 10.1)
    assert suspicions.verdict(20.0) == complaint("a")


def test_lost_node_that_only_helped_is_called_a_helper() -> None:
    """With what it did and the remedy; a host that helps another one is a lost host."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"])
    helpers = (Helper(node="b", start=0, stop=1), Helper(node="z", start=1, stop=2), Helper(node="z", start=2, stop=4))
    plan = Plan.of(plan.course, dataclasses.replace(plan.placement, helpers=helpers))
    assert with_role("it is lost", "a", plan) == with_role("it is lost", "b", plan) == "it is lost"
    assert with_role("it is lost", "z", plan) == (
        "it is lost; helper z fits the adapters of a's blocks [1, 2), b's blocks [2, 4): start it again and --resume "
        "the run, or train anew with another helper in [offload]"
    )


class _NoBooks:
    """Books into which nothing is written, of a run of which eight items are granted."""

    plan, end_seq = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"]), 8

    def note_end(self, seq: int, at_unix_s: float) -> None:
        """Ignore it."""

    def add_report(self, request: control_pb2.ReportRequest) -> None:
        """Ignore it."""


def take(reports: Reports, **values: Any) -> list[rd.Event]:
    """The events of a report."""
    recorder: Any = _NoBooks()
    return list(reports.take(control_pb2.ReportRequest(node="a", **values), recorder))


def copy(turn: int, unit: int) -> control_pb2.CopyDigest:
    """The digest of a copy as a node sends it."""
    return control_pb2.CopyDigest(turn=turn, unit=unit, sha256=f"{unit:02}")


def test_digests_of_copies_go_with_the_end_of_their_turn() -> None:
    """Also if they came in an earlier report; a turn has its own only."""
    reports = Reports(CheckpointManager("r", job(), None))
    assert take(reports, number=1, copies=[copy(0, -1), copy(1, 4)]) == []
    (done,) = take(reports, number=2, copies=[copy(0, 4)], turns_done=[0])
    assert done == rd.TurnReported("a", 0, (), (CopyDigest(-1, "-1"), CopyDigest(4, "04")))
    assert take(reports, number=3, turns_done=[1]) == [rd.TurnReported("a", 1, (), (CopyDigest(4, "04"),))]
    assert take(reports, number=4, turns_done=[2]) == [rd.TurnReported("a", 2)]


@pytest.mark.parametrize("lost_peer", ["a", ""])
def test_error_of_a_node_that_the_run_has_gone_on_without_ends_nothing(lost_peer: str) -> None:
    """It stood still, is a member again, and says that its neighbour closed the link: because it was lost itself."""
    before = make_plan([("a", 0, 2), ("c", 2, 4)], ["a"])
    recorder: Any = _NoBooks()
    recorder.plan = before.extended(make_plan([("a", 0, 4)], ["a"]).placement, 1)
    error = {"error": "PeerLostError", "message": "node a closed the link", "lost_peer": lost_peer}

    def heard(node: str, placement_number: int) -> bool:
        reports = Reports(CheckpointManager("r", job(), None))
        request = control_pb2.ReportRequest(node=node, number=1, **error)  # type: ignore[arg-type]
        events = list(reports.take(request, recorder, placement_number))
        return bool(events) or reports.verdict(math.inf) is not None

    assert heard("c", 0) and heard("a", 0) and heard("a", 1)
    assert not heard("c", 1)


def test_digests_of_copies_without_end_are_refused() -> None:
    """An owner has two copies, of embedding and head."""
    reports = Reports(CheckpointManager("r", job(), None))
    with pytest.raises(IntegrityError, match="node a reports digests of copies without end"):
        take(reports, number=1, copies=[copy(0, -1), copy(0, 4), copy(0, 4)])


def _step(**changes: Any) -> Callable[[control_pb2.ReportRequest], object]:
    values = {"loss_sum": 1.0, "count": 4.0, **changes.pop("values", {})}
    made = {"seq": 3, "step": 3, "kind": "train", "at_unix_s": 1e9, **changes}
    numbers = [control_pb2.Number(name=name, value=value) for name, value in values.items()]
    return lambda report: report.steps.add(values=numbers, **made)


def _part(part: str, **values: Any) -> Callable[[control_pb2.ReportRequest], object]:
    return lambda report: getattr(report, part).add(**values)


DIGEST = "ab" * 32
HOSTILE = [
    (_step(seq=1 << 62), "item 4611686018427387904 of step 3, which nobody granted"),
    (_step(seq=8), "which nobody granted"),
    (_step(seq=-1), "which nobody granted"),
    (_step(kind="x" * 70_000), "an item of kind 'xxx"),
    (_step(at_unix_s=math.nan), "figures of item 3 at nan"),
    (_step(at_unix_s=1e300), "figures of item 3 at"),
    (_step(values={"loss_sum": math.nan}), "'loss_sum' = nan of item 3"),
    (_step(values={"loss_sum": math.inf}), "'loss_sum' = inf"),
    (_step(values={"count": math.nan}), "'count' = nan"),
    (_step(values={"count": -1.0}), "'count' = -1.0"),
    (_step(values={"questions": 1e300}), "'questions' = 1e+300"),
    (_step(values={f"n{n}": 0.0 for n in range(99)}), "101 figures"),
    (_part("traffic", seq=9, target="b", payload="h", bytes=1), "bytes of item 9, which nobody granted"),
    (_part("traffic", seq=1, target="x\x1b[2J", payload="h", bytes=1), "which is none of the plan"),
    (_part("traffic", seq=1, target="b", payload="?", bytes=1), "which is none of the plan"),
    (_part("traffic", seq=1, target="b", payload="h", bytes=1 << 60), "bytes for item 1"),
    (_part("transfers", source="c", bytes=1, seconds=1.0, at_unix_s=1e9), "1 bytes from 'c'"),
    (_part("transfers", source="b", bytes=1, seconds=math.inf, at_unix_s=1e9), "a message after inf s"),
    (_part("spans", action="E1.0", start_unix_s=math.nan, end_unix_s=1.0), "an action from nan"),
    (_part("spans", action="E1.0", start_unix_s=0.0, end_unix_s=math.inf), "to inf"),
    (_part("spans", action="E1.0", start_unix_s=0.0, end_unix_s=1.0, worked_s=math.nan), "of nan s"),
    (_part("saved", turn=1, step=4, sha256="../x", bytes=1), "a shard of step 4"),
    (_part("saved", turn=1, step=-4, sha256=DIGEST, bytes=1), "a shard of step -4"),
    (lambda report: setattr(report, "number", 1 << 62), "with number 4611686018427387904 after 1"),
    (lambda report: setattr(report, "lost_peer", "nobody"), "that it lost 'nobody'"),
]


def test_report_with_figures_that_are_none_is_refused() -> None:
    """Before anything counts on them; the error names the node and is short."""
    recorder: Any = _NoBooks()
    for spoil, message in HOSTILE:
        reports = Reports(CheckpointManager("r", job(), None))
        take(reports, number=1)
        request = control_pb2.ReportRequest(node="a", number=2)
        spoil(request)
        with pytest.raises(IntegrityError, match=r"^node a reports ") as caught:
            list(reports.take(request, recorder))
        assert message in str(caught.value), message
        assert len(str(caught.value)) < 500 and str(caught.value).isprintable(), message


def test_report_of_granted_items_is_taken() -> None:
    """Negative control; and a measurement may have any loss, since nobody trains on it."""
    reports = Reports(CheckpointManager("r", job(), None))
    request = control_pb2.ReportRequest(node="a", number=1)
    for add in (
        _step(),
        _step(kind="measure", values={"loss_sum": math.nan}),
        _part("traffic", seq=8, target="b", payload="t", bytes=1),
        _part("transfers", source="b", bytes=1, seconds=1.0, at_unix_s=1e9),
        _part("spans", action="E1.0", start_unix_s=-4e8, end_unix_s=-4e8 + 1),
        _part("saved", turn=1, step=4, sha256=DIGEST, bytes=1),
    ):
        add(request)
    recorder: Any = _NoBooks()
    assert [type(event) for event in reports.take(request, recorder)] == [rd.StepReported] * 2


def test_totals_that_are_no_figures_are_refused() -> None:
    """An error of ours with the node, whatever a JSON number may be."""
    ledger = RunLedger(_NoBooks.plan, job())
    totals = {"peak_rss_bytes": 7, "hosted_bytes": 1, "cpu_s": 0.5, "peak_versions": 1, "peak_version_bytes": 0}
    ledger.add_totals("a", totals)
    values: tuple[Any, ...] = (math.inf, math.nan, -1, 1 << 70, 10**400, "7", None, True)
    for name, value in itertools.product(totals, values):
        with pytest.raises(IntegrityError, match="the totals of node a are not readable"):
            ledger.add_totals("a", {**totals, name: value})
