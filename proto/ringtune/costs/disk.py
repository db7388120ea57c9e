"""How many bytes a run takes on a node's disk: optimizer state at rest, merged adapters, checkpoints, hidden states.

A host whose adapters a helper fits, and which holds them inside matrices, keeps them in a file: one set, or the sum of
those of all users. Shards of adapters are some megabytes and are not counted, but where helpers fit them: these may be
as large as the matrices, and of each user.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from ringtune.costs.memory.by_method.full_parameters import hosted_units, staying_units, trained_units
from ringtune.costs.memory.share import Share
from ringtune.costs.memory.sizes import Sizes
from ringtune.schedule.course import Course

_SHARDS: Final = 3
"""Shards of a node at once: those of the last two checkpoints, and the one that is being written."""


class DiskNeeds(NamedTuple):
    """Bytes that a run takes at most in a node's folder.

    Attributes:
        state_bytes: optimizer state of units that rest.
        checkpoint_bytes: of all checkpoints that are there at once.
        merged_bytes: adapters that the matrices have inside.
        cache_bytes: hidden states of rows that come again.
    """

    state_bytes: int = 0
    checkpoint_bytes: int = 0
    merged_bytes: int = 0
    cache_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of all of them."""
        return self.state_bytes + self.checkpoint_bytes + self.merged_bytes + self.cache_bytes


def disk_needs(course: Course, share: Share, sizes: Sizes) -> DiskNeeds:
    """Estimate what a run takes at most in the folder of a node, without the headers of files.

    Example: AdamW on a node whose units have 10 MB: state on disk takes 20 MB, a checkpoint 30 MB.
    """
    at_once = min(_SHARDS, _num_checkpoints(course))
    if not course.method.full_parameters:
        shard = _fitted_bytes(course, share, sizes)
        return DiskNeeds(merged_bytes=_merged_bytes(course, share, sizes), checkpoint_bytes=at_once * shard)
    trained = trained_units(course, share)
    state = sum(map(sizes.state_bytes, trained))
    saved = sum(map(sizes.state_bytes, staying_units(course, share))) if course.method.drops_state else state
    shard = saved + sum(map(sizes.trained_bytes, hosted_units(course, share)))
    return DiskNeeds(state if share.state_on_disk else 0, at_once * shard)


def _fitted_bytes(course: Course, share: Share, sizes: Sizes) -> int:
    """Bytes of a shard's adapters that are fitted here for others, with moments, and of those that others fit."""
    fitted = sum(stop - start for ranges in share.helps for start, stop in ranges)
    own = sum(stop - start for start, stop in share.helped)
    has_sums = course.offload is not None and course.offload.interval > 1
    of_helper = sizes.helped.held + sizes.sets_state_bytes + (sizes.helped.gradients if has_sums else 0)
    return fitted * of_helper + own * (sizes.helped.hosted or sizes.helped.sent)


def _merged_bytes(course: Course, share: Share, sizes: Sizes) -> int:
    """Bytes of the adapters of hosted blocks that helpers fit and matrices have inside: as many as travel."""
    if course.offload is None or not course.offload.merged:
        return 0
    return sizes.helped.sent * sum(stop - start for start, stop in share.helped)


def _num_checkpoints(course: Course) -> int:
    """At most so many: they come at the end of a turn."""
    if not course.checkpoint_every:
        return 0
    return math.ceil(course.num_steps / max(course.checkpoint_every, course.local_iterations))
