"""Which slices fit a node's memory, for every (start, stop, hosts above), from few calls of ``ringtune.costs.memory``.

The rule of what a plan takes lives in ``node_memory`` and is not repeated here. Within a *class* of slices (bottom or
not, top or not, frozen, straddling the lowest trainable block, or trained) its sum is affine in start, stop and the
number of hosts above, and proportional to the activations that the node measured; so three or four calls give the
class. What is chosen in the end is checked with ``node_memory`` itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from ringtune.costs.memory import MemoryEstimate, node_memory
from ringtune.costs.profile import NodeFacts
from ringtune.schedule.plan import Phase, Plan, Slice

_HOST, _OTHER = "(host)", "(other {})"


class _Sum(NamedTuple):
    """Bytes, and how many times the activations of a block."""

    other_bytes: int
    activations: int


class _Key(NamedTuple):
    is_owner: bool
    is_bottom: bool
    is_top: bool
    trains_all: bool
    trains: bool
    above: int


class _Class(NamedTuple):
    at: tuple[int, int, int]
    base: _Sum
    per_start: _Sum
    per_stop: _Sum
    per_above: _Sum


class MemoryCaps:
    """Answers whether a node can host a slice.

    Args:
        draft: a plan with everything but the slices.
        facts: of every candidate, by name.
        optimizer: of the job.
        dtype: of the computation.
    """

    def __init__(self, draft: Plan, facts: Mapping[str, NodeFacts], *, optimizer: str, dtype: str) -> None:
        self.draft = draft
        self.facts = facts
        self._optimizer, self._dtype = optimizer, dtype
        self._model = next(iter(facts.values())).model
        self._owners = {owner.node for owner in draft.owners}
        self._owner = draft.owners[0].node
        self._classes: dict[_Key, _Class] = {}
        self._empty: _Sum | None = None
        self._needed: dict[tuple[str, int, int, int], int] = {}
        self._lowest = self._lowest_with_graph()

    def fits(self, node: str, start: int, stop: int, above: int) -> bool:
        """Whether ``node`` can host ``[start, stop)`` with so many hosts above it."""
        return self.needed_bytes(node, start, stop, above) <= self.facts[node].memory_bytes

    def fits_empty(self, node: str) -> bool:
        """Whether ``node`` has room for what it needs without any block: an owner's embedding and head."""
        if node not in self._owners:
            return True
        if self._empty is None:
            self._empty = self._measure(True, self.draft.num_blocks, self.draft.num_blocks, 0)
        return self._bytes(node, self._empty) <= self.facts[node].memory_bytes

    def lacking(self, node: str, start: int, stop: int, above: int) -> int:
        """Bytes that ``node`` lacks to host ``[start, stop)``; 0 if it fits."""
        return max(0, self.needed_bytes(node, start, stop, above) - self.facts[node].memory_bytes)

    def needed_bytes(self, node: str, start: int, stop: int, above: int) -> int:
        """What ``node`` needs at most to host ``[start, stop)``, which is not empty, with so many hosts above it."""
        key = (node, start, stop, above)
        found = self._needed.get(key)
        if found is None:
            found = self._needed[key] = self._computed(node, start, stop, above)
        return found

    def _computed(self, node: str, start: int, stop: int, above: int) -> int:
        is_owner = node in self._owners
        is_stale = self.draft.method == "pipeadapter"
        is_bottom, is_top = start == self.draft.private_blocks, stop == self.draft.num_blocks
        key = _Key(
            is_owner,
            is_bottom,
            is_top,
            start > self._lowest,
            stop > self._lowest,
            above if is_stale else min(above, 1),
        )
        found = self._classes.get(key)
        if found is None:
            found = self._classes[key] = self._class(key)
        away = (start - found.at[0], stop - found.at[1], above - found.at[2])
        slopes = (found.per_start, found.per_stop, found.per_above)
        other, activations = found.base
        for step, slope in zip(away, slopes, strict=True):
            other += step * slope.other_bytes
            activations += step * slope.activations
        return self._bytes(node, _Sum(other, activations))

    def with_slice(self, node: str, start: int, stop: int, above: int = 1) -> Plan:
        """A plan in which ``node`` hosts ``[start, stop)`` and strangers the rest, ``above`` of them above it."""
        low, high = self.draft.private_blocks, self.draft.num_blocks
        pieces = [Slice(node=_OTHER.format(0), start=low, stop=start), Slice(node=node, start=start, stop=stop)]
        above = min(above, high - stop)
        for index in range(above):
            first = stop + index
            last = first + 1 if index < above - 1 else high
            pieces.append(Slice(node=_OTHER.format(index + 1), start=first, stop=last))
        slices = tuple(piece for piece in pieces if piece.num_blocks)
        return dataclasses.replace(self.draft, phases=(Phase(slices=slices),))

    def estimate(self, plan: Plan, node: str) -> MemoryEstimate:
        """What ``node`` holds at most under ``plan``."""
        return self._estimate(plan, node, self.facts[node].activation_block_bytes)

    def _estimate(self, plan: Plan, node: str, activation_block_bytes: int) -> MemoryEstimate:
        return node_memory(
            plan,
            node,
            self._model,
            optimizer=self._optimizer,
            activation_block_bytes=activation_block_bytes,
            dtype=self._dtype,
        )

    def _lowest_with_graph(self) -> int:
        """The lowest block that ever trains, told by how many graphs a node has that hosts all."""
        low, high = self.draft.private_blocks, self.draft.num_blocks
        graphs = self._measure(False, low, high, 0).activations - 1
        return high - graphs // len(self.draft.microbatch_sizes())

    def _bytes(self, node: str, found: _Sum) -> int:
        return found.other_bytes + found.activations * self.facts[node].activation_block_bytes

    def _measure(self, is_owner: bool, start: int, stop: int, above: int) -> _Sum:
        node = self._owner if is_owner else _HOST
        estimate = self._estimate(self.with_slice(node, start, stop, above), node, 1)
        return _Sum(estimate.total_bytes - estimate.activations_bytes, estimate.activations_bytes)

    def _class(self, key: _Key) -> _Class:
        """Measure the longest slice of the class, and those with the next start, stop and number of hosts above."""
        low, high = self.draft.private_blocks, self.draft.num_blocks
        start = low if key.is_bottom else max(low, self._lowest) + 1 if key.trains_all else low + 1
        above = 0 if key.is_top else key.above
        stop = high if key.is_top else high - above if key.trains else min(self._lowest, high - above)
        base = self._measure(key.is_owner, start, stop, above)

        def slope(first: int, last: int, over: int, sign: int) -> _Sum:
            if first >= last or (last > self._lowest) != key.trains or (first > self._lowest) != key.trains_all:
                return _Sum(0, 0)  # the class has one value only
            other = self._measure(key.is_owner, first, last, over)
            return _Sum(sign * (other.other_bytes - base.other_bytes), sign * (other.activations - base.activations))

        fixed = _Sum(0, 0)
        is_stale = self.draft.method == "pipeadapter"
        return _Class(
            (start, stop, above),
            base,
            fixed if key.is_bottom else slope(start + 1, stop, above, 1),
            fixed if key.is_top else slope(start, stop - 1, above, -1),
            fixed if key.is_top or is_stale else self._per_host(key, start, stop),
        )

    def _per_host(self, key: _Key, start: int, stop: int) -> _Sum:
        """What one more host above takes: compare slices that leave room for two."""
        shorter = min(stop, self.draft.num_blocks - 2)
        if shorter <= start:
            return _Sum(0, 0)
        one = self._measure(key.is_owner, start, shorter, 1)
        two = self._measure(key.is_owner, start, shorter, 2)
        return _Sum(two.other_bytes - one.other_bytes, two.activations - one.activations)
