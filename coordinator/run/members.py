"""Members of a coordinator: addresses, leases, measured links, and the choice of members for a run.

A member renews its lease by heartbeats. After a lease without one it is *lost*; it stays in the list for a while, and
may return under the same name. The same name from another process is refused while the first one lives: the random
``instance`` of a process tells a restart from a clone.

Measured links are cached between runs by node names and addresses. A rate older than ``LONGEST_AGE_S`` is measured
anew. The transfers of each run renew it; a link that a run hardly used keeps its age.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from ringtune.costs.profile import LinkFacts
from ringtune.errors import BusyError, CapacityError, ConnectionFailedError, DeadlineError, RingTuneError, TrustError
from ringtune.models.weights_by_digest import ModelManifest
from ringtune.transport.endpoints import WIRE, is_loopback, split_address

MAX_BETWEEN_S: Final = 1.5
"""The clock is read several times within these seconds; in a longer gap the process stood still."""


class WakingClock:
    """Monotonic seconds, without gaps longer than ``MAX_BETWEEN_S`` between two readings.

    After a stop (SIGSTOP, Ctrl-Z), swapping or sleep of the machine all leases would be over by the machine's clock,
    while the heartbeats of that time wait to be read. Of such a gap the time counts in which the process worked, as on
    what a node sends without end.
    """

    def __init__(
        self, now_s: Callable[[], float] = time.monotonic, worked_s: Callable[[], float] = time.process_time
    ) -> None:
        self._now_s, self._worked_s = now_s, worked_s
        self._lock = threading.Lock()
        self._read_s, self._until_s = now_s(), worked_s()
        self._stood_s = 0.0

    def __call__(self) -> float:
        """Return seconds; only differences have a meaning."""
        with self._lock:
            now_s = self._now_s()
            gap_s, self._read_s = now_s - self._read_s, now_s
            until_s, self._until_s = self._until_s, self._worked_s()
            if gap_s > MAX_BETWEEN_S:
                self._stood_s += max(0.0, gap_s - (self._until_s - until_s))
            return now_s - self._stood_s


LONGEST_AGE_S = 3600.0
_LIKE_SIZES = 2.0
_Key = tuple[str, str, str, str]


class _Entry(NamedTuple):
    """A link with the size of the messages that measured it, and the time."""

    link: LinkFacts
    message_bytes: int
    at_s: float


class LinkCache:
    """The measured links of one coordinator; thread-safe."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._entries: dict[_Key, _Entry] = {}

    def find(self, addresses: Mapping[str, str], message_bytes: int) -> tuple[LinkFacts, ...]:
        """Find links of at most ``LONGEST_AGE_S`` between these addresses, from half to twice the message size."""
        oldest_s = self._now_s() - LONGEST_AGE_S
        with self._lock:
            self._entries = {key: entry for key, entry in self._entries.items() if entry.at_s >= oldest_s}
            return tuple(
                entry.link
                for (source, source_at, target, target_at), entry in self._entries.items()
                if addresses.get(source) == source_at
                and addresses.get(target) == target_at
                and 1 / _LIKE_SIZES <= message_bytes / entry.message_bytes <= _LIKE_SIZES
            )

    def put(self, links: Sequence[LinkFacts], addresses: Mapping[str, str], message_bytes: int) -> None:
        """Store links that were measured, or shown by a run, just now; assumed links are left out."""
        with self._lock:
            for link in links:
                if not link.is_assumed:
                    key = (link.source, addresses[link.source], link.target, addresses[link.target])
                    self._entries[key] = _Entry(link, max(1, message_bytes), self._now_s())


_GHOST_LEASES = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One agent, as it described itself when it joined.

    Attributes:
        address: ``host:port`` where the coordinator and the other nodes reach it.
        instance: random per process.
        memory_bytes: budget of a run.
        system: operating system and machine.
        is_guest: takes part only in the evaluation of its own rows.
        train_rows: of the data that it was started with; None = none, or not counted.
        eval_rows: the same for evaluation.
        cores: whole cores that it may use.
        wire: number of the messages that it knows, which is ``endpoints.WIRE``.
        rack: board or switch that it shares with others, as it was told; empty = its machine.
        seen_at_s: monotonic seconds of the last sign of life.
        rss_bytes: resident memory at the last heartbeat.
    """

    node: str
    address: str
    instance: str
    version: str = ""
    has_data: bool = False
    memory_bytes: int = 0
    device: str = "cpu"
    threads: int = 1
    system: str = ""
    is_guest: bool = False
    train_rows: int | None = None
    eval_rows: int | None = None
    cores: int = 0
    wire: int = WIRE
    rack: str = ""
    seen_at_s: float = 0.0
    rss_bytes: int = 0


class Registry:
    """The members, by name."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._members: dict[str, Member] = {}
        self._lost: set[str] = set()
        self._told_lost: set[str] = set()
        self._drained: set[str] = set()
        self._refused: dict[str, str] = {}

    def set_lease(self, lease_s: float, now_s: float) -> None:
        """Change the lease; a lost member stays lost until it joins again, also under a longer lease."""
        self._lost = {node for node, member in self._members.items() if not self._is_alive(member, now_s)}
        self.lease_s = lease_s

    def join(self, member: Member, now_s: float) -> None:
        """Add a member, or one that was started again; raises ``BusyError`` or ``TrustError``.

        What a living process said when it joined holds, its address above all, by which others of a run are judged.
        """
        if member.node in self._refused:
            raise TrustError(f"{self._refused[member.node]}; it may join after a restart of the coordinator")
        self._forget_ghosts(now_s)
        present = self._members.get(member.node)
        is_alive = present is not None and self._is_alive(present, now_s)
        if present and is_alive and present.instance != member.instance:
            raise BusyError(
                f"the name {member.node} is taken by the node at {present.address}, seen "
                f"{now_s - present.seen_at_s:.1f} s ago; give this one another name, or wait {self.lease_s:g} s "
                "if it is a restart"
            )
        self._members[member.node] = dataclasses.replace(present if present and is_alive else member, seen_at_s=now_s)
        self._lost.discard(member.node)
        self._told_lost.discard(member.node)

    def heartbeat(self, node: str, instance: str, rss_bytes: int, now_s: float) -> bool:
        """Renew a member's lease; False if it has to join again, being unknown or lost."""
        present = self._process(node, instance)
        if present is None or not self._is_alive(present, now_s):
            return False
        self._members[node] = dataclasses.replace(present, seen_at_s=now_s, rss_bytes=rss_bytes)
        return True

    def touch(self, node: str, now_s: float) -> None:
        """Count another call of a living member as a sign of life."""
        present = self._members.get(node)
        if present is not None and self._is_alive(present, now_s):
            self._members[node] = dataclasses.replace(present, seen_at_s=now_s)

    def leave(self, node: str, instance: str) -> bool:
        """Remove a member that leaves; False if it is no member."""
        is_member = self._process(node, instance) is not None
        if is_member:
            del self._members[node]
        return is_member

    def remove(self, node: str, reason: str, *, forever: bool) -> bool:
        """Remove a member; with ``forever`` refuse its name from now on. False if it is no member."""
        self._drained.discard(node)
        if forever:
            self._refused[node] = reason
        return self._members.pop(node, None) is not None

    def drain(self, node: str, *, undo: bool) -> bool:
        """Exclude a member from new runs, or undo that; False if it is no member."""
        if node not in self._members:
            return False
        (self._drained.discard if undo else self._drained.add)(node)
        return True

    def is_drained(self, node: str) -> bool:
        """Whether a member is excluded from new runs."""
        return node in self._drained

    def is_alive(self, node: str, now_s: float) -> bool:
        """Whether the node is a member with a valid lease."""
        present = self._members.get(node)
        return present is not None and self._is_alive(present, now_s)

    def living(self, now_s: float) -> tuple[Member, ...]:
        """List every living member, sorted by name."""
        return tuple(member for member in self.all(now_s) if self._is_alive(member, now_s))

    def all(self, now_s: float) -> tuple[Member, ...]:
        """List living and recently lost members, sorted by name."""
        self._forget_ghosts(now_s)
        return tuple(self._members[node] for node in sorted(self._members))

    def newly_lost(self, now_s: float) -> tuple[Member, ...]:
        """List the lost members that no earlier call has listed since they joined, sorted by name."""
        lost = [member for member in self.all(now_s) if not self._is_alive(member, now_s)]
        news = tuple(member for member in lost if member.node not in self._told_lost)
        self._told_lost = {member.node for member in lost}
        return news

    def silent_for_s(self, node: str, instance: str, now_s: float) -> float:
        """Seconds since the last sign of life; infinite if the process is not the member of that name."""
        present = self._process(node, instance)
        return now_s - present.seen_at_s if present is not None else float("inf")

    def _process(self, node: str, instance: str) -> Member | None:
        present = self._members.get(node)
        return present if present is not None and present.instance == instance else None

    def _is_alive(self, member: Member, now_s: float) -> bool:
        return member.node not in self._lost and now_s - member.seen_at_s < self.lease_s

    def _forget_ghosts(self, now_s: float) -> None:
        limit_s = _GHOST_LEASES * self.lease_s
        self._members = {node: member for node, member in self._members.items() if now_s - member.seen_at_s < limit_s}


class Members(Protocol):
    """The members, as a run sees them."""

    links: LinkCache

    def living(self) -> tuple[Member, ...]:
        """List the living members, sorted by name."""

    def silent_for_s(self, node: str, instance: str) -> float:
        """Seconds since the last sign of life of a node's process; infinite if it has left."""

    def model_manifest(self, run_id: str) -> ModelManifest | None:
        """Return the manifest of the coordinator's own copy of a run's model; None if it has none."""


def choose_members(living: Sequence[Member], num_nodes: int) -> tuple[Member, ...] | None:
    """Choose ``num_nodes`` members, those with data first, or all with 0; None if there are too few.

    Example: of a, b and c, where only c has data, two members are c and a.
    """
    if not living or len(living) < num_nodes:
        return None
    ranked = sorted(living, key=lambda member: (not member.has_data, member.node))
    return tuple(ranked[: num_nodes or len(ranked)])


def choose_named(living: Sequence[Member], names: Sequence[str]) -> tuple[Member, ...] | None:
    """Choose the members with these names; None if one is missing."""
    by_name = {member.node: member for member in living}
    return tuple(by_name[name] for name in names) if set(names) <= by_name.keys() else None


def check_reachable(members: Sequence[Member]) -> None:
    """Refuse members on several machines if one has a loopback address; raises ``ConnectionFailedError``."""
    hidden = [member for member in members if is_loopback(member.address)]
    others = [member for member in members if not is_loopback(member.address)]
    if hidden and others:
        raise ConnectionFailedError(
            f"node {hidden[0].node} at {hidden[0].address} can't be reached by node {others[0].node} at "
            f"{others[0].address}; start it again with its machine's address on the network: the coordinator's first "
            "lines have the command"
        )


def machine_of(member: Member) -> str:
    """The machine of a member: the host of its address."""
    return split_address(member.address, option=f"node {member.node}: its address")[0]


def rack_of(member: Member) -> str:
    """The board or switch with which a member is lost: by its name, else its machine."""
    return member.rack or machine_of(member)


def num_neighbours(members: Collection[Member]) -> dict[str, int]:
    """Count for each node the other members on its machine."""
    counts = Counter(machine_of(member) for member in members)
    return {member.node: counts[machine_of(member)] - 1 for member in members}


def missing_nodes_error(
    living: Sequence[Member], names: Sequence[str], waited_s: float, *, has_given_plan: bool = False
) -> RingTuneError:
    """Make the error after a wait for the nodes of an earlier run or of a given plan."""
    missing = sorted(set(names) - {member.node for member in living})
    waited, listed = f"waited {waited_s:g} s for node {', '.join(missing)}", ", ".join(names)
    if has_given_plan:
        return DeadlineError(
            f"{waited}: the given plan is for the nodes {listed}; start the missing ones, or plan anew with "
            "'ringtune plan JOB --save FILE'"
        )
    return DeadlineError(
        f"{waited}: the run needs its nodes ({listed}), as only they have their rows or their parts of the "
        "checkpoint; start the missing ones again"
    )


def unused_owners(living: Sequence[Member], chosen: Sequence[Member]) -> tuple[str, ...]:
    """Names of members with data that do not take part, sorted; guests are left out."""
    names = {member.node for member in chosen}
    return tuple(sorted(each.node for each in living if each.has_data and not each.is_guest and each.node not in names))


def too_few_nodes_error(living: Sequence[Member], num_nodes: int, waited_s: float) -> RingTuneError:
    """Make the error after a wait for members."""
    if not num_nodes:
        return CapacityError("no node has joined this coordinator; start some with 'ringtune node'")
    names = ", ".join(member.node for member in living) or "none"
    return DeadlineError(
        f"waited {waited_s:g} s for {num_nodes} nodes, {len(living)} have joined ({names}); start the others or ask "
        "for fewer"
    )


def lost_message(node: str, silent_s: float, lease_s: float) -> str:
    """Say why a node counts as lost, and the remedy."""
    since = "it has left, or was started again" if silent_s == float("inf") else f"last contact {silent_s:.1f} s ago"
    return f"node {node} is lost: {since}, its lease is {lease_s:g} s; start it again and repeat or --resume the run"
