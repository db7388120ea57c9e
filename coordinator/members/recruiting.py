"""Choose the members that take part in a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from coordinator.members.link_cache import LinkCache
from coordinator.members.registry import Member
from ringtune.errors import CapacityError, ConnectionFailedError, DeadlineError, RingTuneError
from ringtune.rpc.addresses import is_loopback, split_address


class Members(Protocol):
    """What a run needs to know about the members.

    Attributes:
        links: those that were measured between them.
    """

    links: LinkCache

    def living(self) -> tuple[Member, ...]:
        """List the living members, sorted by name."""

    def silent_for_s(self, node: str, instance: str) -> float:
        """Seconds since the last sign of life of a node's process; infinite if it has left."""


def choose_members(living: Sequence[Member], wanted: int) -> tuple[Member, ...] | None:
    """Choose ``wanted`` members, those with data first, or all with ``wanted`` 0; None if there are too few.

    Example: of a, b and c, where only c has data, two wanted members are c and a.
    """
    if not living or len(living) < wanted:
        return None
    ranked = sorted(living, key=lambda member: (not member.has_data, member.node))
    return tuple(ranked[: wanted or len(ranked)])


def choose_named(living: Sequence[Member], names: Sequence[str]) -> tuple[Member, ...] | None:
    """Choose the members with these names; None if one is not there."""
    by_name = {member.node: member for member in living}
    return tuple(by_name[name] for name in names) if set(names) <= by_name.keys() else None


def check_reachable(members: Sequence[Member]) -> None:
    """Refuse members of several machines of which one told an address that only its own machine reaches.

    Raises:
        ConnectionFailedError: names such a member, and one that can't reach it.
    """
    hidden = [member for member in members if is_loopback(member.address)]
    others = [member for member in members if not is_loopback(member.address)]
    if hidden and others:
        raise ConnectionFailedError(
            f"node {hidden[0].node} at {hidden[0].address} can't be reached by node {others[0].node} at "
            f"{others[0].address}; start it again with its machine's address on the network: the coordinator's first "
            "lines have the command"
        )


def machine_of(member: Member) -> str:
    """Return the machine that a member is on: the host of its address."""
    return split_address(member.address, option=f"node {member.node}: its address")[0]


def num_neighbours(members: Sequence[Member]) -> dict[str, int]:
    """Count for each node the other members on its machine."""
    counts = Counter(machine_of(member) for member in members)
    return {member.node: counts[machine_of(member)] - 1 for member in members}


def not_there(
    living: Sequence[Member], names: Sequence[str], waited_s: float, *, has_given_plan: bool = False
) -> RingTuneError:
    """Make the error that ends waiting for the nodes of an earlier run, or of a given plan."""
    missing = sorted(set(names) - {member.node for member in living})
    waited, listed = f"waited {waited_s:g} s for node {', '.join(missing)}", ", ".join(names)
    if has_given_plan:
        return DeadlineError(
            f"{waited}: the given plan is for the nodes {listed}; start the missing ones, or plan anew with "
            "'ringtune plan JOB --save FILE'"
        )
    return DeadlineError(
        f"{waited}: a run goes on with the nodes that it had ({listed}), because their rows or their parts of the "
        "checkpoint are nowhere else; start the missing ones again"
    )


def unused_owners(living: Sequence[Member], chosen: Sequence[Member]) -> tuple[str, ...]:
    """Name the members with data that do not take part, sorted; guests have theirs for an evaluation alone."""
    names = {member.node for member in chosen}
    return tuple(sorted(each.node for each in living if each.has_data and not each.is_guest and each.node not in names))


def too_few(living: Sequence[Member], wanted: int, waited_s: float) -> RingTuneError:
    """Make the error that ends waiting for members."""
    if not wanted:
        return CapacityError("no node has joined this coordinator; start some with 'ringtune node'")
    names = ", ".join(member.node for member in living) or "none"
    return DeadlineError(
        f"waited {waited_s:g} s for {wanted} nodes, {len(living)} have joined ({names}); start the others or ask "
        "for fewer"
    )


def lost_message(node: str, silent_s: float, lease_s: float) -> str:
    """Write why a node counts as lost, and what to do."""
    since = "it has left, or was started again" if silent_s == float("inf") else f"last heard of {silent_s:.1f} s ago"
    return f"node {node} is lost: {since}, its lease is {lease_s:g} s; start it again and repeat or --resume the run"
