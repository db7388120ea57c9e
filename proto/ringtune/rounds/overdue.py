"""Says what the coordinator's state machine waited for too long, in the words of a deadline's error."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from ringtune.rounds.turns.open_turns import OpenTurn

TRAINING_PATIENCE: Final = 1.5
"""How many times longer the coordinator waits in training than a node, which speaks first of what it misses."""


def overdue(
    phase: str,
    waiting: Collection[str],
    oldest: OpenTurn | None,
    chooses_for: int | None,
    *,
    wait_s: float,
    plan_s: float,
) -> str:
    """Say what is overdue in a phase.

    Args:
        phase: of the run.
        waiting: nodes that have not answered in it.
        oldest: the oldest turn that is granted and not done.
        chooses_for: the step for which an operation table is being chosen.
        wait_s: longest time without progress, in seconds.
        plan_s: longest time that planning takes beyond it, in seconds.
    """
    if phase == "planning":
        return f"planning took more than {wait_s + plan_s:g} s; lower runtime.plan_s or ask for less"
    if phase != "training":
        return f"waited {wait_s:g} s in phase {phase} for node {', '.join(sorted(waiting))}"
    limit_s = TRAINING_PATIENCE * wait_s
    if oldest is None:
        took = f"took more than {limit_s + plan_s:g} s; raise runtime.plan_s"
        return f"choosing operations for step {chooses_for} {took}"
    turn, nodes = oldest.turn, ", ".join(oldest.waits_for) or oldest.turn.owner
    where = f"turn {turn.index} of node {turn.owner} (from step {turn.first_step})"
    return f"waited {limit_s:g} s for {where}: not done by {nodes}"
