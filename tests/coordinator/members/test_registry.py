"""Members and leases on a hand-held clock."""

from __future__ import annotations

import pytest

from coordinator.members.registry import Member, Registry
from ringtune.errors import BusyError


def member(node: str, instance: str = "one") -> Member:
    """A member with an address made from its name."""
    return Member(node=node, address=f"127.0.0.1:{len(node)}", instance=instance)


def test_registry_lists_the_living_by_name() -> None:
    """Members come sorted by name, whatever the order in which they joined."""
    registry = Registry(lease_s=10)
    for node in ("b", "c", "a"):
        registry.join(member(node), now_s=0)
    assert [entry.node for entry in registry.living(now_s=1)] == ["a", "b", "c"]


def test_registry_loses_a_member_after_one_lease() -> None:
    """At the very end of its lease a member is lost, but still listed."""
    registry = Registry(lease_s=10)
    registry.join(member("a"), now_s=0)
    assert registry.is_alive("a", now_s=9.9)
    assert not registry.is_alive("a", now_s=10.0)
    assert [entry.node for entry in registry.all(now_s=10.0)] == ["a"]


def test_registry_renews_a_lease_by_heartbeat() -> None:
    """A heartbeat starts the lease anew and carries the resident memory."""
    registry = Registry(lease_s=10)
    registry.join(member("a"), now_s=0)
    assert registry.heartbeat("a", "one", rss_bytes=7, now_s=9)
    assert registry.living(now_s=18)[0].rss_bytes == 7


def test_registry_sends_a_late_member_back_to_join() -> None:
    """A heartbeat after the lease does not revive a member: its run has gone on without it."""
    registry = Registry(lease_s=10)
    registry.join(member("a"), now_s=0)
    assert not registry.heartbeat("a", "one", rss_bytes=0, now_s=11)


def test_registry_refuses_a_clone() -> None:
    """A second process with the name of a living one is refused, and told how long ago that one was seen."""
    registry = Registry(lease_s=10)
    registry.join(member("a"), now_s=0)
    with pytest.raises(BusyError, match=r"taken .* seen 3\.0 s ago"):
        registry.join(member("a", instance="two"), now_s=3)
    assert not registry.heartbeat("a", "two", rss_bytes=0, now_s=3)


def test_registry_takes_a_restart_after_the_lease() -> None:
    """A new process may take the name of a lost one."""
    registry = Registry(lease_s=10)
    registry.join(member("a"), now_s=0)
    registry.join(member("a", instance="two"), now_s=10)
    assert registry.living(now_s=11)[0].instance == "two"


def test_registry_takes_the_same_process_again() -> None:
    """A process that lost the reply of its first join may simply join again."""
    registry = Registry(lease_s=10)
    registry.join(member("a"), now_s=0)
    registry.join(member("a"), now_s=1)
    assert len(registry.living(now_s=2)) == 1


def test_registry_ignores_a_leave_of_a_clone() -> None:
    """Only the process that joined can leave."""
    registry = Registry(lease_s=10)
    registry.join(member("a"), now_s=0)
    assert not registry.leave("a", "two")
    assert registry.leave("a", "one")
    assert registry.all(now_s=1) == ()


def test_registry_forgets_ghosts() -> None:
    """A member that was lost long ago is not listed for ever."""
    registry = Registry(lease_s=10)
    registry.join(member("a"), now_s=0)
    assert registry.all(now_s=299) != ()
    assert registry.all(now_s=300) == ()
