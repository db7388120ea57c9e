"""Why nodes help others, or do not: the seconds of the job with each helper beside those without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A host with a helper, as the planner tried it.

    Attributes:
        host: whose adapters are fitted elsewhere.
        helper: where.
        with_s: seconds of all steps by the simulator; None if it was not asked.
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
    """What the planner thought of helpers under ``offload.mode = "auto"``.

    Attributes:
        trials: in the order in which they were made.
        note: what else there is to say: that nothing fitted without helpers, or that nothing could be tried.
        is_needed: whether every host needs a helper, so that none is compared with nobody.
    """

    trials: tuple[Trial, ...] = ()
    note: str = ""
    is_needed: bool = False


def helper_reason_lines(found: HelpersReason, seconds: Callable[[float], str]) -> list[str]:
    """Write the reason as lines of an explanation."""
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
