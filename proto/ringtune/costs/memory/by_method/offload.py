"""Memory of blocks whose adapters a helper fits: at their host, and at the helper.

The host keeps no gradients and no optimizer state of these adapters, but pairs until they are on their way: at most
those of all micro-batches of one item, and one more while it is packed. Where the next item does not wait for an update
they are those of two items. Where a block keeps more for its backward than its pairs, they take the place of graphs
that are gone, and those of two micro-batches come on top. A helper holds adapters with gradients and state, and no
other weights of the blocks; pairs of ``WAITING`` micro-batches a link, and those that it fits at the moment twice, as
they came and as they are computed with. Weights that go back lie at either end; with overlap those of two updates do.
A host with merged adapters holds none; they are in a file. What users with adapters of their own take of each is in
``costs.offload.set_bytes``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ringtune.costs.memory.share import Share
from ringtune.costs.memory.sizes import Sizes
from ringtune.costs.memory.terms import Term
from ringtune.schedule.actions import Payload
from ringtune.schedule.course import Course
from ringtune.schedule.exchanges.parcels import WAITING
from ringtune.schedule.helping.offload import IN_STEP
from ringtune.schedule.saving import within
from ringtune.schedule.turns.versions import ever_trained
from ringtune.schedule.units import Range

_AT_WORK = 2


def offload_terms(course: Course, share: Share, sizes: Sizes) -> Iterable[Term]:
    """Yield what a node holds besides because helpers fit its adapters, and because it is a helper."""
    micro, trained = course.microbatch_sizes(), ever_trained(course)
    pair = round(sizes.pair_bytes(micro[0] * course.max_length))
    helped = _trained(trained.ranges, share.helped)
    manner = course.offload.manner if course.offload is not None else IN_STEP
    waits = not (manner.overlap or manner.interval > 1)
    late = 0 if waits else len(micro)  # the next item has graphs again
    count = late + (_AT_WORK if _graphs_are_larger(course, share, sizes) else len(micro) + 1)
    yield Term("buffers", "pairs of a block until they are sent", helped * count, pair)
    updates = 2 if manner.overlap else 1
    own = sum(stop - start for start, stop in share.helped)
    yield Term("adapters", "adapter of a block that a helper fits", own, sizes.helped.hosted)
    yield Term("buffers", "adapter that a helper sent", updates * helped, sizes.helped.sent)
    links = [[_trained(trained.ranges, (one,)) for one in ranges] for ranges in share.helps]
    largest = [max(blocks) for blocks in links]
    waiting = WAITING[Payload.PAIRS] * sum(largest) + _AT_WORK * max(largest, default=0)
    fitted = sum(map(sum, links))
    hosted = sum(stop - start for ranges in share.helps for start, stop in ranges)
    yield Term("adapters", "adapter of a block that another node hosts", hosted, sizes.helped.held)
    both = sizes.helped.gradients + sizes.sets_state_bytes
    yield Term("optimizer", "gradient and moments of an adapter that is fitted for another node", fitted, both)
    yield Term("buffers", "pairs of a block that wait to be fitted", waiting, pair)
    yield Term("buffers", "adapter on its way to its host", updates * fitted, sizes.helped.sent)


def _graphs_are_larger(course: Course, share: Share, sizes: Sizes) -> bool:
    """Whether each helped block keeps more for its backward than pairs: then these take the place of a graph that goes.

    Both are there of the micro-batch that is in its backward, and pairs twice of the one that is packed.
    """
    if any(within(share.recompute, start, stop) for start, stop in share.helped):
        return False
    tokens = course.microbatch_sizes()[0] * course.max_length
    kept = min(sizes.kept_bytes(tokens), tokens * (sizes.lowest_token_bytes or math.inf))
    return sizes.pair_bytes(tokens) <= kept


def _trained(trained: Sequence[Range], ranges: Iterable[Range]) -> int:
    """How many blocks of some ranges ever train."""
    return sum(max(0, min(stop, last) - max(start, first)) for first, last in ranges for start, stop in trained)
