"""Tests of ``ringtune.transport.page_access``: guard, tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringtune.errors import StorageError, UsageError
from ringtune.transport.page_access import MIN_CHARACTERS, Guard, make_token, token_of
from tests.support.cases import cases

TOKEN = "t" * 20
LOCAL, FAR = Guard(True, "", 80), Guard(False, TOKEN, 80)


@cases("host", ["127.0.0.1", "127.0.0.1:7080", "localhost:1", "LOCALHOST", "localhost.", "[::1]:7080", "127.9.9.9"])
def test_guard_on_loopback_answers_loopback_names(host: str) -> None:
    """However this machine is called, and through whichever port of a tunnel."""
    assert LOCAL.refuse(host, None, None) is None


@cases(
    "host",
    [
        *("", None, "evil.example", "127.0.0.1.evil.example", "localhost.evil.example:7080", "10.0.0.1", "[::2]"),
        *("localhost:1@evil.example", "localhost:evil.example", "[::1]evil.example", "[::1", "::1", "[127.0.0.1]"),
        *("localhost:", "localhost:123456", "localhost:80\n", "localhost..", "localhost:1:2", "user@localhost"),
    ],
)
def test_guard_on_loopback_refuses_other_names(host: str | None) -> None:
    """A foreign page may point its own name to this machine; its scripts then still say that name."""
    refusal = LOCAL.refuse(host, None, None)
    assert refusal is not None
    assert refusal.status == 421


@cases(
    ("authorization", "cookies"),
    [
        (f"Bearer {TOKEN}", None),
        (f"bearer  {TOKEN} ", None),
        (None, f"a=b; ringtune-80={FAR.cookie_value}"),  # among others, and only at its own port
    ],
)
def test_guard_elsewhere_takes_the_token_and_its_cookie(authorization: str | None, cookies: str | None) -> None:
    """In the header that Prometheus and scripts send, whatever the host is called."""
    assert FAR.refuse("any.example", authorization, cookies) is None


@cases(
    ("authorization", "cookies", "message"),
    [
        (None, None, "needs the token"),
        (None, "other=1", "needs the token"),
        ("", None, "is wrong"),
        ("Bearer", None, "is wrong"),
        ("Bearer ", None, "is wrong"),
        (f"Basic {TOKEN}", None, "is wrong"),
        (f"Bearer {TOKEN}x", None, "is wrong"),
        (f"Bearer {TOKEN[:-1]}", None, "is wrong"),
        ("Bearer \u00fc", None, "is wrong"),
        (None, f"ringtune-80={TOKEN}", "is wrong"),
        (None, "ringtune-80=\u00fc", "needs the token"),
        (None, f"ringtune-81={FAR.cookie_value}", "needs the token"),
        ("Bearer wrong", f"ringtune-80={FAR.cookie_value}", "is wrong"),
        (None, "x" * 100_000, "needs the token"),
    ],
)
def test_guard_elsewhere_refuses_everything_else(authorization: str | None, cookies: str | None, message: str) -> None:
    """Missing and wrong are two sentences; a wrong header is not mended by a cookie."""
    refusal = FAR.refuse("any.example", authorization, cookies)
    assert refusal is not None
    assert refusal.status == 401
    assert message in refusal.message


def test_guard_keeps_its_token_to_itself() -> None:
    """Neither the cookie nor a printed guard has it."""
    assert TOKEN not in repr(FAR) + FAR.cookie_value


def test_guard_elsewhere_needs_to_have_a_token() -> None:
    """An empty one would let everybody in."""
    with pytest.raises(ValueError, match="needs a token"):
        Guard(False, "", 80)


def test_token_is_new_each_time() -> None:
    """Two starts have two, of letters that fit in an address."""
    one, two = make_token(), token_of(None)
    assert one != two
    assert len(one) >= MIN_CHARACTERS
    assert one.replace("-", "").replace("_", "").isalnum()


def test_token_file_is_made_once_and_then_read(tmp_path: Path) -> None:
    """For one user only, and the same token at the next start; one that others may read is refused, with what to do."""
    file = tmp_path / "token"
    made = token_of(file)
    assert token_of(file) == made
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        token_of(file)


@cases("content", [b"", b"short", b"two words that are long enough", b"\xff" * 40])
def test_token_file_without_a_token_is_refused(tmp_path: Path, content: bytes) -> None:
    """An empty token would let everybody in, a short one is soon guessed."""
    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_bytes(content)
    with pytest.raises(UsageError, match="has no token"):
        token_of(file)


def test_token_file_in_no_folder_is_an_error_of_storage(tmp_path: Path) -> None:
    """It names the file."""
    with pytest.raises(StorageError, match="missing/token"):
        token_of(tmp_path / "missing" / "token")
