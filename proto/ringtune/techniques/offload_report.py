"""Reports of offload (ColA): the seconds of a job with each helper, and the bytes of each kind of parcel."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ringtune.schedule.actions import Payload
from ringtune.schedule.plan import Plan
from ringtune.techniques.offload import rows_by_user, uses_of_users


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A helper for a host, as the planner tried it.

    Attributes:
        host: the node with the blocks.
        helper: the node that fits their adapters.
        with_s: predicted seconds of all steps; None = not predicted.
        without_s: the same without this helper, but with those that were taken before.
        full: why it does not fit; empty if it does.
        is_taken: whether the plan has it.
    """

    host: str
    helper: str
    with_s: float | None = None
    without_s: float | None = None
    full: str = ""
    is_taken: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class HelpersReason:
    """The planner's trials of helpers under ``offload.mode = "auto"``.

    Attributes:
        trials: in order.
        note: that nothing fitted without helpers, or that nothing could be tried.
        is_needed: whether every host needs a helper, so that there is no trial without helpers.
    """

    trials: tuple[Trial, ...] = ()
    note: str = ""
    is_needed: bool = False


def helper_reason_lines(found: HelpersReason, seconds: Callable[[float], str]) -> list[str]:
    """Write the trials as lines of an explanation."""
    lines = ['  helpers (offload.mode = "auto"):' + (f" {found.note}" if found.note else "")]
    say = _needed_line if found.is_needed else _line
    return lines + [f"    {say(one, seconds)}" for one in found.trials]


def _needed_line(one: Trial, seconds: Callable[[float], str]) -> str:
    name = f"{one.helper} for {one.host}"
    if one.full:
        return f"{name}: it does not fit: {one.full}"
    end = "taken" if one.is_taken else "not taken, as another one is faster"
    return f"{name}: {end}" if one.with_s is None else f"{name}: {seconds(one.with_s)} for all steps: {end}"


def _line(one: Trial, seconds: Callable[[float], str]) -> str:
    name = f"{one.helper} for {one.host}"
    if one.full:
        return f"{name}: it does not fit: {one.full}"
    if one.with_s is None or one.without_s is None:
        return f"{name}: taken, so that every slice fits"
    end = "taken" if one.is_taken else "not taken" if one.with_s < one.without_s else "it does not pay"
    return f"{name}: {seconds(one.with_s)} for all steps, {seconds(one.without_s)} without: {end}"


_NAMES: Final[Mapping[str, str]] = {
    Payload.UNIT_GRAD: "unit_gradient",
    Payload.PAIRS: "pair",
    Payload.WEIGHTS: "helper_weight",
}


class ParcelBytes:
    """Sent bytes of parcels by kind and link."""

    __slots__ = ("_links",)

    def __init__(self) -> None:
        self._links: dict[str, dict[str, int]] = {payload: defaultdict(int) for payload in _NAMES}

    def add(self, payload: str, link: str, sent_bytes: int) -> None:
        """Count sent bytes; messages other than parcels are ignored."""
        if payload in self._links:
            self._links[payload][link] += sent_bytes

    def to_json(self, what: str) -> dict[str, dict[str, int]]:
        """Return each kind with bytes under its name, such as ``pair_links`` for ``what`` = ``links``."""
        return {f"{_NAMES[kind]}_{what}": dict(sorted(found.items())) for kind, found in self._links.items() if found}


def offload_facts(plan: Plan, *, steps: int = 0) -> dict[str, Any]:
    """Describe the helpers of a run and their settings; empty for a run without helpers.

    ``steps`` is the number of steps done since the beginning of the run.
    """
    placement, settings = plan.placement, plan.course.helper_settings
    if not placement.helpers:
        return {}
    return {
        "offload": {
            "helpers": [
                {"node": one.node, "host": placement.host_of(one.start), "blocks": [one.start, one.stop]}
                for one in placement.joined_helpers()
            ],
            **dataclasses.asdict(settings),
            "staleness": "one step within a turn" if settings.overlap else "none",
            **_by_user(plan, steps),
        }
    }


def _by_user(plan: Plan, steps: int) -> dict[str, Any]:
    """Rows of each user and their use, where users have adapters of their own."""
    if not plan.course.user_sets:
        return {}
    rows = {user.name: {"train": user.train_rows, "eval": user.eval_rows} for user in rows_by_user(plan.course)}
    uses = {user: use._asdict() for user, use in uses_of_users(plan.course, steps).items()}
    return {"rows_by_user": rows, "training_by_user": uses}
