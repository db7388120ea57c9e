"""Figures of a node's report that no node of ours has."""

from __future__ import annotations

import pytest

from ringtune.errors import IntegrityError
from ringtune.rounds.class_counts import MOST_CLASSES, name_of
from ringtune.rpc.codecs.report_checks import check_report
from ringtune.v1 import control_pb2


def check(kind: str, counts: int, others: int = 1) -> None:
    """Check a report of one item with so many counts of classes and other figures."""
    names = [name_of(index // 1000, index % 1000) for index in range(counts)] + [f"f{i}" for i in range(others)]
    values = [control_pb2.Number(name=name, value=1.0) for name in names]
    step = control_pb2.StepReport(seq=1, step=0, kind=kind, values=values)
    check_report(control_pb2.ReportRequest(node="a", number=1, steps=[step]), last=0, nodes=("a",), end_seq=9)


def test_report_may_count_classes_in_an_evaluation_only() -> None:
    """As many as a table has, beside the usual figures."""
    check("evaluate", MOST_CLASSES**2, others=64)
    with pytest.raises(IntegrityError, match="node a reports 1 counts of classes for item 1 of kind 'train'"):
        check("train", 1)
    with pytest.raises(IntegrityError, match="10301 counts of classes"):
        check("evaluate", MOST_CLASSES * (MOST_CLASSES + 3) + 1)
    with pytest.raises(IntegrityError, match="figures of item 1"):
        check("evaluate", 0, others=65)
