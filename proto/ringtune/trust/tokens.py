"""A join token: the right to one certificate, with the hash by which its bearer knows the coordinator.

As text, in one line without spaces::

    ringtune1:node:pi-4:7071:<SHA-256 of the authority's certificate, hex>:<secret>

The coordinator keeps the hash of the secret only.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass
from typing import Final, cast

from ringtune.errors import TokenError
from ringtune.ids import NODE_NAME
from ringtune.trust.parties import Party, Role

_PREFIX: Final = "ringtune1"
_SECRET_BYTES: Final = 32
_TEXT = re.compile(
    rf"{_PREFIX}:(?P<role>node|submitter):(?P<name>{NODE_NAME.pattern}):(?P<port>[0-9]{{1,5}})"
    r":(?P<hash>[0-9a-f]{64}):(?P<secret>[A-Za-z0-9_-]{43})"
)
INVALID: Final = (
    "the join token is not valid: it is wrong, used or expired; make a new one with 'ringtune coordinator token NAME'"
)
"""The one text for all reasons: a stranger learns nothing by trying."""


@dataclass(frozen=True, slots=True)
class Token:
    """A join token.

    Attributes:
        party: who its bearer becomes.
        port: where the coordinator answers those who have no certificate yet; 0 = at the port after its own.
        authority_sha256: of the authority's certificate, hex.
        secret: known to the bearer alone.
    """

    party: Party
    port: int
    authority_sha256: str
    secret: str

    def __str__(self) -> str:
        """The token with its secret, for the one who gets it."""
        return f"{_PREFIX}:{self.party.role}:{self.party.name}:{self.port}:{self.authority_sha256}:{self.secret}"

    def __repr__(self) -> str:
        """The token without its secret, for logs."""
        return f"Token({self.party})"


def make_secret() -> str:
    """Make the secret of a new token."""
    return secrets.token_urlsafe(_SECRET_BYTES)


def secret_hash(secret: str) -> str:
    """Hash a secret, as the coordinator keeps it; it is random, so one SHA-256 is enough."""
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


def parse_token(text: str) -> Token:
    """Read a token; white space around it does not count.

    Raises:
        TokenError: it is damaged; the text is not repeated.
    """
    match = _TEXT.fullmatch(text.strip())
    if match is None or ".." in match["name"] or int(match["port"]) > 65535:
        raise TokenError(
            "the join token is damaged; it is one line that begins with 'ringtune1:', as the coordinator printed it"
        )
    return Token(Party(cast(Role, match["role"]), match["name"]), int(match["port"]), match["hash"], match["secret"])
