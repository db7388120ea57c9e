"""Knapsacks (D2FT): operations of subnets by their scores, within the capacities of boards.

Arrays are K knapsacks by N items, an item is a micro-batch. Costs and capacities are whole numbers, values are made
whole, so that sums are exact and ties are equal on every machine. Ties: of all best choices the one without the latest
item in the order of preference, then without the next latest, and so on. Items of value 0 are taken last, in that
order, as long as they fit.

``two_stage``: stage one takes full operations by their backward scores under C^pf, at c^f + c^b each. Stage two takes
forward-only ones by their forward scores under C^po, at c^f each, among the micro-batches that stage one left, because
equation 5 allows one operation for a micro-batch; three full and one forward-only of five are just that.

``joint``: one multiple-choice knapsack for each subnet, solved exactly. Each micro-batch is full, forward-only or
passed by; both kinds share one capacity, C^pf + C^po. A forward score counts ``score_scale`` times against a backward
score. Capacity that is left goes to full operations, then to forward-only ones, where that loses nothing.

Baselines: *random* draws for each subnet which micro-batches are full and which forward-only, with the counts of its
capacities. *Pruning* passes the subnets of the least scores by for all micro-batches until the next choice; the budget
is over all subnets, so that some nodes may have nothing to do. Magnitude is a subnet's weights. Magnitude-gradient is
the sum of weights and gradients, each as a share of its mean over all subnets, because a sum of two measures needs one
scale.

``choose_table``: a capacity is rounded down to whole rows of its own operation, a micro-batch costs its rows;
micro-batches of equal rows are counted. The joint choice needs one unit for both kinds: a full operation of a row is as
few units as make a forward-only one whole too, at most 100; otherwise it is 100, and a forward-only one is rounded up.

Source: D2FT, equations 5 to 8 and Algorithm 1; Algorithm 2, with each operation's own cost as guard, and its index
stepped down; for ``joint`` equation 6 without the decoupling of equations 7 and 8, and section IV-F (the scale);
section III-A (baselines). Sum: Sokar et al., Where to pay attention in sparse training for feature selection, whose
importance is a weighted sum of both.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringtune.errors import PlanError
from ringtune.schedule.batches import num_batches
from ringtune.schedule.course import Course
from ringtune.schedule.operation_tables import (
    FORWARD_ONLY,
    FULL,
    SHORTCUT,
    BatchOperations,
    BlockScores,
    Choice,
    Operations,
    Policy,
    Score,
    ScoredWeights,
)
from ringtune.techniques.operations import Chooser, choosers_of, kept_subnets, limits_of, whole

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

SUM_BITS: Final = 62
"""Bits of the sum of all values of a knapsack; each value is rounded to its share of them."""
_NEVER: Final = -(2**62)
"""A value below that of every choice."""
_CELLS: Final = 16_000_000
"""Cells of the search table of one go; more knapsacks are solved in several."""


def whole_values(values: NDArray[np.float64]) -> Ints:
    """Convert values to whole numbers, each knapsack in its own unit, a power of two, within ``SUM_BITS``."""
    largest = values.max(axis=tuple(range(1, values.ndim)), initial=0.0, keepdims=True)
    bits = SUM_BITS - (values.shape[-1] - 1).bit_length() if values.size else 0
    whole: Ints = np.rint(np.ldexp(values, bits - np.frexp(largest)[1])).astype(np.int64)
    return whole


def packed(values: Ints, costs: Ints, capacity: Ints, order: Ints, allowed: Bools) -> Bools:
    """Solve all knapsacks exactly; return K by N which items are taken.

    ``order`` has the items of each knapsack in the order of preference; values and costs are at least 0.
    """
    taken = np.zeros(values.shape, dtype=bool)
    if not values.size:
        return taken
    equal = (costs == costs[:, :1]).all(axis=1)
    if equal.any():
        taken[equal] = _sorted(*(each[equal] for each in (values, costs, capacity, order, allowed)))
    rest, worth = np.flatnonzero(~equal), np.where(allowed, values, _NEVER)
    for some in in_parts(rest, values.shape[1], int(capacity[rest].max(initial=0))):
        kinds, left = _searched(worth[some, None], costs[some, None], capacity[some], order[some])
        taken[some] = kinds == 0
        taken[some] |= take_in_order(order[some], costs[some], left, allowed[some] & (kinds < 0))
    return taken


def take_in_order(order: Ints, costs: Ints, capacity: Ints, allowed: Bools) -> Bools:
    """Take items in an order, each that fits into the capacity that is left."""
    taken = np.zeros(costs.shape, dtype=bool)
    at, left = np.arange(len(costs)), capacity.copy()
    for item in order.T:
        cost = costs[at, item]
        fits = allowed[at, item] & (cost <= left)
        taken[at, item] = fits
        left -= np.where(fits, cost, 0)
    return taken


def in_parts(rows: NDArray[Any], items: int, capacity: int) -> list[NDArray[Any]]:
    """Split knapsacks into parts with search tables of at most ``_CELLS`` cells."""
    each = max(1, _CELLS // (items * (capacity + 1)))
    return [rows[at : at + each] for at in range(0, len(rows), each)]


def after(best: Ints, cost: Ints, value: Ints) -> Ints:
    """The value of each knapsack at each capacity with one more item; ``_NEVER`` below the item's cost.

    ``best`` is the same without the item, for capacities from 0, K by W.
    """
    if (cost == cost[0]).all():  # one shift for all knapsacks
        least = min(int(cost[0]), best.shape[1])
        values = np.full_like(best, _NEVER)
        values[:, least:] = best[:, : best.shape[1] - least] + value[:, None]
        return values
    weights = np.arange(best.shape[1]) - cost[:, None]
    below: Ints = np.take_along_axis(best, np.maximum(weights, 0), axis=1) + value[:, None]
    return np.where(weights >= 0, below, _NEVER)


def _sorted(values: Ints, costs: Ints, capacity: Ints, order: Ints, allowed: Bools) -> Bools:
    """Take items of equal cost: the most valuable first, by preference where values tie."""
    ranked = np.argsort(-np.take_along_axis(values, order, axis=1), axis=1, kind="stable")
    return take_in_order(np.take_along_axis(order, ranked, axis=1), costs, capacity, allowed)


def _searched(values: Ints, costs: Ints, capacity: Ints, order: Ints) -> tuple[NDArray[np.int8], Ints]:
    """Search over the items in their order of preference: Algorithm 2, with one or more kinds of each item.

    Values and costs are K by kinds by N. Returns the kind of each item, K by N, -1 for none, and the capacity left.
    """
    at, left = np.arange(len(order)), capacity.copy()
    best = np.zeros((len(order), int(capacity.max()) + 1), dtype=np.int64)
    kinds = np.full((order.shape[1], *best.shape), -1, dtype=np.int8)
    for step, item in enumerate(order.T):
        before = best
        for kind in range(values.shape[1]):
            taking = after(before, costs[at, kind, item], values[at, kind, item])
            kinds[step][taking > best] = kind
            best = np.maximum(best, taking)
    kind_of_item = np.full(order.shape, -1, dtype=np.int8)
    for step in reversed(range(len(kinds))):
        item, kind = order[:, step], kinds[step, at, left]
        kind_of_item[at, item] = kind
        left -= np.where(kind < 0, 0, costs[at, kind, item])
    return kind_of_item, left


Codes = NDArray[np.uint8]
"""Operations as codes of their characters."""


class Knapsacks(NamedTuple):
    """K knapsacks over N micro-batches, in whole numbers.

    Attributes:
        full_costs: of full operations, K by N.
        forward_costs: of forward-only operations, K by N.
        full_capacity: C^pf, K.
        forward_capacity: C^po, K.
        order: micro-batches in the order of preference where scores tie, K by N.
    """

    full_costs: Ints
    forward_costs: Ints
    full_capacity: Ints
    forward_capacity: Ints
    order: Ints


def two_stage(knapsacks: Knapsacks, backward: NDArray[np.float64], forward: NDArray[np.float64]) -> Codes:
    """Choose operations by D2FT's two stages; ``backward`` and ``forward`` are values of the operations, K by N."""
    full_costs, forward_costs, full_capacity, forward_capacity, order = knapsacks
    every = np.ones(order.shape, dtype=bool)
    full = packed(whole_values(backward), full_costs, full_capacity, order, every)
    forward_only = packed(whole_values(forward), forward_costs, forward_capacity, order, ~full)
    return codes_of(full, forward_only)


def codes_of(full: NDArray[np.bool_], forward_only: NDArray[np.bool_]) -> Codes:
    """Combine two masks into codes; items in neither are shortcuts."""
    rest = np.where(forward_only, ord(FORWARD_ONLY), ord(SHORTCUT))
    return np.where(full, ord(FULL), rest).astype(np.uint8)


def joint(
    knapsacks: Knapsacks, backward: NDArray[np.float64], forward: NDArray[np.float64], score_scale: float = 1.0
) -> Codes:
    """Choose operations by one search over both kinds; both kinds of costs must have the same unit.

    ``backward`` and ``forward`` are values of the operations, K by N, ``forward`` before it is multiplied by
    ``score_scale``.
    """
    with np.errstate(over="ignore"):
        scaled = score_scale * forward
    if not np.isfinite(scaled).all():
        raise PlanError(f"operations.score_scale = {score_scale:g} makes forward scores too large; lower it")
    values = whole_values(np.stack([backward, scaled], axis=1))
    costs = np.stack([knapsacks.full_costs, knapsacks.forward_costs], axis=1)
    most = np.maximum(knapsacks.full_costs, knapsacks.forward_costs).sum(axis=1)
    capacity = np.minimum(knapsacks.full_capacity + knapsacks.forward_capacity, most)
    codes = np.zeros(backward.shape, dtype=np.uint8)
    for some in in_parts(np.arange(len(codes)), knapsacks.order.shape[1], int(capacity.max(initial=0))):
        kinds, left = _searched(values[some], costs[some], capacity[some], knapsacks.order[some])
        codes[some] = _filled(kinds == 0, kinds == 1, left, values[some], costs[some], knapsacks.order[some])
    return codes


def _filled(full: Bools, forward_only: Bools, left: Ints, values: Ints, costs: Ints, order: Ints) -> Codes:
    now = np.where(forward_only, values[:, 1], 0)
    more = np.where(forward_only, costs[:, 0] - costs[:, 1], costs[:, 0])
    raised = take_in_order(order, np.maximum(more, 0), left, ~full & (values[:, 0] >= now))
    left = left - np.where(raised, np.maximum(more, 0), 0).sum(axis=1)
    full, forward_only = full | raised, forward_only & ~raised
    added = take_in_order(order, costs[:, 1], left, ~full & ~forward_only)
    return codes_of(full, forward_only | added)


def drawn(knapsacks: Knapsacks, *, seed: int, owner: str, step: int) -> Codes:
    """Draw the operations of each subnet for one owner's batches.

    The random numbers have a key of seed, owner and step, and are counted by batch, subnet and micro-batch.
    """
    digest = hashlib.sha256(f"operations/{seed}/{owner}/{step}".encode()).digest()
    lots = np.random.Philox(key=int.from_bytes(digest[:16], "big")).random_raw(knapsacks.order.size)
    order: Ints = np.argsort(np.reshape(lots, knapsacks.order.shape), axis=1, kind="stable")
    every = np.ones(order.shape, dtype=bool)
    full = take_in_order(order, knapsacks.full_costs, knapsacks.full_capacity, every)
    forward_only = take_in_order(order, knapsacks.forward_costs, knapsacks.forward_capacity, ~full)
    return codes_of(full, forward_only)


def kept(choosers: Sequence[Chooser], scores: NDArray[np.float64], most: float) -> Bools:
    """Choose the choosers that pruning keeps; raises ``PlanError``.

    ``scores`` are of each chooser by each score of the policy, summed over its blocks and all micro-batches; ``most``
    is the number of subnets to keep, each block of a group counting as one.
    """
    blocks = np.array([chooser.stop - chooser.start for chooser in choosers])
    each = scores / blocks[:, None]
    mean = each.mean(axis=0)
    worth = (each / np.where(mean > 0, mean, 1)).sum(axis=1)
    order: Ints = np.argsort(-worth, kind="stable")[None]
    every = np.ones(order.shape, dtype=bool)
    taken: Bools = take_in_order(order, blocks[None], np.array([whole(most, 1)]), every)[0]
    if not taken.any():
        raise PlanError(f"pruning may keep {most:.2g} of {blocks.sum()} subnets, so none; raise operations.compute")
    return taken


Scores = NDArray[np.float64]
"""Shape: batches, micro-batches, blocks, scores, subnets."""


class Batches(NamedTuple):
    """The batches of one owner, with the rows of each micro-batch."""

    owner: str
    num_batches: int
    sizes: tuple[int, ...]


def batches_of(course: Course) -> list[Batches]:
    """List the batches of each owner of a course."""
    return [
        Batches(
            owner=owner.node,
            num_batches=num_batches(owner.train_rows, course.batch_size),
            sizes=course.microbatch_sizes(course.batch_rows(owner)),
        )
        for owner in course.owners
    ]


def scores_by_owner(course: Course, scores: Sequence[BlockScores]) -> dict[str, Scores]:
    """Sort scores, checked by ``operations.check_scores``, into one array for each owner; 0 where nothing is chosen."""
    rows: dict[str, list[BlockScores]] = {owner.node: [] for owner in course.owners}
    for entry in scores:
        rows[entry.owner].append(entry)
    return {batches.owner: _array(course, batches, rows[batches.owner]) for batches in batches_of(course)}


def _array(course: Course, batches: Batches, entries: Sequence[BlockScores]) -> Scores:
    choice, where = _choice(course), tuple(np.array([entry[1:4] for entry in entries], dtype=np.int64).T)
    scores = np.zeros((batches.num_batches, len(batches.sizes), course.num_blocks, len(choice.scores), choice.subnets))
    scores[where] = [entry.values for entry in entries]
    if not (choice.prunes or any(score.needs_gradient for score in choice.scores)):
        scores[:] = scores[entries[0].batch_id]  # of weights alone: all batches are alike
    return scores


MAX_UNITS = 100
"""Upper bound of the units of one row's full operation in the joint choice."""


def choose_table(course: Course, scores: Sequence[BlockScores], step: int = 0) -> Operations:
    """Choose the table by the course's policy; blocks that never train are full, which is forward-only there.

    ``scores`` are of every micro-batch of each scored batch (``Course.num_scored``) and every block that may train;
    empty where the policy needs none. ``step`` is that of the decision; the policy random draws another table at each.
    """
    choice, choosers = _choice(course), choosers_of(course)
    passes = choice.passes(course.microbatches)
    if choice.policy == Policy.STANDARD or not choosers:
        return Operations(subnets=choice.subnets)
    given = scores_by_owner(course, scores) if choice.scores else {}
    if choice.policy == Policy.JOINT:
        given = _in_means(choosers, given)
    if Policy(choice.policy).is_pruning:
        table = _pruned(course, choosers, given)
    else:
        table = [_chosen(course, choosers, batches, given.get(batches.owner), step) for batches in batches_of(course)]
    if not any((codes == ord(FULL)).any() for codes in table):
        of_adapter = choice.scored_weights == ScoredWeights.ADAPTER and choice.backward_score == Score.TAYLOR
        raise PlanError(
            f"operations of policy {choice.policy} leave nothing full, so nothing would train; "
            + ("set operations.backward_score = 'fisher', as a new LoRA's Taylor is 0, " if of_adapter else "")
            + f"lower operations.score_scale, which is {choice.score_scale:g}, or raise operations.compute or "
            "operations.full"
        )
    return Operations(
        batches=tuple(
            BatchOperations(owner=batches.owner, batch_id=at // passes, rows=rows, of_pass=at % passes)
            for batches, codes in zip(batches_of(course), table, strict=True)
            for at, rows in enumerate(_rows(course, choosers, codes))
        ),
        subnets=choice.subnets,
        passes=passes,
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
        summed = _by_chooser(choosers, scores).repeat(choice.passes(course.microbatches), axis=0)
        at = {score: summed[:, :, index].reshape(knapsacks.order.shape) for index, score in enumerate(choice.scores)}
        backward = at[Score(choice.backward_score)]
        forward = at.get(Score(choice.forward_score), np.zeros_like(backward))
        if choice.policy == Policy.JOINT:
            all_fits = knapsacks.full_capacity >= knapsacks.full_costs.sum(axis=1)
            codes = np.where(
                all_fits[:, None], ord(FULL), joint(knapsacks, backward, forward, choice.score_scale)
            ).astype(np.uint8)
        else:
            codes = two_stage(knapsacks, backward, forward)
    return codes.reshape(-1, len(choosers), len(batches.sizes))


def _pruned(course: Course, choosers: Sequence[Chooser], scores: dict[str, Scores]) -> list[NDArray[np.uint8]]:
    summed = np.zeros((len(choosers), len(_choice(course).scores)))
    for owner in sorted(scores):
        summed += _by_chooser(choosers, scores[owner]).sum(axis=(0, 3))
    stay = kept(choosers, summed, kept_subnets(course))
    codes = np.where(stay, ord(FULL), ord(SHORTCUT)).astype(np.uint8)[None, :, None]
    return [np.tile(codes, (batches.num_batches, 1, len(batches.sizes))) for batches in batches_of(course)]


def _in_means(choosers: Sequence[Chooser], given: dict[str, Scores]) -> dict[str, Scores]:
    """Divide each kind of score by its mean over all blocks that choose, so that kinds can be compared."""
    means = {owner: scores.copy() for owner, scores in given.items()}
    for kind in range(next(iter(given.values())).shape[3]):
        every = np.concatenate([scores[:, :, choosers[0].start :, kind].ravel() for scores in given.values()])
        largest = every.max(initial=0)
        if not largest:
            continue
        mean = math.fsum(every / largest) / every.size
        for scores in means.values():
            scores[:, :, :, kind] = scores[:, :, :, kind] / largest / mean
    return means


def _choice(course: Course) -> Choice:
    if course.choice is None:
        raise PlanError("this run chooses no operations; give its job [operations] with a policy")
    return course.choice


# ---- whole numbers ------------------------------------------------------------------------------------


class _Units(NamedTuple):
    """The costs of one row, in whole units."""

    full: int
    forward: int


def _units(choosers: Sequence[Chooser]) -> list[_Units]:
    shares = [each.capacity.forward / (each.capacity.forward + each.capacity.backward) for each in choosers]
    known = {share: _units_of(share) for share in set(shares)}
    return [known[share] for share in shares]


def _units_of(share: float) -> _Units:
    for full in range(1, MAX_UNITS):
        if abs(full * share - round(full * share)) < 1e-9:
            return _Units(full, round(full * share))
    return _Units(MAX_UNITS, math.ceil(MAX_UNITS * share - 1e-9))


def _knapsacks(course: Course, choosers: Sequence[Chooser], batches: Batches, units: Sequence[_Units]) -> Knapsacks:
    limits = [limits_of(course, chooser, batches.sizes) for chooser in choosers]
    passes, each = _choice(course).passes(course.microbatches), math.gcd(*limits[0].costs)
    count = batches.num_batches * passes
    sizes = np.array(limits[0].costs) // each
    full, forward = (np.tile([unit[at] for unit in units], count) for at in (0, 1))
    full_rows = np.tile([limit.full // each for limit in limits], count)
    forward_rows = np.tile([limit.forward_only // each for limit in limits], count)
    return Knapsacks(
        full_costs=full[:, None] * sizes,
        forward_costs=forward[:, None] * sizes,
        full_capacity=full * np.minimum(full_rows, sizes.sum()),
        forward_capacity=forward * np.minimum(forward_rows, sizes.sum()),
        order=_order(choosers, batches.num_batches, passes, len(sizes)),
    )


def _order(choosers: Sequence[Chooser], batches: int, passes: int, microbatches: int) -> Ints:
    """The orders of ``Chooser.order`` for all batches, their passes, and all choosers."""
    turned = (np.arange(batches)[:, None] + np.arange(passes)).reshape(-1, 1, 1)
    firsts = np.array([chooser.first for chooser in choosers])[None, :, None] + turned
    order: Ints = ((firsts + np.arange(microbatches)) % microbatches).reshape(-1, microbatches)
    return order


# ---- arrays and rows ----------------------------------------------------------------------------------


def _by_chooser(choosers: Sequence[Chooser], scores: Scores) -> NDArray[np.float64]:
    """Sum scores over the blocks of each chooser; shape: batches, choosers, scores, micro-batches."""
    sums = [scores[:, :, each.start : each.stop, :, each.subnet].sum(axis=2) for each in choosers]
    return np.stack(sums, axis=1).transpose(0, 1, 3, 2)


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
