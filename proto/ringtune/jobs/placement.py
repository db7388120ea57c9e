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
    """

    replicas: str = AUTO

    def __post_init__(self) -> None:
        """Refuse an unknown word."""
        check_choice("placement.replicas", self.replicas, (AUTO, NEVER))
