"""Errors of a plan that does not fit in memory or on a disk: the node, the bytes that it needs and has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coordinator.planner.even import block_s, split_blocks
from coordinator.planner.fitting.memory_caps import MemoryCaps
from ringtune.costs.disk import DiskNeeds
from ringtune.costs.memory.terms import MemoryEstimate
from ringtune.costs.profile import NodeFacts
from ringtune.errors import CapacityError, PlanError, StorageError
from ringtune.quantities import format_bytes
from ringtune.schedule.plan import Plan


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
    """Make the error that ``node`` can't host ``[start, stop)``; it names the bytes needed and the bytes there are.

    Without ``needs`` the least is named: one host above, or none at the top. A ``remedy`` comes before the usual ones.
    """
    has, is_top = caps.facts[node].memory_bytes, stop == caps.draft.course.head
    needs = needs or caps.estimate_of(node, start, stop, 0 if is_top else 1)
    usual = "lower train.batch_size or train.max_length, or add a node" if stop > start else _owner_remedy(caps)
    return CapacityError(
        f"node {node} needs {needs} {_hosting(start, stop)} but has {format_bytes(has)}{more}; {remedy}{usual}"
    )


def helper_refusal(plan: Plan, node: NodeFacts, needs: MemoryEstimate) -> CapacityError:
    """Make the error that a node has no room for the adapters that it fits beside what else it does."""
    helps = plan.placement.joined_helpers(node.node)
    whose = ", ".join(f"{plan.placement.host_of(one.start)}'s blocks {one.text}" for one in helps)
    return CapacityError(
        f"node {node.node} needs {needs} to fit the adapters of {whose} but has {format_bytes(node.memory_bytes)}; let "
        "another node help (offload.mode), lower train.batch_size, or raise train.microbatches"
    )


def _owner_remedy(caps: MemoryCaps) -> str:
    """Say what helps an owner without room for embedding and head, which no other node can host for it."""
    lower = "lower train.batch_size or train.max_length, or let a node with more memory own its rows"
    if caps.draft.course.method.full_parameters:
        keeps = f"; train.optimizer = 'adafactor' or 'sgd' keeps less than {caps.optimizer!r}"
        return lower if caps.optimizer in _SMALL_STATE else lower + keeps
    return lower if caps.draft.course.frozen else f"{lower}; runtime.frozen = 'auto' holds frozen weights smaller"


def _hosting(start: int, stop: int) -> str:
    return f"for blocks [{start}, {stop})" if stop > start else "for embedding and head"


_SMALL_STATE = ("adafactor", "sgd")
_MORE_ROOM = "make room, or start it with --state on another disk"


def disk_refusal(node: NodeFacts, start: int, stop: int, needs: DiskNeeds) -> StorageError:
    """Make the error that the disk of ``node`` has no room to host ``[start, stop)``; it names both numbers."""
    state, checkpoints, merged, cache = needs
    parts = [f"{format_bytes(state)} of optimizer state"] if state else []
    parts += [f"{format_bytes(checkpoints)} of checkpoints"] if checkpoints else []
    parts += [f"{format_bytes(merged)} of merged adapters"] if merged else []
    parts += [f"{format_bytes(cache)} of hidden states"] if cache else []
    free_bytes = node.state_free_bytes or 0
    less = _less(needs, free_bytes)
    return StorageError(
        f"node {node.node} needs {format_bytes(needs.total_bytes)} in its folder for state {_hosting(start, stop)} "
        f"({' and '.join(parts)}) but {format_bytes(free_bytes)} are free there; {', or '.join([_MORE_ROOM, *less])}"
    )


def _less(needs: DiskNeeds, free_bytes: int) -> list[str]:
    """Say which of the needs would have to go, each where the others alone fit."""
    whole, less = needs.total_bytes, []
    if needs.state_bytes and whole - needs.state_bytes <= free_bytes:
        less.append("set hift.state = 'memory'")
    if needs.checkpoint_bytes and whole - needs.checkpoint_bytes <= free_bytes:
        less.append("set train.checkpoint_every = 0")
    if needs.merged_bytes and whole - needs.merged_bytes <= free_bytes:
        less.append("set offload.merged = false, with which offload.users can't be 'collaboration'")
    if needs.cache_bytes and whole - needs.cache_bytes <= free_bytes:
        less.append("lower cache.max_bytes")
    return less


def refuse_full_shared_disks(facts: Mapping[str, NodeFacts], needs: Mapping[str, DiskNeeds]) -> None:
    """Refuse a plan whose nodes together need more room than there is on a disk that they share.

    Raises:
        StorageError: names the nodes and both numbers.
    """
    disks: dict[str, list[NodeFacts]] = {}
    for name in needs:
        if facts[name].state_disk and facts[name].state_free_bytes is not None:
            disks.setdefault(facts[name].state_disk, []).append(facts[name])
    for nodes in disks.values():
        free_bytes = max(node.state_free_bytes or 0 for node in nodes)
        total = DiskNeeds(*(sum(part) for part in zip(*(needs[node.node] for node in nodes), strict=True)))
        if total.total_bytes > free_bytes:
            raise StorageError(
                f"nodes {', '.join(node.node for node in nodes)} share a disk and together need "
                f"{format_bytes(total.total_bytes)} in their folders for state, but {format_bytes(free_bytes)} are "
                f"free there; {', or '.join([_MORE_ROOM, *_less(total, free_bytes)])}"
            )


def nothing_fits(caps: MemoryCaps, nodes: Sequence[NodeFacts], remedy: str = "") -> CapacityError | StorageError:
    """Make the error that no split fits; it names one node that lacks memory, or room on its disk.

    The node is an owner without room for embedding and head. Else it is the first node without room for its slice in
    the split by speed, or the node with most memory if the method runs all blocks on one. Nodes that may host none do
    not count. A ``remedy`` comes before the usual ones.

    Raises:
        PlanError: every node can do its part; then a plan should have been found.
    """
    draft = caps.draft
    start, stop = draft.private_blocks, draft.course.num_blocks
    allowed = [node for node in nodes if draft.may_host(node.node, start, stop)]
    over = " over the nodes with helpers" if len(allowed) < len(nodes) else ""
    for owner in draft.course.owners:
        if not caps.fits_empty(owner.node):
            return _lacking(caps, owner.node, stop, stop, remedy=remedy)
    if draft.course.method.max_hosts == 1:
        roomiest = max(allowed, key=lambda node: node.memory_bytes)
        more = ", and no other node with a helper has more" if over else ", and no other node has more"
        return refusal(caps, roomiest.node, start, stop, more, remedy=remedy)
    costs = [block_s(node) or 1.0 for node in allowed]
    at = start
    for node, count in zip(allowed, split_blocks(costs, start=start, stop=stop) or (), strict=False):
        above = 0 if at + count == stop else 1
        if count and caps.lacking(node.node, at, at + count, above):
            others = f", and no other split of the blocks{over} fits" if len(nodes) > 1 else ""
            return _lacking(caps, node.node, at, at + count, others, remedy=remedy)
        at += count
    raise PlanError("no split was found although one fits; please report it")


def _lacking(
    caps: MemoryCaps, node: str, start: int, stop: int, more: str = "", *, remedy: str
) -> CapacityError | StorageError:
    """Make the error of what a node lacks: room on its disk, or else memory."""
    if caps.lacking_disk(node, start, stop):
        return disk_refusal(caps.facts[node], start, stop, caps.disk_needs(node, start, stop))
    return refusal(caps, node, start, stop, more, remedy=remedy)
