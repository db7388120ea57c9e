"""The activation cache: ``[cache]`` of a job, later visits of batches, and the boundaries where items enter the ring.

Hosts keep hidden states of rows that return, in files. With ``float32`` the cache changes no result.

``frozen_prefix``: number of lowest blocks without an update so far. Batches have fixed rows, so the same rows return in
every pass over the rows of their owner, and in every evaluation; while no block below a boundary has trained, the same
hidden state enters there. Example: six blocks, one more trains every 20 steps, and a batch with visits at steps 3, 23,
43 and 53. Below the lowest trained block there are 5, 4, 3 and 3. A hidden state kept at boundary 3 at step 3 saves 3
blocks at three visits.

``later_visits``: the steps at which a batch returns, by the order of turns and batches. An owner with three batches,
turns of two steps, two owners that take turns::

    its position in the stream    0  1    2  3    4  5
    batch                         1  0    2  2    0  1      each pass over the rows in an order of its own
    step                          0  1    4  5    8  9

``CachedBatches``: a batch is read only if every node has done the turn that kept it before the reading turn is granted;
a host that could not keep it, or found it damaged, has reported that by then. So a turn is granted only after the end
of all turns that end ``items_ahead`` items before it::

    items ahead 16    turn 0 [0,10)  turn 1 [10,20)  turn 2 [20,30)  turn 3 [30,40)
                      kept in 0 -------------------------> may be read from turn 3 on, which waits for the end of 0

``expected_cache_use``: the savings that a planner expects: the coordinator's decisions, as if every turn were done at
once.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import operator
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, NamedTuple

from ringtune.config.sections import AUTO
from ringtune.errors import JobError, PlanError
from ringtune.quantities import format_bytes
from ringtune.schedule.batches import num_batches
from ringtune.schedule.course import Course, stream_of
from ringtune.schedule.migration import due
from ringtune.schedule.placement import (
    DEFAULT_MAX_BYTES,
    EXACT,
    ITEM_BYTES,
    ROUNDED,
    WHOLE,
    ActivationCacheSettings,
    Passage,
    Placement,
)
from ringtune.schedule.plan import Plan, no_cache_reason
from ringtune.schedule.run_shape import EQUAL, turn_counts, weights
from ringtune.schedule.stages import hosts_of_lane, lane_of
from ringtune.schedule.turns import ITEMS_AHEAD, Item, StepKind, Turn, evaluation_is_due, items, turn_sequence
from ringtune.schedule.versions import trained, weight_version
from ringtune.storage.strict import Bounds, OneOf, check_fields
from ringtune.techniques.base import ANEW, DiskTerm, Technique

OFF: Final = "off"


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSettings:
    """``[cache]``: hidden states that hosts keep of rows that come again, where the blocks below stay frozen.

    Attributes:
        prefix: off, or auto = each host keeps on its disk what enters its slice where that saves work; hosts then keep
            hidden states of rows of others until the run ends.
        max_bytes: bytes that a host keeps at most; rows count as if they had ``train.max_length`` tokens.
        dtype: number type in which they are kept; float32 changes no result, bfloat16 takes half the room and rounds.
    """

    prefix: Annotated[str, OneOf((OFF, AUTO))] = OFF
    max_bytes: Annotated[int, Bounds(ge=0)] = DEFAULT_MAX_BYTES
    dtype: Annotated[str, OneOf((EXACT, ROUNDED))] = EXACT

    def __post_init__(self) -> None:
        check_fields(self, where="cache", error=JobError)

    def of_placement(self, computed: str) -> ActivationCacheSettings | None:
        """The settings for hosts that compute in the type ``computed``; None with ``prefix`` off."""
        if self.prefix == OFF:
            return None
        return ActivationCacheSettings(
            max_bytes=self.max_bytes, dtype=self.dtype if self.dtype == ROUNDED else computed
        )


VISITS_AHEAD: Final = 64
"""Number of later visits that count for the choice of a boundary."""

_CACHED: Final = (StepKind.TRAIN, StepKind.EVALUATE)
_HEADER_BYTES: Final = 4096


def is_cacheable(kind: StepKind) -> bool:
    """Whether items of this kind are kept and read."""
    return kind in _CACHED


def frozen_prefix(course: Course, kind: StepKind, step: int) -> int:
    """Count the lowest blocks that have had no update and get no gradient in an item; the highest block never counts.

    The course must contain the run's decisions. Example: of six blocks the upper two train. Then this is 4, also for an
    evaluation.
    """
    return _frozen_prefix(course.plain, kind, step)


@functools.lru_cache(maxsize=4096)
def _frozen_prefix(course: Course, kind: StepKind, step: int) -> int:
    most = min(course.num_blocks - 1, max(0, trained(course, kind, step).lowest))
    return next((block for block in range(most) if weight_version(course, block, step)), most)


def prefix_after(course: Course, turn: Turn) -> int:
    """The highest boundary at which a batch can be read after a turn; hidden states above it are deleted.

    It never grows. Example: of six blocks the upper two train in the last step of a turn. Then this is 4.
    """
    if not is_cacheable(turn.kind):
        return course.num_blocks
    decided = turn.settled(course)
    return frozen_prefix(decided, turn.kind, max(turn.first_step, turn.end_step - 1))


@functools.lru_cache(maxsize=1024)
def boundary_to_keep(prefixes: tuple[int, ...]) -> int:
    """The boundary at which to keep a batch that is embedded now; 0 if that saves nothing.

    It is the boundary with which all visits save the most blocks together. A batch that enters at a boundary can't be
    kept below it: a later visit that trains a lower block begins at the embedding again, and is kept anew. ``prefixes``
    are the frozen prefixes of this visit and of later ones; they never grow.
    """
    count = len(prefixes)
    ends = [at for at in range(count) if at + 1 == count or prefixes[at + 1] < prefixes[at]]
    saved = [0] * (count + 1)  # blocks that the visits from each on save with the best boundaries
    boundary = 0
    for first in reversed(range(count)):
        last, most = first, saved[first + 1]
        for end in ends:
            if end > first and (value := (end - first) * prefixes[end] + saved[end + 1]) > most:
                last, most = end, value
        saved[first] = most
        boundary = prefixes[last] if last > first else 0
    return boundary


def entry_bytes(course: Course, placement: Placement, host: str, rows: int) -> int:
    """Upper bound of a host's bytes for a batch of so many rows: hidden state, mask and header of each file.

    Rows count with ``max_length`` tokens; kept ones are padded to the longest row only. Each replica keeps the
    micro-batches that pass it. 0 without a cache.
    """
    if placement.cache is None:
        return 0
    row_bytes = course.max_length * (course.widest * ITEM_BYTES[placement.cache.dtype] + 1)
    widths = [
        size
        for micro, size in enumerate(course.microbatch_sizes(rows))
        if any(piece.node == host for piece in hosts_of_lane(placement, lane_of(placement, micro)))
    ]
    return sum(widths) * row_bytes + len(widths) * _HEADER_BYTES


def max_kept_bytes(course: Course, placement: Placement, host: str) -> int:
    """Upper bound of a host's bytes: the limit, or all batches of all owners if these are less."""
    if placement.cache is None:
        return 0
    whole = 0
    for owner in course.owners:
        rows, each = course.batch_rows(owner), course.batch_size
        whole += num_batches(owner.train_rows, rows) * entry_bytes(course, placement, host, rows)
        parts = [min(each, owner.eval_rows - first) for first in range(0, owner.eval_rows, each)]
        whole += sum(entry_bytes(course, placement, host, part) for part in parts)
    return min(placement.cache.max_bytes, whole)


def hosts_at(placement: Placement, boundary: int) -> tuple[str, ...]:
    """The hosts of the block above a boundary, which keep the hidden state there; none for a private block."""
    return tuple(piece.node for piece in placement.hosts if piece.start <= boundary < piece.stop)


class BatchKey(NamedTuple):
    """A batch with later visits, by its id, or its index among the batches of an evaluation."""

    owner: str
    is_evaluated: bool
    batch: int


def key_of(course: Course, item: Item) -> BatchKey:
    """Return the key of an item's batch."""
    is_evaluated = item.kind is StepKind.EVALUATE
    return BatchKey(item.owner, is_evaluated, item.batch if is_evaluated else course.batch_id(item.owner, item.batch))


def later_visits(course: Course, item: Item) -> Iterator[int]:
    """Yield the steps of later visits of an item's batch, ascending; train and evaluation items only."""
    if item.kind is StepKind.EVALUATE:
        each = course.local_iterations
        boundaries = range((item.step // each + 1) * each, course.num_steps, each)
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


@functools.lru_cache(maxsize=1 << 14)
def _turn_of(course: Course, owner: str, count: int) -> int:
    """Index among all train turns of the owner's turn number ``count``.

    Turns of an owner that was left out precede it, and turns that an owner has missed do not.
    """
    at = next(index for index, each in enumerate(course.owners) if each.node == owner)
    if course.turns == EQUAL:
        return course.turns_apart + count * len(course.owners) + at
    shares = weights(course.owners, course.turns)
    numbers = range((count + 1) * (sum(shares) // shares[at] + 1) + len(shares))
    # the first number of turns by which it has had one more than ``count``
    first = bisect.bisect_left(numbers, count + 1, lo=count, key=lambda number: turn_counts(shares, number)[at])
    return course.turns_apart + first - 1


class _Entry(NamedTuple):
    """A kept batch: upper bound of its bytes by host, boundary, and end of the turn that kept it."""

    size_bytes: Mapping[str, int]
    boundary: int
    end_seq: int


class CachedBatches:
    """The kept hidden states of one run, derived from the passages of granted turns."""

    def __init__(self, plan: Plan, cache: ActivationCacheSettings, *, items_ahead: int) -> None:
        self._plan, self._cache, self._items_ahead = plan, cache, items_ahead
        self._entries: dict[BatchKey, _Entry] = {}
        self._held_bytes = Counter[str]()
        self._lost: dict[str, str] = {}
        self._open: deque[Turn] = deque()
        self._useless: dict[int, list[_Entry]] = {}  # turn -> entries that are given up when it is done
        self._prefix = plan.course.num_blocks

    @staticmethod
    def of(plan: Plan, items_ahead: int) -> CachedBatches | None:
        """Make those of a placement, with empty caches; None if it has no cache."""
        cache = plan.placement.cache
        return None if cache is None else CachedBatches(plan, cache, items_ahead=items_ahead)

    def may_grant(self, turn: Turn) -> bool:
        """Whether every node has done the turns that kept the batches of this turn."""
        return not self._open or self._open[0].end_seq > turn.first_seq - self._items_ahead

    def decided(self, turn: Turn) -> Turn:
        """Return the turn with the passages of its items; the same object if all are whole."""
        passages: tuple[Passage, ...] = ()
        if is_cacheable(turn.kind):
            course = turn.settled(self._plan.course)
            passages = tuple(self._passage(course, turn, item) for item in items(course, turn))
        if any(passage != WHOLE for passage in passages):
            turn = dataclasses.replace(turn, passages=passages)
        return turn

    def granted(self, turn: Turn) -> None:
        """Note a granted turn; at its end hosts delete hidden states that no later turn can read."""
        self._open.append(turn)
        prefix = prefix_after(self._plan.course, turn)
        if prefix < self._prefix:
            self._prefix = prefix
            for key in [key for key, entry in self._entries.items() if entry.boundary > prefix]:
                self._give_up(key, turn)

    def close(self, turn: Turn) -> None:
        """Note that every node has done a turn; turns are closed in order."""
        self._open.popleft()
        for entry in self._useless.pop(turn.index, ()):
            self._hold(entry, -1)

    def lose(self, node: str, problem: str) -> bool:
        """Stop using a host that could not keep a batch or found it damaged; return False if that was known."""
        if node in self._lost:
            return False
        self._lost[node] = problem
        self._entries = {key: entry for key, entry in self._entries.items() if node not in entry.size_bytes}
        return True

    def _passage(self, course: Course, turn: Turn, item: Item) -> Passage:
        key, prefix = key_of(course, item), frozen_prefix(course, item.kind, item.step)
        entry = self._entries.get(key)
        if entry is not None and entry.boundary <= prefix:
            is_ready = entry.end_seq <= turn.first_seq - self._items_ahead
            return Passage(enters=entry.boundary) if is_ready else WHOLE
        return self._keep(course, turn, item, prefix)

    def _keep(self, course: Course, turn: Turn, item: Item, prefix: int) -> Passage:
        """Keep a batch that begins at the embedding, if it has later visits and its hosts have room."""
        if prefix <= 0:
            return WHOLE
        boundary = boundary_to_keep((prefix, *itertools.islice(self._later(course, turn, item), VISITS_AHEAD)))
        placement = self._plan.placement
        hosts = hosts_at(placement, boundary) if boundary else ()
        size_bytes = {host: entry_bytes(course, placement, host, item.rows) for host in hosts}
        most = self._cache.max_bytes
        full = [host for host, size in size_bytes.items() if self._held_bytes[host] + size > most]
        if not hosts or full or any(host in self._lost for host in hosts):
            return WHOLE
        key = key_of(course, item)
        self._give_up(key, turn)
        self._entries[key] = _Entry(size_bytes, boundary, turn.end_seq)
        self._hold(self._entries[key], 1)
        return Passage(keeps=boundary)

    def _later(self, course: Course, turn: Turn, item: Item) -> Iterator[int]:
        """Yield the frozen prefixes of later visits that may read hidden states of a turn."""
        first = turn.end_step + self._items_ahead if item.kind.has_update else 0
        steps = (step for step in later_visits(course, item) if step - step % course.local_iterations >= first)
        prefixes = (frozen_prefix(course, item.kind, step) for step in steps)
        return itertools.takewhile(lambda prefix: prefix > 0, prefixes)

    def _give_up(self, key: BatchKey, turn: Turn) -> None:
        """Stop reading a kept batch; its bytes are free when the turn is done."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._useless.setdefault(turn.index, []).append(entry)

    def _hold(self, entry: _Entry, sign: int) -> None:
        for host, size in entry.size_bytes.items():
            self._held_bytes[host] += sign * size


MAX_ITEMS: Final = 100_000
"""Number of items that are counted, which takes seconds; in a longer run they stand for all."""


@dataclass(slots=True)
class ExpectedCacheUse:
    """Expected savings of a run by the cache.

    Attributes:
        entering: those that enter at a kept boundary.
        blocks: saved forwards of one batch through one block.
        kept: host -> kept batches, counted each time they are kept.
    """

    items: int = 0
    entering: int = 0
    blocks: int = 0
    kept: Counter[str] = field(default_factory=Counter)


def expected_cache_use(plan: Plan) -> ExpectedCacheUse:
    """Decide the turns of a run from its beginning, up to ``MAX_ITEMS`` items, and count the savings.

    Where losses decide the depth, the depth is assumed not to grow.
    """
    use, part = ExpectedCacheUse(), plan.at(plan.placement.placement_number)
    prefixes = CachedBatches.of(part, ITEMS_AHEAD)
    under_way: list[Turn] = []
    for turn in itertools.takewhile(lambda turn: turn.first_seq < MAX_ITEMS, turn_sequence(plan.course)):
        if (placement_number := due(plan.course, plan.placements, turn)) != part.placement.placement_number:
            part, under_way = plan.at(placement_number), []
            prefixes = CachedBatches.of(part, ITEMS_AHEAD)
        use.items += turn.num_items
        if prefixes is None:
            continue
        while under_way and not prefixes.may_grant(turn):
            prefixes.close(under_way.pop(0))
        decided = prefixes.decided(turn)
        prefixes.granted(decided)
        under_way.append(decided)
        for item in items(plan.course, decided) if decided.passages else ():
            use.entering += bool(item.passage.enters)
            use.blocks += item.passage.enters
            if item.passage.keeps:
                use.kept.update(hosts_at(part.placement, item.passage.keeps))
    return use


def with_prefix_cache(job: Any, plan: Plan) -> Plan:
    """Add to a plan the cache for which its job asks; raises ``PlanError``."""
    cache = job.cache.of_placement(job.model.dtype)
    if cache is None or not plan.course.num_steps:
        return plan
    if problem := no_cache_reason(plan.course, bool(plan.placement.helpers)):
        raise PlanError(problem)
    if job.audit is not None:
        raise PlanError("an audit repeats work from what a neighbour sent, not from a file of the host")
    cached = Plan(plan.course, tuple(dataclasses.replace(placement, cache=cache) for placement in plan.placements))
    if not expected_cache_use(cached).entering:
        raise PlanError(
            "no batch comes again while the blocks below stay frozen, or none has room; train longer on fewer rows, "
            "unfreeze later, or raise cache.max_bytes"
        )
    return cached


def check_plan(job: Any, plan: Plan, _: Any) -> None:
    """Refuse a given plan with another cache than the job's; raises ``PlanError``."""
    cache_of_job = job.cache.of_placement(job.model.dtype)
    for cache in (placement.cache for placement in plan.placements if placement.cache is not None):
        if cache != cache_of_job:
            says = "cache.prefix = 'off'" if cache_of_job is None else _text(cache_of_job)
            raise PlanError(f"the plan has hosts keep hidden states, {_text(cache)}; the job says {says}; {ANEW}")


def _text(cache: ActivationCacheSettings) -> str:
    return f"{format_bytes(cache.max_bytes)} of {cache.dtype} at most"


def cache_lines(plan: Plan) -> list[str]:
    """Describe the kept hidden states and the savings; empty without a cache."""
    if plan.placement.cache is None:
        return []
    expected = expected_cache_use(plan)
    share = expected.blocks / max(1, expected.items * plan.course.num_blocks)
    hosts = ", ".join(sorted(expected.kept)) or "no host"
    return [
        f"hidden states of rows that come again are kept at {hosts}: {expected.entering:,} of {expected.items:,} "
        f"batches enter where they were kept, which spares {share:.0%} of the forwards of blocks"
    ]


def cache_price(plan: Plan, _: Sequence[object]) -> list[str]:
    """Warn that hosts keep hidden states of others' rows; empty without a cache, or with one node."""
    cache = plan.placement.cache
    if cache is None or len(plan.nodes) == 1:
        return []
    rounds = "; bfloat16 rounds them, so that the result depends on what was kept" if cache.dtype == ROUNDED else ""
    return [
        "until the run ends hosts keep hidden states of others' rows on their disks (cache.prefix = 'auto'), from "
        f"which much of the rows can be told{rounds}"
    ]


TECHNIQUE: Final = Technique(
    name="activation_cache",
    later_keys={f"cache.{name}": value for name, value in dataclasses.asdict(CacheSettings()).items()},
    placed=with_prefix_cache,
    left_out="hidden states are not kept",
    disk_terms=lambda plan, node: [
        DiskTerm("hidden states", max_kept_bytes(plan.course, plan.placement, node), "lower cache.max_bytes")
    ],
    check_plan=check_plan,
    plan_lines=cache_lines,
    notes=cache_price,
    turn_rule=CachedBatches.of,
    totals={"cache_reads": operator.add, "cache_read_bytes": operator.add, "cache_most_kept_bytes": max},
)
