"""Calibration of a profile by a run: recorded times replace measured ones, and lasting changes of pace are found.

``RecordedProfile``: times of recorded actions, neighbours included, for the next plan. An action over several blocks is
divided: each of its blocks has an equal share. If the lowest trainable block is among them, its share has the measured
ratio r to that of the others; such shares count only where a node has too few actions without that block::

    F [2,5), lowest block 2:  d = 2 g + r g       g: a block with trainable ones below it, r g: the lowest one

An action with a part of the subnets is scaled to all of them, and the time of blocks that run again is divided among
forwards and backwards, both by the ratios of the profile.

A run has sizes that nobody measured (its mean padded lengths; the length of a single batch never leaves its owner). So
every action is compared with the profile's time for that size. The mean of these ratios scales the whole measured
curve; the point at the run's own mean size joins it, with the number of actions as its samples.

``ChangeDetector``: a turn gives each name its *pace*, the recorded seconds over the known seconds of the work. Compared
are only turns of one *kind*, in which the name had the same to do::

    turn                 0      1     2     3     4  |   5     6     7
    kind                 x      x     x     y     y  |   y     y     y
    pace of b          (1.6)   1.0   1.1   1.5   1.6 |  3.1   3.0   3.2     the newest three of kind y
                       begins  `-- nothing to do with y  `-- 2.0 times as long as the usual 1.55

The pace has changed if each of the newest turns takes so many times as long as each of the usual ones, or the other way
round, and if the newest differ from the usual ones by more than noise makes likely. One slow turn, of a board that did
other work besides, would make all others look fast: of four usual turns and more the longest and the shortest do not
count, and with fewer no pace counts as faster. Noise is the difference of neighbouring turns of one kind, over all
names together, as a run is too short for an estimate of each. With the mean square ``d`` of differences of logarithms,
a turn has the variance ``d / 2``. A difference of the means of ``m`` usual and ``n`` newest turns has the variance
``d / 2 * (1 / m + 1 / n)``; it has to be ``BEYOND_NOISE`` times the root of that. The largest difference does not
count, as a change makes one itself.

``LinkMonitor``: the rate of a link in a turn is that of its quicker messages, as in ``costs.links``: a busy processor
slows some of them, a slower link all. Turns count as of the same work if as much trains at both ends of the link,
because the messages of both ends share their lines. A turn with few messages that show a rate does not count::

    train turn              0      1     2  |   3     4     5     6
    a -> b, in MB/s       (1.9)   2.4   2.6 |  2.5   0.6   0.6   0.7
                          begins  the usual |         `-- three turns in a row: 3.95 times as long

``PaceMonitor``: the pace of a node, in seconds on the clock, also under a quota of processor time. Only its change
counts: a pace of 1.1 from the start is an error of the profile by a tenth, which the plan has too. Each work has a pace
of its own, as a profile may have forwards wrong and backwards right, and their numbers change as more trains.

Turns are compared where as many of the node's blocks train, blocks below them do or do not, and the node is the
initiator or is not. A board with a quota that it can't see has 1.0 for frozen blocks, between which it rests, and 2.0
when its own blocks train without rests; its speed is the same. As more trains elsewhere, it rests longer and looks
faster, hardly ever slower. So *slower* is judged over all turns in which the node did the same, *faster* only over
those in which all nodes did. A change that begins with the turn from which more of the node's own blocks train is
attributed to them. A changed pace holds for all works of the node, also for those that it had none of: a node at twice
the usual time in frozen forwards would take twice the time in backwards.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

from ringtune.costs.action_costs import NodeCosts, TopShare, padded_size, work_points
from ringtune.costs.activation_costs import VELORA_EXTRA, again_works, count_within, projected_gain, trained_parts
from ringtune.costs.links import KEPT_SAMPLES, Pair, RecordedLinks, has_rate
from ringtune.costs.profile import BLOCK_WORKS, PART_OF, LinkFacts, NodeFacts, Profile, Work, WorkTable, WorkTime
from ringtune.schedule.actions import Action, Graph, Op, Scope
from ringtune.schedule.course import Course
from ringtune.schedule.lowering import lowest_units, subnet_rows, takes_part
from ringtune.schedule.operation_tables import patterns_of
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Item, StepKind, Turn, items
from ringtune.schedule.units import EMBEDDING, Range
from ringtune.schedule.versions import trained

USUAL_TURNS: Final = 2
"""Least turns of a kind, after the run's first turn, that say what is usual."""

MAX_USUAL_TURNS: Final = 6
"""The first so many turns of a kind say what is usual: later ones might have drifted."""

_ENOUGH: Final = 4
"""Of so many usual turns the longest and the shortest do not count; with fewer nothing is called faster."""

LASTING_TURNS: Final = 3
"""A change counts when it lasts for so many turns."""

BEYOND_NOISE: Final = 4.0
"""Standard deviations by which the newest turns have to differ from the usual ones."""

Name = TypeVar("Name", bound=Hashable)

Works = Mapping[str, tuple[float, float]]
"""Of each work in a turn: seconds, and those that are known for it."""


class _Turns:
    """The turns of one name and kind: the first ones, the newest ones, and the number of all."""

    __slots__ = ("first", "newest", "number")

    def __init__(self) -> None:
        self.first: list[Works] = []
        self.newest: deque[Works] = deque(maxlen=LASTING_TURNS)
        self.number = 0

    def add(self, works: Works) -> None:
        if len(self.first) < MAX_USUAL_TURNS:
            self.first.append(works)
        self.newest.append(works)
        self.number += 1

    @property
    def usual(self) -> list[Works]:
        """The first turns, without the newest ones."""
        return self.first[: max(0, self.number - LASTING_TURNS)]


class ChangeDetector(Generic[Name]):
    """Watches any number of names, which are all alike in their noise.

    Args:
        changed: a pace counts as changed when it is so many times the usual one, or the usual one so many times it.
    """

    def __init__(self, changed: float) -> None:
        self._changed = changed
        self._kinds: dict[tuple[Name, Hashable], _Turns] = {}
        self._now: dict[Name, Hashable] = {}
        self._squares, self._largest, self._differences = 0.0, 0.0, 0

    def add(self, name: Name, kind: Hashable, works: Works) -> None:
        """Add a turn of a name; works without seconds are left out."""
        works = {work: times for work, times in works.items() if min(times) > 0}
        if not works:
            return
        found = self._kinds.setdefault((name, kind), _Turns())
        difference = _log_ratio(works, [found.newest[-1]]) if found.newest else None
        if difference is not None:
            self._squares += difference**2
            self._largest = max(self._largest, difference**2)
            self._differences += 1
        found.add(works)
        self._now[name] = kind

    def changed(self) -> dict[Name, float]:
        """The names with a lasting change of pace, each with the factor of its time for the same work."""
        ratios = {}
        for name, kind in self._now.items():
            turns = self._kinds[name, kind]
            if len(turns.usual) >= USUAL_TURNS and (ratio := self._lasting(turns)):
                ratios[name] = ratio
        return ratios

    def _lasting(self, turns: _Turns) -> float:
        """The factor of the newest turns' times; 0 where that is not lasting, or may be noise."""
        newest, usual = (
            sorted(log for works in each if (log := _log_ratio(works, turns.usual)) is not None)
            for each in (turns.newest, turns.usual)
        )
        if len(newest) < LASTING_TURNS:
            return 0.0
        change = statistics.fmean(newest) - statistics.median(usual)
        variance = max(0.0, self._squares - self._largest) / max(1, self._differences - 1) / 2
        noise = math.sqrt(variance * (1 / len(usual) + 1 / len(newest)))
        is_known_well = len(usual) >= _ENOUGH
        if is_known_well:
            usual = usual[1:-1]
        apart = max(newest[0] - usual[-1], usual[0] - newest[-1] if is_known_well else 0.0)
        return math.exp(change) if apart >= math.log(self._changed) and abs(change) >= BEYOND_NOISE * noise else 0.0


def _log_ratio(works: Works, usual: list[Works]) -> float | None:
    """The logarithm of how many times as long a turn took as the works that it shares with usual turns."""
    took_s = usual_s = 0.0
    for work, (seconds, known_s) in works.items():
        before = [turn[work] for turn in usual if work in turn]
        if before:
            took_s += seconds
            usual_s += known_s * sum(each_s for each_s, _ in before) / sum(each_s for _, each_s in before)
    return math.log(took_s / usual_s) if usual_s > 0 else None


MIN_TIMES = 5
KEPT_TIMES = 2000
"""How many of the newest samples are kept for each kind of work on each node."""

_OF_A_PART = frozenset({Scope.MICRO, Scope.RANGE})
_UNSIZED = frozenset({Work.UPDATE, Work.UPDATE_HEAD, Work.HAND_OVER, Work.SAVE})


class _OpenItem(NamedTuple):
    """A granted item: per micro-batch its lowest unit with a gradient, its padded tokens, and its operations if any.

    ``embedded`` has the padded tokens of those that take part.
    """

    item: Item
    lowest: tuple[int, ...]
    sizes: tuple[float, ...]
    rows: tuple[str, ...]
    subnets: int
    embedded: tuple[float, ...]


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
        course = turn.settled(self._course)
        subnets = course.subnets
        for item in items(course, turn):
            if item.seq < self._skipped_items:
                continue
            parts = course.microbatch_sizes(item.rows) if item.kind is not StepKind.CHECKPOINT else ()
            owner = self._facts[item.owner]
            sizes = tuple(padded_size(owner, max_length=course.max_length, rows=rows, kind=item.kind) for rows in parts)
            rows, embedded = subnet_rows(course, item), tuple(itertools.compress(sizes, takes_part(course, item)))
            self._open[item.seq] = _OpenItem(item, lowest_units(course, item), sizes, rows, subnets, embedded)

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
        """Add the mean time of an item's actions of one kind, once all of them are recorded.

        The first embedding of an item makes its whole batch, so that one alone says little.
        """
        found = self._shared.setdefault(entry.item.seq, [])
        found.append(seconds)
        if len(found) == len(entry.embedded):
            work = Work(action.op.timing.work)
            self._add(node, work, statistics.fmean(found), statistics.fmean(entry.embedded))

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
        pools.setdefault((node, work), deque(maxlen=KEPT_TIMES)).append(sample)

    # ---- what comes of it -------------------------------------------------------------------------

    def profile(self) -> Profile:
        """The profile with recorded times for each work with ``MIN_SAMPLES`` on a node, and the links' own rates."""
        nodes = tuple(self._updated(node) for node in self._profile.nodes)
        return dataclasses.replace(self._profile, nodes=nodes, links=self.links.links(self._profile.links))

    def _updated(self, facts: NodeFacts) -> NodeFacts:
        points: dict[str, list[WorkTime]] = {}
        for point in work_points(facts):
            points.setdefault(point.work, []).append(point)
        changed = {work: found for work in Work if len(found := self._samples_of(facts.node, work)) >= MIN_TIMES}
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
        """The samples of a work that are no guess; guesses too where those are below ``MIN_SAMPLES``."""
        sure = self._samples.get((node, work), ())
        return sure if len(sure) >= MIN_TIMES else [*sure, *self._guesses.get((node, work), ())]

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


LINK_CHANGED: Final = 1.5
"""A link counts as changed when its messages take so many times as long as usual, or usually did as now.

More than for nodes, as the rate of a radio link changes by a quarter from turn to turn; chosen, not fitted.
"""

MIN_IN_TURN: Final = 4
"""Messages of a link in a turn that say its rate there."""


class _Transfer(NamedTuple):
    num_bytes: int
    seconds: float
    at_s: float


class LinkMonitor:
    """Watches the rates of links on one placement.

    Args:
        links: as they were known when the placement was planned.
    """

    def __init__(self, links: Sequence[LinkFacts]) -> None:
        self._latency_s = {(link.source, link.target): link.latency_s for link in links}
        self._turn: dict[Pair, list[_Transfer]] = {}
        self._kept: deque[dict[Pair, list[_Transfer]]] = deque(maxlen=LASTING_TURNS)
        self._num_turns = 0
        self._rates: ChangeDetector[Pair] = ChangeDetector(LINK_CHANGED)

    def add(self, source: str, target: str, num_bytes: int, seconds: float, *, at_s: float) -> None:
        """Add one message that arrived at ``at_s``; one of no known link, or that shows no rate, is left out."""
        if (source, target) in self._latency_s and has_rate(num_bytes, seconds, at_s):
            found = self._turn.setdefault((source, target), [])
            if len(found) < KEPT_SAMPLES:
                found.append(_Transfer(num_bytes, seconds, at_s))

    def turn_done(self, kinds: Mapping[str, Hashable]) -> None:
        """Note the rate of every link in the train turn that is done; ``kinds`` says what each node had to do in it."""
        turn, self._turn = self._turn, {}
        self._kept.append(turn)
        self._num_turns += 1
        if self._num_turns == 1:
            return
        for pair, transfers in turn.items():
            if len(transfers) >= MIN_IN_TURN:
                kind = tuple(kinds.get(node) for node in pair)
                self._rates.add(pair, kind, {"byte": (1.0 / self._rate(pair, transfers), 1.0)})

    def changed(self) -> dict[Pair, float]:
        """The links with a lasting change of rate, each with the factor of its messages' times."""
        return self._rates.changed()

    def newest(self) -> RecordedLinks:
        """The messages of the newest train turns alone."""
        links = RecordedLinks()
        for turn in self._kept:
            for (source, target), transfers in turn.items():
                for one in transfers:
                    links.add(source, target, one.num_bytes, one.seconds, at_s=one.at_s)
        return links

    def _rate(self, pair: Pair, transfers: Sequence[_Transfer]) -> float:
        """Bytes per second of the quicker messages, without the link's latency."""
        latency_s = self._latency_s[pair]
        rates = [one.num_bytes / (one.seconds - min(latency_s, one.seconds / 2)) for one in transfers]
        return statistics.quantiles(rates, n=4, method="inclusive")[2]


CHANGED: Final = 1.25
"""A pace counts as changed when it is so many times the usual one, or the usual one so many times the pace."""


_OF_COMPUTING: Final = ("block_forward_s", "block_graph_s", "block_backward_s", "handling_s", "message_s_per_byte")
"""Seconds of a node's facts that depend on its pace, besides those of its works."""


def kinds_of_work(part: Plan, turn: Turn) -> tuple[Hashable, dict[str, Hashable]]:
    """The units that train at the first and the last step of a turn: in the whole ring, and the part of each host."""
    course = part.course.decided(turn.unfreeze_at)
    depth = tuple(trained(course, StepKind.TRAIN, step) for step in (turn.first_step, turn.end_step - 1))
    kinds: dict[str, Hashable] = {
        piece.node: (
            turn.owner == piece.node,
            *(
                (len(units.within(piece.start, piece.stop).blocks), bool(units.within(0, piece.start).blocks))
                for units in depth
            ),
        )
        for piece in part.placement.hosts
    }
    return depth, kinds


class _Done(NamedTuple):
    node: str
    action: Action
    seconds: float


class PaceMonitor:
    """Watches the pace of every node on one placement.

    Args:
        part: of the run's plan that holds.
        profile: that the placement was planned with.

    Attributes:
        links: the watch of the links between the nodes.
    """

    def __init__(self, part: Plan, profile: Profile) -> None:
        self._part, self._profile = part, profile
        self._open: dict[int, tuple[Turn, list[_Done]]] = {}
        self._turn_of: dict[int, int] = {}
        self._kept: deque[tuple[Turn, list[_Done]]] = deque(maxlen=LASTING_TURNS)
        self._num_turns = 0
        self.links = LinkMonitor(profile.links)
        self._same_work: ChangeDetector[str] = ChangeDetector(CHANGED)
        self._same_depth: ChangeDetector[str] = ChangeDetector(CHANGED)

    def granted(self, turn: Turn) -> None:
        """Expect the actions of a turn; only train turns count."""
        if turn.kind is StepKind.TRAIN:
            self._open[turn.index] = (turn, [])
            self._turn_of |= dict.fromkeys(range(turn.first_seq, turn.end_seq), turn.index)

    def add(self, node: str, action: Action, seconds: float) -> None:
        """Add the seconds on the clock of an action of a node."""
        index = self._turn_of.get(action.seq)
        if index is not None:
            self._open[index][1].append(_Done(node, action, seconds))

    def turn_done(self, turn: Turn) -> None:
        """Note the pace of every node in a turn that is done."""
        found = self._open.pop(turn.index, None)
        if found is None:
            return
        for seq in range(turn.first_seq, turn.end_seq):
            self._turn_of.pop(seq, None)
        depth, kinds = kinds_of_work(self._part, turn)
        self.links.turn_done(kinds)
        self._kept.append(found)
        self._num_turns += 1
        if self._num_turns == 1:
            return
        works: dict[str, dict[str, tuple[float, float]]] = {}
        for (node, work), times in self._recorded([found], self._profile).pace.items():
            works.setdefault(node, {})[work] = times
        for node, times_of in works.items():
            self._same_work.add(node, kinds.get(node), times_of)
            self._same_depth.add(node, (depth, kinds.get(node)), times_of)

    def changed(self) -> dict[str, float]:
        """The nodes with a lasting change of pace, each with the factor of its actions' times."""
        slower = {node: ratio for node, ratio in self._same_work.changed().items() if ratio > 1}
        return slower | {node: ratio for node, ratio in self._same_depth.changed().items() if ratio < 1}

    def profile(self, links: RecordedLinks) -> Profile:
        """The profile with what actions took in the newest turns, and the rates of the links as transfers show them.

        Where the rate of a link has changed, the transfers of the newest turns alone say it.

        Args:
            links: with the transfers of the whole run.
        """
        factors = self.changed()
        nodes = tuple(_at_pace(node, factors.get(node.node, 1.0)) for node in self._profile.nodes)
        recorded = self._recorded(self._kept, dataclasses.replace(self._profile, nodes=nodes))
        recorded.links = links
        found = recorded.profile()
        if not (changed := self.links.changed()):
            return found
        newest = self.links.newest().links(found.links)
        return dataclasses.replace(
            found,
            links=tuple(
                new if (new.source, new.target) in changed else old
                for old, new in zip(found.links, newest, strict=True)
            ),
        )

    def _recorded(self, turns: Iterable[tuple[Turn, list[_Done]]], known: Profile) -> RecordedProfile:
        recorded = RecordedProfile(self._part.course, known, recompute=self._part.placement.recompute)
        for turn, actions in turns:
            recorded.granted(turn)
            for node, action, seconds in actions:
                recorded.add(node, action, seconds)
        return recorded


def _at_pace(node: NodeFacts, factor: float) -> NodeFacts:
    """The facts of a node with all its times multiplied by ``factor``."""
    if factor == 1:
        return node
    quartiles = ("median_s", "low_s", "high_s")
    times = (
        dataclasses.replace(time, **{name: factor * getattr(time, name) for name in quartiles})
        for time in node.work_times
    )
    return dataclasses.replace(
        node, work_times=tuple(times), **{name: factor * getattr(node, name) for name in _OF_COMPUTING}
    )
