"""Access to the web page: without login on this machine, with a token elsewhere.

A page on loopback needs no login, but requests must have a loopback host name: a foreign web page may point its own
name to 127.0.0.1 (DNS rebinding), and its scripts could then read the page. At any other address a token is needed,
which such scripts do not have. It is sent as ``Authorization: Bearer TOKEN``; a browser sends it once and then has a
cookie, because its event streams can't send headers. The token is new at each start, or read from a file, for programs
that poll.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import stat
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Final, NamedTuple

from ringtune.errors import UsageError
from ringtune.storage.durable import storage_errors

LOCAL_NAMES: Final = ("localhost", "localhost.localdomain", "ip6-localhost")
MAX_HEADER: Final = 4096
"""Most characters of a header that are read."""


class Refusal(NamedTuple):
    """HTTP status of a refused request, and what is wrong with the remedy."""

    status: int
    message: str


@dataclass(frozen=True, slots=True)
class Guard:
    """Access rules of one address.

    Attributes:
        is_local: whether it is a loopback address.
        token: required elsewhere; not in ``repr``.
        port: part of the cookie's name, as all ports of a host share cookies.
    """

    is_local: bool
    token: str = field(repr=False, default="")
    port: int = 0

    def __post_init__(self) -> None:
        """Refuse an address beyond this machine without a token, with ``ValueError``."""
        if not self.is_local and not self.token:
            raise ValueError("an address beyond this machine needs a token")

    @property
    def cookie_name(self) -> str:
        """Name of the cookie that replaces the token."""
        return f"ringtune-{self.port}"

    @property
    def cookie_value(self) -> str:
        """Value of that cookie, an HMAC of the token."""
        return hmac.new(self.token.encode(), b"ringtune page", hashlib.sha256).hexdigest()

    def refuse_host(self, host: str | None) -> Refusal | None:
        """Refuse a request with a foreign name in the header ``Host``, if the page is on loopback; None = accepted."""
        if not self.is_local or _is_local_host(host or ""):
            return None
        return Refusal(421, "this page is for this machine only: open it by 127.0.0.1 or localhost")

    def refuse(self, host: str | None, authorization: str | None, cookies: str | None) -> Refusal | None:
        """Refuse a request without access; None = accepted. The arguments are headers of the request."""
        if (wrong := self.refuse_host(host)) is not None or self.is_local:
            return wrong
        if authorization is not None:
            return None if self.has_token(authorization) else _WRONG
        if (given := self._cookie(cookies or "")) is None:
            return _MISSING
        return None if hmac.compare_digest(given.encode(), self.cookie_value.encode()) else _WRONG

    def has_token(self, authorization: str | None) -> bool:
        """Whether the header ``Authorization`` has the token, by a comparison in constant time."""
        kind, _, given = (authorization or "")[:MAX_HEADER].partition(" ")
        is_bearer = kind.lower() == "bearer"
        return hmac.compare_digest(given.strip().encode(), self.token.encode()) and is_bearer and bool(self.token)

    def _cookie(self, header: str) -> str | None:
        try:
            cookie = SimpleCookie(header[:MAX_HEADER]).get(self.cookie_name)
        except CookieError:
            return None
        return cookie.value if cookie is not None else None


_MISSING: Final = Refusal(
    401, "this page needs the token that was printed when it was started: open the printed address, or enter it here"
)
_WRONG: Final = Refusal(
    401, "the token is wrong: take the one that was printed when the page was started; it changes with each start"
)


_HOST: Final = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<name>[0-9A-Za-z.-]+))(?::[0-9]{1,5})?")
"""The header ``Host``: an IPv6 address in brackets, or a name or IPv4 address; then a port or nothing."""


def _is_local_host(header: str) -> bool:
    parts = _HOST.fullmatch(header)
    if parts is None:
        return False
    six, name = parts["six"], parts["name"]
    if name and name.lower().removesuffix(".") in LOCAL_NAMES:
        return True
    try:
        return (ipaddress.IPv6Address(six) if six else ipaddress.IPv4Address(name)).is_loopback
    except ValueError:
        return False


MIN_CHARACTERS: Final = 20
_MAX_BYTES: Final = 4096
_RANDOM_BYTES: Final = 24


def make_token() -> str:
    """Make a token: 192 random bits in letters for URLs."""
    return secrets.token_urlsafe(_RANDOM_BYTES)


def token_of(file: Path | None) -> str:
    """Read the token in a file, or write a new one to a missing file; without a file make one."""
    if file is None:
        return make_token()
    with storage_errors(file):
        if not file.exists():
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="ascii") as new:
                new.write(token := make_token())
            return token
        with file.open("rb") as existing:
            if stat.S_IMODE(os.fstat(existing.fileno()).st_mode) & 0o077:
                raise UsageError(f"others may read {file}, which has the token of the page; chmod 600 it")
            content = existing.read(_MAX_BYTES)
    token = content.decode("ascii", "replace").strip()
    if len(token) < MIN_CHARACTERS or not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError(
            f"{file} has no token: one line of at least {MIN_CHARACTERS} letters; remove it to get a new one"
        )
    return token
