"""How deep the steps of a run train: the planner's formulas count steps by their depth."""

from __future__ import annotations

from collections import Counter

from ringtune.schedule.course import Course
from ringtune.schedule.units import Units


def steps_by_depth(course: Course) -> tuple[int, ...]:
    """Number of training steps at each depth; the index is the depth.

    The depth is that of the lowest trained block. Steps of one depth count as alike, whatever trains above their
    lowest block. An evaluation without training is taken as one step of the first depth, which is nearly all forward.
    """
    counts = Counter({depth: count for depth, (count, _) in step_kinds(course).items()})
    return tuple(counts[at] for at in range(course.num_blocks - course.frozen_blocks + 1))


def step_kinds(course: Course) -> dict[int, tuple[int, Units]]:
    """Count the steps of each depth: depth -> (number of steps, units that train at the first of them)."""
    method = course.method.expected()
    found: dict[int, tuple[int, Units]] = {}
    for step in range(course.num_steps) or range(1):
        units = method.trained(course, step)
        depth = depth_of(units)
        count, first = found.get(depth, (0, units))
        found[depth] = (count + 1, first)
    return found


def depth_of(units: Units) -> int:
    """The depth of a step: blocks from the lowest one up that gets a gradient; of the embedding's step all of them."""
    return min(units.num_blocks, max(0, units.num_blocks - units.lowest))


def trained_shares(course: Course) -> tuple[float, float]:
    """Which share of the blocks that a step goes back through it trains, and which of those above the lowest one.

    Both are 1 except where all parameters train a group at a time. Example: four blocks, groups of one unit: of 0 to 4
    blocks, 14 in a sweep, 4 train, and none of them above the lowest.
    """
    if not course.method.full_parameters:
        return 1.0, 1.0
    kinds = [course.method.trained(course, step) for step in range(course.method.period(course)) or range(1)]
    passed, trained = sum(map(depth_of, kinds)), sum(len(units.blocks) for units in kinds)
    above = sum(max(0, depth_of(units) - 1) for units in kinds)
    trained_above = sum(max(0, len(units.blocks) - 1) for units in kinds)
    return trained / max(1, passed), trained_above / max(1, above)
