"""Activation cache of a node: hidden states of the frozen prefix at its slice, a file for each micro-batch.

The coordinator decides which batches are kept (``ringtune.techniques.activation_cache``), and the turn names them. A
node that can't write a file, or finds one damaged, reports it at the end of the turn. Before that report it checks the
files that may be read next, so that no turn is granted that reads a damaged one.

::

    magic  rows tokens width  dtype  crc32    0 ...    hidden state, row by row    mask, a byte a token
    8 B    4 B each           4 B    4 B      to 64 B

A file is mapped into memory, so nothing is copied; the checksum covers everything after the header.
"""

from __future__ import annotations

import logging
import mmap
import struct
import zlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch

from edge.techniques.micro_batches import Handler, MicroBatches, OpenItem
from edge.transport.tensors import WIRE_TYPES, bytes_of
from ringtune.errors import IntegrityError
from ringtune.schedule.actions import Action, Op, Payload, TensorKey
from ringtune.schedule.course import Course
from ringtune.schedule.placement import ActivationCacheSettings
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import ITEMS_AHEAD, StartPoint, Turn, items, turn_sequence
from ringtune.techniques.activation_cache import BatchKey, is_cacheable, key_of, prefix_after

_LOG = logging.getLogger(__name__)


class ActivationCache:
    """Cached hidden states of one node during one run."""

    def __init__(self, plan: Plan, cache: ActivationCacheSettings, node: str, flows: MicroBatches) -> None:
        self._course, self._cache, self._node = plan.course, cache, node
        self._flows = flows
        self._folder: Path | None = None
        self._upcoming: _Upcoming | None = None
        self._files: dict[BatchKey, dict[tuple[int, int], int]] = {}  # (boundary, micro-batch) -> bytes
        self._turns: dict[int, Turn] = {}
        self._prefix = plan.course.num_blocks
        self._problem = ""
        self._is_told = False
        self.reads = self.held_bytes = self.max_held_bytes = self.read_bytes = 0

    @staticmethod
    def of(plan: Plan, node: str, flows: MicroBatches) -> ActivationCache | None:
        """Build the cache of a node; None where the placement has none."""
        cache = plan.placement.cache
        return None if cache is None else ActivationCache(plan, cache, node, flows)

    @property
    def handlers(self) -> dict[Op, Handler]:
        """Handlers of KEEP and READ actions."""
        return {Op.KEEP: self.keep, Op.READ: self.read}

    @property
    def figures(self) -> dict[str, int]:
        """Number and bytes of the micro-batches read, and the peak bytes of all files."""
        return {
            "cache_reads": self.reads,
            "cache_read_bytes": self.read_bytes,
            "cache_most_kept_bytes": self.max_held_bytes,
        }

    def open(self, folder: Path | None, start: StartPoint | None = None, *, problem: str = "") -> None:
        """See ``NodeTechnique.open``."""
        self._upcoming, self._folder = _Upcoming(self._course, start or StartPoint.of(self._course)), None
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # it holds data of other nodes' rows
            self._folder = folder
        except OSError as error:
            problem = f"{folder}: {error.strerror}"
        if self._folder is None:
            self._lose(problem or "it has no folder; start it with --state DIR")

    def grant(self, turn: Turn) -> None:
        """Note a granted turn."""
        self._turns[turn.index] = turn

    def keep(self, action: Action, entry: OpenItem) -> tuple[()]:
        """Write the hidden state of a micro-batch; after a failure the run continues, and the node reports it."""
        flow = self._flows.of(action)
        if self._folder is None or flow.hidden is None or flow.mask is None or self._problem:
            return ()
        key, place = key_of(self._course, entry.item), (action.start, action.micro)
        hidden = flow.hidden.detach().to(device="cpu", dtype=WIRE_TYPES[self._cache.dtype])
        try:
            size_bytes = write_hidden(self._path(key, *place), hidden, flow.mask.cpu())
        except OSError as error:
            self._lose(f"{self._folder}: {error.strerror}")
            return ()
        sizes = self._files.setdefault(key, {})
        self.held_bytes += size_bytes - sizes.get(place, 0)
        self.max_held_bytes = max(self.max_held_bytes, self.held_bytes)
        sizes[place] = size_bytes
        return ()

    def read(self, action: Action, entry: OpenItem) -> tuple[()]:
        """Read the hidden state and mask of a micro-batch; raises ``IntegrityError``."""
        path = self._path(key_of(self._course, entry.item), action.start, action.micro)
        try:
            hidden, mask = read_hidden(path)
        except IntegrityError as error:
            raise IntegrityError(
                f"node {self._node} lost what it kept of a batch while the run needs it: {error}; go on with --resume, "
                "which begins with an empty cache"
            ) from error
        self.reads += 1
        self.read_bytes += hidden.nbytes + mask.nbytes
        self._flows.put(TensorKey(Payload.HIDDEN, action.seq, action.micro, action.start), hidden, mask)
        return ()

    def end_turn(self, index: int) -> str:
        """Delete files that no later turn reads, and check those that may be read next.

        Returns:
            Reason for which the cache can't continue; empty if there is none, or an earlier turn returned it.
        """
        turn = self._turns.pop(index, None)
        if turn is None:
            return ""
        self._delete_above(prefix_after(self._course, turn))
        if self._upcoming is not None and not self._problem:
            for key in self._upcoming.after(index):
                self._check(key)
        is_news, self._is_told = bool(self._problem) and not self._is_told, bool(self._problem)
        return self._problem if is_news else ""

    def _check(self, key: BatchKey) -> None:
        for boundary, micro in self._files.get(key, ()):
            try:
                read_hidden(self._path(key, boundary, micro))
            except IntegrityError as error:
                self._lose(str(error))
                return

    def _delete_above(self, prefix: int) -> None:
        """Delete files above a boundary, which no later turn can read."""
        if prefix >= self._prefix:
            return
        self._prefix = prefix
        for key, sizes in list(self._files.items()):
            for place in [place for place in sizes if place[0] > prefix]:
                self.held_bytes -= sizes.pop(place)
                try:
                    self._path(key, *place).unlink(missing_ok=True)
                except OSError as error:
                    self._lose(f"{self._path(key, *place)} can't be deleted: {error.strerror}")
            if not sizes:
                del self._files[key]

    def _lose(self, problem: str) -> None:
        self._problem = f"node {self._node} keeps no hidden states any more, the run goes on without: {problem}"
        _LOG.warning("%s", self._problem)

    def _path(self, key: BatchKey, boundary: int, micro: int) -> Path:
        kind = "eval" if key.is_evaluated else "train"
        return (self._folder or Path()) / f"{key.owner}.{kind}.{key.batch}.{micro}.{boundary}"


class _Upcoming:
    """Batches of the turns that may be granted next, each turn once."""

    def __init__(self, course: Course, start: StartPoint) -> None:
        self._course = course
        self._sequence = turn_sequence(course, start=start)
        self._known: deque[Turn] = deque()  # not yet returned by ``after``
        self._ends: dict[int, int] = {}
        self._last: Turn | None = None

    def after(self, index: int) -> Iterator[BatchKey]:
        """Yield the batches of turns that may be granted before the turn after ``index`` is done everywhere."""
        until = ITEMS_AHEAD + self._end_of(index + 1)
        while self._last is None or self._last.first_seq < until:
            if not self._pull():
                break
        while self._known and self._known[0].first_seq < until:
            turn = self._known.popleft()
            if is_cacheable(turn.kind):
                yield from (key_of(self._course, item) for item in items(self._course, turn))

    def _end_of(self, index: int) -> int:
        """End of turn ``index``, or of the last turn."""
        while self._last is None or self._last.index < index:
            if not self._pull():
                break
        for old in [old for old in self._ends if old < index]:
            del self._ends[old]
        return self._ends.get(index, self._last.end_seq if self._last else 0)

    def _pull(self) -> bool:
        turn = next(self._sequence, None)
        if turn is None:
            return False
        self._last = turn
        self._known.append(turn)
        self._ends[turn.index] = turn.end_seq
        return True


_MAGIC: Final = b"RTHIDDEN"
_HEADER: Final = struct.Struct("<8sIIIII")
_HEADER_BYTES: Final = 64  # so that the tensors are aligned
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float64)


def write_hidden(path: Path, hidden: torch.Tensor, mask: torch.Tensor) -> int:
    """Write a hidden state (B, T, D) and its mask (B, T), both on the CPU; return the file's bytes.

    Raises ``OSError``: the disk is full, or there is no folder; no partial file is left.
    """
    parts = [bytes_of(hidden.contiguous()), bytes_of(mask.to(torch.uint8).contiguous())]
    checksum = zlib.crc32(parts[1], zlib.crc32(parts[0]))
    header = _HEADER.pack(_MAGIC, *hidden.shape, _DTYPES.index(hidden.dtype), checksum)
    try:
        with path.open("wb") as file:
            file.write(header.ljust(_HEADER_BYTES, b"\0"))
            for part in parts:
                file.write(part)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return _HEADER_BYTES + sum(map(len, parts))


def read_hidden(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Map a file into memory; return hidden state (B, T, D) in its stored dtype, and mask (B, T) of bytes.

    Raises ``IntegrityError``: the file is missing, short or damaged.
    """
    try:
        with path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch needs a writable buffer
    except (OSError, ValueError) as error:
        raise IntegrityError(f"{path} can't be read: {getattr(error, 'strerror', None) or error}") from error
    if len(content) < _HEADER_BYTES:
        raise IntegrityError(f"{path} has {len(content)} bytes, it was longer")
    magic, rows, tokens, width, dtype, checksum = _HEADER.unpack_from(content)
    if magic != _MAGIC or dtype >= len(_DTYPES):
        raise IntegrityError(f"{path} is no hidden state")
    kind, count = _DTYPES[dtype], rows * tokens
    whole_bytes = _HEADER_BYTES + count * width * kind.itemsize + count
    with memoryview(content) as view, view[_HEADER_BYTES:] as payload:
        if len(content) != whole_bytes or not count or zlib.crc32(payload) != checksum:
            raise IntegrityError(f"{path} is damaged: it has another checksum or length than when it was written")
    hidden = torch.frombuffer(content, dtype=kind, count=count * width, offset=_HEADER_BYTES)
    mask = torch.frombuffer(content, dtype=torch.uint8, count=count, offset=whole_bytes - count)
    return hidden.view(rows, tokens, width), mask.view(rows, tokens)
