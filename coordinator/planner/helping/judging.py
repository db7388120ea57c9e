"""Seconds of a plan that gets helpers after its ring was chosen, and the choice that goes with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

from coordinator.planner.choose import Choice
from coordinator.planner.effort import Effort
from coordinator.planner.predict.judge import simulated_job_s
from ringtune.costs.profile import Profile
from ringtune.schedule.plan import Plan

MOST_TRIED: Final = 3
"""Most nodes that are tried as the helper of one host: those whose blocks take the least time."""


class Judge:
    """Judges plans that have the chosen ring, and differ in their helpers.

    Args:
        choice: of the ring.
        profile: of all nodes.
        effort: how hard to look; the clock begins now.
        optimizer: of the job.
    """

    def __init__(self, choice: Choice, profile: Profile, effort: Effort, *, optimizer: str) -> None:
        self._choice, self._profile, self._optimizer = choice, profile, optimizer
        self._most_actions = effort.judged_actions
        self._clock = effort.clock()

    def seconds(self, plan: Plan) -> float | None:
        """Seconds of all steps by the simulator; None if the time is over, or it can't be afforded."""
        return simulated_job_s(
            plan,
            self._profile,
            self._choice.settled.costs if self._choice.settled is not None else self._choice.costs,
            self._choice.runs.ring,
            optimizer=self._optimizer,
            most_actions=self._most_actions,
            is_over=self._clock.is_over,
        )


def chosen_with(choice: Choice | None, taken: Mapping[str, str], seconds: float | None) -> Choice | None:
    """The choice of a plan that got helpers, so that what is explained and predicted has them too."""
    if choice is None:
        return None
    draft = dataclasses.replace(choice.best.draft, helper_of=dict(taken))
    simulated_s = choice.best.simulated_s if seconds is None else seconds
    return dataclasses.replace(choice, best=dataclasses.replace(choice.best, draft=draft, simulated_s=simulated_s))
