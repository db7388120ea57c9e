"""The audit at a node: the trail of what it does, what it keeps until a turn is checked, and repeated work of a host.

The rule is in ``ringtune.techniques.audit``. At most two turns are open, and a turn is closed once it is checked, so
what a turn needs is dropped when the second turn after it is granted. Of tensors between nodes only those are kept
that the coordinator names, as another node's cell was drawn; of its own work a node keeps what it can't know to be
drawn: the sum of gradients after each micro-batch, the trained state after each item, what it holds of its helpers, and
in its own turns the tensors between its slice and its embedding and head. A tensor is handed in to who has its ticket
only, which the coordinator gives to the checker after the turn: else a host could ask its neighbours what is drawn of
it, and a checker an owner for more than that.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from edge.checkpoint.shard_file import PREFIXES
from edge.checkpoint.snapshots import block_of
from edge.model.tensor_files import fill, pieces_of, read_tensor, torch_dtype
from edge.runtime.executor import NodeExecutor
from edge.transport.tensors import ROUNDS, WIRE_TYPES, as_received, bytes_of
from ringtune.errors import DivergedError, FrameError, IntegrityError, PlanError
from ringtune.schedule.access import HEADER_BYTES, MAX_COPY_BYTES, CopyBytes, copy_limit
from ringtune.schedule.actions import Action, Op, Payload, TensorKey
from ringtune.schedule.course import Course
from ringtune.schedule.lowering import item_updates, legs, weights_key
from ringtune.schedule.plan import Plan
from ringtune.schedule.saved_activations import VELORA
from ringtune.schedule.turns import Item, StepKind, Turn, items, microbatch_rows
from ringtune.storage.pieces import Pieces
from ringtune.storage.tensor_files import TensorFile, TensorInfo, TensorPieces, tensor_head, write_tensors
from ringtune.techniques.audit import (
    NOTHING,
    TAG_KEY,
    Cell,
    CellPlace,
    Exchange,
    RepeatResult,
    apart,
    begin_name,
    cell_exchanges,
    end_names,
    fit_name,
    fits_noted_after,
    fitting_apart,
    head_update,
    held_name,
    held_since,
    installs,
    item_of,
    noted_after,
    own_tensors,
    own_updates,
    shown_name,
    smallest_norm,
    state_digest,
    state_name,
    statement,
    sum_name,
    tag_key,
    tag_name,
    tag_nonce,
    tag_text,
    tensor_name,
    vectors_around,
    vectors_name,
)

Exchanged = tuple[torch.Tensor, torch.Tensor | None]
_WHERE: Final = "what a node hands in for the audit"
_MAX_FILES: Final = 12
"""Most files in a host's work, each as large as a state of its blocks at most: two states, three sums, four of helpers,
and three of VeLoRA's vectors."""
_MAX_ELEMENT_BYTES: Final = 8
_KEPT: Final = 2
"""Turns that are kept: one that may be checked, and the one after it."""


Halves = Mapping[int, tuple[list[tuple[bytes, int, int]], list[tuple[bytes, int, int]]]]
"""By block what ``tensors_digest`` needs of its weights, and of the rest: head of each tensor, its place in a file."""


def halves_of(infos: Mapping[str, TensorInfo]) -> Halves:
    """Return the halves of the state of each block from the header of a file with its tensors."""
    halves: dict[int, tuple[list[tuple[bytes, int, int]], list[tuple[bytes, int, int]]]] = {}
    for full, info in sorted(infos.items()):
        both, name = halves.setdefault(block_of(full), ([], [])), full.removeprefix(PREFIXES.value)
        both[name is full].append((tensor_head(name, info.dtype, info.shape), info.offset, info.offset + info.nbytes))
    return halves


class FileWriter:
    """Writes files of tensors; what follows from names, types and shapes is computed when these change."""

    def __init__(self) -> None:
        self.halves: Halves = {}
        self._shapes: list[tuple[str, str, tuple[int, ...]]] | None = None
        self._names: tuple[str, ...] = ()
        self._header = b""

    def write(self, tensors: Mapping[str, TensorPieces]) -> bytes:
        """Return the file that ``write_tensors`` makes."""
        shapes = [(name, piece.dtype, piece.shape) for name, piece in tensors.items()]
        if shapes != self._shapes:
            content = bytes(write_tensors(tensors))
            infos = TensorFile(Pieces.of(content), where=_WHERE).infos
            self._shapes, self._names, self.halves = shapes, tuple(infos), halves_of(infos)
            self._header = content[: len(content) - sum(info.nbytes for info in infos.values())]
        return b"".join([self._header, *(piece for name in self._names for piece in tensors[name].data)])


class State(NamedTuple):
    """Trained tensors with optimizer state of a node's slice as a file, and of each block the digests of both."""

    content: bytes
    parts: Mapping[int, tuple[str, str]]

    @classmethod
    def of(cls, content: bytes, halves: Halves | None = None) -> State:
        """Compute the digests of a file, with tensors at ``halves`` if these are known; raises ``IntegrityError``."""
        view, digests = memoryview(content), {}
        if halves is None:
            halves = halves_of(TensorFile(Pieces.of(content), where=_WHERE).infos)
        for block, both in halves.items():
            weights, rest = hashlib.sha256(), hashlib.sha256()
            for digest, places in zip((weights, rest), both, strict=True):
                for head, start, stop in places:
                    digest.update(head)
                    digest.update(view[start:stop])
            digests[block] = weights.hexdigest(), rest.hexdigest()
        return cls(content, digests)

    @property
    def digests(self) -> Mapping[int, str]:
        """The digest of each block."""
        return {block: state_digest(*both) for block, both in self.parts.items()}


class Commitment(NamedTuple):
    """The trail of a turn as JSON, and the signature of its statement with its certificate, empty in plain text."""

    digests_json: str
    signature: bytes = b""
    certificate_pem: bytes = b""


class _Part(NamedTuple):
    """Some state of a node that is noted as a whole: of its slice, of a block that it fits, or held of a helper."""

    kind: str
    block: int = -1


_SLICE: Final = _Part("slice")
_FIT, _HELD, _SHOWN = "fit", "held", "shown"


Sign = Callable[[bytes], tuple[bytes, bytes]]
"""Signs some bytes; returns the signature, and the certificate of its key; both empty in plain text."""


@dataclass(slots=True)
class _Kept:
    """What is kept of a turn: ``begin`` is the state before its first update, ``after`` those after items.

    Nothing changes any more once it is told.
    """

    turn: Turn
    trail: dict[str, str] = field(default_factory=dict)
    notes: dict[Action, list[_Part]] = field(default_factory=dict)
    head_update: Action | None = None
    own: dict[Action, list[TensorKey]] = field(default_factory=dict)
    secret: str = field(default_factory=lambda: secrets.token_hex(32))
    tagger: Tagger | None = None
    sums: dict[tuple[_Part, int, int], bytes] = field(default_factory=dict)
    vectors: dict[int, dict[int, bytes]] = field(default_factory=dict)
    begin: dict[_Part, State] = field(default_factory=dict)
    after: dict[tuple[_Part, int], State] = field(default_factory=dict)
    is_told: bool = False


class AuditRecorder:
    """Makes the trail of a node in one placement, and keeps what others need to repeat its work.

    ``grant``, ``exchanged``, ``after`` and ``take`` are called on the compute thread, all else on any.
    """

    def __init__(self, plan: Plan, node: str, executor: NodeExecutor, *, run_id: str, sign: Sign) -> None:
        self._plan, self.node, self._executor = plan, node, executor
        self._run_id, self._sign = run_id, sign
        self._piece, self._wire = plan.slice_of(node), plan.course.wire_dtype
        self._lock = threading.Lock()
        self._turns: dict[int, _Kept] = {}
        self._tickets: dict[TensorKey, str] = {}
        self._tensors: dict[TensorKey, Exchanged] = {}
        placement = plan.placement
        self._fitted = {helper.start: _Part(_FIT, helper.start) for helper in placement.helped_by(node)}
        self._lent = {helper.start: _Part(_HELD, helper.start) for helper in placement.helpers_of(node)}
        self._own = {*range(self._piece.start, self._piece.stop)} - self._lent.keys()
        self._parts = [_SLICE] if self._piece.num_blocks else []
        self._parts += [*self._fitted.values(), *(_Part(_HELD, block) for block in (*self._fitted, *self._lent))]
        is_projected = plan.course.helper_settings.pairs == VELORA
        self._shown = {block: _Part(_SHOWN, block) for block in self._lent if is_projected}
        self._parts += self._shown.values()
        self._now: dict[_Part, State] = {}
        self._states = {part: FileWriter() for part in self._parts}
        self._sums = {part: FileWriter() for part in self._parts}
        self._trained: dict[_Part, Mapping[str, nn.Parameter]] = {}

    # ---- on the compute thread --------------------------------------------------------------------

    def grant(self, turn: Turn) -> None:
        """Begin a turn, and drop those that are closed."""
        with self._lock:
            self._turns = {index: kept for index, kept in self._turns.items() if index > turn.index - _KEPT}
            first = min((kept.turn.first_seq for kept in self._turns.values()), default=turn.first_seq)
            self._tensors = {key: value for key, value in self._tensors.items() if key.seq >= first}
            self._tickets = {key: ticket for key, ticket in self._tickets.items() if key.seq >= first}
        if turn.kind is not StepKind.TRAIN:
            return
        if not self._now:
            self._now = {part: self._state_of(part) for part in self._parts}
        self._trained = self._trained_by_part()
        kept, now = _Kept(turn, head_update=head_update(self._plan, turn, self.node)), turn.settled(self._plan)
        for item in items(now.course, turn):
            if (last := noted_after(now, item, self.node)) is not None:
                kept.notes[last] = [_SLICE]
            for action, block in fits_noted_after(now, item, self.node).items():
                held = [_Part(_HELD, block)] if action.op is Op.UPDATE else []
                kept.notes[action] = [self._fitted[block], *held]
            for action, block in installs(now, item, self.node).items():
                kept.notes[action] = [self._lent[block]]
        for tensor in own_tensors(self._plan, turn, self.node):
            kept.own.setdefault(tensor.after, []).append(tensor.key)
        with self._lock:
            self._turns[turn.index] = kept

    def exchanged(self, key: TensorKey, tensor: Any, mask: torch.Tensor | None, *, is_sent: bool) -> None:
        """Note a tensor that this node sends or has received, whose values must not change, or a parcel of pairs."""
        if (kept := self._of(key.seq)) is not None and key.payload in (Payload.HIDDEN, Payload.GRAD, Payload.PAIRS):
            if key.payload == Payload.PAIRS:
                same = parcel_tensor(bytes(tensor))
            elif is_sent:
                same = as_received(tensor, self._wire)
            else:
                same = tensor.detach().to(device="cpu", dtype=self.dtype_of(is_own=False))
            self._note(kept, key, same, mask)

    def after(self, action: Action) -> None:
        """Note what an action has changed: the sum of gradients, or the state."""
        kept = self._of(action.seq)
        if kept is None:
            return
        for key in kept.own.get(action, ()):
            tensor, mask = self._executor.copy_tensor(key)
            self._note(kept, key, tensor, mask, is_own=True)
        if kept.head_update is not None:
            self._after_head(kept, action, kept.head_update)
        if action.op is Op.FIT:
            self._after_sum(kept, self._fitted[action.start], action)
        elif action.op is Op.SHIP and self._shown:
            part = self._shown[action.start]
            self._begin(kept.turn.index, part)
            self._now[part] = state = self._state_of(part)
            kept.sums[part, action.seq, action.micro] = state.content
            kept.trail[shown_name(action.seq, action.micro, part.block)] = hashlib.sha256(state.content).hexdigest()
        elif self._piece.start <= action.start < self._piece.stop:
            if action.op is Op.FORWARD and self._plan.course.velora is not None:
                kept.vectors.setdefault(action.seq, {})[action.micro] = content = vectors_file(self._executor)
                kept.trail[vectors_name(action.seq, action.micro)] = hashlib.sha256(content).hexdigest()
            elif action.op is Op.BACKWARD and (
                action.start in self._own or (_SLICE, action.seq, action.micro) not in kept.sums
            ):
                self._after_sum(kept, _SLICE, action)
        if action.op is Op.UPDATE and self._plan.course.helper_settings.interval > 1:
            self._trained = self._trained_by_part()  # other tensors where an item without an update used the old ones
        for part in kept.notes.get(action, ()):
            self._begin(kept.turn.index, part)
            self._now[part] = state = kept.after[part, action.seq] = self._state_of(part)
            kept.trail |= self._names(part, action.seq, state)

    def _after_sum(self, kept: _Kept, part: _Part, action: Action) -> None:
        """Note the sum of gradients of a part after a backward or a fit."""
        content = self._sums[part].write(gradients(self._trained[part]))
        kept.sums[part, action.seq, action.micro] = content
        at = action.seq, action.micro
        name = sum_name(*at) if part is _SLICE else fit_name(*at, part.block)
        kept.trail[name] = hashlib.sha256(content).hexdigest()

    def _names(self, part: _Part, seq: int, state: State) -> dict[str, str]:
        """Return the entries of a trail with a state of a part; ``seq`` -1 = at the beginning of the turn."""
        if part.kind == _HELD:
            return {held_name(seq, part.block): weights_digest(state, part.block)}
        if part.kind == _SHOWN:
            return {shown_name(-1, 0, part.block): hashlib.sha256(state.content).hexdigest()}
        return {
            (begin_name(block) if seq < 0 else state_name(seq, block)): digest
            for block, digest in state.digests.items()
        }

    def _after_head(self, kept: _Kept, action: Action, last: Action) -> None:
        """Note the weights of the head before the first update of an own turn, and after the last one."""
        unit = self._plan.course.head
        if action.op is Op.HEAD and begin_name(unit) not in kept.trail:
            kept.trail[begin_name(unit)] = state_digest(self._executor.copy_digest(unit, unit + 1), "")
        elif action == last:
            kept.trail |= zip(end_names(unit), (self._executor.copy_digest(unit, unit + 1), ""), strict=True)

    def take(self, turn: int) -> Commitment | None:
        """Return the trail of a finished train turn; None for other turns."""
        kept = self._turns.get(turn)
        if kept is None:
            return None
        for part in self._parts:
            self._begin(turn, part)
            if part.kind not in (_HELD, _SHOWN):
                last = max((seq for other, seq in kept.after if other == part), default=None)
                end = kept.begin[part] if last is None else kept.after[part, last]
                for block, both in end.parts.items():
                    kept.trail |= zip(end_names(block), both, strict=True)
        signed = statement(self._run_id, self._plan, kept.turn, self.node, kept.trail)
        kept.is_told = True
        return Commitment(json.dumps(kept.trail, separators=(",", ":")), *self._sign(signed.encode()))

    def _note(
        self, kept: _Kept, key: TensorKey, tensor: torch.Tensor, mask: torch.Tensor | None, *, is_own: bool = False
    ) -> None:
        """Note the tag of a tensor, or the digest of one that is kept or that this node exchanges with itself."""
        name = tensor_name(key)
        with self._lock:
            if is_kept := key in self._tickets:
                self._tensors[key] = (tensor, mask)
        if not is_own:
            kept.trail[TAG_KEY] = kept.secret
        if is_own or is_kept:
            kept.trail[name] = tensor_digest(tensor, mask)
        else:
            kept.tagger = kept.tagger or Tagger(kept.secret)
            kept.trail[name] = kept.tagger.tag(name, tensor, mask)

    def _begin(self, index: int, part: _Part) -> None:
        """Note the state before the first update of a turn and of those before it, which may have none here."""
        for kept in self._turns.values():
            if part not in kept.begin and kept.turn.index <= index:
                kept.begin[part] = self._now[part]
                kept.trail |= self._names(part, -1, self._now[part])

    def _of(self, seq: int) -> _Kept | None:
        return next((kept for kept in self._turns.values() if kept.turn.first_seq <= seq < kept.turn.end_seq), None)

    def _state_of(self, part: _Part) -> State:
        if part.kind == _HELD:
            return State.of(held_file(self._executor, part.block))
        if part.kind == _SHOWN:
            return State(shown_file(self._executor, part.block), {})
        tensors, writer = self._executor.part.tensors(), self._states[part]
        if self._lent or self._fitted:
            tensors = {name: value for name, value in tensors.items() if self._has(part, block_of(name))}
        return State.of(writer.write(tensors), writer.halves)

    def _trained_by_part(self) -> dict[_Part, Mapping[str, nn.Parameter]]:
        trained = self._executor.part.trained
        if not self._fitted:
            return dict.fromkeys(self._parts, trained)
        return {
            part: {name: value for name, value in trained.items() if self._has(part, block_of(name))}
            for part in self._parts
        }

    def _has(self, part: _Part, block: int) -> bool:
        return block in self._own if part is _SLICE else block == part.block

    # ---- on any thread ----------------------------------------------------------------------------

    def dtype_of(self, *, is_own: bool, payload: str = Payload.HIDDEN) -> torch.dtype:
        """Element type in which tensors are kept: those that pass no link, those of a link, and bytes of parcels."""
        if payload == Payload.PAIRS:
            return torch.uint8
        return self._executor.dtype if is_own or self._wire in ROUNDS else WIRE_TYPES[self._wire]

    def keep(self, tickets: Mapping[TensorKey, str]) -> None:
        """Keep these tensors of turns that are about to be granted, each for who has its ticket."""
        with self._lock:
            self._tickets |= tickets

    def turn(self, index: int) -> Turn:
        """Return a turn that is kept; raises ``FrameError``."""
        return self._kept(index).turn

    def rows(self, key: TensorKey) -> int:
        """Return the rows of a micro-batch of a turn that is kept; raises ``FrameError`` or ``IntegrityError``."""
        with self._lock:
            kept = self._of(key.seq)
        if kept is None:
            raise FrameError(f"node {self.node} keeps nothing of item {key.seq} for the audit")
        now, item = item_of(self._plan, kept.turn, key.seq)
        return microbatch_rows(now.course, item)[key.micro]

    def exchanges(self, cell: Cell, turn: int) -> tuple[Exchange, ...]:
        """Return the tensors of a cell of another host, each with who keeps it, a neighbour of it or itself."""
        return cell_exchanges(self._plan, self.turn(turn), cell)

    def tensor_file(self, key: TensorKey, ticket: str) -> Pieces:
        """Return a file of a kept tensor, in the type of the wire where it passed a link, and its mask.

        Raises ``FrameError``: it is not kept for who has this ticket.
        """
        with self._lock:
            exchanged = self._tensors.get(key) if ticket and self._tickets.get(key) == ticket else None
        if exchanged is None:
            raise FrameError(f"node {self.node} keeps no {key} with this ticket for the audit")
        tensor, mask = exchanged
        return _written({"tensor": tensor, "mask": None if mask is None else mask.to(torch.uint8)})

    def work_file(self, place: CellPlace) -> Pieces:
        """Return the state and sums before and after a cell of this node as one file; raises ``FrameError``."""
        kept, seq = self._kept(place.turn), place.seq
        if not kept.is_told:
            raise FrameError(f"node {self.node} has not told yet what it did in turn {place.turn}")
        part = _Part(_FIT, place.block) if place.is_fit else _SLICE
        if part not in kept.begin:
            raise FrameError(f"node {self.node} trains nothing of it, so it has nothing to be repeated")
        files = {"before": self._before(kept, part, seq).content}
        for name, micro in (("added", place.before), ("total", place.last)):
            if micro >= 0:
                files[name] = self._sum(kept, part, seq, micro)
        if place.last >= 0:
            files |= {"sum": self._sum(kept, part, seq, place.micro)}
        if place.is_fit:
            held = _Part(_HELD, place.block)
            files |= {"held before": self._before(kept, held, seq).content}
            files |= {"held after": kept.after[held, seq].content} if (held, seq) in kept.after else {}
        elif self._lent:
            now, item = item_of(self._plan, kept.turn, seq)
            for block, held in self._lent.items():
                since = held_since(now, kept.turn, item, block)
                content = kept.begin[held] if since < 0 else kept.after[held, since]
                files[f"held {block}"] = content.content
        for block, shown in self._shown.items() if not place.is_fit else ():
            sums = {key: content for key, content in kept.sums.items() if key[0] == shown}
            if (at := (shown, seq, place.micro)) in sums:
                earlier = [kept.begin[shown].content, *sums.values()][[*sums].index(at)]
                files |= {f"shown before {block}": earlier, f"shown {block}": sums[at]}
        known = kept.vectors.get(seq, {}) if not place.is_fit else {}
        if place.micro in known:
            before, last = vectors_around(known, place.micro)
            files |= {"vectors": known[place.micro], "vectors last": known[last]}
            files |= {"vectors before": known[before]} if before >= 0 else {}
        if place.last >= 0 and (part, seq) in kept.after:
            files["after"] = kept.after[part, seq].content
        return _written(files)

    def _before(self, kept: _Kept, part: _Part, seq: int) -> State:
        last = max((earlier for known, earlier in kept.after if known == part and earlier < seq), default=None)
        return kept.begin[part] if last is None else kept.after[part, last]

    def _sum(self, kept: _Kept, part: _Part, seq: int, micro: int) -> bytes:
        if (part, seq, micro) not in kept.sums:
            raise FrameError(f"node {self.node} has no gradient of micro-batch {seq}.{micro}")
        return kept.sums[part, seq, micro]

    def _kept(self, index: int) -> _Kept:
        with self._lock:
            kept = self._turns.get(index)
        if kept is None:
            raise FrameError(f"node {self.node} keeps nothing of turn {index} for the audit")
        return kept


@dataclass(slots=True)
class Repeated:
    """What was computed when a cell was repeated.

    Attributes:
        course: of the run, which knows the widths of what crosses a boundary.
        results: by name in the trail; the distance of a tensor in ``differing`` is 1 until it is compared.
        differing: tensors that the host sent with another digest.
        tagger: makes tags under the key of the host; None = it has none.
    """

    course: Course
    tagger: Tagger | None
    results: dict[str, RepeatResult] = field(default_factory=dict)
    differing: dict[TensorKey, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def under(cls, course: Course, given: Mapping[str, str]) -> Repeated:
        """Begin with nothing, under the key for tags in what the host told."""
        return cls(course, Tagger(given[TAG_KEY]) if TAG_KEY in given else None)

    def note(self, key: TensorKey, tensor: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Note the tag of a tensor that the host exchanged."""
        if self.tagger is not None:
            name = tensor_name(key)
            self.results[tag_name(name)] = RepeatResult(self.tagger.tag(name, tensor, mask))

    def compare(self, key: TensorKey, sent: Exchanged) -> None:
        """Set the distance of a tensor to what the host sent, and its tag.

        What enters a block may be a hidden state beside larger inputs of later blocks, which get no gradient: these are
        compared apart, as a wrong hidden state is small beside them.
        """
        name, ours, theirs = tensor_name(key), {"it": self.differing[key]}, {"it": sent[0]}
        if not ours["it"].numel():
            far = 1.0
        elif key.payload == Payload.PAIRS:
            far = pairs_distance(*(_tensors(bytes(bytes_of(side["it"]))) for side in (ours, theirs)))
        else:
            width = self.course.width(key.boundary, is_gradient=True) if key.is_hidden else 0
            if ours["it"].shape == theirs["it"].shape and 0 < width < ours["it"].shape[-1]:
                ours, theirs = (
                    {"it": side["it"][..., :width], "inputs": side["it"][..., width:]} for side in (ours, theirs)
                )
            far = distance(ours, theirs)
        self.results[name] = self.results[name]._replace(distance=far)
        self.note(key, *sent)


@contextmanager
def _repeating(executor: NodeExecutor, turn: Turn, trained: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Open a turn of which work is repeated, without gradients; forget it at the end.

    Tensors have the shapes of the plan, so what can't be computed is in what the host told of its own work.
    """
    executor.grant(turn)
    try:
        set_gradients(trained, b"")
        yield
    except DivergedError as error:  # the host itself would not have gone on
        raise IntegrityError(f"{_WHERE} leads to numbers that are not finite") from error
    except (FrameError, PlanError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if "memory" in str(error):  # of this node
            raise
        raise IntegrityError(f"{_WHERE} can't be computed with: {str(error)[:200]}") from error
    finally:
        set_gradients(trained, b"")
        executor.forget_turn(turn.index)


class WorkRepeater:
    """Repeats cells of another host of a placement, on blocks of its own; call it on the compute thread."""

    def __init__(self, plan: Plan, node: str, make: Callable[[Plan, str], NodeExecutor]) -> None:
        self.node = node
        self._plan, self._alias = apart(plan, node)
        self._executor = make(self._plan, self._alias)
        self._dtype = self._executor.dtype

    def repeat(
        self,
        turn: Turn,
        place: CellPlace,
        files: Mapping[str, bytes],
        tensors: Mapping[TensorKey, Exchanged],
        given: Mapping[str, str],
    ) -> Repeated:
        """Repeat a cell and the update of its item; raises ``IntegrityError``.

        ``files`` are those of ``AuditRecorder.work_file``, ``tensors`` what the host received, from its neighbours,
        ``given`` has the digests of what it sent, and the secret of its tags.
        """
        executor, seq, micro = self._executor, place.seq, place.micro
        now, item = item_of(self._plan, turn, seq)
        way = legs(now, item, self._alias)[micro]
        repeated, is_added = Repeated.under(now.course, given), False
        with _repeating(executor, turn, executor.part.trained):
            load_state(executor, _file(files, "before"))
            if lent := [helper.start for helper in self._plan.placement.helpers_of(self._alias)]:
                kept = [_tensors(_file(files, f"held {block}")) for block in lent]
                held = {
                    name.removeprefix(PREFIXES.value): value
                    for tensors_of in kept
                    for name, value in tensors_of.items()
                }
                executor.offloading.load_held(held, lent, where=_WHERE)
            if "vectors before" in files:
                set_vectors(executor, files["vectors before"])
            for block in (block for block in lent if f"shown before {block}" in files):
                name = f"shown before {block}"
                executor.offloading.load_shown(block, _tensors(files[name]) if files[name] else {}, where=_WHERE)
            for leg in way:
                action = leg.bind(seq, micro)
                if leg.op is Op.RECEIVE:
                    tensor, mask = tensors[action.key]
                    repeated.note(action.key, tensor, mask)
                    executor.put_tensor(action.key, tensor.to(self._dtype), mask)
                elif leg.op is Op.SEND:
                    name = tensor_name(action.key)
                    if leg.payload == Payload.PAIRS:
                        tensor, mask = parcel_tensor(bytes(executor.take_parcel(action.key))), None
                    else:
                        tensor, mask = executor.take_tensor(action.key)
                        is_own = leg.peer == self.node
                        tensor = tensor.detach() if is_own else as_received(tensor, self._plan.course.wire_dtype)
                    digest = tensor_digest(tensor, mask)
                    if digest == given[name]:
                        repeated.note(action.key, tensor, mask)
                    else:
                        repeated.differing[action.key] = tensor
                    repeated.results[name] = RepeatResult(digest, float(digest != given[name]))
                else:
                    if leg.op is Op.BACKWARD and place.before >= 0 and not is_added:
                        is_added = True
                        set_gradients(executor.part.trained, _file(files, "added"))
                    executor.run(action)
                    if leg.op is Op.SHIP and (name := shown_name(seq, micro, leg.start)) in given:
                        told = _file(files, f"shown {leg.start}")
                        repeated.results[name] = _compared(shown_file(executor, leg.start), told)
                    if leg.op is Op.FORWARD and now.course.velora is not None:
                        told = _file(files, "vectors")
                        repeated.results[vectors_name(seq, micro)] = _compared(vectors_file(executor), told)
            if any(leg.op is Op.BACKWARD for leg in way):
                repeated.results.update(self._updated(now, item, place, files))
        return repeated

    def _updated(self, now: Plan, item: Item, place: CellPlace, files: Mapping[str, bytes]) -> dict[str, RepeatResult]:
        """Compare the sum of gradients, then update with that of the last micro-batch and compare the state."""
        executor, seq = self._executor, place.seq
        sums, least = bytes(write_tensors(gradients(executor.part.trained))), smallest_norm(self._plan.course)
        compared = {sum_name(seq, place.micro): _compared(sums, _file(files, "sum"), least=least)}
        if "after" not in files:
            return compared
        set_gradients(executor.part.trained, _file(files, "total"))
        if now.course.velora is not None:
            set_vectors(executor, _file(files, "vectors last"))
        for action in own_updates(now, item, self._alias):
            executor.run(action)
        return compared | _compared_state(seq, executor.part.tensors(), files)


class FitRepeater:
    """Repeats fits of helpers whose work a node checks, on adapters of its own; call it on the compute thread."""

    def __init__(self, plan: Plan, node: str, make: Callable[[Plan, str], NodeExecutor]) -> None:
        self._plan, self._alias = fitting_apart(plan, node)
        self._executor = make(self._plan, self._alias)

    def repeat(
        self,
        turn: Turn,
        place: CellPlace,
        files: Mapping[str, bytes],
        tensors: Mapping[TensorKey, Exchanged],
        given: Mapping[str, str],
    ) -> Repeated:
        """Repeat the fit of a micro-batch, and the update of its item; as ``WorkRepeater.repeat``."""
        executor, seq, micro, block = self._executor, place.seq, place.micro, place.block
        now, item = item_of(self._plan, turn, seq)
        repeated = Repeated.under(now.course, given)
        trained = {name: value for name, value in executor.part.trained.items() if block_of(name) == block}
        with _repeating(executor, turn, trained):
            load_state(executor, _file(files, "before"))
            held = (name for name in given if name.startswith("held ") and name != held_name(seq, block))
            for name in held:
                repeated.results[name] = self._held(block, "held before", files)
            for key, exchanged in tensors.items():
                repeated.note(key, *exchanged)
                executor.put_parcel(key, Pieces.of(bytes(bytes_of(exchanged[0]))))
            if place.before >= 0:
                set_gradients(trained, _file(files, "added"))
            executor.run(Action(Op.FIT, seq, micro, block, block + 1))
            sums, least = bytes(write_tensors(gradients(trained))), smallest_norm(now.course)
            repeated.results[fit_name(seq, micro, block)] = _compared(sums, _file(files, "sum"), least=least)
            if "after" in files:
                repeated.results |= self._updated(now, item, place, trained, files)
                if (after := held_name(seq, block)) in given:  # of the state that was told, so in equal bits
                    load_state(executor, files["after"])
                    repeated.results[after] = self._held(block, "held after", files)
        return repeated

    def _updated(
        self, now: Plan, item: Item, place: CellPlace, trained: Mapping[str, nn.Parameter], files: Mapping[str, bytes]
    ) -> dict[str, RepeatResult]:
        """Compare the state after the update with the sum of the last micro-batch."""
        executor, block = self._executor, place.block
        set_gradients(trained, _file(files, "total"))
        for action in item_updates(now, item, self._alias):
            if action.start == block:
                executor.run(action)
                executor.take_parcel(weights_key(action))
        tensors = {name: value for name, value in executor.part.tensors().items() if block_of(name) == block}
        return _compared_state(item.seq, tensors, files)

    def _held(self, block: int, name: str, files: Mapping[str, bytes]) -> RepeatResult:
        """Compare what the host holds of the loaded state with what was told."""
        held = held_file(self._executor, block)
        return RepeatResult(weights_digest(State.of(held), block), _distance(held, _file(files, name)))


class NodeAudit:
    """The audit at a node: its own trail, and the repeated work of other nodes, of one host at a time.

    Args:
        make: builds an executor of a node of a plan; a slice of another host is made when it is first asked for.
    """

    def __init__(self, recorder: AuditRecorder, plan: Plan, make: Callable[[Plan, str], NodeExecutor]) -> None:
        self.recorder = recorder
        self._plan, self._make = plan, make
        self._repeater: WorkRepeater | None = None
        self._fits: FitRepeater | None = None

    @property
    def fits(self) -> FitRepeater:
        """The adapters of all blocks whose helpers' work this node checks; errors as for ``repeater``."""
        if self._fits is None:
            self._fits = FitRepeater(self._plan, self.recorder.node, self._make)
        return self._fits

    def repeater(self, node: str) -> WorkRepeater:
        """Return the slice of another host, in place of that of an earlier one; call it on the compute thread.

        Raises:
            ModelError: the model folder lacks weights of that slice.
            CapacityError: there is no memory for it.
        """
        if self._repeater is None or self._repeater.node != node:
            self._repeater = None  # its memory is needed
            self._repeater = WorkRepeater(self._plan, node, self._make)
        return self._repeater

    def repeat(
        self,
        cell: Cell,
        place: CellPlace,
        files: Mapping[str, bytes],
        tensors: Mapping[TensorKey, Exchanged],
        given: Mapping[str, str],
    ) -> Repeated:
        """Repeat a cell of another node; see ``WorkRepeater.repeat``, and ``repeater`` for further errors."""
        repeater = self.fits if cell.is_fit else self.repeater(cell.node)
        try:
            return repeater.repeat(self.recorder.turn(place.turn), place, files, tensors, given)
        except Exception:  # with what the host told the slice may be in a state in which no work can be repeated
            self._repeater = self._fits = None
            raise

    def most_bytes(self, cell: Cell, key: TensorKey | None, sizes: CopyBytes) -> int:
        """Return the most bytes of what is handed in for a cell: a tensor, or with ``key`` None the host's own work.

        ``sizes`` are planned. Raises ``FrameError`` or ``IntegrityError``, as ``AuditRecorder.rows``.
        """
        if key is None:
            num_blocks = 1 if cell.is_fit else self._plan.slice_of(cell.node).num_blocks
            return min(MAX_COPY_BYTES, _MAX_FILES * copy_limit(sizes, num_blocks))
        if key.payload == Payload.PAIRS:
            return MAX_COPY_BYTES
        course = self._plan.course
        width = course.width(key.boundary, is_gradient=not key.is_hidden)
        return HEADER_BYTES + self.recorder.rows(key) * course.max_length * (_MAX_ELEMENT_BYTES * width + 1)

    def failed(
        self, exchanges: Iterable[Exchange], tensors: Mapping[TensorKey, Exchanged], given: Mapping[str, str]
    ) -> Repeated:
        """Return the result of a cell with which nothing can be computed: as far as can be from all that was told.

        The host is to blame, unless it has other tags of what its neighbours hand in.
        """
        repeated = Repeated.under(self._plan.course, given)
        received = {tensor_name(key) for key in tensors}
        repeated.results |= {name: RepeatResult("", 1.0) for name in given.keys() - received - {TAG_KEY}}
        repeated.differing |= {exchange.key: torch.empty(0) for exchange in exchanges if not exchange.comes}
        for key, exchanged in tensors.items():
            repeated.note(key, *exchanged)
        return repeated

    def read_work(self, file: Pieces, place: CellPlace, given: Mapping[str, str]) -> dict[str, bytes]:
        """Read what a host hands in of its own work, with the digests that it told; raises ``IntegrityError``."""
        contents = {name: bytes(pieces.data) for name, pieces in _pieces(bytes(file)).items()}
        after, told = f"state {place.seq}", {}
        before = "begin"  # or the state after the last item before
        for name, digest in given.items():
            kind = name.partition(" ")[0]
            if kind in ("begin", "state", "sum", "fit", "held", "vectors", "shown"):
                told[name] = digest
            if kind == "state" and not name.startswith(f"{after} "):
                before = name.rpartition(" ")[0]
        digests = [
            (
                fit_name(place.seq, micro, place.block) if place.is_fit else sum_name(place.seq, micro),
                hashlib.sha256(contents[name]).hexdigest(),
            )
            for name, micro in (("added", place.before), ("sum", place.micro), ("total", place.last))
            if name in contents
        ]
        for name in (name for name in given if name.startswith("held ")):
            _, since, block = name.split()
            kept = f"held {block}"
            if place.is_fit:
                kept = "held after" if since == str(place.seq) else "held before"
            if kept in contents:
                digests.append((name, weights_digest(State.of(contents[kept]), int(block))))
        for name in (name for name in given if name.startswith("shown ")):
            block = name.rpartition(" ")[2]
            kept = "shown" if name == shown_name(place.seq, place.micro, int(block)) else "shown before"
            if (content := contents.get(f"{kept} {block}")) is not None:
                digests.append((name, hashlib.sha256(content).hexdigest()))
        begin = vectors_name(place.seq, 0)[:-1]
        known = [int(name.removeprefix(begin)) for name in given if name.startswith(begin)]
        first, last = vectors_around(known, place.micro)
        digests += [
            (vectors_name(place.seq, micro), hashlib.sha256(contents[name]).hexdigest())
            for name, micro in (("vectors before", first), ("vectors", place.micro), ("vectors last", last))
            if name in contents
        ]
        for name, prefix in (("before", before), ("after", after)):
            states = State.of(contents[name]).digests if name in contents else {}
            digests += [(f"{prefix} {block}", digest) for block, digest in states.items()]
        odd = [name for name, digest in digests if told.get(name) != digest]
        if odd := odd or sorted(told.keys() - dict(digests).keys()):
            raise IntegrityError(f"{_WHERE} is something else than was told of {odd[0]}")
        return contents

    def read_tensor(self, file: Pieces, key: TensorKey, given: Mapping[str, str], *, is_own: bool = False) -> Exchanged:
        """Read what a neighbour of a host hands in, or with ``is_own`` the host itself; errors as for ``read_work``."""
        tensors = _tensors(bytes(file))
        if "tensor" not in tensors:
            raise IntegrityError(f"{_WHERE} has no tensor; use one version on all machines")
        tensor, mask, name = tensors["tensor"], tensors.get("mask"), tensor_name(key)
        dtype = self.recorder.dtype_of(is_own=is_own, payload=key.payload)
        if tensor.dtype is not dtype or tensor_digest(tensor, mask) != given.get(name):
            raise IntegrityError(f"{_WHERE} is something else than was told of {name}")
        if not self._has_shape(key, tensor, mask):
            raise IntegrityError(f"{_WHERE} has {name} in shape {[*tensor.shape]}, which is not that of the plan")
        return tensor, mask

    def _has_shape(self, key: TensorKey, tensor: torch.Tensor, mask: torch.Tensor | None) -> bool:
        """Whether a tensor and its mask have shapes of the plan: a digest is that of the bytes in any shape."""
        if key.payload == Payload.PAIRS:
            return tensor.ndim == 1 and mask is None
        course, rows = self._plan.course, self.recorder.rows(key)
        width, most = course.width(key.boundary, is_gradient=not key.is_hidden), course.max_length
        if tensor.ndim != 3 or (tensor.shape[0], tensor.shape[2]) != (rows, width):
            return False
        if not 1 <= tensor.shape[1] <= course.sent_tokens(key.boundary, most):
            return False
        if not key.is_hidden or key.boundary == course.head:
            return mask is None
        return mask is not None and (mask.shape, mask.dtype) == (tensor.shape[:2], torch.uint8)


def tensor_digest(tensor: torch.Tensor, mask: torch.Tensor | None) -> str:
    """Return the SHA-256, hex, of a tensor as both ends of its link have it, in the type of the wire, and its mask."""
    digest = hashlib.sha256(bytes_of(tensor.detach().to(device="cpu").contiguous()))
    if mask is not None:
        digest.update(_bytes_of_mask(mask))
    return digest.hexdigest()


def weights_digest(state: State, block: int) -> str:
    """Return the digest of the weights of a block in a state, which may have none."""
    return state.parts[block][0] if block in state.parts else NOTHING


def held_file(executor: NodeExecutor, block: int) -> bytes:
    """Return a file of what the host of a block holds of its helper, at either of both."""
    held = executor.offloading.held(block)
    return bytes(write_tensors({f"{PREFIXES.value}{name}": pieces_of(value) for name, value in held.items()}))


def shown_file(executor: NodeExecutor, block: int) -> bytes:
    """Return a file of the vectors on which a host has projected the pairs of a block; empty before the first."""
    shown = executor.offloading.shown(block)
    return bytes(write_tensors({site: pieces_of(vector) for site, vector in shown.items()})) if shown else b""


def parcel_tensor(content: bytes) -> torch.Tensor:
    """Return the bytes of a parcel as a tensor."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def load_state(executor: NodeExecutor, content: bytes) -> None:
    """Load a state of some blocks, with the gradients that are added up in it; raises ``IntegrityError``."""
    pieces = _pieces(content)
    executor.part.load_migrated(pieces, blocks={block_of(name) for name in pieces})


class Tagger:
    """Makes the tags of a turn, each for another name: Poly1305 of the tensor, as additional data in RFC 8439."""

    def __init__(self, secret: str) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        self._cipher = ChaCha20Poly1305(tag_key(secret))

    def tag(self, name: str, tensor: torch.Tensor, mask: torch.Tensor | None) -> str:
        """Return the tag of a tensor and its mask on the CPU, as in the trail of who received it."""
        masked = b"" if mask is None else bytes(_bytes_of_mask(mask))
        return tag_text(self._cipher.encrypt(tag_nonce(name), masked, bytes_of(tensor.contiguous()))[-16:])


def _bytes_of_mask(mask: torch.Tensor) -> memoryview:
    return bytes_of(mask.detach().to(device="cpu", dtype=torch.uint8).contiguous())


def gradients(trained: Mapping[str, nn.Parameter]) -> dict[str, TensorPieces]:
    """Return the gradients of a node's slice, read when iterated."""
    return {name: pieces_of(value.grad) for name, value in trained.items() if value.grad is not None}


def vectors_file(executor: NodeExecutor) -> bytes:
    """Return a file of VeLoRA's vectors of a node's slice."""
    return bytes(write_tensors({name: pieces_of(value) for name, value in executor.part.vectors.items()}))


def set_vectors(executor: NodeExecutor, content: bytes) -> None:
    """Set VeLoRA's vectors to those of a file; raises ``IntegrityError`` where it is not of this slice."""
    executor.part.load_vectors(_tensors(content), where=_WHERE)


def set_gradients(trained: Mapping[str, nn.Parameter], content: bytes) -> None:
    """Set the gradients of some weights to those of a file, or without content to none; raises ``IntegrityError``."""
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


def distance(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], *, least: float = 0.0) -> float:
    """Return the largest relative distance of two sets of tensors, at most 1; 1 for other names or shapes.

    Relative to the norm of a tensor, or to ``least`` times that of all of them.
    """
    if ours.keys() != theirs.keys() or any(ours[name].shape != theirs[name].shape for name in ours):
        return 1.0
    far, norms = 0.0, {name: float(tensor.double().norm()) for name, tensor in theirs.items()}
    floor = least * math.hypot(*norms.values())
    for name, value in ours.items():
        norm, apart = max(norms[name], floor), float((value.double() - theirs[name].double()).norm())
        far = max(far, 0.0 if apart == 0.0 else apart / norm if norm > apart else 1.0)
    return far


def _distance(ours: bytes, told: bytes, *, least: float = 0.0) -> float:
    if ours == told:
        return 0.0
    return distance(_tensors(ours), _tensors(told), least=least) if ours and told else 1.0


def _compared(ours: bytes, told: bytes, *, least: float = 0.0) -> RepeatResult:
    return RepeatResult(hashlib.sha256(ours).hexdigest(), _distance(ours, told, least=least))


def _compared_state(
    seq: int, tensors: Mapping[str, TensorPieces], files: Mapping[str, bytes]
) -> dict[str, RepeatResult]:
    """Compare the state of each block after an item with what was told of it."""
    ours = bytes(write_tensors(tensors))
    far = _distance(ours, _file(files, "after"))
    return {state_name(seq, block): RepeatResult(digest, far) for block, digest in State.of(ours).digests.items()}


def pairs_distance(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float:
    """Return the largest relative distance of two parcels of pairs, as ``distance``.

    That of a gradient is relative to the norm of all gradients: that of a query may be small, and mostly rounding. That
    of bits, of which each says whether a unit of a ReLU was active, is the share that differs.
    """

    def those(pairs: Mapping[str, torch.Tensor], *, are_gradients: bool) -> dict[str, torch.Tensor]:
        return {name: value for name, value in pairs.items() if name.endswith(".grad") == are_gradients}

    gradients_far = distance(*(those(pairs, are_gradients=True) for pairs in (ours, theirs)), least=1.0)
    others = [those(pairs, are_gradients=False) for pairs in (ours, theirs)]
    bits = [name for name, value in others[1].items() if value.dtype is torch.uint8]
    far = [gradients_far]
    for name in bits:
        packed, told = (pairs.pop(name, None) for pairs in others)
        if packed is None or told is None or (packed.shape, packed.dtype) != (told.shape, told.dtype):
            return 1.0
        odd = sum(int((packed ^ told).bitwise_right_shift(bit).bitwise_and(1).sum()) for bit in range(8))
        far.append(odd / max(1, 8 * packed.numel()))
    return max(*far, distance(*others))


def _written(tensors: Mapping[str, torch.Tensor | bytes | None]) -> Pieces:
    """Write tensors, and files as rows of bytes, in one file."""
    return write_tensors(
        {
            name: TensorPieces("U8", (len(value),), Pieces.of(value)) if isinstance(value, bytes) else pieces_of(value)
            for name, value in tensors.items()
            if value is not None
        }
    )


def _file(files: Mapping[str, bytes], name: str) -> bytes:
    if name not in files:
        raise IntegrityError(f"{_WHERE} lacks {name!r}; use one version on all machines")
    return files[name]


def _pieces(content: bytes) -> dict[str, TensorPieces]:
    file = TensorFile(Pieces.of(content), where=_WHERE)
    return {name: file.tensor(name) for name in file.infos}


def _tensors(content: bytes) -> dict[str, torch.Tensor]:
    return {name: read_tensor(pieces) for name, pieces in _pieces(content).items()}
