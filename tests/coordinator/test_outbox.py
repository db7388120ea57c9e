"""Events between a run and its submitter."""

from __future__ import annotations

import pytest

from coordinator.outbox import Outbox
from ringtune.errors import InterruptedRunError
from ringtune.v1 import control_pb2


def state(name: str) -> control_pb2.RunEvent:
    """An event."""
    return control_pb2.RunEvent(state=name)


def test_outbox_keeps_the_order() -> None:
    """Events come out as they went in, and end when it is closed."""
    outbox = Outbox()
    for name in ("one", "two"):
        outbox.emit(state(name))
    outbox.close()
    assert [event.state for event in outbox.events()] == ["one", "two"]


def test_outbox_does_not_wait_for_ever_for_a_slow_reader() -> None:
    """A submitter that is there but does not read ends the run instead of filling the memory."""
    outbox = Outbox(wait_s=0.05, max_events=2)
    outbox.emit(state("one"))
    outbox.emit(state("two"))
    with pytest.raises(InterruptedRunError, match=r"did not take events for 0\.05 s"):
        outbox.emit(state("three"))


def test_outbox_drops_events_when_nobody_reads_any_more() -> None:
    """After the submitter is gone, the run still ends in order."""
    outbox = Outbox(wait_s=0.05, max_events=1)
    outbox.emit(state("one"))
    reader = outbox.events()
    next(reader)
    reader.close()
    for _ in range(5):
        outbox.emit(state("more"))
