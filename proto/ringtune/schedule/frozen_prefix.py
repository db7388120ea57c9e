"""The frozen prefix of a run: blocks without an update so far, and the boundary where hidden states are worth keeping.

A batch's composition is fixed for the run, so the same rows return in every pass over the rows of its owner, and in
every evaluation. As long as no block below a boundary was trained, the same hidden state enters there.

Example: six blocks, one more trains every 20 steps, and a batch with visits at steps 3, 23, 43 and 53. Below the lowest
trained block there are 5, 4, 3 and 3. A hidden state kept at boundary 3 at step 3 saves 3 blocks at three visits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final, NamedTuple

from ringtune.schedule.batches import num_batches
from ringtune.schedule.course import Course
from ringtune.schedule.placement import ITEM_BYTES, Placement
from ringtune.schedule.stages import hosts_of_lane, lane_of
from ringtune.schedule.turns import Item, StepKind, Turn
from ringtune.schedule.versions import trained, weight_version

VISITS_AHEAD: Final = 64
"""Visits of a batch that count for the choice of its boundary."""

_CACHED: Final = (StepKind.TRAIN, StepKind.EVALUATE)
_HEADER_BYTES: Final = 4096


def may_come_again(kind: StepKind) -> bool:
    """Whether items of this kind are kept, and read."""
    return kind in _CACHED


def frozen_prefix(course: Course, kind: StepKind, step: int) -> int:
    """How many of the lowest blocks get no gradient in an item and have had no update; the highest block never counts.

    Example: of six blocks the upper two train. Then this is 4, also for an evaluation.

    Args:
        course: in which the run's decisions are settled.
        kind: of the item.
        step: of the item.
    """
    return _frozen_prefix(course.plain, kind, step)


@functools.lru_cache(maxsize=4096)
def _frozen_prefix(course: Course, kind: StepKind, step: int) -> int:
    most = min(course.num_blocks - 1, max(0, trained(course, kind, step).lowest))
    return next((block for block in range(most) if weight_version(course, block, step)), most)


def prefix_after(course: Course, turn: Turn) -> int:
    """The highest boundary at which a batch is of use after a turn; hidden states kept above it are deleted then.

    Example: of six blocks the upper two train in the last step of a turn. Then this is 4; it never grows.

    Args:
        course: of the run.
        turn: as it was granted.
    """
    if not may_come_again(turn.kind):
        return course.num_blocks
    decided = course.decided(turn.unfreeze_at, turn.operations)
    return frozen_prefix(decided, turn.kind, max(turn.first_step, turn.end_step - 1))


def boundary_to_keep(prefixes: Sequence[int]) -> int:
    """The boundary at which to keep a batch that is embedded now; 0 if that is of no use.

    A batch that enters at a boundary can't be kept below it, so a later visit that trains a lower block has to begin at
    the embedding again, and is then kept anew. The boundary is that by which all visits together save the most blocks.

    Args:
        prefixes: the frozen prefix at this visit and at later ones; it never grows.
    """
    found, _ = _best(tuple(prefixes))
    return found


@functools.lru_cache(maxsize=1024)
def _best(prefixes: tuple[int, ...]) -> tuple[int, int]:
    """The boundary for the first visit, and the blocks that all visits save with the best one at each whole visit."""
    count = len(prefixes)
    ends = [at for at in range(count) if at + 1 == count or prefixes[at + 1] < prefixes[at]]
    saved = [0] * (count + 1)
    boundary = 0
    for first in reversed(range(count)):
        last, most = first, saved[first + 1]
        for end in ends:
            if end > first and (value := (end - first) * prefixes[end] + saved[end + 1]) > most:
                last, most = end, value
        saved[first] = most
        boundary = prefixes[last] if last > first else 0
    return boundary, saved[0]


def entry_bytes(course: Course, placement: Placement, host: str, rows: int) -> int:
    """Bytes that a host keeps at most of a batch of so many rows: with hidden state, mask and header of each file.

    Rows are counted with ``max_length`` tokens; what is kept is shorter where the longest row of the batch is. Of
    replicas each keeps the micro-batches that pass it.

    Args:
        course: of the run.
        placement: that has a cache.
        host: of the boundary where the batch is kept.
        rows: of the batch.
    """
    if placement.cache is None:
        return 0
    row_bytes = course.max_length * (course.hidden_size * ITEM_BYTES[placement.cache.dtype] + 1)
    own = [size for micro, size in enumerate(course.microbatch_sizes(rows)) if _passes(placement, host, micro)]
    return sum(own) * row_bytes + len(own) * _HEADER_BYTES


def _passes(placement: Placement, host: str, micro: int) -> bool:
    return any(piece.node == host for piece in hosts_of_lane(placement, lane_of(placement, micro)))


def most_kept_bytes(course: Course, placement: Placement, host: str) -> int:
    """Bytes that a host keeps at most: no more than the limit, and than all batches of all owners take."""
    if placement.cache is None:
        return 0
    whole = 0
    for owner in course.owners:
        rows, each = course.batch_rows(owner), course.batch_size
        whole += num_batches(owner.train_rows, rows) * entry_bytes(course, placement, host, rows)
        parts = [min(each, owner.eval_rows - first) for first in range(0, owner.eval_rows, each)]
        whole += sum(entry_bytes(course, placement, host, part) for part in parts)
    return min(placement.cache.max_bytes, whole)


def hosts_at(placement: Placement, boundary: int) -> tuple[str, ...]:
    """The hosts of the block at a boundary, which keep the hidden state that enters it; none if it is private."""
    return tuple(piece.node for piece in placement.hosts if piece.start <= boundary < piece.stop)


def why_no_cache(course: Course, has_helpers: bool) -> str:
    """Why hosts of a run can't keep what leaves its frozen prefix, with what could be done; empty if they can."""
    if course.method.full_parameters:
        return f"{course.method.name} trains all parameters, so that no prefix stays frozen; use an adapter"
    if course.may_skip:
        return "operation tables let each micro-batch pass other blocks; use operations.policy = 'standard'"
    if course.offload is not None or has_helpers:
        return "helpers fit the adapters of some blocks; use offload.mode = 'off'"
    return ""


class Key(NamedTuple):
    """The name of a batch with later visits.

    Attributes:
        owner: of the rows.
        is_evaluated: whether it is a batch of an evaluation.
        batch: its id, or its index among the batches of an evaluation.
    """

    owner: str
    is_evaluated: bool
    batch: int


def key_of(course: Course, item: Item) -> Key:
    """The batch of an item."""
    is_evaluated = item.kind is StepKind.EVALUATE
    return Key(item.owner, is_evaluated, item.batch if is_evaluated else course.batch_id(item.owner, item.batch))
