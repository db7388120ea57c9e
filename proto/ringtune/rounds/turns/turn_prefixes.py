"""The coordinator's part in the prefix cache: where each item of a turn enters the ring, and where it is kept.

A batch is read only where it was kept in a turn that every node has done before this one is granted; a host that could
not keep it, or found it damaged, has said so by then. So a turn is granted only when those are done that end so many
items before it::

    items ahead 16    turn 0 [0,10)  turn 1 [10,20)  turn 2 [20,30)  turn 3 [30,40)
                      kept in 0 -------------------------> may be read from turn 3 on, which waits for the end of 0

With ``float32`` no result depends on it. Where the placement has no cache, this does nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ringtune.schedule.course import Course
from ringtune.schedule.passage import WHOLE, Passage, PrefixCache
from ringtune.schedule.plan import Plan
from ringtune.schedule.prefixes.kept import (
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
from ringtune.schedule.prefixes.visits import later_visits
from ringtune.schedule.turns.turns import Item, Turn, items


class _Entry(NamedTuple):
    """A batch that is kept: with how many bytes at most by whom, where, and since when.

    Replicas of a stage keep the micro-batches that pass them.
    """

    size_bytes: Mapping[str, int]
    boundary: int
    end_seq: int


class TurnPrefixes:
    """What the hosts of one run keep, by what they were told.

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
        """The same for another placement, whose hosts begin with an empty cache."""
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
        """Keep a batch that has to begin at the embedding, if it comes again and its host has room."""
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
        """Yield the frozen prefixes of the later visits that may read what is kept in a turn."""
        first = turn.end_step + self._items_ahead if item.kind.has_update else 0
        steps = (step for step in later_visits(course, item) if step - step % course.local_iterations >= first)
        prefixes = (frozen_prefix(course, item.kind, step) for step in steps)
        return itertools.takewhile(lambda prefix: prefix > 0, prefixes)

    def _give_up(self, key: Key, turn: Turn) -> None:
        """Count on what is kept of a batch no longer; its bytes are free when the turn is done."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._useless.setdefault(turn.index, []).append(entry)

    def _hold(self, entry: _Entry, sign: int) -> None:
        for host, size in entry.size_bytes.items():
            self._held_bytes[host] = self._held_bytes.get(host, 0) + sign * size
