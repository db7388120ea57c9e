"""Whether a frame is one that the plan foresees at this node, now.

The answer comes from the same lowering that the engine follows (:func:`ringtune.schedule.lowering.item_legs`), so
a frame is admitted only if the schedule has a receive for it: run, plan epoch, kind, source, item,
micro-batch, boundary, shape, element type and size all have to be what they must be. Because the sizes
follow from the plan, nothing is ever allocated on a stranger's word.
"""

from __future__ import annotations

import bisect
import dataclasses
import threading
from dataclasses import dataclass
from typing import Final

import torch

from edge.wire.frames import DTYPE_NAMES, NAMES, PROBE, describe
from edge.wire.tensors import wire_bytes
from ringtune.errors import FrameError
from ringtune.schedule.lowering import Op, Payload, item_legs, links, lowest_with_graph
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import ITEMS_AHEAD, Item, StartPoint, StepKind, Turn, items, turn_sequence
from ringtune.schedule.unfreezing import unfrozen_soonest
from ringtune.v1 import ring_pb2

MAX_BLOB_BYTES: Final = 1 << 30
"""Largest head with its moments, or probe."""

_ITEMS_AT_ONCE: Final = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class RunExpectation:
    """What a node expects on its links during a run.

    Attributes:
        run_id: the run.
        plan_epoch: counts the plans of the run.
        plan: the plan.
        digest: of the plan; a peer with another one is refused.
        node: the receiving node itself.
        compute_dtype: element type of the tensors handed to the sink.
        start: where the run goes on; None = its very beginning.
        max_blob_bytes: largest head that is taken.
    """

    run_id: str
    plan_epoch: int
    plan: Plan
    digest: str
    node: str
    compute_dtype: torch.dtype = torch.float32
    start: StartPoint | None = None
    max_blob_bytes: int = MAX_BLOB_BYTES


def check_hello(expectation: RunExpectation, header: ring_pb2.FrameHeader | None) -> str:
    """The source of a link that the plan names.

    Raises:
        FrameError: the first frame is no HELLO, or of another run, plan or node.
    """
    if header is None or header.kind != ring_pb2.FRAME_KIND_HELLO:
        raise FrameError("the first frame of a link is no HELLO; use one version on all machines")
    _check_run(expectation, header)
    if header.plan_digest != expectation.digest:
        raise FrameError(
            f"node {header.source} has plan {header.plan_digest[:12]}, node {expectation.node} has "
            f"{expectation.digest[:12]}; start the run again"
        )
    if (header.source, expectation.node) not in links(expectation.plan):
        raise FrameError(f"the plan has no link from node {header.source!r} to node {expectation.node}")
    return header.source


def _check_run(expectation: RunExpectation, header: ring_pb2.FrameHeader) -> None:
    if header.run_id != expectation.run_id:
        raise FrameError(
            f"a frame of run {header.run_id!r} came from node {header.source!r}, node {expectation.node} works on "
            f"run {expectation.run_id!r}; end the other run"
        )
    if header.plan_epoch != expectation.plan_epoch:
        raise FrameError(
            f"a frame of plan epoch {header.plan_epoch} came from node {header.source!r}, now is "
            f"{expectation.plan_epoch}; it is dropped"
        )


class Newest:
    """The newest turn that came on any link of a node: some sources send nothing but a head, and that seldom."""

    def __init__(self) -> None:
        self.turn = 0
        self._lock = threading.Lock()

    def note(self, turn: int) -> None:
        """Something of this turn came; from any thread."""
        with self._lock:
            self.turn = max(self.turn, turn)


class FrameCheck:
    """Admits the frames of one source during one run; remembers what it has admitted.

    Safe for threads: the link's reader admits, the compute thread returns credits.

    Args:
        expectation: of the run.
        source: whose frames.
        newest: shared by all links of the node.
    """

    def __init__(self, expectation: RunExpectation, source: str, newest: Newest | None = None) -> None:
        self._expectation = expectation
        # where the run decides what trains: every gradient that any decision can bring, and no other one
        self._plan = unfrozen_soonest(expectation.plan)
        self._source = source
        self._turns: list[Turn] = []  # those near the newest one; the first of them is number self._forgotten
        self._forgotten = 0
        self._start = expectation.start or StartPoint.of(self._plan)
        self._sequence = turn_sequence(self._plan, start=self._start)
        # a round has that many turns at most, and every owner gets something in each; turns are granted ahead
        self._window = (len(self._plan.owners) + 1) ** 2 + 1 + ITEMS_AHEAD
        self._newest = newest or Newest()
        self._part = (-1, -1)
        self._items: tuple[Item, ...] = ()
        self._routes: dict[tuple[str, StepKind, int], frozenset[tuple[int, str]]] = {}
        self._sizes: dict[int, tuple[int, ...]] = {}
        self._seen: dict[int, set[tuple[str, int, int, int]]] = {}
        self._outstanding: dict[int, int] = {}
        self._lock = threading.Lock()

    def admit(self, header: ring_pb2.FrameHeader) -> None:
        """Let a frame pass.

        Raises:
            FrameError: it is not one that the plan foresees now; names what was expected.
        """
        _check_run(self._expectation, header)
        if header.source != self._source:
            raise FrameError(f"a frame says it is from node {header.source!r}, the link is node {self._source}'s")
        kind = NAMES.get(header.kind)
        if kind is None:
            raise FrameError(f"a frame of kind {header.kind} came from node {self._source}; use one version everywhere")
        if kind in (Payload.HEAD, PROBE):
            self._admit_blob(header, kind)
        else:
            self._admit_tensor(header, kind)

    def revoke(self, header: ring_pb2.FrameHeader) -> None:
        """Forget an admitted frame whose payload was dropped; the same frame may come again."""
        kind = NAMES[header.kind]
        for seen in self._seen.values():
            seen.discard(_key(header, kind))
        if kind == Payload.HIDDEN:
            self.credit_returned(header.boundary, 1)

    def credit_returned(self, boundary: int, count: int) -> None:
        """The inbox has room again for so many hidden states at ``boundary``."""
        with self._lock:
            self._outstanding[boundary] = max(0, self._outstanding.get(boundary, 0) - count)

    def _take_credit(self, header: ring_pb2.FrameHeader) -> None:
        with self._lock:
            taken = self._outstanding.get(header.boundary, 0)
            if taken >= self._plan.credits:
                raise FrameError(f"{describe(header)} came without credit: {taken} of {self._plan.credits} are taken")
            self._outstanding[header.boundary] = taken + 1

    # ---- blobs --------------------------------------------------------------------------------------

    def _admit_blob(self, header: ring_pb2.FrameHeader, kind: str) -> None:
        limit = self._expectation.max_blob_bytes
        if header.payload_bytes > limit:
            raise FrameError(f"{describe(header)} has {header.payload_bytes} bytes, the limit is {limit}")
        if kind == PROBE:
            return
        turn = self._turn(header.seq, header)
        before = self._turns[turn.index - 1 - self._forgotten].owner if turn.index else self._start.holder
        if (before, turn.owner) != (self._source, self._expectation.node):
            raise FrameError(
                f"{describe(header)} came to node {self._expectation.node}, but that turn's head goes from node "
                f"{before or 'none'} to node {turn.owner}; it is dropped"
            )
        self._check_new(turn, header, kind)
        self._remember(turn, header, kind)

    # ---- tensors ------------------------------------------------------------------------------------

    def _admit_tensor(self, header: ring_pb2.FrameHeader, kind: str) -> None:
        turn, item = self._item(header)
        if (header.boundary, kind) not in self._foreseen(item):
            raise FrameError(
                f"{describe(header)} is not foreseen by the plan at node {self._expectation.node}; it is dropped"
            )
        self._check_shape(header, item, kind)
        self._check_new(turn, header, kind)
        if kind == Payload.HIDDEN:
            self._take_credit(header)
        self._remember(turn, header, kind)

    def _foreseen(self, item: Item) -> frozenset[tuple[int, str]]:
        """The (boundary, payload) that the source sends here for each micro-batch of this item."""
        lowest = lowest_with_graph(self._plan, item.kind, item.step)
        key = (item.owner, item.kind, lowest)
        if key not in self._routes:
            legs = item_legs(self._plan, item, self._expectation.node)
            receives = (leg for leg in legs if leg.op is Op.RECEIVE and leg.peer == self._source)
            self._routes[key] = frozenset((leg.start, leg.payload) for leg in receives)
        return self._routes[key]

    def _check_shape(self, header: ring_pb2.FrameHeader, item: Item, kind: str) -> None:
        plan = self._plan
        sizes = self._sizes.get(item.rows) or self._sizes.setdefault(item.rows, plan.microbatch_sizes(item.rows))
        if header.micro >= len(sizes):
            raise FrameError(f"{describe(header)} came, but the item has {len(sizes)} micro-batches; it is dropped")
        shape = tuple(header.shape)
        rows, width = sizes[header.micro], plan.hidden_size
        if len(shape) != 3 or shape[0] != rows or shape[2] != width or not 1 <= shape[1] <= plan.max_length:
            raise FrameError(
                f"{describe(header)} has shape {list(shape)}, expected [{rows}, 1..{plan.max_length}, {width}]"
            )
        dtype = DTYPE_NAMES.get(header.dtype)
        if dtype != plan.wire_dtype:
            raise FrameError(f"{describe(header)} is in {dtype or header.dtype}, the plan says {plan.wire_dtype}")
        has_mask = kind == Payload.HIDDEN and header.boundary < plan.num_blocks
        mask_bytes = rows * shape[1] if has_mask else 0
        if header.mask_bytes != mask_bytes:
            raise FrameError(f"{describe(header)} has {header.mask_bytes} bytes of mask, expected {mask_bytes}")
        expected = wire_bytes(shape, plan.wire_dtype, mask_bytes)
        if header.payload_bytes != expected:
            raise FrameError(f"{describe(header)} claims {header.payload_bytes} bytes, its shape has {expected}")

    # ---- when ---------------------------------------------------------------------------------------

    def _turn(self, index: int, header: ring_pb2.FrameHeader) -> Turn:
        """The turn of this index, if it is near what came last."""
        newest = self._newest.turn
        low, high = newest - self._window, newest + self._window
        self._keep_near(newest)
        if not max(0, low) <= index <= high or index >= self._forgotten + len(self._turns):
            raise FrameError(f"{describe(header)} is of turn {index}, far from turn {newest} that is on now")
        return self._turns[index - self._forgotten]

    def _item(self, header: ring_pb2.FrameHeader) -> tuple[Turn, Item]:
        turn = self._turn(self._position(header), header)
        offset = header.seq - turn.first_seq
        part = offset // _ITEMS_AT_ONCE
        if self._part != (turn.index, part):
            self._part, self._items = (turn.index, part), self._expand(turn, part * _ITEMS_AT_ONCE)
        return turn, self._items[offset % _ITEMS_AT_ONCE]

    def _position(self, header: ring_pb2.FrameHeader) -> int:
        """The index of the turn that the item belongs to."""
        self._keep_near(self._newest.turn)
        position = bisect.bisect_right(self._turns, header.seq, key=_first_seq) - 1
        if position < 0 or header.seq >= self._turns[position].end_seq:
            raise FrameError(f"{describe(header)} is of no turn near turn {self._newest.turn} that is on now")
        return self._forgotten + position

    def _expand(self, turn: Turn, start: int) -> tuple[Item, ...]:
        """Some items of a turn, from its ``start``-th on: a turn may be long."""
        part = dataclasses.replace(
            turn,
            first_seq=turn.first_seq + start,
            num_items=min(_ITEMS_AT_ONCE, turn.num_items - start),
            first_step=turn.first_step + (start if turn.kind.has_update else 0),
            first_batch=turn.first_batch + start,
        )
        return items(self._plan, part)

    def _keep_near(self, newest: int) -> None:
        """Have the turns around ``newest`` and one more before them, and forget the older ones now and then."""
        while self._forgotten + len(self._turns) <= newest + self._window:
            turn = next(self._sequence, None)
            if turn is None:
                break
            self._turns.append(turn)
        useless = newest - self._window - 1 - self._forgotten
        if useless > self._window:
            del self._turns[:useless]
            self._forgotten += useless

    def _check_new(self, turn: Turn, header: ring_pb2.FrameHeader, kind: str) -> None:
        if _key(header, kind) in self._seen.get(turn.index, ()):
            raise FrameError(f"{describe(header)} came twice; the second one is dropped")

    def _remember(self, turn: Turn, header: ring_pb2.FrameHeader, kind: str) -> None:
        self._seen.setdefault(turn.index, set()).add(_key(header, kind))
        self._newest.note(turn.index)
        oldest = self._newest.turn - self._window
        for index in [index for index in self._seen if index < oldest]:
            del self._seen[index]


def _key(header: ring_pb2.FrameHeader, kind: str) -> tuple[str, int, int, int]:
    return (kind, header.seq, header.micro, header.boundary)


def _first_seq(turn: Turn) -> int:
    return turn.first_seq
