"""What a run's links deliver: how long each message took, on the coordinator's clock."""

from __future__ import annotations

from typing import Any

import pytest

from edge.agent.active_run import ActiveRun
from edge.run.reporter import Arrived
from edge.run.shared_clock import SharedClock
from tests.support.plans import make_plan


class Reports:
    """Keeps what is put."""

    def __init__(self) -> None:
        self.entries: list[Any] = []

    def put(self, entry: Any) -> None:
        """Keep an entry."""
        self.entries.append(entry)


def test_message_took_from_its_sending_or_from_the_one_before_it() -> None:
    """Two messages sent at 100 s arrive at 101 s and 103 s: the link had the second one for 2 s only, not for 3."""
    now_s = [0.0]
    clock = SharedClock(lambda: now_s[0])
    clock.compare(0.0, 0.0, 100.0)
    active = ActiveRun("r", "b", 0, make_plan([("a", 0, 2), ("b", 2, 4)], ["a"]), clock=clock)
    reports: Any = Reports()
    run: Any = object()
    active.reporter, active.run = reports, run
    for at_s in (1.0, 3.0):
        now_s[0] = at_s
        active.on_received("a", 500, 100.0)
    now_s[0] = 4.0
    active.on_received("c", 500, 101.0)
    assert [entry.source for entry in reports.entries] == ["a", "a", "c"]
    assert all(isinstance(entry, Arrived) for entry in reports.entries)
    assert [entry.seconds for entry in reports.entries] == pytest.approx([1.0, 2.0, 3.0])
