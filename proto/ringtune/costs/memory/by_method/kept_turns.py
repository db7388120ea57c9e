"""What a node keeps of the ends of the last turns, its own and copies of others, so that a run can go back to one.

A file has weights and optimizer state of the trained blocks. A host of blocks [2, 4) that keeps copies for one of
[0, 2), all of which train: four files of each, of which one is being made or is coming. An owner keeps its head as
well, for each of its own turns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ringtune.costs.memory.share import Share
from ringtune.costs.memory.sizes import Sizes
from ringtune.costs.memory.terms import Term
from ringtune.schedule.changing_hands.copy_holders import TURNS_KEPT
from ringtune.schedule.course import Course
from ringtune.schedule.turns.versions import ever_trained
from ringtune.schedule.units import EMBEDDING

OWN_TURNS: Final = "trained block, as it was at the end of a turn"
COPIES: Final = "the same of another host"
HEADS: Final = "head, as it was at the end of a turn"
_FILES: Final = TURNS_KEPT + 1


def kept_turn_terms(course: Course, share: Share, sizes: Sizes) -> Iterable[Term]:
    """The terms of what a node keeps of the ends of turns; none where its placement keeps nothing."""
    if share.copies is None or not course.num_steps:
        return
    reach = ever_trained(course)
    block = sizes.adapter_bytes + sizes.adapter_state_bytes
    yield Term("kept", OWN_TURNS, _FILES * _trained(reach.ranges, share.start, share.stop), block)
    yield Term("kept", COPIES, _FILES * sum(_trained(reach.ranges, *one) for one in share.copies), block)
    if share.is_owner and reach.has_head:
        yield Term("kept", HEADS, _FILES, sizes.head_bytes + sizes.head_state_bytes)


def end_of_turn_bytes(course: Course, share: Share, sizes: Sizes) -> int:
    """Bytes of weights and state that a node has trained at most, which it would copy at the end of each turn."""
    ends = (EMBEDDING, course.head) if share.is_owner else ()
    reach = ever_trained(course)
    units = [unit for unit in (*range(share.start, share.stop), *ends) if unit in reach]
    return sum(sizes.trained_bytes(unit) + sizes.state_bytes(unit) for unit in units)


def _trained(ranges: Iterable[tuple[int, int]], start: int, stop: int) -> int:
    return sum(max(0, min(stop, last) - max(start, first)) for first, last in ranges)
