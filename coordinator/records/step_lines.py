"""How steps and rounds are numbered wherever somebody reads them, and which step is the last one.

Plans, turns and frames count from 0. Screens, ``metrics.jsonl``, ``report.json`` and status count from 1, so that the
number of a step is also the number of steps that are done after it: the evaluation of "step 40" follows step 40, and
a checkpoint of step 40 has it. The ledger converts (``shown``); nobody else adds or takes one.

A line of a step has ``"kind": "train"``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringtune.quantities import format_bytes, format_seconds
from ringtune.rounds.events.recovery_events import LogRecovery
from ringtune.rounds.events.replanning_events import LogFetched, Replanned
from ringtune.schedule.plan import Plan

STEP_KIND = "train"


def shown(index: int) -> int:
    """Return the number that people see for a step or a round that the protocol counts from 0."""
    return index + 1


def is_step(line: Mapping[str, Any]) -> bool:
    """Whether a line of ``metrics.jsonl`` is that of a step."""
    return bool(line.get("kind") == STEP_KIND)


def placement_number(line: Mapping[str, Any], otherwise: int = 0) -> int:
    """Return the number of the placement that a line names; ``otherwise`` if it names none."""
    return int(line.get("placement_number", line.get("epoch", otherwise)))  # version 0.2.0 and before: epoch


def is_settled(line: Mapping[str, Any], steps_done: int) -> bool:
    """Whether a line stays when the run goes on after ``steps_done`` steps.

    A decision or an evaluation of just that step comes again.
    """
    step = int(line["step"])
    return step <= steps_done if is_step(line) else step < steps_done


class LastStep:
    """The last step of a run: the training step with the highest number that an owner has completed.

    What is shown as the loss of a run is the loss of this step. Owners report in their own time, so the report of a
    step may come after that of a later one.

    Attributes:
        line: what was told of it; empty before the first.
    """

    def __init__(self) -> None:
        self.line: Mapping[str, Any] = {}

    def take(self, line: Mapping[str, Any]) -> bool:
        """Note an item that is done; whether it is the last step now."""
        if line["kind"] != STEP_KIND or (self.line and line["step"] <= self.line["step"]):
            return False
        self.line = line
        return True


def replan_line(plan: Plan, why: Replanned) -> dict[str, Any]:
    """Write the line of a placement found in mid-run, with the predicted seconds of the steps that are left."""
    newest = plan.placements[-1]
    predicted = {"stays_s": why.stays_s, "moves_s": why.moves_s, "cost_s": why.cost_s}
    step = newest.first_turn * plan.course.local_iterations
    told = {key: round(value, 6) for key, value in predicted.items()}
    return {"kind": "replan", "step": step, "to": newest.placement_number, "predicted": told}


def fetched_line(command: LogFetched) -> dict[str, Any]:
    """Write what nodes have fetched of base weights for a placement to come, while the run trained."""
    problems = {"problems": dict(command.problems)} if command.problems else {}
    came = dict(command.fetched_bytes)
    return {
        "kind": "fetched",
        "to": command.placement_number,
        "seconds": round(command.seconds, 6),
        "bytes": came,
        **problems,
    }


def fetched_text(command: LogFetched) -> str:
    """Say what nodes have fetched for a placement to come; empty if nothing had to come."""
    if command.problems:
        problems = "; ".join(problem for _, problem in command.problems)
        return f"placement {command.placement_number} is not there yet: {problems}"
    count = sum(count for _, count in command.fetched_bytes)
    if not count:
        return ""
    return (
        f"{format_bytes(count)} of base weights came for placement {command.placement_number} in"
        f" {format_seconds(command.seconds)}, while the run trained"
    )


def recovery_line(command: LogRecovery) -> dict[str, Any]:
    """Write what a recovery was: who was lost or what was not finite, to which step all went back, what it took."""
    return {
        "kind": "recovery",
        "step": command.step,
        "lost": list(command.lost),
        "placement_number": command.part.placement.placement_number,
        "seconds": round(command.seconds, 6),
        "fetched_bytes": dict(command.fetched_bytes),
        **({"bad_step": command.bad_step} if command.bad_step else {}),
        **({"back": [*command.back]} if command.back else {}),
        **({"left_out": [*command.left_out], "num_steps": command.plan.course.num_steps} if command.left_out else {}),
    }
