"""A profile kept current by a run: the times of recorded actions in place of measured ones.

What a node does in a run is what the next plan wants to know, neighbours and all. An action over several blocks is
taken apart: each of its blocks took an equal share. Only where the lowest trainable block is among them its share
stands to that of the others as it did when they were measured, and such shares count only where a node has too few
actions that say it without that::

    F [2,5), lowest block 2:  d = 2 g + r g       g: a block with trainable ones below it, r g: the lowest one

Where a block did not compute all its subnets, the action is taken as long as it would have been with all of them: the
profile tells how much longer that is. Where blocks run again for their backward, it tells too how the time is shared
out among forwards and backwards.

A time belongs to a size, and a run has sizes that nobody measured (its mean padded lengths). So every action is
compared with what the profile has for that size, and the mean of these ratios moves the whole measured curve; the
point at the run's own mean size joins it, with the number of actions as its samples. Sizes themselves are means: the
length of a single batch never leaves its owner.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ringtune.costs.links.recorded import RecordedLinks
from ringtune.costs.profile import LinkFacts, NodeFacts, Profile
from ringtune.costs.times.saving_seconds import VELORA_EXTRA, again_works, count_within, projected_gain, trained_parts
from ringtune.costs.times.seconds import NodeCosts, padded_size, work_points
from ringtune.costs.times.top_share import TopShare
from ringtune.costs.work_times import BLOCK_WORKS, PART_OF, Work, WorkTable, WorkTime
from ringtune.schedule.actions import Action, Graph, Op, Scope
from ringtune.schedule.course import Course
from ringtune.schedule.lowering import lowest_units, subnet_rows
from ringtune.schedule.operations.codes import patterns_of
from ringtune.schedule.turns.turns import Item, StepKind, Turn, items
from ringtune.schedule.turns.versions import trained
from ringtune.schedule.units import EMBEDDING, Range

LEAST_SAMPLES = 5
KEPT_SAMPLES = 2000
"""How many of the newest samples are kept for each kind of work on each node."""

_OF_A_PART = frozenset({Scope.MICRO, Scope.RANGE})
_UNSIZED = frozenset({Work.UPDATE, Work.UPDATE_HEAD, Work.HAND_OVER, Work.SAVE})


class _OpenItem(NamedTuple):
    """A granted item: per micro-batch its lowest unit with a gradient, its padded tokens, and its operations if any."""

    item: Item
    lowest: tuple[int, ...]
    sizes: tuple[float, ...]
    rows: tuple[str, ...]
    subnets: int


class _Sample(NamedTuple):
    """One recorded work: its time, its size, and its time over the profile's for that size (0 = none)."""

    seconds: float
    size: float
    ratio: float


class RecordedProfile:
    """Turns the recorded actions of a run into the times of a profile.

    Args:
        course: the run.
        profile: that it was planned with; has every node of it.
        recompute: blocks whose backward runs them again.
        skipped_items: the first so many do not count: what happens for the first time takes longer.

    Attributes:
        links: takes the run's transfers.
        pace: of each work of a node its seconds, and those that the profile has for it.
    """

    def __init__(
        self, course: Course, profile: Profile, *, recompute: Sequence[Range] = (), skipped_items: int = 0
    ) -> None:
        self._course = course
        self._profile = profile
        self._recompute = tuple(recompute)
        self._projected: Sequence[Range] = course.velora.blocks if course.velora is not None else ()
        self._gain = projected_gain(course.velora, profile.nodes[0].model)
        self._skipped_items = skipped_items
        self._top = TopShare(course, profile.nodes[0].model) if course.top_tokens else None
        self._facts = profile.by_name
        points = {node: work_points(facts) for node, facts in self._facts.items()}
        self._tables = {node: WorkTable(found, where=f"node {node}") for node, found in points.items()}
        self._costs = {node: NodeCosts(self._facts[node], course.head) for node, found in points.items() if found}
        self._open: dict[int, _OpenItem] = {}
        self._shared: dict[int, list[float]] = {}
        self._samples: dict[tuple[str, Work], deque[_Sample]] = {}
        self._guesses: dict[tuple[str, Work], deque[_Sample]] = {}
        self._worked: set[str] = set()
        self.links = RecordedLinks()
        self.pace: dict[tuple[str, Work], tuple[float, float]] = {}

    def joined(self, facts: NodeFacts, links: Sequence[LinkFacts]) -> None:
        """Take the times of one more node, too, and its transfers.

        Args:
            facts: of the node.
            links: between it and the others.
        """
        profile, points = self._profile, work_points(facts)
        nodes = sorted((*profile.nodes, facts), key=lambda node: node.node)
        self._profile = dataclasses.replace(profile, nodes=tuple(nodes), links=(*profile.links, *links))
        self._facts = self._profile.by_name
        self._tables[facts.node] = WorkTable(points, where=f"node {facts.node}")
        if points:
            self._costs[facts.node] = NodeCosts(facts, self._course.head)

    # ---- what happens -----------------------------------------------------------------------------

    def granted(self, turn: Turn) -> None:
        """Note a granted turn: actions of its items count from now on, unless they score subnets beside their work."""
        if turn.kind is StepKind.SCORE:
            return
        course = self._course.decided(turn.unfreeze_at, turn.operations)
        subnets = course.operations.subnets if course.operations else 1
        for item in items(course, turn):
            if item.seq < self._skipped_items:
                continue
            parts = course.microbatch_sizes(item.rows) if item.kind is not StepKind.CHECKPOINT else ()
            owner = self._facts[item.owner]
            sizes = tuple(padded_size(owner, max_length=course.max_length, rows=rows, kind=item.kind) for rows in parts)
            self._open[item.seq] = _OpenItem(
                item, lowest_units(course, item), sizes, subnet_rows(course, item), subnets
            )

    def turn_done(self, turn: Turn) -> None:
        """Forget a turn that is done: no more of its actions count."""
        for seq in range(turn.first_seq, turn.end_seq):
            self._open.pop(seq, None)
            self._shared.pop(seq, None)

    def add(self, node: str, action: Action, seconds: float, *, worked_s: float = 0.0) -> None:
        """Add the recorded time of one action of a node.

        Where a quota holds, what counts is how long the action would have taken at the quota alone: the seconds on the
        clock depend on how much the node had rested, which the virtual clock adds by itself.

        An action is left out if no granted turn has its item, the profile lacks its node, the run lacks its blocks or
        micro-batch, or its time is negative or not finite.
        """
        entry = self._open.get(action.seq)
        if entry is None or node not in self._tables or not 0 <= seconds < math.inf or not self._fits(action, entry):
            return
        if 0 < worked_s < math.inf:
            seconds = worked_s
            self._worked.add(node)
        if action.op.timing.is_shared:
            self._add_shared(node, action, entry, seconds)
            return
        size = entry.sizes[action.micro] if action.op.scope in _OF_A_PART else 0.0
        if entry.rows and action.op.scope is Scope.RANGE:
            seconds /= self._cost_share(node, action, entry, size)
        if self._projected and action.op.graph is not Graph.NONE:
            seconds /= self._projected_share(node, action, entry, size)
        if action.op is Op.BACKWARD and self._course.method.full_parameters:  # as if all its blocks trained
            units = trained(self._course, entry.item.kind, entry.item.step)
            passing = action.stop - action.start - len(units.within(action.start, action.stop).blocks)
            seconds += passing * self._known(node, Work.FORWARD, size)
        shares = self._shares(node, action, entry, seconds, size)
        for work, share in shares:
            self._add(node, work, share, size, is_guess=len(shares) > 1)

    def _projected_share(self, node: str, action: Action, entry: _OpenItem, size: float) -> float:
        """The time of an action with projections over that without; works stand to each other as they were measured."""
        count = action.stop - action.start
        share = 1 + VELORA_EXTRA * count_within(self._projected, action) / count
        back_s = self._known(node, Work.BACKWARD, size)
        if action.op is Op.BACKWARD and self._gain and back_s > 0:
            units = trained(self._course, entry.item.kind, entry.item.step)
            gained = count_within(trained_parts(self._course, self._projected, units), action)
            works = again_works(action, self._recompute, entry.lowest[action.micro])
            graph_s = self._known(node, Work.GRAPH, size)
            whole_s = sum(number * self._known(node, work, size) for work, number in works.items()) or count * back_s
            share -= min(self._gain * gained * graph_s / whole_s, 0.9)
        return share

    def _fits(self, action: Action, entry: _OpenItem) -> bool:
        scope = action.op.scope
        if scope in _OF_A_PART and not 0 <= action.micro < len(entry.sizes):
            return False
        if scope is Scope.RANGE and not 0 <= action.start < action.stop <= self._course.num_blocks:
            return False
        stop = self._course.head + (1 if action.start == self._course.head else 0)  # no update is of blocks and head
        return scope is not Scope.UNITS or EMBEDDING < action.start < action.stop <= stop

    def _add_shared(self, node: str, action: Action, entry: _OpenItem, seconds: float) -> None:
        """Add the mean time of an item's actions of one kind, once all of them have come.

        The first embedding of an item makes its whole batch, so that one alone says little.
        """
        found = self._shared.setdefault(entry.item.seq, [])
        found.append(seconds)
        if len(found) == len(entry.sizes):
            work = Work(action.op.timing.work)
            self._add(node, work, statistics.fmean(found), statistics.fmean(entry.sizes))

    def _cost_share(self, node: str, action: Action, entry: _OpenItem, size: float) -> float:
        """By the profile, the seconds of an action over those it would take if all its blocks were full.

        Example: an action of two blocks, one of them with half of its subnets, has a share of 0.75. It is 1 where the
        profile knows nothing of the work.
        """
        op, start, stop = action.op, action.start, action.stop
        patterns = patterns_of(entry.rows[action.micro], start, stop, entry.subnets)
        if not all(work in self._tables[node] for work in (op.timing.work, op.timing.lowest) if work):
            return 1.0
        costs, lowest = self._costs[node], entry.lowest[action.micro]
        each = [
            costs.seconds(op, start, stop, size=size, lowest=lowest, kind=entry.item.kind, patterns=found)
            for found in (patterns, ())
        ]
        return each[0] / each[1] if min(each) > 0 else 1.0

    def _shares(
        self, node: str, action: Action, entry: _OpenItem, seconds: float, size: float
    ) -> Sequence[tuple[Work, float]]:
        """Take an action's time apart into times of works; ``NodeCosts.seconds`` goes the way back."""
        timing, blocks = action.op.timing, action.stop - action.start
        if not timing.work:
            return []
        has_part = self._top is not None and action.op.scope is Scope.RANGE and action.stop == self._course.head
        count = blocks - 1 + self._top.of(size) if self._top is not None and has_part else float(blocks)
        if again := again_works(action, self._recompute, entry.lowest[action.micro] if timing.lowest else 0):
            return self._in_parts(node, again, seconds * blocks / count, size)
        if timing.lowest and action.start <= entry.lowest[action.micro]:
            return self._with_lowest(node, (Work(timing.work), Work(timing.lowest)), blocks, count, seconds, size)
        if timing.head and action.start == self._course.head:
            return [(Work(timing.head), seconds)]
        if timing.evaluating and not entry.item.kind.has_backward:
            return [(Work(timing.evaluating), seconds)]
        return [(Work(timing.work), seconds / count if action.op.scope in (Scope.RANGE, Scope.UNITS) else seconds)]

    def _with_lowest(
        self, node: str, works: tuple[Work, Work], blocks: int, count: float, seconds: float, size: float
    ) -> Sequence[tuple[Work, float]]:
        """Share a time out among blocks, as long as ``count`` whole ones; the lowest is the lowest with a graph.

        Example: 2.5 s for 3 blocks, the lowest known to take half as long, are 1 s for a block above and 0.5 s for the
        lowest.
        """
        above, lowest = works
        if blocks == 1:
            return [(lowest, seconds / count)]
        usual, least = self._known(node, above, size), self._known(node, lowest, size)
        ratio = least / usual if usual > 0 and least > 0 else 1.0
        each = seconds / (count - 1 + ratio)
        return [(above, each), (lowest, ratio * each)]

    def _in_parts(
        self, node: str, works: Mapping[Work, int], seconds: float, size: float
    ) -> Sequence[tuple[Work, float]]:
        """Share a time out among works as the profile has them; nothing where it does not know all of them."""
        known = {work: self._known(node, work, size) for work in works}
        all_s = sum(count * known[work] for work, count in works.items())
        return [(work, seconds * known[work] / all_s) for work in works] if min(known.values()) > 0 else []

    def _known(self, node: str, work: Work, size: float) -> float:
        table = self._tables[node]
        return table.seconds(work, size) if work in table else 0.0

    def _add(self, node: str, work: Work, seconds: float, size: float, *, is_guess: bool = False) -> None:
        known = self._known(node, work, size)
        sample = _Sample(seconds, 0.0 if work in _UNSIZED else size, seconds / known if known > 0 else 0.0)
        before_s, before_known_s = self.pace.get((node, work), (0.0, 0.0))
        if known > 0:
            self.pace[node, work] = (before_s + seconds, before_known_s + known)
        pools = self._guesses if is_guess else self._samples
        pools.setdefault((node, work), deque(maxlen=KEPT_SAMPLES)).append(sample)

    # ---- what comes of it -------------------------------------------------------------------------

    def profile(self) -> Profile:
        """The profile with recorded times for each work with ``LEAST_SAMPLES`` on a node, and the links' own rates."""
        nodes = tuple(self._updated(node) for node in self._profile.nodes)
        return dataclasses.replace(self._profile, nodes=nodes, links=self.links.links(self._profile.links))

    def _updated(self, facts: NodeFacts) -> NodeFacts:
        points: dict[str, list[WorkTime]] = {}
        for point in work_points(facts):
            points.setdefault(point.work, []).append(point)
        changed = {work: found for work in Work if len(found := self._samples_of(facts.node, work)) >= LEAST_SAMPLES}
        if not changed:
            return facts
        for work, found in changed.items():
            before = points.get(work, [])
            points[work] = self._moved(facts.node, work, before, found)
            if before and work in PART_OF and PART_OF[work] in points:  # a part takes as much longer as the whole
                points[PART_OF[work]] = _in_step(points[PART_OF[work]], self._tables[facts.node], points[work])
        is_wall = facts.node not in self._worked
        kept = tuple(point for work in Work for point in points.get(work, ()))
        table = WorkTable(kept, where=f"node {facts.node}")
        full = self._course.microbatch_sizes()[0] * self._course.max_length

        def of_block(work: Work, before_s: float) -> float:
            return table.seconds(work, full) if work in changed else before_s

        return dataclasses.replace(
            facts,
            work_times=kept,
            has_messages=facts.has_messages or (is_wall and any(work in changed for work in BLOCK_WORKS)),
            block_forward_s=of_block(Work.FORWARD, facts.block_forward_s),
            block_graph_s=of_block(Work.GRAPH, facts.block_graph_s),
            block_backward_s=of_block(Work.BACKWARD, facts.block_backward_s),
        )

    def _samples_of(self, node: str, work: Work) -> Sequence[_Sample]:
        """The samples of a work that are no guess; guesses too where those are below ``LEAST_SAMPLES``."""
        sure = self._samples.get((node, work), ())
        return sure if len(sure) >= LEAST_SAMPLES else [*sure, *self._guesses.get((node, work), ())]

    def _moved(self, node: str, work: Work, before: Sequence[WorkTime], found: Sequence[_Sample]) -> list[WorkTime]:
        """Scale the measured points of a work by the mean ratio of its samples; add the recorded point."""
        size = statistics.fmean(sample.size for sample in found)
        rows = self._rows(size)
        tokens = round(size / rows)
        ratios = [sample.ratio for sample in found if sample.ratio > 0]
        if len(ratios) < len(found):  # nothing measured to compare with: times in proportion to the mean size
            ratios = [sample.seconds * (size / sample.size if sample.size else 1.0) for sample in found]
            return [_point(work, rows, tokens, len(found), _spread(ratios))]
        known = self._known(node, work, rows * tokens)
        low, mean, high = _spread(ratios)
        curve = [
            _point(work, at.rows, at.tokens, at.samples, (low * at.median_s, mean * at.median_s, high * at.median_s))
            for at in before
            if at.size and work not in _UNSIZED and (at.rows, at.tokens) != (rows, tokens)
        ]
        return [*curve, _point(work, rows, tokens, len(found), (low * known, mean * known, high * known))]

    def _rows(self, size: float) -> int:
        """Rows of a point at a mean size: those of the largest micro-batch, 1 if the size is smaller."""
        rows = self._course.microbatch_sizes()[0]
        return rows if size >= rows else 1


def _in_step(parts: Sequence[WorkTime], before: WorkTable, after: Sequence[WorkTime]) -> list[WorkTime]:
    """Scale the points of a part of a block by what became of the whole block's time at their sizes."""
    work, table = after[0].work, WorkTable(after, where="a node")
    found = []
    for part in parts:
        known = before.seconds(work, part.size)
        ratio = table.seconds(work, part.size) / known if known > 0 else 1.0
        times = {name: ratio * getattr(part, name) for name in ("median_s", "low_s", "high_s")}
        found.append(dataclasses.replace(part, **times))
    return found


def _point(work: Work, rows: int, tokens: int, samples: int, quartiles: tuple[float, float, float]) -> WorkTime:
    low_s, median_s, high_s = quartiles
    rows, tokens = (0, 0) if work in _UNSIZED else (rows, tokens)
    return WorkTime(work=work, rows=rows, tokens=tokens, median_s=median_s, low_s=low_s, high_s=high_s, samples=samples)


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, mean, third quartile; the quartiles enclose the mean.

    The mean, not the median: lengths of batches and waits for a quota are skewed, and what a run takes is a sum.
    """
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    mean = statistics.fmean(values)
    return min(low, mean), mean, max(high, mean)
