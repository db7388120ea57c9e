"""The plan in which helpers fit the adapters of whole slices: what a job, the planner, or a what-if names."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Final

from ringtune.errors import PlanError
from ringtune.files.strict import nearest
from ringtune.schedule.helping.helpers import Helper
from ringtune.schedule.helping.offload import IN_STEP, Manner, Offload
from ringtune.schedule.plan import Plan
from ringtune.schedule.saving import merged
from ringtune.schedule.units import Range

NOBODY: Final = "off"
"""The word for a plan in which nobody helps."""


def helped(plan: Plan, helper_of: Mapping[str, str], manner: Manner = IN_STEP) -> Plan:
    """Make the plan in which each named host has its helper for every block of its slice that may train.

    Each block is a range of its own, so that pairs of upper blocks travel, and their weights come back, while blocks
    below still go backward. Example: with the slices [0, 2) of a and [2, 4) of b, ``{"a": "z"}`` gives the helper z the
    ranges [0, 1) and [1, 2). A host whose blocks never train, or that hosts none, gets no helper.

    Args:
        plan: whose helpers are replaced.
        helper_of: host -> helper; none = each host fits its own adapters.
        manner: how they fit.

    Raises:
        PlanError: helpers do not go with the course, or a host would help itself.
    """
    helpers = tuple(
        Helper(node=helper_of[piece.node], start=block, stop=block + 1)
        for piece in plan.placement.hosts
        if piece.node in helper_of
        for start, stop in plan.course.trainable.ranges_within(piece.start, piece.stop)
        for block in range(start, stop)
    )
    offload = None
    if helpers and not manner.is_exact:
        blocks = merged(Range(helper.start, helper.stop) for helper in helpers)
        offload = Offload(blocks=blocks, **dataclasses.asdict(manner))
    if (helpers, offload) == (plan.placement.helpers, plan.course.offload):
        return plan
    course = dataclasses.replace(plan.course, offload=offload)
    return Plan(course, (dataclasses.replace(plan.placement, helpers=helpers),))


def helpers_by_host(plan: Plan) -> dict[str, str]:
    """The helper of each host that has one, as ``helped`` takes it; of several helpers of a host the lowest."""
    placement = plan.placement
    return {placement.host_of(one.start): one.node for one in reversed(placement.helpers)}


def parse_helpers(text: str, known: Collection[str], *, where: str) -> dict[str, str]:
    """Read who helps whom from one word: ``pi-1=laptop+pi-2=laptop``, or ``off`` for nobody.

    Args:
        text: of the user.
        known: the nodes that there are.
        where: the option, for messages.

    Raises:
        PlanError: another form, a host twice, or an unknown name; named with the nearest.
    """
    if text == NOBODY:
        return {}
    found: dict[str, str] = {}
    for part in text.split("+"):
        host, equals, helper = (word.strip() for word in part.partition("="))
        if not (host and equals and helper) or host in found:
            raise PlanError(
                f"{where}={text}: write '{NOBODY}', or HOST=HELPER with each host once, several with + between"
            )
        for name in (host, helper):
            if name not in known:
                raise PlanError(f"{where}={text}: there is no node {name!r}; {nearest(name, known)}")
        found[host] = helper
    return found
