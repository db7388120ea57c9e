"""Offload: what of helpers (``schedule.helpers``) a result depends on; a course without it trains as without helpers.

A helper that fits after every step, from exact pairs, gives the weights of local training, and is of the placement
alone. With an interval of I it adds up the gradients of I steps, and then updates once; the steps that are left over at
the end of the run are one more update. With an interval of 4 a run of 10 steps::

    step          0  1  2  3  4  5  6  7  8  9
    updates after             1           2     3

With overlap a host installs the update of a step when the backward of the next step of its turn is through. It never
holds two versions, and its forwards see all updates but that of the step before; a turn ends with everything installed.
The helper fits the pairs at its newest weights::

    step            0  1  2  3 | 4  5         a turn of four steps
    forward sees    0  0  1  2 | 4  4

Source: ColA, section 3.2 (adaptation interval) and Algorithm 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ringtune.errors import PlanError
from ringtune.files.strict import read_dataclass
from ringtune.schedule.saving import check_ranges, in_ranges, ranges_from_json, ranges_to_json
from ringtune.schedule.units import Range

EXACT: Final = "float32"
PAIRS: Final = (EXACT, "bfloat16", "velora")
"""How pairs travel: as they were computed, rounded to 16 bits, or with projections of inputs (``schedule.saving``)."""

JOINT: Final = "joint"
ALONE: Final = "alone"
COLLABORATION: Final = "collaboration"
USERS: Final = (JOINT, ALONE, COLLABORATION)
"""Whose adapters a row goes through: those of all users together, its user's own, or the sum of all users' own."""


_MERGING: Final = {
    ALONE: "gives each row the adapters of its user, which are beside the matrix and not inside",
    COLLABORATION: "adds the adapters of all users to one matrix",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Manner:
    """How helpers fit adapters, as far as the result depends on it.

    Attributes:
        interval: steps of a block whose gradients are added up for one update.
        pairs: one of ``PAIRS``.
        merged: whether a host holds the adapters inside the matrices beside them, with the rounding of a matrix.
        overlap: whether a host goes on to the next step of a turn before its helper has updated; see ``Offload.lag``.
        users: one of ``USERS``; which rows are whose is in ``schedule.whose_rows.users``.
    """

    interval: int = 1
    pairs: str = EXACT
    merged: bool = False
    overlap: bool = False
    users: str = JOINT

    def __post_init__(self) -> None:
        """Refuse an unknown word, an interval below 1, and users whose adapters can't be merged so, or have to be.

        Raises:
            PlanError: names the value.
        """
        if self.interval < 1:
            raise PlanError(f"offload.interval is {self.interval}, it has to be at least 1")
        if self.pairs not in PAIRS:
            raise PlanError(f"offload.pairs = {self.pairs!r} is not one of {', '.join(PAIRS)}")
        if self.users not in USERS:
            raise PlanError(f"offload.users = {self.users!r} is not one of {', '.join(USERS)}")
        if self.users != JOINT and self.merged != (self.users == COLLABORATION):
            raise PlanError(
                f"offload.users = {self.users!r} {_MERGING[self.users]}; set offload.merged = "
                f"{'false' if self.merged else 'true'}"
            )

    @property
    def has_users(self) -> bool:
        """Whether each user has adapters of their own."""
        return self.users != JOINT

    @property
    def is_exact(self) -> bool:
        """Whether the weights are those of local training."""
        return (self.interval, self.pairs, self.merged, self.overlap, self.users) == (1, EXACT, False, False, JOINT)


IN_STEP: Final = Manner()
"""After every step, from exact pairs, with the host waiting: the weights are those of local training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offload(Manner):
    """What a result depends on where helpers fit adapters.

    Attributes:
        blocks: ranges of blocks whose adapters helpers fit, ascending.
    """

    blocks: tuple[Range, ...]

    def __post_init__(self) -> None:
        """Refuse ranges that are none, and what ``Manner`` refuses.

        Raises:
            PlanError: names the value.
        """
        Manner.__post_init__(self)
        check_ranges(self.blocks, where="offload.blocks")
        if not self.blocks:
            raise PlanError("offload.blocks is empty; name blocks, or leave offload out")

    @property
    def manner(self) -> Manner:
        """How helpers fit, without which blocks."""
        return Manner(**{entry.name: getattr(self, entry.name) for entry in dataclasses.fields(Manner)})

    def lag(self, unit: int) -> int:
        """How many steps of a turn a forward of a block is behind: 1 with overlap, where a helper fits the block."""
        return 1 if self.overlap and self.has_block(unit) else 0

    def has_block(self, unit: int) -> bool:
        """Whether a helper fits the adapters of a block; embedding and head stay with their owner."""
        return in_ranges(unit, self.blocks)

    def updates(self, steps: int, *, is_over: bool) -> int:
        """Updates of a block after so many steps that trained it.

        Args:
            steps: that trained it.
            is_over: whether the run is at its end.
        """
        whole, rest = divmod(steps, self.interval)
        return whole + (1 if is_over and rest else 0)

    def rate_at(self, step: int, num_steps: int) -> tuple[int, int]:
        """Where the learning rate of a helper's update stands: updates before it, and updates of the whole run."""
        return step // self.interval, -(-num_steps // self.interval)

    def to_json(self) -> dict[str, Any]:
        """Write the record as a JSON-able table."""
        return {**dataclasses.asdict(self), "blocks": ranges_to_json(self.blocks)}

    @staticmethod
    def from_json(value: object, *, where: str = "offload") -> Offload:
        """Read what ``to_json`` wrote.

        Raises:
            PlanError: a field is missing or unknown, or a rule is broken.
        """
        given: dict[str, object] = {}
        if isinstance(value, Mapping) and "blocks" in value:
            given["blocks"] = ranges_from_json(value["blocks"], where=f"{where}.blocks")
        return read_dataclass(Offload, value, where=where, error=PlanError, given=given)
