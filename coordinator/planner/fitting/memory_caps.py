"""Bytes that a node needs for a slice, of memory and on its disk: a cache over ``costs.memory.estimate``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from coordinator.planner.draft import Draft
from coordinator.planner.fitting.slice_saving import KEEPS_ALL, SliceSaving, slice_saving
from ringtune.costs.blobs import takes_replica_grads
from ringtune.costs.disk import DiskNeeds, disk_needs
from ringtune.costs.memory.estimate import memory_estimate
from ringtune.costs.memory.share import Share
from ringtune.costs.memory.sizes import Sizes
from ringtune.costs.memory.terms import MemoryEstimate
from ringtune.costs.profile import NodeFacts
from ringtune.costs.times.saving_seconds import projected_gain
from ringtune.schedule.plan import Plan
from ringtune.schedule.prefixes.kept import most_kept_bytes
from ringtune.schedule.slice_policy import NONE
from ringtune.schedule.turns.versions import ever_trained
from ringtune.schedule.units import Range

_NEVER = 1 << 62
_GROWING = ("weights", "adapters", "head", "data", "device")
"""Parts of an estimate that no longer slice makes smaller."""


class MemoryCaps:
    """Memory that each node needs for each slice of one draft.

    Args:
        draft: what is to be placed.
        facts: of every candidate, by name.
        optimizer: of the job.
        dtype: of the computation.
    """

    def __init__(self, draft: Draft, facts: Mapping[str, NodeFacts], *, optimizer: str, dtype: str) -> None:
        self.draft = draft
        self.facts = facts
        self.optimizer = optimizer
        self.dtype = dtype
        self._owners = {owner.node for owner in draft.course.owners}
        self._course = draft.with_offload(draft.course)
        self._projected = draft.with_offload(draft.projected_course)
        self._sizes = {
            name: Sizes.at(self._projected, node, optimizer=optimizer, dtype=dtype) for name, node in facts.items()
        }
        self._savings: dict[tuple[str, int, int, int], SliceSaving] = {}
        self._needed: dict[tuple[str, int, int, int], int] = {}

    def fits(self, node: str, start: int, stop: int, above: int) -> bool:
        """Whether ``node`` can host ``[start, stop)`` with so many hosts above it."""
        return self.lacking(node, start, stop, above) == 0

    def most_blocks(self, node: str) -> int:
        """How many blocks below the head ``node`` has room for, if it is the only host of them; 0 for none."""
        course, first = self.draft.course, self.draft.private_blocks
        counts = range(course.num_blocks - first, 0, -1)
        return next((count for count in counts if self.fits(node, course.num_blocks - count, course.num_blocks, 0)), 0)

    def fits_empty(self, node: str) -> bool:
        """Whether ``node`` has room without any block: an owner for its embedding and head, any other node always."""
        top = self.draft.course.num_blocks
        return node not in self._owners or self.fits(node, top, top, 0)

    def lacking(self, node: str, start: int, stop: int, above: int) -> int:
        """Bytes that ``node`` lacks to host ``[start, stop)``, of memory and on its disk; 0 if it fits.

        It lacks all that there is where it may not host them, see ``Draft.may_host``.
        """
        if not self.draft.may_host(node, start, stop):
            return _NEVER
        memory = max(0, self.needed_bytes(node, start, stop, above) - self.facts[node].memory_bytes)
        return memory + self.lacking_disk(node, start, stop)

    def lacking_disk(self, node: str, start: int, stop: int) -> int:
        """Bytes that the disk of ``node`` lacks if it hosts ``[start, stop)``; 0 if they fit, or it is not known."""
        free_bytes = self.facts[node].state_free_bytes
        return 0 if free_bytes is None else max(0, self.disk_needs(node, start, stop).total_bytes - free_bytes)

    def disk_needs(self, node: str, start: int, stop: int) -> DiskNeeds:
        """Estimate what ``node`` takes on its disk if it hosts ``[start, stop)``."""
        share = Share(
            is_owner=node in self._owners,
            start=start,
            stop=stop,
            above=0,
            state_on_disk=self.draft.state_on_disk,
            helped=self._helped(node, start, stop),
        )
        return disk_needs(self._course, share, self._sizes[node])

    def disk_of(self, plan: Plan, node: str) -> DiskNeeds:
        """Estimate what ``node`` takes on its disk under ``plan``."""
        needs = disk_needs(plan.course, Share.of(plan, node), self._sizes[node])
        return needs._replace(cache_bytes=most_kept_bytes(plan.course, plan.placement, node))

    def _helped(self, node: str, start: int, stop: int) -> tuple[Range, ...]:
        return self.draft.course.trainable.ranges_within(start, stop) if node in self.draft.helper_of else ()

    def holds(self, plan: Plan, node: str) -> bool:
        """Whether ``node`` has memory and disk for its part in ``plan``, and links take what it sends."""
        if not takes_replica_grads(plan, node, self._sizes[node]):
            return False
        free_bytes = self.facts[node].state_free_bytes
        fits = self.estimate(plan, node).total_bytes <= self.facts[node].memory_bytes
        return fits and (free_bytes is None or self.disk_of(plan, node).total_bytes <= free_bytes)

    def may_fit(self) -> bool:
        """Whether some split might fit, by the frozen bytes alone; False is certain and takes no search.

        Example: 12 blocks of 4 MB can't be on two nodes of 20 MB, which hold at most 5 each.
        """
        if self.draft.course.method.full_parameters:
            return True
        most = {name: self._most_blocks(name) for name in self.facts}
        if any(most[owner] < 0 for owner in self._owners):
            return False
        max_hosts = self.draft.course.method.max_hosts or len(most)
        hosted = sum(max(0, count) for count in sorted(most.values())[-max_hosts:])
        return hosted >= self.draft.course.num_blocks - self.draft.private_blocks

    def _most_blocks(self, node: str) -> int:
        """No more blocks than these fit at ``node``; below 0 where not even what it holds without any block fits.

        What only grows with a slice is counted: frozen weights and adapters, and an owner's embedding, head and rows.
        """
        top, sizes = self.draft.course.num_blocks, self._sizes[node]
        alone = self._estimate_of(node, top, top, 0, KEEPS_ALL).parts()
        room_bytes = self.facts[node].memory_bytes - sum(alone[part] for part in _GROWING)
        adapter_bytes = sizes.helped.hosted if node in self.draft.helper_of else sizes.adapter_bytes
        return room_bytes // max(1, sizes.block_bytes + adapter_bytes)

    def needed_bytes(self, node: str, start: int, stop: int, above: int) -> int:
        """Bytes that ``node`` needs at most to host ``[start, stop)`` with so many hosts above it."""
        key = (node, start, stop, above)
        found = self._needed.get(key)
        if found is None:
            found = self._needed[key] = self.estimate_of(node, start, stop, above).total_bytes
        return found

    def estimate_of(self, node: str, start: int, stop: int, above: int) -> MemoryEstimate:
        """Estimate by terms what ``node`` needs to host ``[start, stop)``, with as many hosts as there could be."""
        return self._estimate_of(node, start, stop, above, self.saving_of(node, start, stop, above))

    def saving_of(self, node: str, start: int, stop: int, above: int) -> SliceSaving:
        """How ``node`` saves activations if it hosts ``[start, stop)`` with so many hosts above it."""
        if self.draft.activations == NONE:
            return KEEPS_ALL
        key = (node, start, stop, above)
        found = self._savings.get(key)
        if found is None:
            kept = self.kept_blocks(start, stop)
            has_lowest = kept.start == ever_trained(self.draft.course).lowest
            found = self._savings[key] = slice_saving(
                self.draft.activations,
                kept,
                lambda saving: self._estimate_of(node, start, stop, above, saving).total_bytes,
                self.facts[node],
                may_project=self.draft.may_project,
                gain=self.projected_gain(node),
                first_is_small=has_lowest and self._sizes[node].lowest_token_bytes > 0,
            )
        return found

    def projected_gain(self, node: str) -> float:
        """What VeLoRA takes off a backward, over a forward; not counted on where a step trains one group of units."""
        course = self.draft.course
        velora = None if course.method.full_parameters else self.draft.velora or course.velora
        return projected_gain(velora, self.facts[node].model)

    def kept_blocks(self, start: int, stop: int) -> Range:
        """The blocks of [start, stop) that keep something for a backward: those from the lowest that trains on."""
        return Range(min(stop, max(start, ever_trained(self.draft.course).lowest)), stop)

    def _estimate_of(self, node: str, start: int, stop: int, above: int, saving: SliceSaving) -> MemoryEstimate:
        most_below = min(len(self.facts) - 1 - above, start - self.draft.private_blocks)
        share = Share(
            is_owner=node in self._owners,
            start=start,
            stop=stop,
            above=above,
            below=max(0, most_below),
            private_blocks=self.draft.private_blocks,
            credits=self.draft.credits,
            recompute=(Range(saving.start, saving.stop),) if saving.recomputed else (),
            state_on_disk=self.draft.state_on_disk,
            helped=self._helped(node, start, stop),
            copies=self._copies(start, stop),
        )
        course = self._projected if saving.is_projected else self._course
        return memory_estimate(course, share, self._sizes[node])

    def _copies(self, start: int, stop: int) -> tuple[Range, ...] | None:
        """Blocks of which a host may keep copies: all that it does not host, as the host before it could have them."""
        first, top = self.draft.private_blocks, self.draft.course.num_blocks
        others = (Range(first, start), Range(stop, top)) if start < stop else ()
        return others if self.draft.copies else None

    def estimate(self, plan: Plan, node: str) -> MemoryEstimate:
        """Estimate by terms what ``node`` holds at most under ``plan``."""
        return memory_estimate(plan.course, Share.of(plan, node), self._sizes[node])

    def keeping_everything(self, plan: Plan, node: str) -> MemoryEstimate:
        """Estimate what ``node`` would hold under ``plan`` if its blocks kept everything."""
        share = dataclasses.replace(Share.of(plan, node), recompute=())
        return memory_estimate(dataclasses.replace(plan.course, velora=None), share, self._sizes[node])

    def with_velora(self, plan: Plan, node: str) -> MemoryEstimate:
        """Estimate what ``node`` would hold under ``plan`` with VeLoRA wherever it can be, and nothing run again."""
        share = dataclasses.replace(Share.of(plan, node), recompute=())
        return memory_estimate(dataclasses.replace(plan.course, velora=self.draft.velora), share, self._sizes[node])

    def block_bytes(self, node: str, tokens: int) -> tuple[int, int]:
        """Bytes that one block keeps at ``node`` of so many padded tokens, and the same with VeLoRA."""
        sizes = self._sizes[node]
        return round(sizes.kept_bytes(tokens)), round(sizes.projected_bytes(tokens))
