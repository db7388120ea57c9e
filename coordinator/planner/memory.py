"""Memory of a slice on a node: its bytes of memory and disk, how it saves activations to fit, and refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from coordinator.planner.draft import Draft
from ringtune.costs.activation_costs import mean_gain, projected_gains
from ringtune.costs.links import takes_parcels
from ringtune.costs.memory_estimate import BEST, CHECKPOINT_COPIES, CHECKPOINTS, DiskNeeds, disk_needs, memory_estimate
from ringtune.costs.memory_sizes import Sizes
from ringtune.costs.memory_terms import MemoryEstimate, Share
from ringtune.costs.model_facts import dropout_token_bytes
from ringtune.costs.profile import NodeFacts
from ringtune.errors import CapacityError, StorageError
from ringtune.quantities import format_bytes
from ringtune.schedule.course import Course
from ringtune.schedule.plan import Plan
from ringtune.schedule.units import Range
from ringtune.schedule.versions import ever_trained
from ringtune.techniques import TECHNIQUES
from ringtune.techniques.activation_checkpointing import KEEPS_ALL, NONE, SliceSaving, slice_saving

_NEVER = 1 << 62
_GROWING = ("weights", "adapters", "head", "data", "device")
"""Parts of an estimate that never shrink as a slice grows."""


class MemoryCaps:
    """Memory that each node needs for each slice of one draft."""

    def __init__(self, draft: Draft, facts: Mapping[str, NodeFacts]) -> None:
        self.draft, self.facts = draft, facts
        self._owners = {owner.node for owner in draft.course.owners}
        self._audit = draft.settings.audit
        self._course = draft.with_helper_settings(draft.course)
        self._projected = draft.with_helper_settings(draft.saving.projected(draft.course))
        self._sizes = {name: Sizes.at(self._projected, node, draft.settings) for name, node in facts.items()}
        self._savings: dict[tuple[str, int, int, int], SliceSaving] = {}
        self._needed: dict[tuple[str, int, int, int], int] = {}

    def max_blocks(self, node: str) -> int:
        """Number of blocks below the head for which ``node`` has room as their only host."""
        top = self.draft.course.num_blocks
        counts = range(top - self.draft.private_blocks, 0, -1)
        return next((count for count in counts if not self.lacking(node, top - count, top, 0)), 0)

    def fits_empty(self, node: str) -> bool:
        """Whether ``node`` has room without any block: an owner for embedding and head, any other node always."""
        top = self.draft.course.num_blocks
        return node not in self._owners or not self.lacking(node, top, top, 0)

    def lacking(self, node: str, start: int, stop: int, above: int) -> int:
        """Bytes of memory and disk that ``node`` lacks to host ``[start, stop)``; 0 if it fits.

        ``_NEVER`` if it may not host these blocks (``Draft.may_host``).
        """
        if not self.draft.may_host(node, start, stop):
            return _NEVER
        memory = max(0, self.needed_bytes(node, start, stop, above) - self.facts[node].memory_bytes)
        return memory + self.lacking_disk(node, start, stop)

    def lacking_disk(self, node: str, start: int, stop: int) -> int:
        """Bytes that the disk of ``node`` lacks to host ``[start, stop)``; 0 if it fits, or free bytes are unknown."""
        free_bytes = self.facts[node].state_free_bytes
        return 0 if free_bytes is None else max(0, self.disk_needs(node, start, stop).total_bytes - free_bytes)

    def disk_needs(self, node: str, start: int, stop: int) -> DiskNeeds:
        """Estimate the bytes on the disk of ``node`` if it hosts ``[start, stop)``."""
        share = Share(
            is_owner=node in self._owners,
            start=start,
            stop=stop,
            above=0,
            state_on_disk=self.draft.state_on_disk,
            helped=self._helped(node, start, stop),
            copies=self._copies(node, start, stop) if self.draft.has_room_for_all else None,
        )
        return self._but_files(disk_needs(self._course, share, self._sizes[node], keeps_best=self.draft.keeps_best))

    def disk_of(self, plan: Plan, node: str) -> DiskNeeds:
        """Estimate the bytes on the disk of ``node`` under ``plan``."""
        needs = disk_needs(plan.course, Share.of(plan, node), self._sizes[node], keeps_best=self.draft.keeps_best)
        more = (term for technique in TECHNIQUES for term in technique.disk_terms(plan, node))
        return self._but_files(DiskNeeds((*needs.terms, *more)))

    def _but_files(self, needs: DiskNeeds) -> DiskNeeds:
        """Leave out what a run that has begun may have on the disk already."""
        return needs.but(CHECKPOINTS, BEST, CHECKPOINT_COPIES) if self.draft.has_files else needs

    def _helped(self, node: str, start: int, stop: int) -> tuple[Range, ...]:
        return self.draft.course.trainable.ranges_within(start, stop) if node in self.draft.helper_of else ()

    def holds(self, plan: Plan, node: str) -> bool:
        """Whether ``node`` has memory and disk for its part of ``plan``, and links take its parcels."""
        if not takes_parcels(plan, node, self._sizes[node]):
            return False
        free_bytes = self.facts[node].state_free_bytes
        fits = self.estimate(plan, node).total_bytes <= self.facts[node].memory_bytes
        return fits and (free_bytes is None or self.disk_of(plan, node).total_bytes <= free_bytes)

    def may_fit(self) -> bool:
        """Whether some split might fit, counting only bytes that grow with a slice; False is certain.

        Example: 12 blocks of 4 MB can't be on two nodes of 20 MB, which hold at most 5 each.
        """
        if self.draft.course.method.full_parameters:
            return True
        most = {name: self._max_blocks(name) for name in self.facts}
        if any(most[owner] < 0 for owner in self._owners):
            return False
        max_hosts = self.draft.course.method.max_hosts or len(most)
        hosted = sum(max(0, count) for count in sorted(most.values())[-max_hosts:])
        return hosted >= self.draft.course.num_blocks - self.draft.private_blocks

    def _max_blocks(self, node: str) -> int:
        """Upper bound of the blocks that fit at ``node``; below 0 if it has no memory without any block.

        Only parts that grow with a slice count: frozen weights and adapters, and an owner's embedding, head and rows.
        """
        top, sizes = self.draft.course.num_blocks, self._sizes[node]
        alone = self._estimate_of(node, top, top, 0, KEEPS_ALL).parts()
        room_bytes = self.facts[node].memory_bytes - sum(alone[part] for part in _GROWING)
        adapter_bytes = sizes.helped.hosted if node in self.draft.helper_of else sizes.adapter_bytes
        return room_bytes // max(1, sizes.block_bytes + adapter_bytes)

    def needed_bytes(self, node: str, start: int, stop: int, above: int) -> int:
        """Peak bytes of ``node`` if it hosts ``[start, stop)`` with ``above`` hosts above it."""
        key = (node, start, stop, above)
        needed_bytes = self._needed.get(key)
        if needed_bytes is None:
            needed_bytes = self._needed[key] = self.estimate_of(node, start, stop, above).total_bytes
        return needed_bytes

    def estimate_of(self, node: str, start: int, stop: int, above: int) -> MemoryEstimate:
        """Estimate by terms what ``node`` needs to host ``[start, stop)``, with as many hosts below as possible."""
        return self._estimate_of(node, start, stop, above, self.saving_of(node, start, stop, above))

    def saving_of(self, node: str, start: int, stop: int, above: int) -> SliceSaving:
        """Return how ``node`` saves activations if it hosts ``[start, stop)`` with ``above`` hosts above it."""
        policy = self.draft.saving
        if policy.name == NONE:
            return KEEPS_ALL
        key = (node, start, stop, above)
        slice_saved = self._savings.get(key)
        if slice_saved is None:
            kept = self.kept_blocks(start, stop)
            has_lowest = kept.start == ever_trained(self.draft.course).lowest
            slice_saved = self._savings[key] = slice_saving(
                policy.name,
                kept,
                lambda saving: self._estimate_of(node, start, stop, above, saving).total_bytes,
                self.facts[node],
                may_project=policy.may_project,
                gain=self.projected_gain(node, kept),
                first_is_small=has_lowest and self._sizes[node].lowest_token_bytes > 0,
            )
        return slice_saved

    def projected_gain(self, node: str, kept: Range) -> float:
        """Seconds that projections take off these blocks' backward, over their forward; 0 if steps train groups."""
        in_groups = self.draft.course.method.full_parameters
        return 0.0 if in_groups else mean_gain(projected_gains(self._projected, self.facts[node].model), *kept)

    def kept_blocks(self, start: int, stop: int) -> Range:
        """The blocks of [start, stop) that keep activations for a backward: from the lowest trained one on."""
        return Range(min(stop, max(start, ever_trained(self.draft.course).lowest)), stop)

    def _estimate_of(self, node: str, start: int, stop: int, above: int, saving: SliceSaving) -> MemoryEstimate:
        max_below = min(len(self.facts) - 1 - above, start - self.draft.private_blocks)
        share = Share(
            is_owner=node in self._owners,
            start=start,
            stop=stop,
            above=above,
            below=max(0, max_below),
            private_blocks=self.draft.private_blocks,
            credits=self.draft.credits,
            recompute=(Range(saving.start, saving.stop),) if saving.recomputed else (),
            state_on_disk=self.draft.state_on_disk,
            helped=self._helped(node, start, stop),
            copies=self._copies(node, start, stop),
            keeps_heads=self.draft.copies and self.draft.num_copies > 0,
            audit=self._audit,
            again=Range(start, stop) if self._audit and start < stop else None,  # of a host with as many blocks
        )
        course = self._projected if saving.is_projected else self._course
        return memory_estimate(course, share, self._sizes[node])

    def _copies(self, node: str, start: int, stop: int) -> tuple[Range, ...] | None:
        """Blocks of which a host may keep copies: all that it does not train itself; None without copies."""
        first, top = self.draft.private_blocks, self.draft.course.num_blocks
        others = (Range(first, start), Range(stop, top)) if start < stop else ()
        return (*others, *self._helped(node, start, stop)) if self.draft.copies else None

    def estimate(self, plan: Plan, node: str) -> MemoryEstimate:
        """Estimate by terms the peak memory of ``node`` under ``plan``."""
        return memory_estimate(plan.course, Share.of(plan, node, self._audit), self._sizes[node])

    def without_recomputing(self, plan: Plan, node: str, course: Course) -> MemoryEstimate:
        """Estimate the peak memory of ``node`` under ``plan`` with a course's projections and without recomputation."""
        share = dataclasses.replace(Share.of(plan, node, self._audit), recompute=())
        return memory_estimate(course, share, self._sizes[node])

    def block_bytes(self, node: str, rows: int, *, dropout: float) -> tuple[int, int, int]:
        """Bytes that one block keeps at ``node`` for padded rows: all, with projections, and those due to dropout."""
        sizes, model, length = self._sizes[node], self.facts[node].model, self.draft.course.max_length
        dropped = dropout_token_bytes(model, tokens=length, dtype=self.draft.settings.dtype) if dropout else 0
        tokens = rows * length
        return round(sizes.kept_bytes(tokens)), round(sizes.projected_bytes(tokens)), round(tokens * dropped)


def refusal(
    caps: MemoryCaps,
    node: str,
    start: int,
    stop: int,
    more: str = "",
    *,
    needs: MemoryEstimate | None = None,
    remedy: str = "",
) -> CapacityError:
    """Make the error that ``node`` has no memory to host ``[start, stop)``, with needed and available bytes.

    Without ``needs`` the least is named: with one host above, or none for the top slice. A ``remedy`` precedes the
    usual ones.
    """
    has, is_top = caps.facts[node].memory_bytes, stop == caps.draft.course.head
    needs = needs or caps.estimate_of(node, start, stop, 0 if is_top else 1)
    usual = "lower train.batch_size or train.max_length, or add a node" if stop > start else _owner_remedy(caps)
    return CapacityError(
        f"node {node} needs {needs} {_hosting(start, stop)} but has {format_bytes(has)}{more}; {remedy}{usual}"
    )


def helper_refusal(plan: Plan, node: NodeFacts, needs: MemoryEstimate) -> CapacityError:
    """Make the error that a helper has no memory for the adapters that it fits, beside its other parts of the plan."""
    helps = plan.placement.joined_helpers(node.node)
    parts = ", ".join(f"{plan.placement.host_of(helper.start)}'s blocks {helper.text}" for helper in helps)
    return CapacityError(
        f"node {node.node} needs {needs} to fit the adapters of {parts} but has {format_bytes(node.memory_bytes)}; let "
        "another node help (offload.mode), lower train.batch_size, or raise train.microbatches"
    )


_SMALL_STATE = ("adafactor", "sgd")


def _owner_remedy(caps: MemoryCaps) -> str:
    """Return the remedies for an owner without memory for embedding and head, which no other node can host for it."""
    lower = "lower train.batch_size or train.max_length, or let a node with more memory own its rows"
    optimizer = caps.draft.settings.optimizer
    if caps.draft.course.method.full_parameters:
        keeps = f"; train.optimizer = 'adafactor' or 'sgd' keeps less than {optimizer!r}"
        return lower if optimizer in _SMALL_STATE else lower + keeps
    return lower if caps.draft.course.frozen else f"{lower}; runtime.frozen = 'auto' holds frozen weights smaller"


def _hosting(start: int, stop: int) -> str:
    return f"for blocks [{start}, {stop})" if stop > start else "for embedding and head"


_MORE_ROOM = "make room, or start it with --state on another disk"


def disk_refusal(node: NodeFacts, start: int, stop: int, needs: DiskNeeds) -> StorageError:
    """Make the error that the disk of ``node`` has no room to host ``[start, stop)``, with both numbers."""
    parts = [f"{format_bytes(size)} of {what}" for what, size in needs.parts().items()]
    free_bytes = node.state_free_bytes or 0
    return StorageError(
        f"node {node.node} needs {format_bytes(needs.total_bytes)} in its folder for state {_hosting(start, stop)} "
        f"({' and '.join(parts)}) but {format_bytes(free_bytes)} are free there; {_disk_remedy(needs, free_bytes)}"
    )


def _disk_remedy(needs: DiskNeeds, free_bytes: int) -> str:
    return ", or ".join([_MORE_ROOM, *needs.remedies(free_bytes)])


def refuse_full_shared_disks(facts: Mapping[str, NodeFacts], needs: Mapping[str, DiskNeeds]) -> None:
    """Refuse a plan if nodes that share a disk together need more than is free on it; raises ``StorageError``."""
    disks: dict[str, list[NodeFacts]] = {}
    for name in needs:
        if facts[name].state_disk and facts[name].state_free_bytes is not None:
            disks.setdefault(facts[name].state_disk, []).append(facts[name])
    for nodes in disks.values():
        free_bytes = max(node.state_free_bytes or 0 for node in nodes)
        total = DiskNeeds.together(needs[node.node] for node in nodes)
        if total.total_bytes > free_bytes:
            raise StorageError(
                f"nodes {', '.join(node.node for node in nodes)} share a disk and together need "
                f"{format_bytes(total.total_bytes)} in their folders for state, but {format_bytes(free_bytes)} are "
                f"free there; {_disk_remedy(total, free_bytes)}"
            )
