"""The activation cache: ``[cache]`` of a job, later visits of batches, and the boundary where an item enters the ring.

Hosts keep hidden states of rows that return, in files. With ``float32`` no result depends on it.

``later_visits``: the steps at which a batch returns, by the order of turns and batches. An owner with three batches,
turns of two steps, two owners that take turns::

    its position in the stream    0  1    2  3    4  5
    batch                         1  0    2  2    0  1      each pass over the rows in an order of its own
    step                          0  1    4  5    8  9

``TurnPrefixes``: a batch is read only where it was kept in a turn that every node has done before the reading turn is
granted; a host that could not keep it, or found it damaged, has reported that by then. So a turn is granted only when
those are done that end so many items before it::

    items ahead 16    turn 0 [0,10)  turn 1 [10,20)  turn 2 [20,30)  turn 3 [30,40)
                      kept in 0 -------------------------> may be read from turn 3 on, which waits for the end of 0

``expect_prefixes``: the savings that a planner expects, by the coordinator's own decisions, as if every turn were done
at once.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ringtune.config.sections import AUTO, check_choice
from ringtune.errors import JobError
from ringtune.schedule.course import Course, stream_of
from ringtune.schedule.frozen_prefix import (
    VISITS_AHEAD,
    Key,
    boundary_to_keep,
    entry_bytes,
    frozen_prefix,
    hosts_at,
    key_of,
    may_come_again,
    prefix_after,
)
from ringtune.schedule.migration import due
from ringtune.schedule.placement import DEFAULT_MAX_BYTES, EXACT, ROUNDED, WHOLE, Passage, PrefixCache
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import EQUAL, turn_counts, weights
from ringtune.schedule.turns import (
    ITEMS_AHEAD,
    Item,
    StartPoint,
    StepKind,
    Turn,
    evaluation_is_due,
    items,
    turn_sequence,
)

OFF: Final = "off"
_PREFIXES: Final = (OFF, AUTO)
_DTYPES: Final = (EXACT, ROUNDED)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSettings:
    """``[cache]``: hidden states that hosts keep of rows that come again, where the blocks below stay frozen.

    Attributes:
        prefix: off, or auto = each host keeps on its disk what enters its slice where that saves work; hosts then keep
            hidden states of rows of others until the run ends.
        max_bytes: bytes that a host keeps at most; rows count as if they had ``train.max_length`` tokens.
        dtype: number type in which they are kept; float32 changes no result, bfloat16 takes half the room and rounds.
    """

    prefix: str = OFF
    max_bytes: int = DEFAULT_MAX_BYTES
    dtype: str = EXACT

    def __post_init__(self) -> None:
        """Refuse an unknown word, and a negative limit."""
        check_choice("cache.prefix", self.prefix, _PREFIXES)
        check_choice("cache.dtype", self.dtype, _DTYPES)
        if self.max_bytes < 0:
            raise JobError(f"cache.max_bytes is {self.max_bytes}, it has to be at least 0")

    def of_placement(self, computed: str) -> PrefixCache | None:
        """The settings of hosts that keep hidden states, computed in a type; None if they do not."""
        if self.prefix == OFF:
            return None
        return PrefixCache(max_bytes=self.max_bytes, dtype=self.dtype if self.dtype == ROUNDED else computed)


def later_visits(course: Course, item: Item) -> Iterator[int]:
    """Yield the steps of later visits of the batch of a train or evaluation item, in ascending order."""
    if item.kind is StepKind.EVALUATE:
        boundaries = range(_next_boundary(course, item.step), course.num_steps, course.local_iterations)
        yield from (step for step in boundaries if evaluation_is_due(course, step))
        if item.step < course.num_steps:
            yield course.num_steps
        return
    stream = stream_of(course.plain, item.owner)
    batch, index = stream.batch_id(item.batch), item.batch // stream.num_batches + 1
    while step_of(course, item.owner, index * stream.num_batches) < course.num_steps:
        step = step_of(course, item.owner, stream.position(batch, index))
        if step >= course.num_steps:
            break
        yield step
        index += 1


def step_of(course: Course, owner: str, position: int) -> int:
    """The step at which an owner trains the batch at a position of its stream, in a run without end."""
    turn, offset = divmod(position, course.local_iterations)
    return _turn_of(course.plain, owner, turn) * course.local_iterations + offset


def _next_boundary(course: Course, step: int) -> int:
    return (step // course.local_iterations + 1) * course.local_iterations


@functools.lru_cache(maxsize=1 << 14)
def _turn_of(course: Course, owner: str, count: int) -> int:
    """The number, among all owners' train turns, of the owner's turn after ``count`` others of its own.

    Turns of an owner that was left out came before it.
    """
    left_out = sum(one.turns for one in course.left_out)
    at = next(index for index, one in enumerate(course.owners) if one.node == owner)
    if course.turns == EQUAL:
        return left_out + count * len(course.owners) + at
    own = weights(course.owners, course.turns)
    least, most = count, (count + 1) * (sum(own) // own[at] + 1) + len(own)
    while least < most:  # the first number of turns by which it has had one more than ``count``
        middle = (least + most) // 2
        if turn_counts(own, middle)[at] > count:
            most = middle
        else:
            least = middle + 1
    return left_out + least - 1


class _Entry(NamedTuple):
    """A batch that is kept: with how many bytes at most by whom, where, and since when.

    Replicas of a stage keep the micro-batches that pass them.
    """

    size_bytes: Mapping[str, int]
    boundary: int
    end_seq: int


class TurnPrefixes:
    """The hidden states that hosts of one run keep, by the passages of granted turns.

    Args:
        plan: of the run.
        items_ahead: so many items before a turn that reads, the turn that kept has to be done.
    """

    def __init__(self, plan: Plan, *, items_ahead: int) -> None:
        self._plan, self._items_ahead = plan, items_ahead
        self._cache: PrefixCache | None = plan.placement.cache
        self._entries: dict[Key, _Entry] = {}
        self._held_bytes: dict[str, int] = {}
        self._lost: dict[str, str] = {}
        self._open: deque[Turn] = deque()
        self._useless: dict[int, list[_Entry]] = {}  # turn -> entries that are given up when it is done
        self._prefix = plan.course.num_blocks

    def moved(self, part: Plan) -> TurnPrefixes:
        """The same for another placement, with empty caches at its hosts."""
        return TurnPrefixes(part, items_ahead=self._items_ahead)

    def may_grant(self, turn: Turn) -> bool:
        """Whether every turn is done in which what the turn may read was kept."""
        return self._cache is None or not self._open or self._open[0].end_seq > turn.first_seq - self._items_ahead

    def decided(self, turn: Turn) -> Turn:
        """The turn with the passages of its items; the very turn where all of them are whole."""
        if self._cache is None:
            return turn
        passages: tuple[Passage, ...] = ()
        if may_come_again(turn.kind):
            course = self._plan.course.decided(turn.unfreeze_at, turn.operations)
            passages = tuple(self._passage(course, turn, item, self._cache) for item in items(course, turn))
        if any(passage != WHOLE for passage in passages):
            turn = dataclasses.replace(turn, passages=passages)
        return turn

    def granted(self, turn: Turn) -> None:
        """Note a turn that was granted; hosts delete at its end what no later turn can read."""
        if self._cache is None:
            return
        self._open.append(turn)
        prefix = prefix_after(self._plan.course, turn)
        if prefix < self._prefix:
            self._prefix = prefix
            for key in [key for key, entry in self._entries.items() if entry.boundary > prefix]:
                self._give_up(key, turn)

    def close(self, turn: Turn) -> None:
        """Note that every node has done a turn; turns are closed in their order."""
        if self._cache is not None:
            self._open.popleft()
            for entry in self._useless.pop(turn.index, ()):
                self._hold(entry, -1)

    def lose(self, host: str, problem: str) -> bool:
        """Count on a host no longer, which could not keep a batch or found it damaged; whether that is news."""
        if self._cache is None or host in self._lost:
            return False
        self._lost[host] = problem
        self._entries = {key: entry for key, entry in self._entries.items() if host not in entry.size_bytes}
        return True

    def _passage(self, course: Course, turn: Turn, item: Item, cache: PrefixCache) -> Passage:
        key, prefix = key_of(course, item), frozen_prefix(course, item.kind, item.step)
        entry = self._entries.get(key)
        if entry is not None and entry.boundary <= prefix:
            is_ready = entry.end_seq <= turn.first_seq - self._items_ahead
            return Passage(enters=entry.boundary) if is_ready else WHOLE
        return self._keep(course, turn, item, cache, prefix)

    def _keep(self, course: Course, turn: Turn, item: Item, cache: PrefixCache, prefix: int) -> Passage:
        """Keep a batch that has to begin at the embedding, if it has later visits and its host has room."""
        if prefix <= 0:
            return WHOLE
        boundary = boundary_to_keep([prefix, *itertools.islice(self._later(course, turn, item), VISITS_AHEAD)])
        placement = self._plan.placement
        hosts = hosts_at(placement, boundary) if boundary else ()
        size_bytes = {host: entry_bytes(course, placement, host, item.rows) for host in hosts}
        full = [host for host, size in size_bytes.items() if self._held_bytes.get(host, 0) + size > cache.max_bytes]
        if not hosts or full or any(host in self._lost for host in hosts):
            return WHOLE
        key = key_of(course, item)
        self._give_up(key, turn)
        self._entries[key] = _Entry(size_bytes, boundary, turn.end_seq)
        self._hold(self._entries[key], 1)
        return Passage(keeps=boundary)

    def _later(self, course: Course, turn: Turn, item: Item) -> Iterator[int]:
        """Yield the frozen prefixes of the later visits that may read hidden states of a turn."""
        first = turn.end_step + self._items_ahead if item.kind.has_update else 0
        steps = (step for step in later_visits(course, item) if step - step % course.local_iterations >= first)
        prefixes = (frozen_prefix(course, item.kind, step) for step in steps)
        return itertools.takewhile(lambda prefix: prefix > 0, prefixes)

    def _give_up(self, key: Key, turn: Turn) -> None:
        """Stop reading the kept hidden state of a batch; its bytes are free when the turn is done."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._useless.setdefault(turn.index, []).append(entry)

    def _hold(self, entry: _Entry, sign: int) -> None:
        for host, size in entry.size_bytes.items():
            self._held_bytes[host] = self._held_bytes.get(host, 0) + sign * size


MOST_ITEMS: Final = 100_000
"""About so many items from the beginning are counted, which takes seconds; of a longer run these stand for all."""


@dataclass(slots=True)
class ExpectedPrefixes:
    """The expected savings of a run by items that enter above the embedding.

    Attributes:
        items: passes of batches through the ring.
        entering: of these, those that enter where they were kept.
        blocks: forwards of blocks that these spare, of one batch through one block each.
        kept: host -> batches that it keeps, counted as often as they are kept anew.
    """

    items: int = 0
    entering: int = 0
    blocks: int = 0
    kept: dict[str, int] = field(default_factory=lambda: defaultdict(int))


def expect_prefixes(plan: Plan, *, start: StartPoint | None = None) -> ExpectedPrefixes:
    """Decide the turns of a run from its beginning, up to ``MOST_ITEMS``, and count.

    Where the losses of the run decide what trains, nothing more trains in this expectation.
    """
    found, part = ExpectedPrefixes(), plan.at(plan.placement.placement_number)
    prefixes = TurnPrefixes(part, items_ahead=ITEMS_AHEAD)
    under_way: list[Turn] = []
    for turn in itertools.takewhile(lambda turn: turn.first_seq < MOST_ITEMS, turn_sequence(plan.course, start=start)):
        if (placement_number := due(plan.course, plan.placements, turn)) != part.placement.placement_number:
            part, under_way = plan.at(placement_number), []
            prefixes = prefixes.moved(part)
        while under_way and not prefixes.may_grant(turn):
            prefixes.close(under_way.pop(0))
        decided = prefixes.decided(turn)
        prefixes.granted(decided)
        under_way.append(decided)
        found.items += turn.num_items
        for item in items(plan.course, decided) if decided.passages else ():
            found.entering += bool(item.passage.enters)
            found.blocks += item.passage.enters
            if item.passage.keeps:
                for host in hosts_at(part.placement, item.passage.keeps):
                    found.kept[host] += 1
    return found
