"""Bytes of adapters that users have of their own: of one block, where they are kept, and where they travel.

========================= ==================== ================================ =========================
where                     one set for all      alone                            collaboration
========================= ==================== ================================ =========================
at the host, in modules   the set              a set of each user               none: it is merged
at the helper             the set              a set of each user               a set of each user
back after an update      the set              sets of the users of an update   the sum of all sets
gradients at the helper   of the set           as many sets                     as many sets
========================= ==================== ================================ =========================

Which users an update changes depends on batches; counted are all users of the owner with the most of them, at most one
for each row, and with an interval of several steps as many for each step. The sum of linear models is as large as one
of them, that of others at most as large as all together, or as the block.
"""

from __future__ import annotations

from typing import NamedTuple

from ringtune.costs.profile import ModelFacts
from ringtune.models.adapter_config import is_all
from ringtune.models.auxiliary_config import LINEAR
from ringtune.schedule.course import Course
from ringtune.schedule.offload import ALONE
from ringtune.schedule.users import most_changed, user_sets


class SetBytes(NamedTuple):
    """Bytes of the adapters of one block whose adapters a helper fits.

    Attributes:
        hosted: in the modules of its host.
        held: at its helper.
        sent: of the weights that go back after an update.
        gradients: of the weights, at the helper.
        sets: how many sets there are; optimizer state is there of each.
    """

    hosted: int
    held: int
    sent: int
    gradients: int
    sets: int = 1


def set_bytes(course: Course, model: ModelFacts, *, adapter: str = "") -> SetBytes:
    """Return the bytes of a block's adapters where a helper fits them.

    Args:
        course: of the run.
        model: with its adapters.
        adapter: configuration; unknown = it may be of any kind.
    """
    one, offload = model.adapter_block_bytes, course.offload
    hosted = 0 if offload is not None and offload.merged else one
    count = len(user_sets(course))
    if offload is None or not count:
        return SetBytes(hosted, one, one, one)
    changed = most_changed(course) * one
    if offload.users == ALONE:
        return SetBytes(count * one, count * one, changed, changed, count)
    total = one if adapter and is_all(adapter, LINEAR) else min(count * one, max(one, model.block_bytes))
    return SetBytes(0, count * one, total, changed, count)
