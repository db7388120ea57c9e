"""Predictions for the page's sliders, in a process of their own: ``python -m coordinator.web.predictor``.

A prediction takes seconds of plain Python, which would block the run's thread in the coordinator's process. So this
process, with a lower priority, answers each line with a line. It ends with its input.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from coordinator.planner.what_if import PredictedPlan, WhatIf
from ringtune.costs.memory_sizes import MemorySettings
from ringtune.costs.profile import Profile
from ringtune.errors import PlanError, RingTuneError
from ringtune.schedule.plan import Plan

MAX_ACTIONS: Final = 150_000
"""Limit of actions in one prediction; a board simulates some 20,000 a second."""
_NICE: Final = 10


def answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """Answer one question.

    Args:
        question: ``plan``, ``profile`` (as JSON texts), ``settings`` (the fields of ``MemorySettings``), ``steps``
            (number of measured steps to compare; 0 = as many as can be predicted), ``speeds`` by node, ``rates`` by
            link, both as factors, and ``microbatches`` (0 = unchanged).

    Returns:
        ``steps``, and the seconds ``before_s`` and ``after_s`` of so many; ``whole_before_s`` and ``whole_after_s`` of
        all steps if these are few enough; or ``error``.
    """
    try:
        what_if = _what_if(question["plan"], question["profile"], MemorySettings(**question["settings"]))
        changes = _changes(question, what_if.profile)
        affordable = _affordable(what_if.plan, int(question["microbatches"]))
        steps = _steps(what_if.plan, int(question["steps"]), affordable)
        comparison = {"steps": steps, **_seconds(what_if, steps, changes, "")}
        if (total := what_if.plan.course.num_steps) != steps and total <= affordable:
            comparison |= _seconds(what_if, total, changes, "whole_")
    except RingTuneError as error:
        return {"error": str(error)}
    return comparison


@functools.lru_cache(maxsize=2)
def _what_if(plan_text: str, profile_text: str, settings: MemorySettings) -> WhatIf:
    plan, profile = Plan.from_json(json.loads(plan_text)), Profile.from_json(json.loads(profile_text))
    newest = dataclasses.replace(
        plan.placements[-1], placement_number=0, first_turn=0
    )  # a run that has moved stays there
    return WhatIf(plan=Plan(plan.course, (newest,)), profile=profile, settings=settings)


def _changes(question: Mapping[str, Any], profile: Profile) -> list[str]:
    """Convert the sliders to changes of ``ringtune what-if``."""
    rates = {f"{link.source}>{link.target}": link for link in profile.links}
    changes = [f"{node}.compute={float(factor)!r}" for node, factor in sorted(question["speeds"].items())]
    for name, factor in sorted(question["rates"].items()):
        if (link := rates.get(name)) is None:
            raise PlanError(f"the rate of link {name} was not measured, so it can't be changed; change a node instead")
        rate = link.rate_bytes_per_s * float(factor)
        changes.append(f"link.{link.source}.{link.target}.rate={rate!r}")
    if question["microbatches"]:
        changes.append(f"microbatches={int(question['microbatches'])}")
    return changes


def _affordable(plan: Plan, microbatches: int) -> int:
    """Number of steps that can be predicted within ``MAX_ACTIONS``, with other micro-batches too; 0 = unchanged."""
    course = plan.course
    per_step = max(course.microbatches, microbatches) * (3 * len(plan.placement.hosts) + 2) + len(plan.nodes)
    return max(course.local_iterations, MAX_ACTIONS // per_step)


def _steps(plan: Plan, most_steps: int, affordable: int) -> int:
    """Number of steps to compare: whole turns, as many as are wanted and can be predicted."""
    course = plan.course
    most = min(most_steps or course.num_steps, course.num_steps, affordable)
    if most == course.num_steps:
        return most
    return max(1, most // course.local_iterations) * course.local_iterations


def _seconds(what_if: WhatIf, steps: int, changes: Sequence[str], prefix: str) -> dict[str, float]:
    short = () if steps == what_if.plan.course.num_steps else (f"num_steps={steps}",)
    before = _base(what_if, short)
    after = what_if.after([*short, *changes]) if changes else before
    return {f"{prefix}before_s": before.prediction.train_s, f"{prefix}after_s": after.prediction.train_s}


@functools.lru_cache(maxsize=8)
def _base(what_if: WhatIf, short: Sequence[str]) -> PredictedPlan:
    """The prediction without changes, which is part of every answer."""
    return what_if.after(short)


def main() -> None:
    """Answer each line of JSON on the standard input with one."""
    os.nice(_NICE)
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
