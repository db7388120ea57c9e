"""Method ``hift``: all parameters train, one group of units at a step, in turn.

Units are embedding, blocks and head. Those that are not always active form groups of m consecutive units, from the
embedding up; the last group may be smaller. A sweep trains every group once, in an order that is fixed for the run.
Four blocks and the head always active, m = 2, bottom2up ::

    units    -1  0  1  2  3  4        step      0      1     2     3      4     5
    group     0  0  1  1  2  always   trains    -1,0,4 1,2,4 3,4   -1,0,4 1,2,4 3,4
                                      sweep     0      0     0     1      1     1

The learning rate is constant during a sweep.

Source: HiFT, section 3 and Algorithm 1. "Random only shuffles the grouping order before training"; the number of groups
is rounded up.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated, Any, Final

from ringtune.errors import PlanError
from ringtune.schedule.batches import RandomStream
from ringtune.schedule.methods.base import Method, method
from ringtune.schedule.run_shape import Extent
from ringtune.schedule.units import EMBEDDING, Units, head_of
from ringtune.storage.strict import Bounds, OneOf, check_fields

BOTTOM_UP: Final = "bottom2up"
TOP_DOWN: Final = "top2down"
RANDOM: Final = "random"
ORDERS: Final = (BOTTOM_UP, TOP_DOWN, RANDOM)
ALWAYS: Final = ("embedding", "head")
"""Units that ``always_active`` may have."""

MEMORY: Final = "memory"
DROP: Final = "drop"
DISK: Final = "disk"
STATES: Final = (MEMORY, DROP, DISK)
"""Where the optimizer state of groups is kept between their steps; only ``drop`` changes the result."""


@method
@dataclass(frozen=True, kw_only=True, slots=True)
class Hift(Method):
    """All parameters train, one group of units at a step.

    Attributes:
        group_size: units of a group, m.
        order: of the groups in a sweep, one of ``ORDERS``.
        seed: of the random order; 0 for the others.
        always_active: units that train at every step and are in no group; some of ``ALWAYS``.
        drops_state: whether the optimizer state of a group is dropped after its step.
    """

    name = "hift"
    section = "hift"
    full_parameters = True

    group_size: Annotated[int, Bounds(ge=1)] = 1
    order: Annotated[str, OneOf(ORDERS)] = BOTTOM_UP
    seed: int = 0
    always_active: Annotated[tuple[str, ...], OneOf(ALWAYS)] = ()
    drops_state: bool = False

    def __post_init__(self) -> None:
        """Refuse units or an order that do not exist, and a group without units; raises ``PlanError``."""
        check_fields(self, where="", error=PlanError)
        if len(set(self.always_active)) != len(self.always_active):
            raise PlanError(f"always_active has a unit twice: {list(self.always_active)}")

    # ---- groups and sweeps ------------------------------------------------------------------------

    def groups(self, num_blocks: int, frozen_blocks: int = 0) -> tuple[Units, ...]:
        """Return the groups of a model in the order of a sweep, without the units always active.

        Frozen blocks, and with them the embedding below, are in no group.
        """
        return _groups(self, num_blocks, frozen_blocks)

    def always(self, num_blocks: int) -> Units:
        """Return the units that train at every step."""
        numbers = {"embedding": EMBEDDING, "head": head_of(num_blocks)}
        return Units.of(num_blocks, (numbers[unit] for unit in self.always_active))

    def num_sweeps(self, extent: Extent) -> int:
        """Number of sweeps that the run begins: 10 steps with 4 groups begin 3."""
        return -(-extent.num_steps // self.period(extent))

    # ---- trained units ----------------------------------------------------------------------------

    def trained(self, extent: Extent, step: int) -> Units:
        """Return the units of the step's group, and those that are always active."""
        kinds = _trained(self, extent.num_blocks, extent.frozen_blocks)
        return kinds[step % len(kinds)]

    def reach(self, extent: Extent) -> Units:
        """Return every unit that is not frozen, unless the run ends within its first sweep."""
        kinds = _trained(self, extent.num_blocks, extent.frozen_blocks)[: max(0, extent.num_steps)]
        return Units.of(extent.num_blocks, {unit for units in kinds for unit in units})

    def updates(self, extent: Extent, unit: int, step: int) -> int:
        """One update per sweep after the unit's step in it; one per step for a unit always active.

        Example: of three groups the second one has its updates at the steps 1, 4 and 7: two before step 7.
        """
        place = _places(self, extent.num_blocks, extent.frozen_blocks).get(unit)
        if place is None:
            return max(0, step) if unit in self.always(extent.num_blocks) else 0
        return max(0, -(-(step - place) // self.period(extent)))

    def period(self, extent: Extent) -> int:
        """Steps of a sweep: the number of groups."""
        return len(self.groups(extent.num_blocks, extent.frozen_blocks))

    def rate_at(self, extent: Extent, step: int) -> tuple[int, int]:
        """Sweeps before that of ``step``, and sweeps of the whole run."""
        return step // self.period(extent), self.num_sweeps(extent)

    # ---- settings ---------------------------------------------------------------------------------

    @classmethod
    def from_settings(cls, settings: Any, *, seed: int = 0) -> Method:
        """Make the method from ``[hift]`` (``techniques.full_parameters.HiftSettings``)."""
        if settings is None:
            return cls()
        return cls(
            group_size=settings.group_size,
            order=settings.order,
            seed=seed if settings.order == RANDOM else 0,
            always_active=tuple(unit for unit in ALWAYS if unit in settings.always_active),
            drops_state=settings.state == DROP,
        )

    def check(self, extent: Extent) -> None:
        """Refuse an embedding that is always active below frozen blocks with ``PlanError``."""
        if extent.frozen_blocks and "embedding" in self.always_active:
            raise PlanError(
                f"the method hift has the embedding always active, but the lowest {extent.frozen_blocks} blocks are "
                "frozen, and it with them; set privacy.private_blocks = 0, or leave it out of hift.always_active"
            )


@functools.lru_cache(maxsize=64)
def _groups(hift: Hift, num_blocks: int, frozen_blocks: int) -> tuple[Units, ...]:
    always = hift.always(num_blocks)
    lowest = frozen_blocks or EMBEDDING
    units = [unit for unit in range(lowest, head_of(num_blocks) + 1) if unit not in always]
    starts = range(0, len(units), hift.group_size)
    groups = [Units.of(num_blocks, units[start : start + hift.group_size]) for start in starts]
    if hift.order == TOP_DOWN:
        groups.reverse()
    elif hift.order == RANDOM:
        order = RandomStream("hift", hift.seed).permutation(len(groups))
        groups = [groups[index] for index in order]
    return tuple(groups)


@functools.lru_cache(maxsize=64)
def _trained(hift: Hift, num_blocks: int, frozen_blocks: int) -> tuple[Units, ...]:
    always = tuple(hift.always(num_blocks))
    return tuple(Units.of(num_blocks, (*group, *always)) for group in _groups(hift, num_blocks, frozen_blocks))


@functools.lru_cache(maxsize=64)
def _places(hift: Hift, num_blocks: int, frozen_blocks: int) -> dict[int, int]:
    groups = _groups(hift, num_blocks, frozen_blocks)
    return {unit: place for place, group in enumerate(groups) for unit in group}
