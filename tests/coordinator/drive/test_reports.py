"""What a node's reports become: each once, and nothing kept without bound."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.drive.checkpointing import Checkpointing
from coordinator.drive.reports import Reports
from ringtune.errors import IntegrityError
from ringtune.rounds import rounds as rd
from ringtune.rounds.copy_digests import CopyDigest
from ringtune.v1 import control_pb2
from tests.support.fake_agents import job


class _NoBooks:
    """Books into which nothing is written."""

    def add_report(self, request: control_pb2.ReportRequest) -> None:
        """Ignore it."""


def take(reports: Reports, **values: Any) -> list[rd.Event]:
    """The events of a report."""
    books: Any = _NoBooks()
    return list(reports.take(control_pb2.ReportRequest(node="a", **values), books))


def copy(turn: int, unit: int) -> control_pb2.CopyDigest:
    """The digest of a copy as a node sends it."""
    return control_pb2.CopyDigest(turn=turn, unit=unit, sha256=f"{unit:02}")


def test_digests_of_copies_go_with_the_end_of_their_turn() -> None:
    """Also if they came in an earlier report; a turn has its own only."""
    reports = Reports(Checkpointing("r", job(), None))
    assert take(reports, number=1, copies=[copy(0, -1), copy(1, 4)]) == []
    (done,) = take(reports, number=2, copies=[copy(0, 4)], turns_done=[0])
    assert done == rd.TurnReported("a", 0, (), (CopyDigest(-1, "-1"), CopyDigest(4, "04")))
    assert take(reports, number=3, turns_done=[1]) == [rd.TurnReported("a", 1, (), (CopyDigest(4, "04"),))]
    assert take(reports, number=4, turns_done=[2]) == [rd.TurnReported("a", 2)]


def test_digests_of_copies_without_end_are_refused() -> None:
    """An owner has two copies, of embedding and head."""
    reports = Reports(Checkpointing("r", job(), None))
    with pytest.raises(IntegrityError, match="node a reports digests of copies without end"):
        take(reports, number=1, copies=[copy(0, -1), copy(0, 4), copy(0, 4)])
