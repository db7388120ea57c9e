"""``[placement]``: what the planner may do when it decides who hosts what; no result depends on it."""

from __future__ import annotations

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
        replan: whether the run moves to another placement when boards become slower or faster in mid-run: where that
            is predicted to gain more than the move costs, or never.
    """

    replicas: str = AUTO
    follow: str = NEVER
    replan: str = AUTO

    def __post_init__(self) -> None:
        """Refuse unknown words."""
        for name in ("replicas", "follow", "replan"):
            check_choice(f"placement.{name}", getattr(self, name), (AUTO, NEVER))
