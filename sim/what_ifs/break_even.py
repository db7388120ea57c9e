"""From which rate of their links on helpers make a run faster, by the simulator."""

from __future__ import annotations

import dataclasses
import math
from typing import Final

from ringtune.costs.profile import LinkFacts, Profile
from ringtune.errors import PlanError
from ringtune.schedule.helped import helped
from ringtune.schedule.plan import Plan
from sim.prediction import predict

LEAST_BYTES_PER_S: Final = 1e3
MOST_BYTES_PER_S: Final = 1e10
_CLOSE: Final = 1.02


def gained_s(plan: Plan, profile: Profile, bytes_per_s: float, *, optimizer: str = "adamw") -> float:
    """Predict how many seconds a run takes less with its helpers than without, at a rate of the links between them.

    Args:
        plan: with helpers.
        profile: of its nodes, with links.
        bytes_per_s: of every link between a host and its helper, in both directions; other links stay.
        optimizer: of the job.

    Raises:
        PlanError: the plan has no helpers.
    """
    if not plan.placement.helpers:
        raise PlanError("the plan has no helpers, so none of them can pay; name some with offload.mode")
    at_rate = _with_rate(plan, profile, bytes_per_s)
    without = predict(helped(plan, {}), at_rate, optimizer=optimizer)
    return without.wall_s - predict(plan, at_rate, optimizer=optimizer).wall_s


def break_even_bytes_per_s(plan: Plan, profile: Profile, *, optimizer: str = "adamw") -> float | None:
    """Find the rate from which on helpers pay, up to ``_CLOSE`` times the true one.

    The gain is taken to rise with the rate. Arguments as for ``gained_s``.

    Returns:
        The rate in bytes per second; None if not even ``MOST_BYTES_PER_S`` is enough.

    Raises:
        PlanError: the plan has no helpers.
    """
    low, high = LEAST_BYTES_PER_S, MOST_BYTES_PER_S
    if gained_s(plan, profile, high, optimizer=optimizer) <= 0:
        return None
    while high / low > _CLOSE:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if gained_s(plan, profile, middle, optimizer=optimizer) > 0 else (middle, high)
    return high


def _with_rate(plan: Plan, profile: Profile, bytes_per_s: float) -> Profile:
    pairs = {frozenset((one.node, plan.placement.host_of(one.start))) for one in plan.placement.helpers}

    def changed(link: LinkFacts) -> LinkFacts:
        if frozenset((link.source, link.target)) not in pairs:
            return link
        return dataclasses.replace(
            link, rate_bytes_per_s=bytes_per_s, rate_low_bytes_per_s=0.0, rate_high_bytes_per_s=0.0
        )

    return dataclasses.replace(profile, links=tuple(map(changed, profile.links)))
