"""Which policy for activations holds in each slice of a plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from ringtune.schedule.plan import Plan
from ringtune.schedule.saving import ranges_to_json, within
from ringtune.schedule.units import Range

NONE: Final = "none"
VELORA: Final = "velora"
RECOMPUTE: Final = "recompute"
BOTH: Final = "both"
POLICIES: Final = (NONE, VELORA, RECOMPUTE, BOTH)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlicePolicy:
    """What the blocks of one slice do to save activations.

    Attributes:
        recomputed: those that run again for their backward.
        projected: those whose linear layers keep projections (VeLoRA).
    """

    recomputed: tuple[Range, ...] = ()
    projected: tuple[Range, ...] = ()

    @staticmethod
    def of(plan: Plan, start: int, stop: int) -> SlicePolicy:
        """The policy of a plan's blocks [start, stop)."""
        velora = plan.course.velora
        return SlicePolicy(
            recomputed=within(plan.placement.recompute, start, stop),
            projected=within(velora.blocks, start, stop) if velora is not None else (),
        )

    @property
    def name(self) -> str:
        """One of ``POLICIES``; a slice of which some blocks do something has the name of what they do."""
        if self.recomputed:
            return BOTH if self.projected else RECOMPUTE
        return VELORA if self.projected else NONE

    @property
    def text(self) -> str:
        """The policy in words: ``blocks [0, 2) run again``; empty where everything is kept."""
        said = [f"blocks {_ranges(self.recomputed)} run again"] if self.recomputed else []
        said += [f"VeLoRA in blocks {_ranges(self.projected)}"] if self.projected else []
        return ", ".join(said)

    def to_json(self) -> dict[str, Any]:
        """Write the policy with its ranges as a JSON-able table."""
        return {
            "policy": self.name,
            "recomputed": ranges_to_json(self.recomputed),
            "projected": ranges_to_json(self.projected),
        }


def _ranges(ranges: Iterable[Range]) -> str:
    return ", ".join(f"[{start}, {stop})" for start, stop in ranges)
