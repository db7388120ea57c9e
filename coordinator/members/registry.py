"""Keep the members with their addresses and leases; every method is told the time.

A member renews its lease by heartbeats. One that was not heard of for a whole lease is *lost*; it stays in
the list for a while, so that a user sees its name, and may come back under the same name.

The same name from another process is refused while the first one lives: an ``instance`` is random per
process and tells a restart from a clone.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ringtune.errors import BusyError, TrustError

_GHOST_LEASES = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One agent, as it described itself when it joined.

    Attributes:
        node: its name.
        address: ``host:port`` where the coordinator and the other nodes reach it.
        instance: random per process.
        version: of its package.
        has_data: whether it owns data.
        memory_bytes: what it lets a run use.
        device: ``cpu`` or ``cuda``.
        threads: compute threads.
        system: operating system and machine.
        is_guest: takes part in nothing but the evaluation of its own rows.
        train_rows: its share of the rows that it was started with; None = none, or not counted.
        eval_rows: the same for evaluation.
        cores: whole cores that it may use.
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
    seen_at_s: float = 0.0
    rss_bytes: int = 0


class Registry:
    """The members, by name.

    Args:
        lease_s: a member that was not heard of for so many seconds is lost.
    """

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._members: dict[str, Member] = {}
        self._told_lost: set[str] = set()
        self._drained: set[str] = set()
        self._refused: dict[str, str] = {}

    def join(self, member: Member, now_s: float) -> None:
        """Add a member, or take a restarted one again.

        Raises:
            BusyError: a living member of another process has the name.
            TrustError: the node was removed.
        """
        if member.node in self._refused:
            raise TrustError(f"{self._refused[member.node]}; it may join when the coordinator was started again")
        self._forget_ghosts(now_s)
        present = self._members.get(member.node)
        if present and present.instance != member.instance and self._is_alive(present, now_s):
            raise BusyError(
                f"the name {member.node} is taken by the node at {present.address}, seen "
                f"{now_s - present.seen_at_s:.1f} s ago; give this one another name, or wait {self.lease_s:g} s "
                "if it is a restart"
            )
        self._members[member.node] = dataclasses.replace(member, seen_at_s=now_s)
        self._told_lost.discard(member.node)

    def heartbeat(self, node: str, instance: str, rss_bytes: int, now_s: float) -> bool:
        """Renew a member's lease.

        Returns:
            Whether the member is known; one that is not, or whose lease ran out, has to join again.
        """
        present = self._members.get(node)
        if present is None or present.instance != instance or not self._is_alive(present, now_s):
            return False
        self._members[node] = dataclasses.replace(present, seen_at_s=now_s, rss_bytes=rss_bytes)
        return True

    def touch(self, node: str, now_s: float) -> None:
        """Count any other call of a living member as a sign of life."""
        present = self._members.get(node)
        if present is not None and self._is_alive(present, now_s):
            self._members[node] = dataclasses.replace(present, seen_at_s=now_s)

    def leave(self, node: str, instance: str) -> bool:
        """Forget a member that leaves in order; False if it was none."""
        present = self._members.get(node)
        if present is None or present.instance != instance:
            return False
        del self._members[node]
        return True

    def remove(self, node: str, reason: str, *, forever: bool) -> bool:
        """Forget a member that shall not stay; with ``forever`` refuse its name too. False if it was none."""
        self._drained.discard(node)
        if forever:
            self._refused[node] = reason
        return self._members.pop(node, None) is not None

    def drain(self, node: str, *, undo: bool) -> bool:
        """Take a member into no new run, or again; False if it is none."""
        if node not in self._members:
            return False
        (self._drained.discard if undo else self._drained.add)(node)
        return True

    def is_drained(self, node: str) -> bool:
        """Whether a member is taken into no new run."""
        return node in self._drained

    def is_alive(self, node: str, now_s: float) -> bool:
        """Whether the node is a member whose lease has not run out."""
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
        """List the members that are lost and were not listed here since they joined, sorted by name."""
        lost = [member for member in self.all(now_s) if not self._is_alive(member, now_s)]
        found = tuple(member for member in lost if member.node not in self._told_lost)
        self._told_lost = {member.node for member in lost}
        return found

    def silent_for_s(self, node: str, instance: str, now_s: float) -> float:
        """Seconds since the last sign of life; infinite for a stranger, and if another process has the name now."""
        present = self._members.get(node)
        is_same = present is not None and present.instance == instance
        return now_s - present.seen_at_s if present is not None and is_same else float("inf")

    def _is_alive(self, member: Member, now_s: float) -> bool:
        return now_s - member.seen_at_s < self.lease_s

    def _forget_ghosts(self, now_s: float) -> None:
        limit_s = _GHOST_LEASES * self.lease_s
        self._members = {node: member for node, member in self._members.items() if now_s - member.seen_at_s < limit_s}
