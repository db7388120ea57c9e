"""What the planner thought of slices that follow the schedule, for people and files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One placement of a run that moves.

    Attributes:
        first_step: with which it begins.
        depth: how many blocks train there.
        slices: of it, in words.
        move_s: predicted seconds of the move to it.
        gain_s: seconds that its steps take less than on the best placement for all steps.
    """

    first_step: int
    depth: int
    slices: str
    move_s: float
    gain_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PhasesReason:
    """What the planner thought of slices that follow the schedule.

    Attributes:
        fixed_s: seconds of all steps on the best placement for all of them, by the simulator.
        moving_s: seconds of all steps and moves.
        phases: the placements of the best moving run; one, or none, if none is better.
        is_taken: whether the run moves.
        why_not: why nothing was looked at; empty if something was.
    """

    fixed_s: float = 0.0
    moving_s: float = 0.0
    phases: tuple[Phase, ...] = ()
    is_taken: bool = False
    why_not: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as numbers and strings."""
        return dataclasses.asdict(self)


def phases_lines(reason: PhasesReason, seconds: Callable[[float], str]) -> list[str]:
    """Write what was judged as lines for people."""
    if reason.why_not:
        return [f"  the run stays on one placement: {reason.why_not}"]
    if not reason.is_taken:
        return [
            f"  placement.follow: all steps with moves {seconds(reason.moving_s)}, not much less than "
            f"{seconds(reason.fixed_s)} without, by the simulator"
        ]
    both = f"{seconds(reason.moving_s)} with moves, {seconds(reason.fixed_s)} without"
    lines = [f"  slices follow the schedule: {both}, by the simulator"]
    for phase in reason.phases:
        moved = f", after a move of {seconds(phase.move_s)}" if phase.first_step else ""
        when = f"from step {phase.first_step}, depth {phase.depth}{moved}"
        lines.append(f"    {when}: {phase.slices}; gains {seconds(phase.gain_s)}")
    return [*lines, "  what follows is of the plan with one placement for all steps, from which this was made"]
