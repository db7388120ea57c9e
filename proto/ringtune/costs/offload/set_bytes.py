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
of them, that of others at most as large as all together, or as the block. Where users have several kinds of adapters
those with the largest sets are taken to change, and the sum is at most as large as the matrices beside all kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ringtune.costs.kind_facts import KindFacts
from ringtune.costs.profile import ModelFacts
from ringtune.models.adapters.adapter_config import is_all
from ringtune.models.adapters.auxiliary_config import LINEAR
from ringtune.schedule.course import Course
from ringtune.schedule.helping.offload import ALONE
from ringtune.schedule.whose_rows.users import most_changed, user_sets


class SetBytes(NamedTuple):
    """Bytes of the adapters of one block whose adapters a helper fits.

    Attributes:
        hosted: in the modules of its host.
        held: at its helper.
        sent: of the weights that go back after an update.
        gradients: of the weights, at the helper.
    """

    hosted: int
    held: int
    sent: int
    gradients: int


def set_bytes(course: Course, model: ModelFacts, *, adapter: str = "") -> SetBytes:
    """Return the bytes of a block's adapters where a helper fits them.

    Args:
        course: of the run.
        model: with its adapters.
        adapter: configuration; unknown = it may be of any kind.
    """
    one, offload = model.adapter_block_bytes, course.offload
    hosted = 0 if offload is not None and offload.merged else one
    users = user_sets(course)
    if offload is None or not users:
        return SetBytes(hosted, one, one, one)
    own = sorted((kind.adapter_block_bytes for kind in kinds_of_users(model, users)), reverse=True)
    changed, held = sum(own[: most_changed(course)]), sum(own)
    if offload.users == ALONE:
        return SetBytes(held, held, changed, changed)
    if model.kinds:
        return SetBytes(0, held, max(own[0], model.beside_block_bytes), changed)
    is_linear = bool(adapter) and is_all(adapter, LINEAR)
    return SetBytes(0, held, one if is_linear else min(held, max(one, model.block_bytes)), changed)


def kinds_of_users(model: ModelFacts, users: Sequence[str]) -> list[ModelFacts | KindFacts]:
    """The sizes of each user's adapters in a block; without users those of the set that all have."""
    chosen = {user: kind for kind in model.kinds for user in kind.users}
    return [chosen.get(user, model) for user in users] or [model]
