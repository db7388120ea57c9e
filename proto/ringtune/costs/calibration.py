"""Calibration of a profile by a run: recorded times replace measured ones, and lasting changes of speed are detected.

``RecordedProfile`` turns recorded actions into times for the next plan. An action over several blocks is divided evenly
among them. If the lowest trainable block is among them, its time has the profile's ratio r to that of the others; such
samples count only where a node has too few actions without that block::

    F [2,5), lowest block 2:  d = 2 g + r g       g: a block with trainable ones below it, r g: the lowest one

An action with some of the subnets is scaled to all of them, and a backward with recomputed blocks is divided into
forwards and backwards, both by the ratios of the profile.

A run has other sizes than a measurement (its mean padded lengths; lengths of single batches never leave their owner).
So each action is compared with the profile's time for its size. The mean of these ratios scales the whole measured
curve, and a point at the run's mean size is added to it.

``ChangeDetector``: in a turn each name has a *pace*, its recorded seconds over the known seconds of the work. Only
turns of one *kind*, in which the name had the same work, are compared::

    turn                 0      1     2     3     4  |   5     6     7
    kind                 x      x     x     y     y  |   y     y     y
    pace of b          (1.6)   1.0   1.1   1.5   1.6 |  3.1   3.0   3.2     the newest three of kind y
                       first    `-- other kind     `-- 2.0 times as long as the usual 1.55

A pace has changed if each of the newest turns is slower than each of the usual ones by a factor, or each faster, and if
the difference exceeds the noise. One slow turn, of a board that did other work, would make all others look fast: of at
least four usual turns the longest and the shortest do not count, and with fewer no pace counts as faster. Noise is
estimated from consecutive turns of one kind over all names, since one name has too few turns. With the mean square
``d`` of differences of logarithms, a turn has the variance ``d / 2``, and the difference of the means of ``m`` usual
and ``n`` newest turns ``d / 2 * (1 / m + 1 / n)``; it must be ``BEYOND_NOISE`` times the root of that. The largest
difference does not count, as a change itself causes one.

``LinkMonitor``: the rate of a link in a turn is that of its quicker messages, as in ``costs.links``: a busy processor
slows some of them, a slower link all. Turns are of one kind if both ends of the link had the same work, because the
messages of a node share its line. A turn with few messages that have a rate does not count::

    train turn              0      1     2  |   3     4     5     6
    a -> b, in MB/s       (1.9)   2.4   2.6 |  2.5   0.6   0.6   0.7
                          first   the usual |         `-- three turns in a row: 3.95 times as long

``PaceMonitor``: the pace of a node, by wall-clock seconds, also under a quota of processor time. Only its change
counts: a pace of 1.1 from the start is an error of the profile, which the plan has too. Each work has a pace of its
own, as a profile may be wrong for forwards and right for backwards, and their numbers change as more blocks train.

Turns are of one kind for a node if the same number of its blocks train, blocks below them train or do not, and it is
the initiator or is not. A board with an invisible quota has pace 1.0 for frozen blocks, between which it is idle, and
2.0 when its own blocks train without idle time, at the same speed. As more blocks train elsewhere, it is idle longer
and looks faster, hardly ever slower. So *slower* is judged over all turns with the same work of the node, *faster* only
over those with the same work of all nodes. A change at the turn from which more of the node's blocks train is
attributed to them. A changed pace is applied to all works of the node, also to those without samples.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

from ringtune.costs.action_costs import NodeCosts, TopShare, micro_sizes, work_points
from ringtune.costs.activation_costs import again_works, mean_gain, projected_gains, trained_parts
from ringtune.costs.links import KEPT_SAMPLES, Message, Pair, RecordedLinks, has_rate
from ringtune.costs.profile import BLOCK_WORKS, PART_OF, LinkFacts, NodeFacts, Profile, Work, WorkTable, WorkTime
from ringtune.schedule.actions import Action, Graph, Op, Scope
from ringtune.schedule.course import Course
from ringtune.schedule.lowering import lowest_units, subnet_rows, takes_part
from ringtune.schedule.operation_tables import patterns_of
from ringtune.schedule.plan import Plan
from ringtune.schedule.saved_activations import overlap, within
from ringtune.schedule.turns import Item, StepKind, Turn, items
from ringtune.schedule.units import EMBEDDING, Range
from ringtune.schedule.versions import trained
from ringtune.techniques.activation_checkpointing import VELORA_EXTRA

USUAL_TURNS: Final = 2
"""Fewest usual turns of a kind, without the run's first turn."""

MAX_USUAL_TURNS: Final = 6
"""Most usual turns of a kind, its first ones: later ones might have drifted."""

_ENOUGH: Final = 4
"""From this number of usual turns on the longest and the shortest do not count; with fewer no pace counts as faster."""

LASTING_TURNS: Final = 3
"""Number of newest turns in which a change must last."""

BEYOND_NOISE: Final = 4.0
"""Standard deviations by which the newest turns must differ from the usual ones."""

Name = TypeVar("Name", bound=Hashable)

Works = Mapping[str, tuple[float, float]]
"""Work in a turn -> (recorded seconds, known seconds)."""


class _Turns:
    """Turns of one name and kind: the first, the newest, and the number of all."""

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
        """First turns without the newest ones."""
        return self.first[: max(0, self.number - LASTING_TURNS)]


class ChangeDetector(Generic[Name]):
    """Detects lasting changes of pace of any number of names with equal noise.

    ``changed`` is the smallest factor between newest and usual paces, in either direction, that counts.
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
        turns = self._kinds.setdefault((name, kind), _Turns())
        difference = _log_ratio(works, [turns.newest[-1]]) if turns.newest else None
        if difference is not None:
            self._squares += difference**2
            self._largest = max(self._largest, difference**2)
            self._differences += 1
        turns.add(works)
        self._now[name] = kind

    def changed(self) -> dict[Name, float]:
        """Return the names with a lasting change of pace -> factor of the time for the same work."""
        ratios = {}
        for name, kind in self._now.items():
            turns = self._kinds[name, kind]
            if len(turns.usual) >= USUAL_TURNS and (ratio := self._lasting(turns)):
                ratios[name] = ratio
        return ratios

    def _lasting(self, turns: _Turns) -> float:
        """Factor of the newest turns' times; 0 where the change does not last, or may be noise."""
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
    """Logarithm of a turn's time over the time of usual turns, for the works in both; None without a common work."""
    took_s = usual_s = 0.0
    for work, (seconds, known_s) in works.items():
        before = [turn[work] for turn in usual if work in turn]
        if before:
            took_s += seconds
            usual_s += known_s * sum(each_s for each_s, _ in before) / sum(each_s for _, each_s in before)
    return math.log(took_s / usual_s) if usual_s > 0 else None


MIN_TIMES = 5
KEPT_TIMES = 2000
"""Newest samples that are kept for each work on each node."""

_OF_A_PART = frozenset({Scope.MICRO, Scope.RANGE})
_UNSIZED = frozenset({Work.UPDATE, Work.UPDATE_HEAD, Work.HAND_OVER, Work.SAVE})


class _OpenItem(NamedTuple):
    """A granted item; per micro-batch lowest unit with a gradient, padded tokens, and row of its table if any.

    ``embedded`` has the padded tokens of the micro-batches that take part.
    """

    item: Item
    lowest: tuple[int, ...]
    sizes: tuple[float, ...]
    rows: tuple[str, ...]
    subnets: int
    embedded: tuple[float, ...]


class _Sample(NamedTuple):
    """One recorded work: seconds, size, and its time over the profile's for that size (0 = none)."""

    seconds: float
    size: float
    ratio: float


class RecordedProfile:
    """Turns the recorded actions of a run into the times of a profile.

    Args:
        profile: of its plan; has every node of the run.
        skipped_items: number of first items that do not count, as first executions take longer.

    Attributes:
        links: takes the run's transfers.
        pace: (node, work) -> (recorded seconds, seconds in the profile).
    """

    def __init__(
        self, course: Course, profile: Profile, *, recompute: Sequence[Range] = (), skipped_items: int = 0
    ) -> None:
        self._course = course
        self._recompute = tuple(recompute)
        self._projected = course.projected
        self._gains = projected_gains(course, profile.nodes[0].model)
        self._skipped_items = skipped_items
        self._top = TopShare(course, profile.nodes[0].model) if course.top_tokens else None
        self._take(profile)
        self._open: dict[int, _OpenItem] = {}
        self._shared: dict[int, list[float]] = {}
        self._samples: dict[tuple[str, Work], deque[_Sample]] = {}
        self._guesses: dict[tuple[str, Work], deque[_Sample]] = {}
        self._worked: set[str] = set()
        self.links = RecordedLinks()
        self.pace: dict[tuple[str, Work], tuple[float, float]] = {}

    def _take(self, profile: Profile) -> None:
        self._profile, self._facts = profile, profile.by_name
        points = {node: work_points(facts) for node, facts in self._facts.items()}
        self._tables = {node: WorkTable(curve, where=f"node {node}") for node, curve in points.items()}
        self._costs = {node: NodeCosts(self._facts[node], self._course.head) for node, curve in points.items() if curve}

    def has_node(self, node: str) -> bool:
        """Whether a node was there at the start, or has joined."""
        return node in self._facts

    def joined(self, facts: NodeFacts, links: Sequence[LinkFacts]) -> None:
        """Add a node that joined the run, with its links."""
        nodes = sorted((*self._profile.nodes, facts), key=lambda node: node.node)
        self._take(Profile(nodes=tuple(nodes), links=(*self._profile.links, *links)))

    # ---- what happens -----------------------------------------------------------------------------

    def granted(self, turn: Turn) -> None:
        """Note a granted turn: actions of its items count from now on.

        Not those of scores, which do more, nor of texts, of which some have ended and are not computed.
        """
        if turn.kind in (StepKind.SCORE, StepKind.GENERATE):
            return
        course = turn.settled(self._course)
        subnets = course.subnets
        for item in items(course, turn):
            if item.seq < self._skipped_items:
                continue
            sizes = micro_sizes(course, item, self._facts[item.owner])
            rows, embedded = subnet_rows(course, item), tuple(itertools.compress(sizes, takes_part(course, item)))
            self._open[item.seq] = _OpenItem(item, lowest_units(course, item), sizes, rows, subnets, embedded)

    def turn_done(self, turn: Turn) -> None:
        """Drop a turn that is done: no more of its actions count."""
        for seq in range(turn.first_seq, turn.end_seq):
            self._open.pop(seq, None)
            self._shared.pop(seq, None)

    def add(self, node: str, action: Action, seconds: float, *, worked_s: float = 0.0) -> None:
        """Add the recorded time of one action of a node.

        ``worked_s`` is the time of the action at the node's quota alone, and is used if it is positive: wall-clock
        seconds depend on the idle time before the action, which the simulator adds by itself.

        An action is left out if no granted turn has its item, the profile lacks its node, its blocks or micro-batch are
        out of range, or its time is negative or not finite.
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
        """Time of an action with projections over its time without, by the profile's ratios of works."""
        count = action.stop - action.start
        share = 1 + VELORA_EXTRA * overlap(self._projected, [(action.start, action.stop)]) / count
        back_s = self._known(node, Work.BACKWARD, size)
        if action.op is Op.BACKWARD and any(self._gains) and back_s > 0:
            units = trained(self._course, entry.item.kind, entry.item.step)
            parts = within(trained_parts(self._course, self._projected, units), action.start, action.stop)
            gained = sum(mean_gain(self._gains, *part) * (part.stop - part.start) for part in parts)
            works = again_works(action, self._recompute, entry.lowest[action.micro])
            graph_s = self._known(node, Work.GRAPH, size)
            whole_s = sum(number * self._known(node, work, size) for work, number in works.items()) or count * back_s
            share -= min(gained * graph_s / whole_s, 0.9)
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

        The first embedding of an item loads its whole batch, so a single action is not typical.
        """
        times = self._shared.setdefault(entry.item.seq, [])
        times.append(seconds)
        if len(times) == len(entry.embedded):
            work = Work(action.op.timing.work)
            self._add(node, work, statistics.fmean(times), statistics.fmean(entry.embedded))

    def _cost_share(self, node: str, action: Action, entry: _OpenItem, size: float) -> float:
        """Seconds of an action over its seconds with all blocks full, by the profile; 1 if it lacks the work.

        Example: an action of two blocks, one of them with half of its subnets, has a share of 0.75.
        """
        op, start, stop = action.op, action.start, action.stop
        patterns = patterns_of(entry.rows[action.micro], start, stop, entry.subnets)
        if not all(work in self._tables[node] for work in (op.timing.work, op.timing.lowest) if work):
            return 1.0
        costs, lowest = self._costs[node], entry.lowest[action.micro]
        each = [
            costs.seconds(op, start, stop, size=size, lowest=lowest, kind=entry.item.kind, patterns=given)
            for given in (patterns, ())
        ]
        return each[0] / each[1] if min(each) > 0 else 1.0

    def _shares(
        self, node: str, action: Action, entry: _OpenItem, seconds: float, size: float
    ) -> Sequence[tuple[Work, float]]:
        """Divide an action's time into times of works; the inverse of ``NodeCosts.seconds``."""
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
        """Divide a time among blocks that cost as much as ``count`` whole ones, one of them the lowest trained.

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
        """Divide a time among works in the ratios of the profile; nothing if it lacks one of them."""
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
        """Return the profile with recorded times of works with ``MIN_TIMES`` samples on a node, and recorded rates."""
        nodes = tuple(self._updated(node) for node in self._profile.nodes)
        return dataclasses.replace(self._profile, nodes=nodes, links=self.links.links(self._profile.links))

    def _updated(self, facts: NodeFacts) -> NodeFacts:
        points: dict[str, list[WorkTime]] = {}
        for point in work_points(facts):
            points.setdefault(point.work, []).append(point)
        changed = {work: samples for work in Work if len(samples := self._samples_of(facts.node, work)) >= MIN_TIMES}
        if not changed:
            return facts
        for work, samples in changed.items():
            before = points.get(work, [])
            points[work] = self._moved(facts.node, work, before, samples)
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
        """Return the undivided samples of a work; if they are fewer than ``MIN_TIMES``, the divided ones too."""
        sure = self._samples.get((node, work), ())
        return sure if len(sure) >= MIN_TIMES else [*sure, *self._guesses.get((node, work), ())]

    def _moved(self, node: str, work: Work, before: Sequence[WorkTime], samples: Sequence[_Sample]) -> list[WorkTime]:
        """Scale the measured points of a work by the mean ratio of its samples, and add the recorded point."""
        size = statistics.fmean(sample.size for sample in samples)
        largest = self._course.microbatch_sizes()[0]
        rows = largest if size >= largest else 1
        tokens = round(size / rows)
        ratios = [sample.ratio for sample in samples if sample.ratio > 0]
        if len(ratios) < len(samples):  # nothing measured to compare with: times in proportion to the mean size
            ratios = [sample.seconds * (size / sample.size if sample.size else 1.0) for sample in samples]
            return [_point(work, rows, tokens, len(samples), _spread(ratios))]
        known = self._known(node, work, rows * tokens)
        low, mean, high = _spread(ratios)
        curve = [
            _point(work, at.rows, at.tokens, at.samples, (low * at.median_s, mean * at.median_s, high * at.median_s))
            for at in before
            if at.size and work not in _UNSIZED and (at.rows, at.tokens) != (rows, tokens)
        ]
        return [*curve, _point(work, rows, tokens, len(samples), (low * known, mean * known, high * known))]


def _in_step(parts: Sequence[WorkTime], before: WorkTable, after: Sequence[WorkTime]) -> list[WorkTime]:
    """Scale the points of a part of a block as the whole block's times at their sizes."""
    work, table = after[0].work, WorkTable(after, where="a node")
    scaled = []
    for part in parts:
        known = before.seconds(work, part.size)
        ratio = table.seconds(work, part.size) / known if known > 0 else 1.0
        scaled.append(part.scaled(ratio))
    return scaled


def _point(work: Work, rows: int, tokens: int, samples: int, quartiles: tuple[float, float, float]) -> WorkTime:
    low_s, median_s, high_s = quartiles
    rows, tokens = (0, 0) if work in _UNSIZED else (rows, tokens)
    return WorkTime(work=work, rows=rows, tokens=tokens, median_s=median_s, low_s=low_s, high_s=high_s, samples=samples)


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, mean, third quartile; the quartiles are widened to enclose the mean.

    The mean, not the median, because lengths of batches and waits for a quota are skewed, and a run takes their sum.
    """
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    mean = statistics.fmean(values)
    return min(low, mean), mean, max(high, mean)


LINK_CHANGED: Final = 1.5
"""Factor of the time of messages, in either direction, from which on a link counts as changed.

Larger than for nodes, as the rate of a radio link changes by a quarter from turn to turn; chosen, not fitted.
"""

MIN_IN_TURN: Final = 4
"""Fewest messages of a link in a turn that give a rate."""


class LinkMonitor:
    """Monitors the rates of links on one placement; ``links`` are those known when it was planned."""

    def __init__(self, links: Sequence[LinkFacts]) -> None:
        self._latency_s = {(link.source, link.target): link.latency_s for link in links}
        self._turn: dict[Pair, list[Message]] = {}
        self._kept: deque[dict[Pair, list[Message]]] = deque(maxlen=LASTING_TURNS)
        self._num_turns = 0
        self._rates: ChangeDetector[Pair] = ChangeDetector(LINK_CHANGED)

    def add(self, source: str, target: str, num_bytes: int, seconds: float, *, at_s: float) -> None:
        """Add one message that arrived at ``at_s``; one of an unknown link, or without a rate, is left out."""
        if (source, target) in self._latency_s and has_rate(num_bytes, seconds, at_s):
            messages = self._turn.setdefault((source, target), [])
            if len(messages) < KEPT_SAMPLES:
                messages.append(Message(num_bytes, seconds, at_s))

    def turn_done(self, kinds: Mapping[str, Hashable]) -> None:
        """Note the rate of every link in a finished train turn; ``kinds`` has the kind of each node's work in it."""
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
        """Return the links with a lasting change of rate -> factor of their messages' times."""
        return self._rates.changed()

    def newest(self) -> RecordedLinks:
        """Return the messages of the newest train turns."""
        links = RecordedLinks()
        for turn in self._kept:
            for (source, target), transfers in turn.items():
                for message in transfers:
                    links.add(source, target, message.num_bytes, message.seconds, at_s=message.at_s)
        return links

    def _rate(self, pair: Pair, transfers: Sequence[Message]) -> float:
        """Bytes per second of the quicker messages (third quartile), without the link's latency."""
        latency_s = self._latency_s[pair]
        rates = [message.num_bytes / (message.seconds - min(latency_s, message.seconds / 2)) for message in transfers]
        return statistics.quantiles(rates, n=4, method="inclusive")[2]


CHANGED: Final = 1.25
"""Factor of a pace, in either direction, from which on it counts as changed."""


def kinds_of_work(part: Plan, turn: Turn) -> tuple[Hashable, dict[str, Hashable]]:
    """Return the kind of a turn for the whole ring, and for each host.

    The ring's kind is the units that train at the turn's first and last step. A host's is whether it is the initiator,
    and for both steps the number of its blocks that train and whether blocks below them do.
    """
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
    """Monitors the pace of every node on one placement."""

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
        """Add the wall-clock seconds of an action of a node."""
        index = self._turn_of.get(action.seq)
        if index is not None:
            self._open[index][1].append(_Done(node, action, seconds))

    def turn_done(self, turn: Turn) -> None:
        """Note the pace of every node in a finished turn."""
        granted = self._open.pop(turn.index, None)
        if granted is None:
            return
        for seq in range(turn.first_seq, turn.end_seq):
            self._turn_of.pop(seq, None)
        depth, kinds = kinds_of_work(self._part, turn)
        self.links.turn_done(kinds)
        self._kept.append(granted)
        self._num_turns += 1
        if self._num_turns == 1:
            return
        works: dict[str, dict[str, tuple[float, float]]] = {}
        for (node, work), times in self._recorded([granted], self._profile).pace.items():
            works.setdefault(node, {})[work] = times
        for node, times_of in works.items():
            self._same_work.add(node, kinds.get(node), times_of)
            self._same_depth.add(node, (depth, kinds.get(node)), times_of)

    def changed(self) -> dict[str, float]:
        """Return the nodes with a lasting change of pace -> factor of their actions' times."""
        slower = {node: ratio for node, ratio in self._same_work.changed().items() if ratio > 1}
        return slower | {node: ratio for node, ratio in self._same_depth.changed().items() if ratio < 1}

    def profile(self, links: RecordedLinks) -> Profile:
        """Return the profile with times of the newest turns, and recorded rates of links.

        The rate of a changed link is from the newest turns only. ``links`` has the transfers of the whole run.
        """
        factors = self.changed()
        nodes = tuple(node.at_pace(factors.get(node.node, 1.0)) for node in self._profile.nodes)
        recorded = self._recorded(self._kept, dataclasses.replace(self._profile, nodes=nodes))
        recorded.links = links
        profile = recorded.profile()
        if not (changed := self.links.changed()):
            return profile
        newest = self.links.newest().links(profile.links)
        return dataclasses.replace(
            profile,
            links=tuple(
                new if (new.source, new.target) in changed else old
                for old, new in zip(profile.links, newest, strict=True)
            ),
        )

    def _recorded(self, turns: Iterable[tuple[Turn, list[_Done]]], known: Profile) -> RecordedProfile:
        recorded = RecordedProfile(self._part.course, known, recompute=self._part.placement.recompute)
        for turn, actions in turns:
            recorded.granted(turn)
            for node, action, seconds in actions:
                recorded.add(node, action, seconds)
        return recorded
