"""Seconds in which nobody listened count for no lease."""

from __future__ import annotations

import pytest

from coordinator.members.registry import Member, Registry
from coordinator.members.waking_clock import MOST_BETWEEN_S, WakingClock


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


@pytest.mark.parametrize("every_s", [0.01, 0.25, MOST_BETWEEN_S])
def test_clock_of_a_process_that_runs_is_the_machines(every_s: float) -> None:
    """However busy it is."""
    machine = Machine()
    assert passed_s(machine, WakingClock(machine), 60.0, every_s) == pytest.approx(60.0)


@pytest.mark.parametrize("stood_s", [MOST_BETWEEN_S + 0.1, 9.0, 86_400.0])
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
