"""What a report says of helpers: who helped whom, what their result is, and bytes of each kind of parcel."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

from ringtune.schedule.actions import Payload
from ringtune.schedule.helping.offload import IN_STEP
from ringtune.schedule.plan import Plan
from ringtune.schedule.whose_rows.users import rows_by_user, user_sets, uses_of_users

_NAMES: Final[Mapping[str, str]] = {
    Payload.UNIT_GRAD: "unit_gradient",
    Payload.PAIRS: "pair",
    Payload.WEIGHTS: "helper_weight",
}


class ParcelBytes:
    """Bytes of parcels by kind and link."""

    __slots__ = ("_links",)

    def __init__(self) -> None:
        self._links: dict[str, dict[str, int]] = {payload: defaultdict(int) for payload in _NAMES}

    def add(self, payload: str, link: str, sent_bytes: int) -> None:
        """Count bytes of a parcel; other messages are left out."""
        if payload in self._links:
            self._links[payload][link] += sent_bytes

    def to_json(self, what: str) -> dict[str, dict[str, int]]:
        """Write each kind that there is under its name, as ``pair_links`` with the word ``links``."""
        return {f"{_NAMES[kind]}_{what}": dict(sorted(found.items())) for kind, found in self._links.items() if found}


def offload_facts(plan: Plan, *, steps: int = 0) -> dict[str, Any]:
    """Say who helped whom, and what of it the result depends on; nothing of a run without helpers.

    Args:
        plan: of the run.
        steps: that it has done since its beginning.
    """
    placement, offload = plan.placement, plan.course.offload
    manner = offload.manner if offload else IN_STEP
    if not placement.helpers:
        return {}
    return {
        "offload": {
            "helpers": [
                {"node": one.node, "host": placement.host_of(one.start), "blocks": [one.start, one.stop]}
                for one in placement.joined_helpers()
            ],
            **dataclasses.asdict(manner),
            "staleness": "one step within a turn" if manner.overlap else "none",
            **_by_user(plan, steps),
        }
    }


def _by_user(plan: Plan, steps: int) -> dict[str, Any]:
    """How many rows each user has, and what came of them, where each has adapters of their own."""
    if not user_sets(plan.course):
        return {}
    rows = {user.name: {"train": user.train_rows, "eval": user.eval_rows} for user in rows_by_user(plan.course)}
    uses = {user: use._asdict() for user, use in uses_of_users(plan.course, steps).items()}
    return {"rows_by_user": rows, "training_by_user": uses}
