"""What is taken of an announcement, and which coordinator a node joins by itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ringtune.errors import ConnectionFailedError, TrustError, UsageError
from ringtune.transport.discovery import Announcement, choose, is_announced, read_announcement, words_of
from tests.support.cases import cases

HASH, OTHER = "0123456789abcdef" * 4, "fedcba9876543210" * 4
DESK = Announcement(name="desk 7070", address="192.168.1.10:7070", version="0.2.0", authority=HASH[:16])
LAB = dataclasses.replace(DESK, name="lab 7070", address="192.168.1.11:7070", authority=OTHER[:16])
PLAIN = dataclasses.replace(DESK, name="plain 7070", address="192.168.1.12:7070", authority="")


def read(**changes: Any) -> Announcement | None:
    """What is taken of an announcement of ``DESK``, with changes."""
    words = {key.encode(): value for key, value in words_of("0.2.0", HASH).items()} | changes.pop("words", {})
    given: dict[str, Any] = {"name": "desk 7070", "addresses": ["192.168.1.10"], "port": 7070} | changes
    return read_announcement(words=words, **given)


def test_announcement_is_read_as_it_was_made() -> None:
    """Name, address, version and digits; no secret and not the whole hash."""
    assert read() == DESK
    assert HASH.encode() not in b"".join(words_of("0.2.0", HASH).values())
    assert "authority" not in words_of("0.2.0", "")
    assert str(PLAIN) == "'plain 7070' at 192.168.1.12:7070 (version 0.2.0, plain text)"


@cases(
    ("changes", "address"),
    [
        ({"addresses": ["fe80::1"]}, "[fe80::1]:7070"),
        ({"addresses": ["224.0.0.251", "10.0.0.2"]}, "10.0.0.2:7070"),
        ({"addresses": ["x; rm -rf /", "0.0.0.0", "10.0.0.3"]}, "10.0.0.3:7070"),  # noqa: S104
    ],
)
def test_announcement_takes_the_first_address_that_can_be_called(changes: dict[str, Any], address: str) -> None:
    """Whatever else is announced beside it."""
    found = read(**changes)
    assert found is not None and found.address == address


@cases(
    "changes",
    [
        {"addresses": []},
        {"addresses": ["not an address"] * 8 + ["10.0.0.2"]},
        {"port": 0},
        {"port": 70000},
        {"port": None},
        {"words": {b"form": b"2"}},
        {"words": {b"form": None}},
        {"words": {b"version": None}},
        {"words": {b"version": b"0.2.0\x1b[2J"}},
        {"words": {b"version": b"9" * 5000}},
        {"words": {b"authority": b"0123"}},
        {"words": {b"authority": b"\xff" * 16}},
    ],
)
def test_announcement_of_another_form_is_left_out(changes: dict[str, Any]) -> None:
    """Without an address, a port, or words that match."""
    assert read(**changes) is None


def test_announced_name_is_cut_and_shown_escaped() -> None:
    """A name is somebody else's: it can't clear a screen or fill it."""
    found = read(name="\x1b[2J" * 100)
    assert found is not None and len(found.name) == 63
    assert "\x1b" not in str(found)


def test_choosing_takes_the_one_with_the_authority_of_the_token() -> None:
    """Alone, or among others; twice the same is one."""
    for found in ([DESK], [LAB, DESK, PLAIN], [DESK, DESK, dataclasses.replace(DESK, name="desk 7070 (2)")]):
        assert choose(found, authorities=[HASH], what="the join token") == "192.168.1.10:7070"


@cases(
    ("found", "authority", "error", "message"),
    [
        ([], HASH, ConnectionFailedError, "no coordinator was found on this network within 3 s; give --coordinator"),
        ([], "", ConnectionFailedError, "--no-announce"),
        ([LAB], HASH, TrustError, "none has the authority 0123456789abcdef of the join token"),
        ([PLAIN], HASH, TrustError, "shown to none of them"),
        ([DESK, dataclasses.replace(DESK, address="10.0.0.2:7070")], HASH, UsageError, "several have the authority"),
        ([DESK], "", UsageError, "joins none by itself: give --token-file FILE"),
        ([PLAIN], "", UsageError, "'plain 7070' at 192.168.1.12:7070"),
    ],
)
def test_choosing_lists_and_refuses(
    found: list[Announcement], authority: str, error: type[Exception], message: str
) -> None:
    """None, another one, several, or no token: each says what was found and what to type."""
    with pytest.raises(error, match=message) as caught:
        choose(found, authorities=[authority] if authority else [], what="the join token")
    assert all(one.address in str(caught.value) for one in found)


def test_coordinator_is_announced_where_others_reach_it() -> None:
    """The options decide; else the address."""
    cases = [(loopback, asked) for loopback in (True, False) for asked in (None, True, False)]
    assert [is_announced(is_loopback=loopback, asked=asked) for loopback, asked in cases] == [
        False, True, False,
        True, True, False,
    ]  # fmt: skip
