"""The admission of frames at a node: a frame is accepted only if the plan has it in a turn that may be sent now.

Run, placement, kind, source, item, micro-batch, boundary, shape, element type and size must be those of a receive in
the schedule, by the lowering that the engine follows (:func:`ringtune.schedule.lowering.way`). Sizes follow from the
plan, so memory is never allocated by the claim of a header.

A grant reaches one node before another, so a frame may arrive for a turn that this node is not granted yet. Such turns
are derived from the course, but only a bounded number beyond the last grant.
"""

from __future__ import annotations

import bisect
import threading
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch

from edge.transport.access import RunAccess
from edge.transport.frames import DTYPE_NAMES, NAMES, as_text, key_of
from edge.transport.tensors import MAX_EXPONENT, MIN_EXPONENT, wire_bytes
from ringtune.costs.links import MAX_BLOB_BYTES
from ringtune.engine.failure_texts import diverged
from ringtune.errors import DivergedError, FrameError, RingTuneError
from ringtune.schedule.access import NOT_PLANNED, CopyBytes, NodeCall, RequestedCall, copy_limit
from ringtune.schedule.actions import Op, Payload, TensorKey
from ringtune.schedule.lowering import PARCELS, credit_boundary, max_waiting, parcels, possible_arrivals, way
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import max_turns_apart
from ringtune.schedule.turns import (
    ITEMS_AHEAD,
    Item,
    StartPoint,
    StepKind,
    Turn,
    evaluation_turns,
    follows_token,
    item_of,
    microbatch_rows,
    turn_sequence,
)
from ringtune.transport.parties import Party
from ringtune.v1 import ring_pb2


@dataclass(frozen=True, kw_only=True, slots=True)
class RunExpectation:
    """The run that a node receives frames of: what frames are checked against.

    Attributes:
        digest: of the plan; computed once, as every link that is opened is checked under the receiver's lock.
        start: item from which the run continues; None = from its first.
        access: who may open a link; None = the nodes that the plan lets send to this one.
        reopen_s: seconds for which a broken link may be opened again; 0 = it is lost at once.
        sizes: planned; no larger head, weights of a helper or gradients of a replica are received.
    """

    run_id: str
    placement_number: int
    plan: Plan
    digest: str = field(init=False)
    node: str
    compute_dtype: torch.dtype = torch.float32
    start: StartPoint | None = None
    access: RunAccess | None = None
    reopen_s: float = 0.0
    sizes: CopyBytes = NOT_PLANNED

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", self.plan.digest)

    def require_link(self, source: str, caller: Party | None) -> None:
        """Refuse a link of another node, or in another node's name, with ``TrustError``; see ``RunAccess.require``."""
        access = self.access
        if access is None:
            access = RunAccess(self.node)
            access.place(self.run_id, self.plan, self.start)
        access.require(RequestedCall(NodeCall.LINK, source, self.run_id), caller)

    def known_turns(self) -> KnownTurns:
        """Return the turns of the run; none is granted yet."""
        return KnownTurns(self.plan, self.start or StartPoint.of(self.plan.course))


def check_hello(expectation: RunExpectation, header: ring_pb2.FrameHeader) -> str:
    """Check the first frame of a link; return its source; raises ``FrameError``."""
    if header.kind != ring_pb2.FRAME_KIND_HELLO:
        raise FrameError("the first frame of a link is no HELLO; use one version on all machines")
    _check_run(expectation, header)
    if header.plan_digest != expectation.digest:
        raise FrameError(
            f"node {header.source} has plan {header.plan_digest[:12]}, node {expectation.node} has "
            f"{expectation.digest[:12]}; start the run again"
        )
    return header.source


def _check_run(expectation: RunExpectation, header: ring_pb2.FrameHeader) -> None:
    if header.run_id != expectation.run_id:
        raise FrameError(
            f"a frame of run {header.run_id!r} arrived from node {header.source!r}, node {expectation.node} works on "
            f"run {expectation.run_id!r}; end the other run"
        )
    if header.placement_number != expectation.placement_number:
        raise FrameError(
            f"a frame of placement {header.placement_number} arrived from node {header.source!r}, the current one is "
            f"{expectation.placement_number}; it is dropped"
        )


class FrameCheck:
    """Admits the frames of one source during one run, each at most once.

    Safe for threads: the link's reader admits, the compute thread returns credits.
    """

    def __init__(self, expectation: RunExpectation, source: str, turns: KnownTurns | None = None) -> None:
        self._expectation = expectation
        self._course, self._credits = expectation.plan.course, expectation.plan.placement.credits
        self._source = source
        self._turns = turns or expectation.known_turns()
        self._seen: dict[int, set[TensorKey]] = {}
        self._outstanding: dict[int, int] = {}
        self._lock = threading.Lock()

    def admit(self, header: ring_pb2.FrameHeader) -> None:
        """Admit a frame, or refuse it; raises ``FrameError``."""
        _check_run(self._expectation, header)
        if header.source != self._source:
            raise FrameError(f"a frame has the source node {header.source!r}, the link is node {self._source}'s")
        kind = NAMES.get(header.kind)
        if kind is None:
            raise FrameError(
                f"a frame of kind {header.kind} arrived from node {self._source}; use one version everywhere"
            )
        if kind in PARCELS:
            self._admit_parcel(header, kind)
        elif kind == Payload.HEAD:
            self._admit_head(header)
        else:
            self._admit_tensor(header, kind)

    def revoke(self, header: ring_pb2.FrameHeader) -> None:
        """Undo the admission of a frame with a dropped payload; it may be sent again."""
        key = key_of(header)
        for seen in self._seen.values():
            seen.discard(key)
        if key.is_hidden:
            self.credit_returned(header.boundary, 1)
        elif key.payload in PARCELS:
            self.credit_returned(credit_boundary(self._course, key.payload), 1)

    def explained(self, header: ring_pb2.FrameHeader, error: RingTuneError) -> RingTuneError:
        """Return the error for an admitted frame's payload; for a value that is not finite it names step and rows."""
        known = self._turns.by_seq(header.seq)
        if not isinstance(error, DivergedError) or known is None:
            return error
        item = item_of(known.plan.course, known.turn, header.seq - known.turn.first_seq)
        key = key_of(header)
        what = f"{error}: {as_text(header)}"
        return diverged(item, what, course=self._course, micro=key.micro if key.payload not in PARCELS else None)

    def credit_returned(self, boundary: int, count: int) -> None:
        """Note that the inbox has room for ``count`` more hidden states at ``boundary``."""
        with self._lock:
            self._outstanding[boundary] = max(0, self._outstanding.get(boundary, 0) - count)

    def _take_credit(self, header: ring_pb2.FrameHeader, boundary: int, credits_: int) -> None:
        with self._lock:
            taken = self._outstanding.get(boundary, 0)
            if taken >= credits_:
                raise FrameError(f"{as_text(header)} arrived without credit: {taken} of {credits_} are taken")
            self._outstanding[boundary] = taken + 1

    # ---- parcels and heads --------------------------------------------------------------------------

    def _check_size(self, header: ring_pb2.FrameHeader, most_bytes: int = MAX_BLOB_BYTES) -> None:
        if header.payload_bytes > most_bytes:
            raise FrameError(f"{as_text(header)} has {header.payload_bytes} bytes, the limit is {most_bytes}")

    def _most_bytes(self, kind: str) -> int:
        """Return the most bytes of a parcel: weights and gradients are no larger than a copy of their blocks."""
        sizes, placement, node = self._expectation.sizes, self._expectation.plan.placement, self._expectation.node
        if kind == Payload.WEIGHTS:
            helpers = [helper for helper in placement.helpers_of(node) if helper.node == self._source]
            return copy_limit(sizes, sum(helper.stop - helper.start for helper in helpers))
        if kind == Payload.REPLICA_GRAD:
            return copy_limit(sizes, placement.slice_of(node).num_blocks)
        return MAX_BLOB_BYTES

    def _admit_parcel(self, header: ring_pb2.FrameHeader, kind: str) -> None:
        self._check_size(header, self._most_bytes(kind))
        known, item = self._item(header)
        if key_of(header) not in parcels(known.plan, item, self._source, self._expectation.node):
            raise FrameError(f"{as_text(header)} is not in the plan at node {self._expectation.node}; it is dropped")
        self._check_new(known.turn, header)  # a duplicate takes no credit
        most = max_waiting(known.plan, kind, self._source, self._expectation.node)
        self._take_credit(header, credit_boundary(self._course, kind), most)
        self._remember(known.turn, header)

    def _admit_head(self, header: ring_pb2.FrameHeader) -> None:
        self._check_size(header, copy_limit(self._expectation.sizes, 0, has_head=True))
        if self._course.method.full_parameters:
            raise FrameError(f"{as_text(header)} is not in the plan, where every owner has a copy; it is dropped")
        known = self._turns.by_index(header.seq)
        if known is None:
            raise self._far(header, f"turn {header.seq}")
        before = self._turns.holder_before(known.turn)
        if (before, known.turn.owner) != (self._source, self._expectation.node):
            raise FrameError(
                f"{as_text(header)} arrived at node {self._expectation.node}, but that turn's head goes from node "
                f"{before or 'none'} to node {known.turn.owner}; it is dropped"
            )
        self._remember(known.turn, header)

    # ---- tensors ------------------------------------------------------------------------------------

    def _admit_tensor(self, header: ring_pb2.FrameHeader, kind: str) -> None:
        known, item = self._item(header)
        sizes = microbatch_rows(self._course, item)
        if header.micro >= len(sizes):
            raise FrameError(f"{as_text(header)} arrived, but the item has {len(sizes)} micro-batches; it is dropped")
        if (header.boundary, kind) not in self._receives(known, item, header.micro):
            raise FrameError(f"{as_text(header)} is not in the plan at node {self._expectation.node}; it is dropped")
        tokens = 1 if follows_token(self._course, item) else self._course.max_length
        self._check_shape(header, sizes[header.micro], tokens, kind)
        self._check_new(known.turn, header)  # a duplicate takes no credit
        if kind == Payload.HIDDEN:
            self._take_credit(header, header.boundary, self._credits)
        self._remember(known.turn, header)

    def _receives(self, known: KnownTurn, item: Item, micro: int) -> frozenset[tuple[int, str]]:
        """Return each (boundary, payload) that the source sends, or may send, to this node for a micro-batch."""
        if known.is_open:
            arrivals = possible_arrivals(known.plan, item.owner, self._expectation.node)
            return frozenset((each.boundary, each.payload) for each in arrivals if each.source == self._source)
        legs = way(known.plan, item, micro).get(self._expectation.node, ())
        receives = (leg for leg in legs if leg.op is Op.RECEIVE and leg.peer == self._source)
        return frozenset((leg.start, leg.payload) for leg in receives)

    def _check_shape(self, header: ring_pb2.FrameHeader, rows: int, tokens: int, kind: str) -> None:
        course, shape = self._course, tuple(header.shape)
        width = course.width(header.boundary, is_gradient=kind != Payload.HIDDEN)
        most = course.sent_tokens(header.boundary, tokens)
        if len(shape) != 3 or shape[0] != rows or shape[2] != width or not 1 <= shape[1] <= most:
            raise FrameError(f"{as_text(header)} has shape {list(shape)}, expected [{rows}, 1..{most}, {width}]")
        dtype = DTYPE_NAMES.get(header.dtype)
        if dtype != course.wire_dtype:
            raise FrameError(f"{as_text(header)} is in {dtype or header.dtype}, the plan says {course.wire_dtype}")
        if header.exponent and (dtype != "float16" or not MIN_EXPONENT <= header.exponent <= MAX_EXPONENT):
            raise FrameError(f"{as_text(header)} is in {dtype} with exponent {header.exponent}; it is dropped")
        has_mask = kind == Payload.HIDDEN and header.boundary < course.head
        mask_bytes = rows * shape[1] if has_mask else 0
        if header.mask_bytes != mask_bytes:
            raise FrameError(f"{as_text(header)} has {header.mask_bytes} bytes of mask, expected {mask_bytes}")
        expected = wire_bytes(shape, course.wire_dtype, mask_bytes)
        if header.payload_bytes != expected:
            raise FrameError(f"{as_text(header)} claims {header.payload_bytes} bytes, its shape has {expected}")

    # ---- when ---------------------------------------------------------------------------------------

    def _item(self, header: ring_pb2.FrameHeader) -> tuple[KnownTurn, Item]:
        known = self._turns.by_seq(header.seq)
        if known is None:
            raise self._far(header, "a turn")
        return known, item_of(known.plan.course, known.turn, header.seq - known.turn.first_seq)

    def _far(self, header: ring_pb2.FrameHeader, what: str) -> FrameError:
        first, last = self._turns.span()
        return FrameError(
            f"{as_text(header)} is of {what} that is none of turns {first} to {last}, which are accepted now"
        )

    def _check_new(self, turn: Turn, header: ring_pb2.FrameHeader) -> None:
        if key_of(header) in self._seen.get(turn.index, ()):
            raise FrameError(f"{as_text(header)} arrived twice; the second one is dropped")

    def _remember(self, turn: Turn, header: ring_pb2.FrameHeader) -> None:
        self._check_new(turn, header)
        self._seen.setdefault(turn.index, set()).add(key_of(header))
        first, _ = self._turns.span()
        for index in [index for index in self._seen if index < first]:
            del self._seen[index]


class KnownTurn(NamedTuple):
    """A turn with its plan; ``is_open``: the operations of its items are not decided yet.

    Before the turn's grant it is a plan in which every unit trains that any decision could let train.
    """

    turn: Turn
    plan: Plan
    is_open: bool = False


MAX_TURNS_AHEAD: Final = 1 << 16
"""Most turns that a node derives beyond its last granted one: 20 MiB, of a million texts it would be 300."""


class KnownTurns:
    """The turns of one run of which this node may receive frames now; safe for threads.

    ``start`` is the item from which the run continues.
    """

    def __init__(self, plan: Plan, start: StartPoint) -> None:
        self._plan, self._soonest = plan, plan.soonest()
        self._holder = start.holder
        self._sequence = turn_sequence(plan.course, start=start)
        self._known: list[KnownTurn] = []  # consecutive; the first one has index self._forgotten
        self._forgotten = self._first = start.first_turn
        self._granted = start.first_turn - 1
        # a slow node waits for its own turn at the latest; a checkpoint, evaluations and scores may follow each turn
        owners = plan.course.owners
        between = len(owners) * (2 if plan.course.choice else 1) + 2
        between += evaluation_turns(plan.course) if plan.course.generation else 0
        self._ahead = min(max_turns_apart(owners, plan.course.turns) * between + 2 + ITEMS_AHEAD, MAX_TURNS_AHEAD)
        self._lock = threading.Lock()

    def granted(self, turn: Turn) -> None:
        """Add a granted turn; turns are granted in order."""
        known = KnownTurn(turn, turn.settled(self._plan))
        with self._lock:
            self._derive(turn.index)
            at = turn.index - self._forgotten
            if 0 <= at < len(self._known):
                self._known[at] = known
            elif at == len(self._known):  # a turn that is not in the course: a checkpoint because the user stops
                self._known.append(known)
            self._granted = max(self._granted, turn.index)

    def done_before(self, index: int) -> None:
        """Forget the turns before ``index``, which this node has done, but the last one: it names the head's holder."""
        with self._lock:
            useless = index - 1 - self._forgotten  # the last one names the head's holder
            if useless > 0:
                del self._known[:useless]
                self._forgotten += useless

    def by_index(self, index: int) -> KnownTurn | None:
        """Return a turn by its index; None if it is not known now."""
        with self._lock:
            self._derive(self._granted + self._ahead)
            at = index - self._forgotten
            return self._known[at] if 0 <= at < len(self._known) else None

    def by_seq(self, seq: int) -> KnownTurn | None:
        """Return the turn of an item; None if it is not known now."""
        with self._lock:
            self._derive(self._granted + self._ahead)
            at = bisect.bisect_right(self._known, seq, key=lambda known: known.turn.first_seq) - 1
            return self._known[at] if at >= 0 and seq < self._known[at].turn.end_seq else None

    def holder_before(self, turn: Turn) -> str:
        """Return the node that has the head before a turn; empty if the turn before is forgotten."""
        if turn.index == self._first:
            return self._holder
        before = self.by_index(turn.index - 1)
        return before.turn.owner if before else ""

    def span(self) -> tuple[int, int]:
        """Return the indices of the first and the last known turn."""
        with self._lock:
            return self._forgotten, self._forgotten + len(self._known) - 1

    def _derive(self, last: int) -> None:
        """Derive the turns up to index ``last`` from the course, as far as it goes."""
        while self._forgotten + len(self._known) <= last:
            turn = next(self._sequence, None)
            if turn is None:
                break
            is_open = self._plan.course.choice is not None and turn.kind is StepKind.TRAIN
            self._known.append(KnownTurn(turn, self._soonest, is_open))
