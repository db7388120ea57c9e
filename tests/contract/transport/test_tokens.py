"""Join tokens: read as they were written, refused without repeating them, and secret in logs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtune.errors import TokenError
from ringtune.transport.parties import Token, make_secret, node_party, parse_token, secret_hash
from tests.contract.transport.test_parties import NAMES

HASH = "0123456789abcdef" * 4


@given(name=NAMES, port=st.integers(0, 65535))
def test_tokens_are_read_as_they_were_written(name: str, port: int) -> None:
    """White space of a file does not count."""
    token = Token(node_party(name), port, HASH, make_secret())
    assert parse_token(f" {token}\n") == token


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-1],
        lambda text: text + "x",
        lambda text: text.replace("ringtune1", "ringtune2"),
        lambda text: text.replace(":node:", ":coordinator:"),
        lambda text: text.replace(":pi:", ":../pi:"),
        lambda text: text.replace(":pi:", ":p..i:"),
        lambda text: text.replace(":7071:", ":65536:"),
        lambda text: text.replace(HASH, HASH.upper()),
        lambda text: f"{text}\n{text}",
        lambda text: "",
    ],
)
def test_tokens_that_are_damaged_are_refused_unseen(damage: object) -> None:
    """The error does not repeat what was given: it may be nearly a secret."""
    secret = make_secret()
    text = damage(str(Token(node_party("pi"), 7071, HASH, secret)))  # type: ignore[operator]
    with pytest.raises(TokenError) as refused:
        parse_token(text)
    assert secret[:8] not in str(refused.value)


def test_tokens_hide_their_secret_in_logs() -> None:
    """What a log or a traceback shows of a token does not let anybody join."""
    token = Token(node_party("pi"), 7071, HASH, make_secret())
    assert token.secret not in f"{token!r} {[token]}"
    assert token.secret in str(token)


def test_tokens_have_secrets_that_differ() -> None:
    """Every secret is new, and its hash tells nothing of it."""
    secrets = {make_secret() for _ in range(100)}
    assert len(secrets) == len({secret_hash(secret) for secret in secrets}) == 100
    assert min(map(len, secrets)) == 43
