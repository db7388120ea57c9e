"""The rules of who may look: names of hosts on loopback, the token elsewhere."""

from __future__ import annotations

import pytest

from ringtune.web.guard import Guard

TOKEN = "t" * 20
LOCAL, FAR = Guard(True, "", 80), Guard(False, TOKEN, 80)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:7080", "localhost:1", "LOCALHOST", "localhost.", "[::1]:7080", "127.9.9.9"]
)
def test_guard_on_loopback_answers_loopback_names(host: str) -> None:
    """However this machine is called, and through whichever port of a tunnel."""
    assert LOCAL.refuse(host, None, None) is None


@pytest.mark.parametrize(
    "host",
    ["", None, "evil.example", "127.0.0.1.evil.example", "localhost.evil.example:7080", "10.0.0.1", "[::2]"],
)
def test_guard_on_loopback_refuses_other_names(host: str | None) -> None:
    """A foreign page may point its own name to this machine; its scripts then still say that name."""
    refusal = LOCAL.refuse(host, None, None)
    assert refusal is not None
    assert refusal.status == 421


@pytest.mark.parametrize("given", [f"Bearer {TOKEN}", f"bearer  {TOKEN} "])
def test_guard_elsewhere_takes_the_token(given: str) -> None:
    """In the header that Prometheus and scripts send, whatever the host is called."""
    assert FAR.refuse("any.example", given, None) is None


@pytest.mark.parametrize(
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


def test_guard_takes_its_cookie() -> None:
    """Among others, and only at its own port."""
    assert FAR.refuse("any.example", None, f"a=b; ringtune-80={FAR.cookie_value}") is None


def test_guard_keeps_its_token_to_itself() -> None:
    """Neither the cookie nor a printed guard has it."""
    assert TOKEN not in repr(FAR) + FAR.cookie_value


def test_guard_elsewhere_needs_to_have_a_token() -> None:
    """An empty one would let everybody in."""
    with pytest.raises(ValueError, match="needs a token"):
        Guard(False, "", 80)
