"""``[placement]``: what the planner may do when it decides who hosts what; no result depends on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ringtune.jobs.sections import check_choice

AUTO: Final = "auto"
NEVER: Final = "never"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementSettings:
    """``[placement]``: what the planner may do when it decides who hosts what.

    Attributes:
        replicas: whether several nodes may host the same blocks and share the micro-batches out: where the planner
            predicts that this is faster and all have memory for it, or never.
        follow: whether the slices may follow the unfreezing schedule: where the planner predicts that the run is faster
            with the moves in it, or never; where the losses decide, when another block begins to train.
        replan: whether the run moves to another placement when boards or links change their speed in mid-run: where
            that is predicted to gain more than the move costs, or never.
        microbatches: whether the planner may take another number of micro-batches than ``train.microbatches``, a power
            of two up to 16: where it predicts that this is faster, or never. ``train.microbatches = "auto"`` is this.
    """

    replicas: str = AUTO
    follow: str = NEVER
    replan: str = AUTO
    microbatches: str = NEVER

    def __post_init__(self) -> None:
        """Refuse unknown words."""
        for name in ("replicas", "follow", "replan", "microbatches"):
            check_choice(f"placement.{name}", getattr(self, name), (AUTO, NEVER))


def with_free_microbatches(tables: Mapping[str, object], default: int, batch_size: int) -> Mapping[str, object]:
    """Read ``train.microbatches = "auto"`` as a number to begin with and the planner's leave to take another.

    Args:
        tables: of a job, as a TOML reader gives them.
        default: number of micro-batches.
        batch_size: rows of a batch where the job does not say.

    Returns:
        The tables; new ones where it says so.
    """
    train, placement = tables.get("train"), tables.get("placement", {})
    if not isinstance(train, Mapping) or not isinstance(placement, Mapping) or train.get("microbatches") != AUTO:
        return tables
    rows = train.get("batch_size", batch_size)
    number = min(default, rows) if type(rows) is int else default
    return {
        **tables,
        "train": {**train, "microbatches": number},
        "placement": {**placement, "microbatches": AUTO},
    }
