"""What the planner thought of stages with several hosts, for people and files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from ringtune.schedule.plan import Plan

_TOLD: Final = 5
"""Most layouts beside the one that is taken that people are told of, the ring of single hosts among them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicasReason:
    """What the planner thought of stages with several hosts.

    Attributes:
        ring_s: seconds of all steps on the best ring, by the simulator.
        judged: the slices of each layout that the simulator judged well, with its seconds, the fastest first.
        num_rough: layouts that the simulator judged roughly, these among them.
        is_taken: whether the first of them was taken.
        why_not: why none was judged; empty if some were.
    """

    ring_s: float = 0.0
    judged: tuple[tuple[str, float], ...] = ()
    num_rough: int = 0
    is_taken: bool = False
    why_not: str = ""

    @property
    def best_s(self) -> float | None:
        """Seconds of all steps as they are carried out; None if nothing was judged."""
        return None if not self.judged else self.judged[0][1] if self.is_taken else self.ring_s

    def to_json(self) -> dict[str, Any]:
        """Return the fields as numbers and strings."""
        return dataclasses.asdict(self)


def layout_text(plan: Plan) -> str:
    """Name stages and micro-batches: ``[0, 6) on a, b; [6, 12) on c with 8 micro-batches``; shares if they differ."""
    parts = []
    for stage in plan.placement.stages:
        has_shares = len({piece.share for piece in stage}) > 1
        names = (f"{piece.node} x{piece.share}" if has_shares else piece.node for piece in stage)
        parts.append(f"{stage[0].text} on {', '.join(names)}")
    return f"{'; '.join(parts)} with {plan.course.microbatches} micro-batches"


def replicas_lines(reason: ReplicasReason, seconds: Callable[[float], str]) -> list[str]:
    """Write what was judged as lines for people."""
    if reason.why_not:
        return [f"  each block has one host: {reason.why_not}"]
    ring = ("one host for each block", reason.ring_s)
    first, *others = sorted([*reason.judged, ring], key=lambda pair: pair[1])
    if not reason.is_taken:
        return [
            f"  placement.replicas: {_told(reason.judged[0], seconds)}, not much faster than {_told(ring, seconds)}"
        ]
    lines = [f"  all steps: {seconds(first[1])} by the simulator"]
    told = others[:_TOLD] if ring in others[:_TOLD] else [*others[: _TOLD - 1], ring]
    lines += [f"  {'second best' if one is others[0] else 'other'}: {_told(one, seconds)}" for one in told]
    more = reason.num_rough + 1 - len(told) - 1
    return lines + ([f"  {more} more were simulated"] if more > 0 else [])


def _told(one: tuple[str, float], seconds: Callable[[float], str]) -> str:
    return f"{one[0]}: {seconds(one[1])}"
