"""How a run chooses its operation tables: which scores, under which capacities, and how often anew.

The run gathers scores in a pass without updates, the coordinator solves the knapsacks, and the table that comes out is
a decision of the run: it holds from the next turn on, each turn carries it, and the books have it.

Source: D2FT, section II-A.3 (scores) and II-B (capacities C^pf and C^po of each subnet's device).
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ringtune.errors import PlanError, RingTuneError
from ringtune.files.strict import read_dataclass
from ringtune.schedule.operations.given import GivenTable, check_tables
from ringtune.schedule.operations.table import Operations


class Score(enum.StrEnum):
    """What a subnet counts for a micro-batch; w are its weights, g their gradients for that micro-batch."""

    FISHER = "fisher"  # sum of g * g
    WEIGHT_MAGNITUDE = "weight-magnitude"  # sum of |w|, the same for every micro-batch
    GRADIENT_MAGNITUDE = "gradient-magnitude"  # sum of |g|
    TAYLOR = "taylor"  # sum of |g * w|

    @property
    def needs_gradient(self) -> bool:
        """Whether it takes a backward to know it."""
        return self is not Score.WEIGHT_MAGNITUDE


class Policy(enum.StrEnum):
    """What makes a table of scores."""

    STANDARD = "standard"  # everything is full
    TWO_STAGE = "two-stage"  # D2FT, Algorithm 1: full operations first, forward-only ones among the rest
    JOINT = "joint"  # one multiple-choice knapsack over both
    RANDOM = "random"  # each subnet draws by lot, with the same counts
    MAGNITUDE = "magnitude"  # subnets of small weights are passed by for all micro-batches
    MAGNITUDE_GRADIENT = "magnitude-gradient"  # so are subnets of small weights and gradients

    @property
    def is_pruning(self) -> bool:
        """Whether it passes whole subnets by, for all micro-batches of a while."""
        return self in (Policy.MAGNITUDE, Policy.MAGNITUDE_GRADIENT)


UNDEFINED_POLICIES: Final = {
    "gshard": "the paper compares with it, but does not say where the gating networks of a pre-trained model and their "
    "weights come from, how many experts a row takes, and what capacity an expert has",
}
"""Policies of the paper that can't be built from what it says, and what is missing."""


class Ties(enum.StrEnum):
    """Which micro-batches a subnet prefers where scores tie, as weight magnitudes always do."""

    SPREAD = "spread"  # other ones than its neighbours, so that each micro-batch has as many full subnets
    TOGETHER = "together"  # the same ones as all others, so that whole micro-batches are full, or pass all blocks by


WORDS: Final[Mapping[str, type[enum.StrEnum]]] = {
    "policy": Policy,
    "backward_score": Score,
    "forward_score": Score,
    "ties": Ties,
}
"""The keys of operations that are words, and the words that each may be."""

PRUNING_STEPS: Final = 16
"""Steps after which the pruning policies choose anew (D2FT, section III-A)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCapacity:
    """What the subnets of one block may do for the micro-batches of one batch, each of them by itself.

    Attributes:
        full: seconds, or any other measure, of full operations: C^pf.
        forward_only: the same of forward-only operations: C^po.
        forward: cost of a forward for one row, c^f.
        backward: cost of a backward for one row, c^b.
    """

    full: float
    forward_only: float
    forward: float
    backward: float

    def __post_init__(self) -> None:
        """Refuse what is no cost or capacity; 0 is 0.0, as it is read again, so that digests are equal."""
        for entry in dataclasses.fields(self):
            object.__setattr__(self, entry.name, float(getattr(self, entry.name)))
        values = dataclasses.astuple(self)
        if not all(math.isfinite(value) and value >= 0 for value in values) or self.forward + self.backward <= 0:
            raise PlanError(f"capacities and costs have to be at least 0 and finite, not {list(values)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """How a run chooses its operation tables.

    Attributes:
        policy: a value of ``Policy``.
        subnets: of each block.
        capacities: of each block, from block 0 on; one for all blocks if there is one.
        backward_score: a value of ``Score``, by which full operations are chosen.
        forward_score: a value of ``Score``, by which forward-only operations are chosen.
        score_scale: what a forward score counts against a backward score where both are chosen together, each in
            parts of its mean over the job.
        refresh_steps: a table is chosen anew at the first turn after so many steps; 0 = once, before training.
        groups: ranges [start, stop) of blocks, ascending; all blocks of one have the same operations, so that the node
            which hosts them can be passed by. Blocks in none of them have operations of their own.
        ties: a value of ``Ties``.
        is_counted: whether capacities are of micro-batches, whatever their rows, so that counts are exact; otherwise
            they are of rows, which no choice exceeds.
        tables: that another run has chosen; they hold from their steps on, and nothing is scored or chosen.
    """

    policy: str
    subnets: int
    capacities: tuple[BlockCapacity, ...]
    backward_score: str = Score.WEIGHT_MAGNITUDE.value
    forward_score: str = Score.FISHER.value
    score_scale: float = 1.0
    refresh_steps: int = 0
    groups: tuple[tuple[int, ...], ...] = ()
    ties: str = Ties.SPREAD.value
    is_counted: bool = False
    tables: tuple[GivenTable, ...] = ()

    def __post_init__(self) -> None:
        """Refuse an unknown policy or score, and numbers that can't be meant."""
        check_words(self, PlanError)
        if self.subnets < 1 or self.refresh_steps < 0 or not (self.capacities or self.tables):
            raise PlanError("operations need at least one subnet a block, one capacity, and no negative refresh_steps")
        if self.tables:
            check_tables(self.tables)
        object.__setattr__(self, "score_scale", float(self.score_scale))
        if not (math.isfinite(self.score_scale) and self.score_scale > 0):
            raise PlanError(f"operations.score_scale is {self.score_scale}, it has to be above 0")
        _check_groups(self.groups, self.subnets)

    @property
    def by_slice(self) -> bool:
        """Whether whole ranges of blocks have the same operations."""
        return bool(self.groups)

    @property
    def prunes(self) -> bool:
        """Whether whole subnets are passed by, for all micro-batches of a while."""
        return not self.tables and Policy(self.policy).is_pruning

    @property
    def scores(self) -> tuple[Score, ...]:
        """The scores that have to be gathered: those that something is chosen by."""
        if self.tables:
            return ()
        match Policy(self.policy):
            case Policy.STANDARD | Policy.RANDOM:
                return ()
            case Policy.MAGNITUDE:
                return (Score.WEIGHT_MAGNITUDE,)
            case Policy.MAGNITUDE_GRADIENT:
                return (Score.WEIGHT_MAGNITUDE, Score.GRADIENT_MAGNITUDE)
        if self.policy == Policy.TWO_STAGE and not any(each.forward_only for each in self.capacities):
            return (Score(self.backward_score),)
        return tuple(dict.fromkeys((Score(self.backward_score), Score(self.forward_score))))

    def capacity(self, block: int) -> BlockCapacity:
        """The capacity of one block's subnets."""
        return self.capacities[block] if len(self.capacities) > 1 else self.capacities[0]

    # ---- given tables -----------------------------------------------------------------------------

    @staticmethod
    def given(tables: Sequence[GivenTable]) -> Choice:
        """The choice that repeats what another run has chosen.

        Raises:
            PlanError: no run has chosen such tables.
        """
        check_tables(tables)
        return Choice(
            policy=Policy.STANDARD.value,
            subnets=tables[0].operations.subnets,
            capacities=(),
            tables=tuple(tables),
        )

    def given_at(self, step: int) -> Operations | None:
        """The table that was given for a step; None if none begins to hold there."""
        return next((table.operations for table in self.tables if table.step == step), None)

    # ---- files ------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Write the choice as a JSON-able table; without ``tables`` where none are given."""
        value = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        value["capacities"] = [dataclasses.asdict(capacity) for capacity in self.capacities]
        value["tables"] = [table.to_json() for table in self.tables]
        if not self.tables:
            del value["tables"]
        return value

    @staticmethod
    def from_json(value: object, *, where: str = "choice") -> Choice:
        """Read what ``to_json`` wrote.

        Raises:
            PlanError: a field is missing or unknown, or a rule is broken.
        """
        given: dict[str, object] = {}
        if isinstance(value, Mapping) and "tables" in value:
            entries = value["tables"]
            if not isinstance(entries, list):
                raise PlanError(f"{where}.tables has to be a list; plan anew")
            given["tables"] = tuple(
                GivenTable.from_json(entry, where=f"{where}.tables[{at}]") for at, entry in enumerate(entries)
            )
        return read_dataclass(Choice, value, where=where, error=PlanError, given=given)


def _check_groups(groups: tuple[tuple[int, ...], ...], subnets: int) -> None:
    if groups and subnets != 1:
        raise PlanError(f"operations of groups of blocks have 1 subnet a block, not {subnets}")
    at = 0
    for group in groups:
        if len(group) != 2 or not at <= group[0] < group[1]:
            raise PlanError(f"operations.groups have {list(group)}, it has to be [start, stop) from {at} on")
        at = group[1]


def check_words(settings: object, error: type[RingTuneError]) -> None:
    """Refuse settings of operations with a word that means nothing.

    Args:
        settings: with a field for each of ``WORDS``.
        error: to raise.

    Raises:
        RingTuneError: of the given kind; names the key, the words that there are, and why a policy of a paper is none.
    """
    for name, known in WORDS.items():
        value = getattr(settings, name)
        if value not in set(known):
            why = f"; {UNDEFINED_POLICIES[value]}" if value in UNDEFINED_POLICIES else ""
            raise error(f"operations.{name} = {value!r} is not one of {', '.join(known)}{why}")
