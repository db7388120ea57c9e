"""Members and leases on a hand-held clock, and which of them take part in a run."""

from __future__ import annotations

import pytest

from coordinator.run.members import MAX_BETWEEN_S, Member, Registry, WakingClock, check_reachable
from ringtune.errors import BusyError, ConnectionFailedError


def member_named(node: str, address: str) -> Member:
    """A member at an address."""
    return Member(node=node, address=address, instance="one")


def test_recruiting_refuses_a_node_that_the_others_can_not_reach() -> None:
    """A node that told 127.0.0.1 is named before the run begins, and so is one that would look for it in vain."""
    desk, board = member_named("desk", "127.0.0.1:5"), member_named("board", "10.0.0.7:5")
    with pytest.raises(ConnectionFailedError, match=r"node desk at 127\.0\.0\.1:5 can't be reached by node board"):
        check_reachable([board, desk])
    check_reachable([desk, member_named("two", "127.0.0.1:6")])
    check_reachable([board, member_named("pi", "10.0.0.8:5")])


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


class Machine:
    """A machine's clock, which goes on whatever its processes do."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        """Read it."""
        return self.now_s


def passed_s(machine: Machine, clock: WakingClock, seconds: float, every_s: float) -> float:
    """Let time go by while the clock is read every so often; how much of it counted."""
    began_s, end_s = clock(), machine.now_s + seconds
    while machine.now_s < end_s:
        machine.now_s = min(end_s, machine.now_s + every_s)
        last_s = clock()
    return last_s - began_s


@pytest.mark.parametrize("every_s", [0.01, 0.25, MAX_BETWEEN_S])
def test_clock_of_a_process_that_runs_is_the_machines(every_s: float) -> None:
    """However busy it is."""
    machine = Machine()
    assert passed_s(machine, WakingClock(machine), 60.0, every_s) == pytest.approx(60.0)


@pytest.mark.parametrize("stood_s", [MAX_BETWEEN_S + 0.1, 9.0, 86_400.0])
def test_lease_is_not_over_because_the_coordinator_stood_still(stood_s: float) -> None:
    """It is over a lease of listening later, if nothing is heard."""
    machine = Machine()
    clock, registry = WakingClock(machine), Registry(5.0)
    registry.join(Member(node="a", address="a:1", instance="x"), clock())
    passed_s(machine, clock, 4.0, 0.25)
    machine.now_s += stood_s
    assert registry.is_alive("a", clock())
    assert registry.silent_for_s("a", "x", clock()) == pytest.approx(4.0)
    passed_s(machine, clock, 1.1, 0.25)
    assert not registry.is_alive("a", clock())
