"""Access to the page: on this machine for anybody, elsewhere for the bearer of the token of the page.

A page on loopback needs no login, but requests need a loopback name: a foreign web page may point its own name to
127.0.0.1 (DNS rebinding), and its scripts would then read ours. At any other address a token is needed, which such a
page does not have. A token is sent as ``Authorization: Bearer TOKEN``; a browser sends it once, and has a cookie from
then on, because its streams can't send headers of their own. The token is new at each start, or that of a file, for
programs that ask every few seconds.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
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
"""Longest header that is read, in characters."""


class Refusal(NamedTuple):
    """The reason why a request is not answered.

    Attributes:
        status: of HTTP.
        message: for people: what is wrong and what to do.
    """

    status: int
    message: str


@dataclass(frozen=True, slots=True)
class Guard:
    """The rules of one address.

    Attributes:
        is_local: whether it is a loopback address.
        token: that has to be given elsewhere; not shown by ``repr``.
        port: where it listens, which is in the cookie's name: cookies of one host are shared by its ports.
    """

    is_local: bool
    token: str = field(repr=False, default="")
    port: int = 0

    def __post_init__(self) -> None:
        """Refuse to guard an address beyond this machine without a token.

        Raises:
            ValueError: there is none.
        """
        if not self.is_local and not self.token:
            raise ValueError("an address beyond this machine needs a token")

    @property
    def cookie_name(self) -> str:
        """The name of the cookie that stands for the token."""
        return f"ringtune-{self.port}"

    @property
    def cookie_value(self) -> str:
        """The value of that cookie: made from the token, which can't be found out from it."""
        return hmac.new(self.token.encode(), b"ringtune page", hashlib.sha256).hexdigest()

    def refuse_host(self, host: str | None) -> Refusal | None:
        """Refuse a request that names another host, where the page is for this machine.

        Args:
            host: the header ``Host``.
        """
        if not self.is_local or _is_local_name(_without_port(host or "")):
            return None
        return Refusal(421, "this page is for this machine only: open it by 127.0.0.1 or localhost")

    def refuse(self, host: str | None, authorization: str | None, cookies: str | None) -> Refusal | None:
        """Refuse a request that has no access; None if it has.

        Args:
            host: the header ``Host``.
            authorization: the header ``Authorization``.
            cookies: the header ``Cookie``.
        """
        if (wrong := self.refuse_host(host)) is not None or self.is_local:
            return wrong
        if authorization is not None:
            return None if self.has_token(authorization) else _WRONG
        if (given := self._cookie(cookies or "")) is None:
            return _MISSING
        return None if hmac.compare_digest(given.encode(), self.cookie_value.encode()) else _WRONG

    def has_token(self, authorization: str | None) -> bool:
        """Whether the header ``Authorization`` bears the token; compared in a time that tells nothing of it."""
        kind, _, given = (authorization or "")[:MAX_HEADER].partition(" ")
        is_bearer = kind.lower() == "bearer"
        return hmac.compare_digest(given.strip().encode(), self.token.encode()) and is_bearer and bool(self.token)

    def _cookie(self, header: str) -> str | None:
        try:
            found = SimpleCookie(header[:MAX_HEADER]).get(self.cookie_name)
        except CookieError:
            return None
        return found.value if found is not None else None


_MISSING: Final = Refusal(
    401, "this page needs the token that was printed when it was started: open the printed address, or enter it here"
)
_WRONG: Final = Refusal(
    401, "the token is wrong: take the one that was printed when the page was started; it changes with each start"
)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_local_name(host: str) -> bool:
    if host.lower().rstrip(".") in LOCAL_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


MIN_CHARACTERS: Final = 20
_MAX_BYTES: Final = 4096
_RANDOM_BYTES: Final = 24


def make_token() -> str:
    """Make a token: 192 random bits in letters that fit in an address."""
    return secrets.token_urlsafe(_RANDOM_BYTES)


def token_of(file: Path | None) -> str:
    """Read the token of a file; make file and token if it is not there, and a token alone without a file.

    Raises:
        UsageError: others may read the file, or it has no token of some length.
        StorageError: the file can't be read or written.
    """
    if file is None:
        return make_token()
    with storage_errors(file):
        if not file.exists():
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="ascii") as new:
                new.write(token := make_token())
            return token
        with file.open("rb") as old:
            if stat.S_IMODE(os.fstat(old.fileno()).st_mode) & 0o077:
                raise UsageError(f"others may read {file}, which has the token of the page; chmod 600 it")
            content = old.read(_MAX_BYTES)
    token = content.decode("ascii", "replace").strip()
    if len(token) < MIN_CHARACTERS or not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError(
            f"{file} has no token: one line of at least {MIN_CHARACTERS} letters; remove it to get a new one"
        )
    return token
