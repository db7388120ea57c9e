"""Why a connection failed, where gRPC only says that the socket was closed."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable

import pytest

from coordinator.server.certificate_authority import Authority
from ringtune.transport.parties import COORDINATOR, node_party
from ringtune.transport.refusals import refusal_reason
from ringtune.transport.speaker import Speaker, speaking_as
from tests.contract.transport.test_tls import A_NODE, COORDINATOR_ITSELF, serving
from tests.support.trust_parts import DAY_S, speaker_of

HOUR_S = 3600.0


def coordinator_later(later_s: float) -> Speaker:
    """A coordinator whose certificate was issued ``later_s`` from now."""
    return speaker_of("coordinator", "coordinator", later_s=later_s)


def node_later(later_s: float) -> Speaker:
    """The node ``a`` with a certificate that was issued ``later_s`` from now."""
    return speaker_of("a", later_s=later_s)


CASES: dict[str, tuple[Callable[[], Speaker | None], Callable[[], Speaker | None], str]] = {
    "this one expired": (
        lambda: speaker_of("a", later_s=-31 * DAY_S),
        lambda: COORDINATOR_ITSELF,
        "process has expired",
    ),
    "this one is early": (
        lambda: speaker_of("a", later_s=3 * DAY_S),
        lambda: COORDINATOR_ITSELF,
        "process is not valid",
    ),
    "that one expired": (lambda: A_NODE, lambda: coordinator_later(-31 * DAY_S), "has expired on .* set the clock"),
    "that one is early": (lambda: A_NODE, lambda: coordinator_later(3 * DAY_S), "is not valid before .* set the clock"),
    "another authority": (
        lambda: speaker_of("a", authority=Authority.make(time.time())),
        lambda: COORDINATOR_ITSELF,
        "is of another authority than node a's",
    ),
    "another name": (lambda: A_NODE, lambda: speaker_of("b"), "is node b, not the coordinator; correct the address"),
    "plain here": (lambda: None, lambda: COORDINATOR_ITSELF, "takes certificates only, and this process has none"),
    "plain there": (lambda: A_NODE, lambda: None, "speaks plain text, and this process encrypts"),
    "plain on both sides": (lambda: None, lambda: None, ""),
    "all well": (lambda: A_NODE, lambda: COORDINATOR_ITSELF, ""),
    "two hours behind": (lambda: node_later(2 * HOUR_S), lambda: COORDINATOR_ITSELF, ""),
    "two hours ahead": (lambda: A_NODE, lambda: coordinator_later(2 * HOUR_S), ""),
}


@pytest.mark.parametrize("case", CASES)
def test_refusals_are_explained(case: str) -> None:
    """Dates, chain, name and plain text, of this side and of the other; nothing is made up where all is well."""
    here, there, text = CASES[case]
    with serving(there()) as (address, _), speaking_as(here()):
        why = refusal_reason(address, COORDINATOR, time.time())
    assert re.search(text, why) if text else why == ""


def test_refusals_by_the_other_side_are_told_from_here() -> None:
    """Its clock is ahead: only the other side knows, and it hangs up; the remedy names both machines."""
    almost_over = speaker_of("a", later_s=-31 * DAY_S)
    with serving() as (address, _), speaking_as(almost_over):
        why = refusal_reason(address, COORDINATOR, time.time() - 1.5 * DAY_S)
    assert "refuses the certificate of node a" in why
    assert "on both machines" in why


@pytest.mark.parametrize("who", [None, A_NODE])
def test_refusals_are_none_where_nobody_is(who: Speaker | None) -> None:
    """A closed port is no question of certificates."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with speaking_as(who):
        assert refusal_reason(address, node_party("b"), time.time()) == ""
