"""Check the figures of a node's report where they are decoded: they come from another machine.

A report may speak of granted items and of nodes of the plan only. Counts are whole and no more than a number can hold,
times are times, losses are finite. A report that has anything else is of no node of ours.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from ringtune.errors import IntegrityError
from ringtune.files.strict import describe_value
from ringtune.rounds.class_counts import MOST_CLASSES, pair_of
from ringtune.rounds.entities import KINDS, is_entity_count
from ringtune.rounds.number_sums import SIGNED
from ringtune.schedule.actions import Payload
from ringtune.schedule.turns.turns import StepKind
from ringtune.texts import shown
from ringtune.v1 import control_pb2

MOST_SKIPPED: Final = 1000
"""Most reports that may be missing before one: those of a node whose run ended, or moved, while it was sending."""
MOST_COUNT: Final = float(1 << 53)
MOST_BYTES: Final = 1 << 50
MOST_S: Final = 1e11
"""Seconds from 1970 to the year 5138; a clock that is wrong by decades is none of this check's business."""
_MOST_SUM: Final = 1e300
_MOST_NAMES: Final = 64
_MOST_COUNTS: Final = MOST_CLASSES**2 + MOST_CLASSES * len(KINDS)
_KINDS: Final = frozenset(StepKind)
_FINITE: Final = (StepKind.TRAIN, StepKind.EVALUATE)
_SHA256: Final = re.compile("[0-9a-f]{64}")
_SUMS: Final = frozenset({"loss_sum", "absolute_sum", *SIGNED})
"""Figures that are sums of numbers, not counts."""


def check_report(request: control_pb2.ReportRequest, *, last: int, nodes: Collection[str], end_seq: int) -> None:
    """Check the figures of a report.

    Args:
        request: the report.
        last: number of the node's last report; 0 = none.
        nodes: of the plan.
        end_seq: one past the last granted item.

    Raises:
        IntegrityError: names the node and the figure.
    """
    problem = next(_problems(request, last, nodes, end_seq), "")
    if problem:
        raise IntegrityError(f"node {request.node} reports {problem}; use one version on all machines")


def _problems(request: control_pb2.ReportRequest, last: int, nodes: Collection[str], end_seq: int) -> Iterator[str]:
    if request.number > last + MOST_SKIPPED:
        yield f"with number {request.number} after {last}"
    for step in request.steps:
        yield from _of_step(step, end_seq)
    for traffic in request.traffic:
        if not 0 <= traffic.seq <= end_seq:
            yield f"bytes of item {traffic.seq}, which nobody granted"
        if traffic.target not in nodes or traffic.payload not in frozenset(Payload):
            yield f"bytes of {shown(traffic.payload)} to {shown(traffic.target)}, which is none of the plan"
        if traffic.bytes > MOST_BYTES:
            yield f"{traffic.bytes} bytes for item {traffic.seq}"
    for transfer in request.transfers:
        if transfer.source not in nodes or transfer.bytes > MOST_BYTES:
            yield f"{transfer.bytes} bytes from {shown(transfer.source)}"
        if not (_is_time(transfer.at_unix_s) and _is_time(transfer.seconds)):
            yield f"a message after {transfer.seconds} s at {transfer.at_unix_s}"
    for span in request.spans:
        if not all(map(_is_time, (span.start_unix_s, span.end_unix_s, span.worked_s))):
            yield f"an action from {span.start_unix_s} to {span.end_unix_s}, of {span.worked_s} s"
    for saved in request.saved:
        if not _SHA256.fullmatch(saved.sha256) or saved.bytes > MOST_BYTES or saved.step < 0:
            yield f"a shard of step {saved.step} with {saved.bytes} bytes and digest {shown(saved.sha256)}"
    if request.lost_peer and request.lost_peer not in nodes:
        yield f"that it lost {shown(request.lost_peer)}, which is none of the plan"


def _of_step(step: control_pb2.StepReport, end_seq: int) -> Iterator[str]:
    if not 0 <= step.seq < end_seq or step.step < 0:
        yield f"item {step.seq} of step {step.step}, which nobody granted"
    if step.kind not in _KINDS:
        yield f"an item of kind {shown(step.kind)}"
    counts = sum(1 for number in step.values if pair_of(number.name) or is_entity_count(number.name))
    names = len(step.values) - counts
    if counts and (step.kind != StepKind.EVALUATE or counts > _MOST_COUNTS):
        yield f"{counts} counts of classes for item {step.seq} of kind {shown(step.kind)}"
    if names > _MOST_NAMES or not _is_time(step.at_unix_s):
        yield f"{len(step.values)} figures of item {step.seq} at {step.at_unix_s}"
    for number in step.values:
        if number.name not in _SUMS:
            is_good = 0 <= number.value <= MOST_COUNT
        else:  # of items that measure it may be anything
            is_good = abs(number.value) <= _MOST_SUM or step.kind not in _FINITE
        if not is_good:
            yield f"{shown(number.name)} = {number.value} of item {step.seq}"


def total_of(totals: Mapping[str, Any], name: str) -> float:
    """Return a figure of a node's totals.

    Raises:
        ValueError: it is no number, or none that a node can have.
    """
    value: object = totals[name]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= MOST_COUNT:
        raise ValueError(f"{name} is {describe_value(value)}")
    return value


def _is_time(seconds: float) -> bool:
    return math.isfinite(seconds) and abs(seconds) <= MOST_S
