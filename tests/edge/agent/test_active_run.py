"""What a run's links deliver: how long each message took, on the coordinator's clock."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from coordinator.server.certificate_authority import DAYS
from edge.agent import active_run
from edge.agent.active_run import ActiveRun
from edge.checkpoint.snapshot_servicer import fetch_audited, open_stub
from edge.runtime.reporter import Arrived, SharedClock
from ringtune.errors import (
    ConnectionFailedError,
    FrameError,
    InterruptedRunError,
    ModelError,
    RingTuneError,
    TrustError,
)
from ringtune.transport.credentials import using_credentials
from ringtune.v1 import control_pb2
from tests.support.plans import make_plan
from tests.support.trust_parts import DAY_S, credentials_of


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


def link_error(told: RingTuneError) -> RingTuneError:
    """The error of node a, whose link to node b fails with ``told``."""

    class Refused:
        def open(self, timeout_s: float) -> None:
            raise told

        def close(self) -> None:
            pass

    active = ActiveRun("r", "a", 0, make_plan([("a", 0, 2), ("b", 2, 4)], ["a"]))
    backend: Any = SimpleNamespace(connect=lambda active, target, address: Refused())
    options: Any = SimpleNamespace(name="a", insecure=False)
    with pytest.raises(RingTuneError, match=r"^node a can't send to node b: ") as caught:
        active_run.open_links(active, options, backend, {"b": "127.0.0.1:1"}, time.monotonic())
    return caught.value


@pytest.mark.parametrize("kind", [FrameError, TrustError, ModelError])
def test_link_that_its_peer_does_not_take_is_an_error_with_the_peer(kind: type[RingTuneError]) -> None:
    """So the coordinator knows that either of both may be its cause; it is one of links, whatever the peer calls it."""
    error = link_error(kind("not today"))
    assert isinstance(error, FrameError | ConnectionFailedError)
    assert (str(error), error.peer) == ("node a can't send to node b: not today", "b")


@pytest.mark.parametrize(
    ("text", "remedy"),
    [("certificate has expired", "start it again"), ("unable to get local issuer certificate", "join with a token")],
)
def test_link_that_the_certificate_of_a_peer_prevents_is_an_error_with_the_peer(text: str, remedy: str) -> None:
    """So a run that is prepared goes on without that host; what to do stands beside. Its own certificate is its own."""
    told = ConnectionFailedError(f"Ssl handshake failed: {text}")
    with using_credentials(credentials_of("a")):
        error = link_error(told)
    assert (type(error), error.peer) == (ConnectionFailedError, "b")
    assert "who answers at 127.0.0.1:1 has a certificate" in str(error)
    assert remedy in str(error)
    with using_credentials(credentials_of("a", later_s=-(DAYS + 1) * DAY_S)):
        error = link_error(told)
    assert (type(error), error.peer) == (TrustError, "")
    assert "the certificate of this process has expired" in str(error)


def test_figures_of_a_run_that_was_released_meanwhile_are_none() -> None:
    """Whoever asks for them hears that the run is over; a node has no bug then."""
    active = ActiveRun("r", "b", 0, make_plan([("a", 0, 2), ("b", 2, 4)], ["a"]))
    active.drop()
    with pytest.raises(InterruptedRunError, match="run r was released while node b counted its figures"):
        active.figures()


def test_channels_of_an_audit_are_closed_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch that is still waiting for a host ends then, a later one says why, and no channel is left open."""
    active = ActiveRun("r", "b", 0, make_plan([("a", 0, 2), ("b", 2, 4)], ["a"]))
    asked, until_s = control_pb2.SnapshotRequest(), time.monotonic() + 20.0
    stub = active.audit_stub("a", "127.0.0.1:1")
    waiting: Any = stub.Fetch(asked, wait_for_ready=True, timeout=20.0)
    active.cancelled.set()
    active.drop()
    assert waiting.code() is grpc.StatusCode.CANCELLED
    with pytest.raises(InterruptedRunError, match="the run was released here"):
        fetch_audited(asked, "a", "127.0.0.1:1", until_s, lease_s=20.0, stub=stub)
    channel, stub = open_stub("c", "127.0.0.1:1")
    monkeypatch.setattr(active_run, "open_stub", lambda node, address: (channel, stub))
    with pytest.raises(InterruptedRunError, match="run r was released while node b repeated work of it"):
        active.audit_stub("c", "127.0.0.1:1")
    with pytest.raises(ValueError, match=r"(?i)channel closed|closed channel"):
        stub.Fetch(asked)
