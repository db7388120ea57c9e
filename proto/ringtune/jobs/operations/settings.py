"""``[operations]``: which subnets do what for which micro-batch, and how that is chosen (D2FT)."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ringtune.errors import JobError
from ringtune.jobs.sections import MOST_STEPS
from ringtune.schedule.operations.choice import Policy, Score, Ties, check_words


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationsSettings:
    """``[operations]``: which subnets do what for which micro-batch; full is forward-only where a block does not train.

    Attributes:
        policy: what chooses the operations; standard = everything is full.
        heads: attention heads of one subnet, which has as large a share of the feed-forward rows; 0 = a whole block
            is one subnet.
        by_slice: whether all blocks of a node have the same operations, so that it can be passed by.
        compute: share of what blocks that train cost if everything is full, above 0 and at most 1; how many operations
            are forward-only follows from measured costs, so runs to be repeated give ``full`` and ``forward_only``.
        full: instead of ``compute``: of how many micro-batches of a batch each subnet does forward and backward.
        forward_only: with ``full``: of how many more it does the forward only.
        balance: whether nodes get unequal counts, so that all are busy for the same time in a step.
        backward_score: by what full operations are chosen.
        forward_score: by what forward-only operations are chosen.
        score_scale: with policy joint: what a forward score counts against a backward score, each in parts of its mean.
        ties: which micro-batches a subnet prefers where scores tie: other ones than its neighbours, or the same as all.
        refresh_rounds: scores and operations are gathered and chosen anew after so many rounds; 0 = once, at the start.
        table: instead of all other keys: the file ``operations.json`` of a run, whose operations this run repeats. A
            file that a run wrote is refused where seed, batch size, micro-batches, blocks or owners' rows differ; of a
            table without ``origin``, made by hand or taken out of a plan, only owners, numbers and codes are checked.
    """

    policy: str = Policy.STANDARD.value
    heads: int = 1
    by_slice: bool = False
    compute: float | None = None
    full: int | None = None
    forward_only: int | None = None
    balance: bool = False
    backward_score: str = Score.WEIGHT_MAGNITUDE.value
    forward_score: str = Score.FISHER.value
    score_scale: float = 1.0
    ties: str = Ties.SPREAD.value
    refresh_rounds: int = 0
    table: str = ""

    def __post_init__(self) -> None:
        """Refuse values out of range, and two ways of saying how much is done."""
        check_words(self, JobError)
        for name in ("heads", "compute", "full", "forward_only", "score_scale", "refresh_rounds"):
            if isinstance(getattr(self, name), bool):
                raise JobError(f"operations.{name} is {str(getattr(self, name)).lower()}, it has to be a number")
        for name in ("heads", "full", "forward_only", "refresh_rounds"):
            if (getattr(self, name) or 0) < 0:
                raise JobError(f"operations.{name} is {getattr(self, name)}, it has to be at least 0")
        if self.refresh_rounds > MOST_STEPS:
            raise JobError(f"operations.refresh_rounds is {self.refresh_rounds}, it has to be at most {MOST_STEPS:,}")
        if self.compute is not None and not 0 < self.compute <= 1:
            raise JobError(f"operations.compute is {self.compute}, it has to be above 0 and at most 1")
        if self.compute is not None and (self.full is not None or self.forward_only is not None):
            raise JobError("operations.compute and operations.full both say how much is done; keep one")
        if self.forward_only is not None and self.full is None:
            raise JobError("operations.forward_only needs operations.full; add it, 0 if nothing shall be full")
        if not 0 < self.score_scale < float("inf"):
            raise JobError(f"operations.score_scale is {self.score_scale}, it has to be above 0 and finite")

    @property
    def is_chosen(self) -> bool:
        """Whether the run chooses its operations, so that they are neither given nor all full."""
        return self.policy != Policy.STANDARD

    @property
    def is_any(self) -> bool:
        """Whether anything may be less than full: operations are chosen or given."""
        return self.is_chosen or bool(self.table)

    def changed(self) -> tuple[str, ...]:
        """The keys that have another value than their default."""
        return tuple(entry.name for entry in fields(self) if getattr(self, entry.name) != entry.default)
