"""The audit at a node: the trail of what it does, what it keeps until a turn is checked, and repeated work of a host.

The rule is in ``ringtune.techniques.audit``. At most two turns are open, and a turn is closed once it is checked, so
what a turn needs is dropped when the second turn after it is granted. Of tensors between nodes only those are kept
that the coordinator names, as another node's cell was drawn; of its own work a node keeps what it can't know to be
drawn: the sum of gradients after each micro-batch, and the trained state after each item.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from edge.checkpoint.snapshots import block_digests, block_of
from edge.model.tensor_files import fill, pieces_of, torch_dtype
from edge.runtime.executor import NodeExecutor
from edge.transport.tensors import WIRE_TYPES, bytes_of
from ringtune.errors import FrameError, IntegrityError
from ringtune.schedule.actions import Action, Op, TensorKey
from ringtune.schedule.lowering import item_updates, legs
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Item, StepKind, Turn, items
from ringtune.storage.pieces import Pieces
from ringtune.storage.tensor_files import TensorFile, TensorPieces, write_tensors
from ringtune.techniques.audit import (
    Cell,
    CellPlace,
    Compared,
    begin_name,
    exchanges,
    item_of,
    state_name,
    sum_name,
    tensor_name,
    way_of,
)

Exchanged = tuple[torch.Tensor, torch.Tensor | None]
_WHERE: Final = "what a node hands in for the audit"
_KEPT: Final = 2
"""Turns that are kept: one that may be checked, and the one after it."""


class State(NamedTuple):
    """Trained tensors with optimizer state of a node's slice as a file, and the digest of each block."""

    content: bytes
    digests: Mapping[int, str]


@dataclass(slots=True)
class _Kept:
    """What is kept of a turn: ``begin`` is the state before its first update, ``after`` those after items."""

    turn: Turn
    trail: dict[str, str] = field(default_factory=dict)
    last_updates: dict[int, Action] = field(default_factory=dict)
    sums: dict[tuple[int, int], bytes] = field(default_factory=dict)
    begin: State | None = None
    after: dict[int, State] = field(default_factory=dict)


class AuditRecorder:
    """Makes the trail of a node in one placement, and keeps what others need to repeat its work.

    ``grant``, ``exchanged``, ``after`` and ``take`` are called on the compute thread, all else on any.
    """

    def __init__(self, plan: Plan, node: str, executor: NodeExecutor) -> None:
        self._plan, self._node, self._executor = plan, node, executor
        self._piece, self._wire = plan.slice_of(node), WIRE_TYPES[plan.course.wire_dtype]
        self._lock = threading.Lock()
        self._turns: dict[int, _Kept] = {}
        self._wanted: set[TensorKey] = set()
        self._tensors: dict[TensorKey, Exchanged] = {}
        self._state: State | None = None

    # ---- on the compute thread --------------------------------------------------------------------

    def grant(self, turn: Turn) -> None:
        """Begin a turn, and drop those that are closed."""
        with self._lock:
            self._turns = {index: kept for index, kept in self._turns.items() if index > turn.index - _KEPT}
            first = min((kept.turn.first_seq for kept in self._turns.values()), default=turn.first_seq)
            self._tensors = {key: value for key, value in self._tensors.items() if key.seq >= first}
            self._wanted = {key for key in self._wanted if key.seq >= first}
        if turn.kind is not StepKind.TRAIN:
            return
        if self._state is None and self._piece.num_blocks:
            self._state = self._state_now()
        kept, now = _Kept(turn), turn.settled(self._plan)
        for item in items(now.course, turn):
            if own := _own_updates(now, item, self._node):
                kept.last_updates[item.seq] = own[-1]
        with self._lock:
            self._turns[turn.index] = kept

    def exchanged(self, key: TensorKey, tensor: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Note a tensor that this node sends or has received; its values must not change."""
        kept = self._of(key.seq)
        if kept is None:
            return
        kept.trail[tensor_name(key)] = tensor_digest(tensor, mask, self._wire)
        with self._lock:
            if key in self._wanted:
                self._tensors[key] = (tensor.detach().to(self._wire), mask)

    def after(self, action: Action) -> None:
        """Note what an action has changed: the sum of gradients, or the state."""
        kept = self._of(action.seq) if action.op in (Op.BACKWARD, Op.UPDATE) else None
        if kept is None or not self._piece.start <= action.start < self._piece.stop:
            return
        if action.op is Op.BACKWARD:
            content = gradients(self._executor)
            kept.sums[action.seq, action.micro] = content
            kept.trail[sum_name(action.seq, action.micro)] = hashlib.sha256(content).hexdigest()
        elif action == kept.last_updates.get(action.seq) and self._state is not None:
            self._begin(kept.turn.index)
            self._state = kept.after[action.seq] = self._state_now()
            kept.trail |= {state_name(action.seq, block): digest for block, digest in self._state.digests.items()}

    def take(self, turn: int) -> str:
        """Return the trail of a finished train turn as JSON; empty for other turns."""
        kept = self._turns.get(turn)
        if kept is None:
            return ""
        self._begin(turn)
        return json.dumps(kept.trail, separators=(",", ":"))

    def _begin(self, index: int) -> None:
        """Note the state before the first update of a turn and of those before it, which may have none here."""
        for kept in self._turns.values():
            if kept.begin is None and kept.turn.index <= index and self._state is not None:
                kept.begin = self._state
                kept.trail |= {begin_name(block): digest for block, digest in self._state.digests.items()}

    def _of(self, seq: int) -> _Kept | None:
        return next((kept for kept in self._turns.values() if kept.turn.first_seq <= seq < kept.turn.end_seq), None)

    def _state_now(self) -> State:
        content = bytes(write_tensors(self._executor.part.tensors()))
        return State(content, block_digests(Pieces.of(content)))

    # ---- on any thread ----------------------------------------------------------------------------

    def keep(self, keys: Iterable[TensorKey]) -> None:
        """Keep these tensors of turns that are about to be granted."""
        with self._lock:
            self._wanted |= {*keys}

    def turn(self, index: int) -> Turn:
        """Return a turn that is kept.

        Raises:
            FrameError: it is not.
        """
        return self._kept(index).turn

    def tensor(self, key: TensorKey) -> Exchanged:
        """Return a kept tensor in the type of the wire, and its mask.

        Raises:
            FrameError: it is not kept.
        """
        with self._lock:
            found = self._tensors.get(key)
        if found is None:
            raise FrameError(f"node {self._node} keeps no {key} for the audit")
        return found

    def work(self, place: CellPlace) -> dict[str, bytes]:
        """Return the files that go into a cell of this node, and those that came out of it.

        Raises:
            FrameError: they are not kept.
        """
        kept, seq = self._kept(place.turn), place.seq
        before = next((kept.after[one] for one in sorted(kept.after, reverse=True) if one < seq), kept.begin)
        if before is None:
            raise FrameError(f"node {self._node} hosts nothing, so it has nothing to be repeated")
        found = {"before": before.content}
        for name, micro in (("added", place.before), ("total", place.last)):
            if micro >= 0:
                found[name] = self._sum(kept, seq, micro)
        if place.last >= 0:
            found |= {"sum": self._sum(kept, seq, place.micro)}
        if seq in kept.after:
            found["after"] = kept.after[seq].content
        return found

    def _sum(self, kept: _Kept, seq: int, micro: int) -> bytes:
        if (seq, micro) not in kept.sums:
            raise FrameError(f"node {self._node} has no gradient of micro-batch {seq}.{micro}")
        return kept.sums[seq, micro]

    def _kept(self, index: int) -> _Kept:
        with self._lock:
            found = self._turns.get(index)
        if found is None:
            raise FrameError(f"node {self._node} keeps nothing of turn {index} for the audit")
        return found


class WorkRepeater:
    """Repeats cells of another host of a placement, on blocks of its own; call it on the compute thread.

    Args:
        plan: the part of the placement.
        node: the host whose cells are repeated.
        make: builds an executor of a node of a plan.
    """

    def __init__(self, plan: Plan, node: str, make: Callable[[Plan, str], NodeExecutor]) -> None:
        self.node, self._alias = node, f"{node}.again"
        slices = tuple(
            replace(piece, node=self._alias) if piece.node == node else piece for piece in plan.placement.slices
        )
        self._plan = Plan(plan.course, (replace(plan.placement, slices=slices),))  # of a host that owns no rows
        self._executor = make(self._plan, self._alias)
        self._wire, self._dtype = WIRE_TYPES[plan.course.wire_dtype], self._executor.dtype

    def sources(self, turn: Turn, place: CellPlace) -> dict[TensorKey, str]:
        """Return the tensors of a cell, each with the neighbour that exchanged it."""
        cell = Cell(self._alias, place.seq, place.micro)
        return {one.key: one.peer for one in exchanges(way_of(self._plan, turn, cell), cell)}

    def repeat(
        self, turn: Turn, place: CellPlace, tensors: Mapping[TensorKey, Exchanged], files: Mapping[str, bytes]
    ) -> dict[str, Compared]:
        """Repeat a cell and the update of its item; return what was given and found, by name in the trail.

        ``tensors`` are those that the host exchanged, from its neighbours; ``files`` are of ``AuditRecorder.work``.

        Raises:
            IntegrityError: a file is missing or does not fit the slice.
        """
        executor, seq, micro = self._executor, place.seq, place.micro
        now, item = item_of(self._plan, turn, seq)
        way = legs(now, item, self._alias)[micro]
        results: dict[str, Compared] = {}
        executor.grant(turn)
        try:
            before = _load_state(executor, _file(files, "before"))
            name = self._name_before(now, turn, seq)
            results |= {name(block): Compared(digest) for block, digest in before.items()}
            set_gradients(executor, b"")
            for leg in way:
                action = leg.bind(seq, micro)
                if leg.op is Op.RECEIVE:
                    tensor, mask = tensors[action.key]
                    results[tensor_name(action.key)] = Compared(tensor_digest(tensor, mask, self._wire))
                    executor.put_tensor(action.key, tensor.to(self._dtype), mask)
                elif leg.op is Op.SEND:
                    results[tensor_name(action.key)] = self._sent(executor, action.key, tensors[action.key])
                else:
                    if leg.op is Op.BACKWARD and place.before >= 0:
                        set_gradients(executor, added := _file(files, "added"))
                        results[sum_name(seq, place.before)] = Compared(hashlib.sha256(added).hexdigest())
                    executor.run(action)
            if any(leg.op is Op.BACKWARD for leg in way):
                results |= self._updated(now, item, place, files)
        finally:
            set_gradients(executor, b"")
            executor.forget_turn(turn.index)
        return results

    def _sent(self, executor: NodeExecutor, key: TensorKey, given: Exchanged) -> Compared:
        tensor, mask = executor.take_tensor(key)
        far = distance({"it": tensor.to(self._wire)}, {"it": given[0]})
        return Compared(tensor_digest(*given, self._wire), tensor_digest(tensor, mask, self._wire), far)

    def _updated(self, now: Plan, item: Item, place: CellPlace, files: Mapping[str, bytes]) -> dict[str, Compared]:
        """Compare the sum of gradients, then update with that of the last micro-batch and compare the state."""
        executor, seq = self._executor, place.seq
        found = {sum_name(seq, place.micro): _compared(gradients(executor), _file(files, "sum"))}
        if place.last != place.micro:
            found[sum_name(seq, place.last)] = Compared(hashlib.sha256(_file(files, "total")).hexdigest())
        set_gradients(executor, _file(files, "total"))
        for action in _own_updates(now, item, self._alias):
            executor.run(action)
        given, own = _file(files, "after"), bytes(write_tensors(executor.part.tensors()))
        theirs, ours = block_digests(Pieces.of(given)), block_digests(Pieces.of(own))
        far = distance(_tensors(own), _tensors(given)) if theirs != ours else 0.0
        return found | {
            state_name(seq, block): Compared(theirs.get(block, ""), digest, far) for block, digest in ours.items()
        }

    def _name_before(self, now: Plan, turn: Turn, seq: int) -> Callable[[int], str]:
        """Return what names the state before an item: that of the last update before it in the turn."""
        earlier = [one.seq for one in items(now.course, turn) if one.seq < seq and _own_updates(now, one, self._alias)]
        return (lambda block: state_name(earlier[-1], block)) if earlier else begin_name


class NodeAudit(NamedTuple):
    """The audit at a node: its own trail, and the repeated work of another host, if it has a slice of one."""

    recorder: AuditRecorder
    repeater: WorkRepeater | None

    def sources(self, place: CellPlace) -> dict[TensorKey, str]:
        """Return the tensors of a cell of the other host, each with the node that keeps it.

        Raises:
            FrameError: this node has no slice of another host, or not the turn.
        """
        return self._slice.sources(self.recorder.turn(place.turn), place)

    def tensor_file(self, key: TensorKey) -> Pieces:
        """Return a file of a kept tensor and its mask; raises ``FrameError`` if it is not kept."""
        tensor, mask = self.recorder.tensor(key)
        return _written({"tensor": tensor, "mask": None if mask is None else mask.to(torch.uint8)})

    def work_file(self, place: CellPlace) -> Pieces:
        """Return ``AuditRecorder.work`` as one file."""
        return _written(self.recorder.work(place))

    def repeat(self, place: CellPlace, tensors: Mapping[TensorKey, Pieces], work: Pieces) -> dict[str, Compared]:
        """Repeat a cell of the other host, from what others have handed in; see ``WorkRepeater.repeat``."""
        exchanged, found = {key: _read_tensor(file) for key, file in tensors.items()}, TensorFile(work, where=_WHERE)
        files = {name: bytes(found.tensor(name).data) for name in found.infos}
        return self._slice.repeat(self.recorder.turn(place.turn), place, exchanged, files)

    @property
    def _slice(self) -> WorkRepeater:
        if self.repeater is None:
            raise FrameError("this node repeats no work of another host; use one version on all machines")
        return self.repeater


def tensor_digest(tensor: torch.Tensor, mask: torch.Tensor | None, wire: torch.dtype) -> str:
    """Return the SHA-256, hex, of a tensor as both ends of its link have it: rounded to the type of the wire."""
    digest = hashlib.sha256(bytes_of(tensor.detach().to(device="cpu", dtype=wire).contiguous()))
    if mask is not None:
        digest.update(bytes_of(mask.detach().to(device="cpu", dtype=torch.uint8).contiguous()))
    return digest.hexdigest()


def gradients(executor: NodeExecutor) -> bytes:
    """Return the gradients of a node's slice as a file."""
    found = {name: value.grad for name, value in executor.part.trained.items() if value.grad is not None}
    return bytes(write_tensors({name: pieces_of(grad) for name, grad in found.items()}))


def set_gradients(executor: NodeExecutor, content: bytes) -> None:
    """Set the gradients of a node's slice to those of a file; without content it has none.

    Raises:
        IntegrityError: the file is not of this slice.
    """
    trained = executor.part.trained
    given = _pieces(content) if content else {}
    if not given.keys() <= trained.keys():
        raise IntegrityError(f"{_WHERE} has gradients of other blocks; use one version on all machines")
    for name, parameter in trained.items():
        parameter.grad = _filled(given[name], parameter) if name in given else None


def _filled(source: TensorPieces, parameter: nn.Parameter) -> torch.Tensor:
    if tuple(source.shape) != tuple(parameter.shape) or torch_dtype(source.dtype) is not parameter.dtype:
        raise IntegrityError(f"{_WHERE} has a gradient of another shape; use one version on all machines")
    target = torch.empty_like(parameter, requires_grad=False)
    fill(target, source)
    return target


def distance(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float:
    """Return the largest relative distance of two sets of tensors, at most 1; 1 for other names or shapes."""
    if ours.keys() != theirs.keys() or any(ours[name].shape != theirs[name].shape for name in ours):
        return 1.0
    far = 0.0
    for name, own in ours.items():
        left, right = own.double(), theirs[name].double()
        norm, apart = float(right.norm()), float((left - right).norm())
        far = max(far, 0.0 if apart == 0.0 else apart / norm if norm > apart else 1.0)
    return far


def _written(tensors: Mapping[str, torch.Tensor | bytes | None]) -> Pieces:
    """Write tensors, and files as rows of bytes, in one file."""
    return write_tensors(
        {
            name: TensorPieces("U8", (len(value),), Pieces.of(value)) if isinstance(value, bytes) else pieces_of(value)
            for name, value in tensors.items()
            if value is not None
        }
    )


def _read_tensor(file: Pieces) -> Exchanged:
    found = _tensors(bytes(file))
    if "tensor" not in found:
        raise IntegrityError(f"{_WHERE} has no tensor; use one version on all machines")
    return found["tensor"], found.get("mask")


def _compared(own: bytes, given: bytes) -> Compared:
    ours, theirs = (hashlib.sha256(content).hexdigest() for content in (own, given))
    return Compared(theirs, ours, 0.0 if ours == theirs else distance(_tensors(own), _tensors(given)))


def _file(files: Mapping[str, bytes], name: str) -> bytes:
    if name not in files:
        raise IntegrityError(f"{_WHERE} lacks {name!r}; use one version on all machines")
    return files[name]


def _pieces(content: bytes) -> dict[str, TensorPieces]:
    file = TensorFile(Pieces.of(content), where=_WHERE)
    return {name: file.tensor(name) for name in file.infos}


def _tensors(content: bytes) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, pieces in _pieces(content).items():
        found[name] = torch.empty(pieces.shape, dtype=torch_dtype(pieces.dtype))
        fill(found[name], pieces)
    return found


def _load_state(executor: NodeExecutor, content: bytes) -> Mapping[int, str]:
    """Load a state; return the digest of each block."""
    pieces = _pieces(content)
    executor.part.load_migrated(pieces, blocks={block_of(name) for name in pieces})
    return block_digests(Pieces.of(content))


def _own_updates(now: Plan, item: Item, node: str) -> list[Action]:
    piece: Any = now.slice_of(node)
    return [action for action in item_updates(now, item, node) if piece.start <= action.start < piece.stop]
