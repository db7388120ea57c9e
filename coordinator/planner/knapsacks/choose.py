"""Choose a run's table of operations from the scores that its nodes reported.

Costs and capacities become whole numbers. A capacity is rounded down to whole rows of its own operation, a
micro-batch costs its rows; micro-batches of equal rows are counted. The joint choice needs one unit for both kinds: a
full operation of a row is as few units as make a forward-only one whole too, at most 100; otherwise it is 100, and a
forward-only one is rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coordinator.planner.knapsacks.baselines import drawn, kept
from coordinator.planner.knapsacks.joint import joint
from coordinator.planner.knapsacks.packing import Ints
from coordinator.planner.knapsacks.reported import Batches, Scores, batches_of, scores_by_owner
from coordinator.planner.knapsacks.two_stage import Codes, Knapsacks, two_stage
from ringtune.errors import PlanError
from ringtune.schedule.course import Course
from ringtune.schedule.operations.choice import Choice, Policy, Score
from ringtune.schedule.operations.codes import FULL, SHORTCUT
from ringtune.schedule.operations.scores import BlockScores
from ringtune.schedule.operations.table import BatchOperations, Operations
from ringtune.schedule.spreading.choosers import Chooser, choosers_of, limits_of
from ringtune.schedule.spreading.expected import kept_subnets

MOST_UNITS = 100
"""Units of one row's full operation in the joint choice, at most."""


def choose_table(course: Course, scores: Sequence[BlockScores], step: int = 0) -> Operations:
    """The table of a course's policy; blocks that may not train are full, which is forward-only there.

    Args:
        course: with a choice.
        scores: of every micro-batch of each batch that is scored (``Course.num_scored``) and every block that may
            train; not asked for where the policy needs none.
        step: of the decision; the policy random draws another table at each.

    Raises:
        PlanError: the course chooses nothing, scores are missing, twice, or no number of at least 0, or nothing
            would ever be full.
    """
    if course.choice is None:
        raise PlanError("this run chooses no operations; give its job [operations] with a policy")
    choice, choosers = course.choice, choosers_of(course)
    if choice.policy == Policy.STANDARD or not choosers:
        return Operations(subnets=choice.subnets)
    given = scores_by_owner(course, choosers, scores) if choice.scores else {}
    if choice.policy == Policy.JOINT:
        given = _in_means(choosers, given)
    if Policy(choice.policy).is_pruning:
        found = _pruned(course, choosers, given)
    else:
        found = [_chosen(course, choosers, batches, given.get(batches.owner), step) for batches in batches_of(course)]
    if not any((codes == ord(FULL)).any() for codes in found):
        raise PlanError(
            f"operations of policy {choice.policy} leave nothing full, so nothing would train; lower "
            f"operations.score_scale, which is {choice.score_scale:g}, or raise operations.compute or operations.full"
        )
    return Operations(
        batches=tuple(
            BatchOperations(owner=batches.owner, batch_id=batch_id, rows=rows)
            for batches, codes in zip(batches_of(course), found, strict=True)
            for batch_id, rows in enumerate(_rows(course, choosers, codes))
        ),
        subnets=choice.subnets,
    )


def _chosen(
    course: Course, choosers: Sequence[Chooser], batches: Batches, scores: Scores | None, step: int
) -> NDArray[np.uint8]:
    choice = _choice(course)
    units = _units(choosers) if choice.policy == Policy.JOINT else [_Units(1, 1)] * len(choosers)
    knapsacks = _knapsacks(course, choosers, batches, units)
    if scores is None:
        codes = drawn(knapsacks, seed=course.seed, owner=batches.owner, step=step)
    else:
        summed = _by_chooser(choosers, scores)
        at = {score: summed[:, :, index].reshape(knapsacks.order.shape) for index, score in enumerate(choice.scores)}
        backward = at[Score(choice.backward_score)]
        forward = at.get(Score(choice.forward_score), np.zeros_like(backward))
        if choice.policy == Policy.JOINT:
            codes = _full_where_all_fits(knapsacks, joint(knapsacks, backward, forward, choice.score_scale))
        else:
            codes = two_stage(knapsacks, backward, forward)
    return codes.reshape(batches.num_batches, len(choosers), len(batches.sizes))


def _full_where_all_fits(knapsacks: Knapsacks, codes: Codes) -> Codes:
    """Leave nothing out for a score where nothing has to be left out."""
    all_fits = knapsacks.full_capacity >= knapsacks.full_costs.sum(axis=1)
    return np.where(all_fits[:, None], ord(FULL), codes).astype(np.uint8)


def _pruned(course: Course, choosers: Sequence[Chooser], scores: dict[str, Scores]) -> list[NDArray[np.uint8]]:
    summed = np.zeros((len(choosers), len(_choice(course).scores)))
    for owner in sorted(scores):
        summed += _by_chooser(choosers, scores[owner]).sum(axis=(0, 3))
    stay = kept(choosers, summed, kept_subnets(course))
    codes = np.where(stay, ord(FULL), ord(SHORTCUT)).astype(np.uint8)[None, :, None]
    return [np.tile(codes, (batches.num_batches, 1, len(batches.sizes))) for batches in batches_of(course)]


def _in_means(choosers: Sequence[Chooser], given: dict[str, Scores]) -> dict[str, Scores]:
    """Each kind of score as a share of its mean over all blocks that choose: what is compared needs one scale."""
    found = {owner: scores.copy() for owner, scores in given.items()}
    for kind in range(next(iter(given.values())).shape[3]):
        every = np.concatenate([scores[:, :, choosers[0].start :, kind].ravel() for scores in given.values()])
        largest = every.max(initial=0)
        if not largest:
            continue
        mean = math.fsum(every / largest) / every.size
        for scores in found.values():
            scores[:, :, :, kind] = scores[:, :, :, kind] / largest / mean
    return found


def _choice(course: Course) -> Choice:
    if course.choice is None:
        raise PlanError("this run chooses no operations; give its job [operations] with a policy")
    return course.choice


# ---- whole numbers ------------------------------------------------------------------------------------


class _Units(NamedTuple):
    """What one row costs, in whole numbers."""

    full: int
    forward: int


def _units(choosers: Sequence[Chooser]) -> list[_Units]:
    shares = [each.capacity.forward / (each.capacity.forward + each.capacity.backward) for each in choosers]
    known = {share: _units_of(share) for share in set(shares)}
    return [known[share] for share in shares]


def _units_of(share: float) -> _Units:
    for full in range(1, MOST_UNITS):
        if abs(full * share - round(full * share)) < 1e-9:
            return _Units(full, round(full * share))
    return _Units(MOST_UNITS, math.ceil(MOST_UNITS * share - 1e-9))


def _knapsacks(course: Course, choosers: Sequence[Chooser], batches: Batches, units: Sequence[_Units]) -> Knapsacks:
    limits = [limits_of(course, chooser, batches.sizes) for chooser in choosers]
    count, each = batches.num_batches, math.gcd(*limits[0].costs)
    sizes = np.array(limits[0].costs) // each
    full, forward = (np.tile([unit[at] for unit in units], count) for at in (0, 1))
    full_rows = np.tile([limit.full // each for limit in limits], count)
    forward_rows = np.tile([limit.forward_only // each for limit in limits], count)
    return Knapsacks(
        full_costs=full[:, None] * sizes,
        forward_costs=forward[:, None] * sizes,
        full_capacity=full * np.minimum(full_rows, sizes.sum()),
        forward_capacity=forward * np.minimum(forward_rows, sizes.sum()),
        order=_order(choosers, count, len(sizes)),
    )


def _order(choosers: Sequence[Chooser], batches: int, microbatches: int) -> Ints:
    """As ``Chooser.order`` for all batches and choosers."""
    firsts = np.array([chooser.first for chooser in choosers])[None, :, None] + np.arange(batches)[:, None, None]
    return ((firsts + np.arange(microbatches)) % microbatches).reshape(-1, microbatches)


# ---- arrays and rows ----------------------------------------------------------------------------------


def _by_chooser(choosers: Sequence[Chooser], scores: Scores) -> NDArray[np.float64]:
    """Batches by choosers by scores by micro-batches: the sums over the blocks of each chooser."""
    found = [scores[:, :, each.start : each.stop, :, each.subnet].sum(axis=2) for each in choosers]
    return np.stack(found, axis=1).transpose(0, 1, 3, 2)


def _rows(course: Course, choosers: Sequence[Chooser], codes: Codes) -> list[tuple[str, ...]]:
    batches, _, microbatches = codes.shape
    subnets = _choice(course).subnets
    table = np.full((batches, course.microbatches, course.num_blocks, subnets), ord(FULL), dtype=np.uint8)
    for at, chooser in enumerate(choosers):
        table[:, :microbatches, chooser.start : chooser.stop, chooser.subnet] = codes[:, at, :, None]
    width = course.num_blocks * subnets
    text = table.tobytes().decode("ascii")
    rows = [text[start : start + width] for start in range(0, len(text), width)]
    return [tuple(rows[at : at + course.microbatches]) for at in range(0, len(rows), course.microbatches)]
