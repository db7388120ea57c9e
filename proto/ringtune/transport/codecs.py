"""Codecs between messages and values: turns, numbers, grants, scores; and checks of reports.

Actions are sent as words (:mod:`ringtune.schedule.actions`), scores as one message for each block of each batch, with
packed float64. Input is not trusted: invalid bytes raise :class:`~ringtune.errors.IntegrityError`.

A turn in a grant names its operation table by digest, and a node gets each table once::

    grant 1   tables {A}   turns 2 A, 3 A
    grant 2                turns 4 A
    grant 3   tables {B}   turns 5 A, 6 B

Each node has a writer of its own. A grant may be sent again unchanged; the reader keeps the last tables for it.

A report may name only granted items and nodes of the plan. Counts are whole and bounded, times are finite and bounded,
losses are finite. Any other report is refused.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import struct
import threading
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from ringtune.errors import IntegrityError, PlanError
from ringtune.run_control.evaluation import KINDS, MAX_CLASSES, SIGNED, is_entity_count, pair_of
from ringtune.schedule.actions import Payload, TensorKey
from ringtune.schedule.course import TABLES_AT_ONCE, Course
from ringtune.schedule.operation_tables import BlockScores, Operations
from ringtune.schedule.placement import Passage
from ringtune.schedule.turns import StepKind, Turn
from ringtune.storage.strict import describe_value, parse_json
from ringtune.texts import MAX_NAME, shown
from ringtune.transport.credentials import Removal, Removals
from ringtune.transport.parties import party_of
from ringtune.v1 import control_pb2

_NO_TABLES: Final[Mapping[str, Operations]] = types.MappingProxyType({})

# ---- turns -----------------------------------------------------------------------------------------


_SAME: Final = ("index", "owner", "round", "first_seq", "num_items", "first_step", "first_batch")
"""Fields that a turn and its message have alike."""


def turn_to_proto(turn: Turn) -> control_pb2.TurnMessage:
    """Encode a turn, without its operation table, which ``GrantWriter`` names."""
    return control_pb2.TurnMessage(
        **{name: getattr(turn, name) for name in _SAME},
        kind=turn.kind.value,
        unfreeze_at=turn.unfreeze_at,
        enters=[passage.enters for passage in turn.passages],
        keeps=[passage.keeps for passage in turn.passages],
    )


def turn_from_proto(message: control_pb2.TurnMessage, tables: Mapping[str, Operations] = _NO_TABLES) -> Turn:
    """Decode a turn; ``tables`` are by digest; raises ``IntegrityError``."""
    counts = (message.index, message.round, message.first_seq, message.first_step, message.first_batch)
    steps = tuple(message.unfreeze_at)
    if any(later <= earlier for earlier, later in itertools.pairwise((0, *steps))):
        raise IntegrityError(
            f"turn {message.index} of the grant unfreezes at {list(steps)}; use one version on all machines"
        )
    if not message.owner or message.num_items < 1 or min(counts) < 0:
        raise IntegrityError(f"turn {message.index} of the grant is not readable; use one version on all machines")
    if message.operations and message.operations not in tables:
        raise IntegrityError(
            f"turn {message.index} of the grant has the operation table {message.operations[:12]!r}, which did not "
            "come; use one version on all machines"
        )
    if not len(message.enters) == len(message.keeps) in (0, message.num_items):
        raise IntegrityError(
            f"turn {message.index} of the grant says of {len(message.enters)} items where they enter, and of "
            f"{len(message.keeps)} where they are kept, but has {message.num_items}; use one version on all machines"
        )
    return Turn(
        **{name: getattr(message, name) for name in _SAME},
        kind=step_kind(message.kind),
        unfreeze_at=steps,
        operations=tables[message.operations] if message.operations else None,
        passages=tuple(map(Passage, message.enters, message.keeps)),
    )


def step_kind(text: str) -> StepKind:
    """Parse the kind of a turn; raises ``IntegrityError`` for an unknown one."""
    try:
        return StepKind(text)
    except ValueError as error:
        known = ", ".join(StepKind)
        raise IntegrityError(f"step kind {text!r} is not one of {known}; use one version on all machines") from error


# ---- numbers ---------------------------------------------------------------------------------------


def removal_to_proto(removal: Removal) -> control_pb2.RemovedCertificate:
    """Encode a removal."""
    party = removal.party
    return control_pb2.RemovedCertificate(
        reason=removal.reason, role=party.role, name=party.name, generation=removal.generation
    )


def removals_from_proto(messages: Iterable[control_pb2.RemovedCertificate]) -> Removals:
    """Decode removals."""
    return Removals(
        Removal(each.reason, party_of([f"{each.name}.{each.role}.ringtune"]), each.generation) for each in messages
    )


def numbers_to_proto(values: Iterable[tuple[str, float]]) -> list[control_pb2.Number]:
    """Encode named figures, in the given order."""
    return [control_pb2.Number(name=name, value=value) for name, value in values]


def numbers_from_proto(messages: Iterable[control_pb2.Number]) -> tuple[tuple[str, float], ...]:
    """Decode named figures in the given order; raises ``IntegrityError`` for a missing or duplicate name."""
    values = tuple((message.name, message.value) for message in messages)
    names = [name for name, _ in values]
    if "" in names or len(set(names)) != len(names):
        raise IntegrityError(f"figures {names} have no distinct names; use one version on all machines")
    return values


KEPT_TABLES: Final = TABLES_AT_ONCE


class GrantWriter:
    """Encodes the grants for one node, of one run and placement."""

    def __init__(self, run_id: str, placement_number: int = 0) -> None:
        self._run_id, self._placement_number = run_id, placement_number
        self._sent: Operations | None = None

    def request(
        self, turns: Sequence[Turn], *, keep_from_step: int = 0, keep: Mapping[TensorKey, str] | None = None
    ) -> control_pb2.GrantRequest:
        """Encode a grant, with the tables that the node does not have from the last grant."""
        request = control_pb2.GrantRequest(
            run_id=self._run_id,
            placement_number=self._placement_number,
            turns=[turn_to_proto(turn) for turn in turns],
            keep_from_step=keep_from_step,
            keep=[control_pb2.AuditedTensor(**key._asdict(), ticket=ticket) for key, ticket in (keep or {}).items()],
        )
        for turn, message in zip(turns, request.turns, strict=True):
            if turn.operations is None:
                continue
            table = table_to_proto(turn.operations)
            message.operations = table.digest
            if turn.operations != self._sent:
                request.tables.append(table)
                self._sent = turn.operations
        return request


class GrantReader:
    """Decodes the grants of one run; safe for threads."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self._tables: dict[str, Operations] = {}
        self._lock = threading.Lock()

    def turns(self, request: control_pb2.GrantRequest) -> tuple[Turn, ...]:
        """Decode the turns of a grant; raises ``IntegrityError``."""
        with self._lock:
            for message in request.tables:
                self._tables.pop(message.digest, None)
                self._tables[message.digest] = table_from_proto(message, self._course)
            turns = tuple(self._turn(message) for message in request.turns)
            for digest in list(self._tables)[:-KEPT_TABLES]:
                del self._tables[digest]
        return turns

    def _turn(self, message: control_pb2.TurnMessage) -> Turn:
        turn = turn_from_proto(message, self._tables)
        if turn.kind is StepKind.TRAIN and self._course.choice is not None and turn.operations is None:
            raise IntegrityError(
                f"turn {turn.index} of the grant trains without a table of operations; use one version on all machines"
            )
        return turn


@functools.lru_cache(maxsize=KEPT_TABLES)
def table_to_proto(operations: Operations) -> control_pb2.TableMessage:
    """Encode a table; the message is cached and must not be changed."""
    text = json.dumps(operations.to_json(), separators=(",", ":"))
    return control_pb2.TableMessage(digest=operations.digest, table_json=text.encode())


def table_from_proto(message: control_pb2.TableMessage, course: Course) -> Operations:
    """Decode a table; raises ``IntegrityError``."""
    name = f"the table {message.digest[:12]!r} of the grant"
    try:
        operations = Operations.from_json(parse_json(message.table_json), where="table")
        course.decided((), operations)
    except (PlanError, ValueError) as error:
        raise IntegrityError(f"{name} can't be used: {error}; use one version on all machines") from error
    if operations.digest != message.digest:
        raise IntegrityError(f"{name} has the digest {operations.digest[:12]}; use one version on all machines")
    return operations


_BYTES: Final = 8
_MAX_VALUES: Final = 1 << 20  # of one message, below the limit of a channel


def scores_to_proto(turn: int, scores: Iterable[BlockScores]) -> Iterator[control_pb2.SubnetScores]:
    """Encode the scores of a turn, one message for each batch and block; raises ``PlanError``."""
    ordered = sorted(scores, key=lambda entry: (entry.owner, entry.batch_id, entry.block, entry.micro))
    for (owner, batch_id, block), group in itertools.groupby(
        ordered, key=lambda entry: (entry.owner, entry.batch_id, entry.block)
    ):
        entries = list(group)
        shapes = {tuple(len(values) for values in entry.values) for entry in entries}
        sizes = set(next(iter(shapes)))
        if [entry.micro for entry in entries] != list(range(len(entries))) or len(shapes) != 1 or len(sizes) != 1:
            raise PlanError(
                f"the scores of turn {turn} are not complete for batch {batch_id}, block {block}; please report it"
            )
        numbers = [number for entry in entries for values in entry.values for number in values]
        yield control_pb2.SubnetScores(
            turn=turn,
            owner=owner,
            batch_id=batch_id,
            block=block,
            scores=len(entries[0].values),
            subnets=sizes.pop(),
            values=struct.pack(f"<{len(numbers)}d", *numbers),
        )


def scores_from_proto(message: control_pb2.SubnetScores) -> tuple[BlockScores, ...]:
    """Decode scores, one entry for each micro-batch; numbers are not checked, and may be NaN."""
    each, size = message.scores * message.subnets, len(message.values)
    if not each or not size or size % (_BYTES * each) or size > _BYTES * _MAX_VALUES:
        raise IntegrityError(
            f"scores of batch {message.batch_id}, block {message.block} are {size} bytes, which are not "
            f"{message.scores} scores of {message.subnets} subnets; use one version on all machines"
        )
    numbers = struct.unpack(f"<{size // _BYTES}d", message.values)
    return tuple(
        BlockScores(
            owner=message.owner,
            batch_id=message.batch_id,
            micro=micro,
            block=message.block,
            values=tuple(
                numbers[at : at + message.subnets] for at in range(micro * each, (micro + 1) * each, message.subnets)
            ),
        )
        for micro in range(len(numbers) // each)
    )


MAX_SKIPPED: Final = 1000
"""Most missing reports before one, as a run may end or move while a node is sending."""
MAX_COUNT: Final = float(1 << 53)
MAX_BYTES: Final = 1 << 50
MAX_S: Final = 1e11
"""Seconds from 1970 to the year 5138; a clock that is wrong by decades is accepted."""
_MAX_SUM: Final = 1e300
_MAX_NAMES: Final = 64
_MAX_NOTES: Final = 1000  # of one report; each is a line at the user
_MAX_ENDS: Final = 1000  # of turns in one report: a node is granted a few ahead
_MAX_COUNTS: Final = MAX_CLASSES**2 + MAX_CLASSES * len(KINDS)
_KINDS: Final = frozenset(StepKind)
_SHA256: Final = re.compile("[0-9a-f]{64}")
_DIGITS: Final = 64
_SUMS: Final = frozenset({"loss_sum", "absolute_sum", *SIGNED})
"""Figures that are sums of real numbers, not counts."""


def check_report(request: control_pb2.ReportRequest, *, last: int, nodes: Collection[str], end_seq: int) -> None:
    """Check the figures of a report; raises ``IntegrityError`` with the node and the figure.

    ``last`` is the number of the node's last report (0 = none), ``end_seq`` one past the last granted item.
    """
    problem = next(_problems(request, last, nodes, end_seq), "")
    if problem:
        raise IntegrityError(f"node {request.node} reports {problem}; use one version on all machines")


def _problems(request: control_pb2.ReportRequest, last: int, nodes: Collection[str], end_seq: int) -> Iterator[str]:
    if request.number > last + MAX_SKIPPED:
        yield f"with number {request.number} after {last}"
    if len(request.notes) > _MAX_NOTES:
        yield f"{len(request.notes):,} sentences at once"
    if len(request.turns_done) > _MAX_ENDS:
        yield f"the end of {len(request.turns_done):,} turns at once"
    if len(request.steps) > 2 * end_seq:  # of each item one, and again where the run went back
        yield f"{len(request.steps):,} items at once, {end_seq:,} are granted"
    for step in request.steps:
        yield from _of_step(step, end_seq)
    for traffic in request.traffic:
        if not 0 <= traffic.seq <= end_seq:
            yield f"bytes of item {traffic.seq}, which nobody granted"
        if traffic.target not in nodes or traffic.payload not in frozenset(Payload):
            yield f"bytes of {shown(traffic.payload)} to {shown(traffic.target)}, which is none of the plan"
        if traffic.bytes > MAX_BYTES:
            yield f"{traffic.bytes} bytes for item {traffic.seq}"
    for transfer in request.transfers:
        if transfer.source not in nodes or transfer.bytes > MAX_BYTES:
            yield f"{transfer.bytes} bytes from {shown(transfer.source)}"
        if not (_is_time(transfer.at_unix_s) and _is_time(transfer.seconds)):
            yield f"a message after {transfer.seconds} s at {transfer.at_unix_s}"
    for span in request.spans:
        if not all(map(_is_time, (span.start_unix_s, span.end_unix_s, span.worked_s))):
            yield f"an action from {span.start_unix_s} to {span.end_unix_s}, of {span.worked_s} s"
    for saved in request.saved:
        if not _SHA256.fullmatch(saved.sha256) or saved.bytes > MAX_BYTES or saved.step < 0:
            yield f"a shard of step {saved.step} with {saved.bytes} bytes and digest {shown(saved.sha256)}"
    for digest in (*request.copies, *request.kept, *(each for saved in request.saved for each in saved.digests)):
        if len(digest.sha256) > _DIGITS:
            yield f"a digest of {len(digest.sha256):,} characters for unit {digest.unit}"
    if request.lost_peer and request.lost_peer not in nodes:
        yield f"that it lost {shown(request.lost_peer)}, which is none of the plan"


def _of_step(step: control_pb2.StepReport, end_seq: int) -> Iterator[str]:
    if not 0 <= step.seq < end_seq or step.step < 0:
        yield f"item {step.seq} of step {step.step}, which nobody granted"
    if step.kind not in _KINDS:
        yield f"an item of kind {shown(step.kind)}"
    counts = sum(1 for number in step.values if pair_of(number.name) or is_entity_count(number.name))
    names = len(step.values) - counts
    if counts and (step.kind != StepKind.EVALUATE or counts > _MAX_COUNTS):
        yield f"{counts} counts of classes for item {step.seq} of kind {shown(step.kind)}"
    if any(len(number.name) > MAX_NAME for number in step.values):
        yield f"a figure of item {step.seq} with a name of more than {MAX_NAME} characters"
    if names > _MAX_NAMES or not _is_time(step.at_unix_s):
        yield f"{len(step.values)} figures of item {step.seq} at {step.at_unix_s}"
    for number in step.values:
        if number.name not in _SUMS:
            is_good = 0 <= number.value <= MAX_COUNT
        else:  # for items that measure, any value is accepted
            is_good = abs(number.value) <= _MAX_SUM or step.kind == StepKind.SCORE
        if not is_good:
            yield f"{shown(number.name)} = {number.value} of item {step.seq}"


def total_of(totals: Mapping[str, Any], name: str) -> float:
    """Return a figure of a node's totals; raises ``ValueError`` unless it is from 0 to ``MAX_COUNT``."""
    value: object = totals[name]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= MAX_COUNT:
        raise ValueError(f"{name} is {describe_value(value)}")
    return value


def _is_time(seconds: float) -> bool:
    return math.isfinite(seconds) and abs(seconds) <= MAX_S
