"""Credentials of this process on its connections, from options and disk; without any connections are plain text.

They are set before the first connection and may be renewed later: connections opened after that use the new
certificate.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ringtune.errors import UsageError
from ringtune.transport.parties import Party, find_user_trust

if TYPE_CHECKING:
    from ringtune.transport.identity import CertificateFacts, Identity


class Removal(NamedTuple):
    """Certificates of a party that are refused: those before a generation.

    Attributes:
        reason: why.
        generation: the first one that is not refused.
    """

    reason: str
    party: Party
    generation: int


class Removals:
    """The refused certificates that have not expired; constant."""

    def __init__(self, removals: Iterable[Removal] = ()) -> None:
        self.entries = tuple(removals)
        self._by_party = {each.party: each for each in self.entries}
        self.version = hashlib.sha256(repr(self.entries).encode()).hexdigest()[:16]

    def refusal(self, caller: CertificateFacts) -> str:
        """Say why a party with a valid certificate is refused; empty = it is not."""
        removal = self._by_party.get(caller.party)
        return removal.reason if removal is not None and caller.generation < removal.generation else ""


@dataclass(slots=True)
class Credentials:
    """Identity of a process, and the certificates that it refuses.

    After a failed renewal none is attempted before ``renew_after_unix_s``.
    """

    identity: Identity
    removed: Removals = field(default_factory=Removals)
    renew_after_unix_s: float = 0.0

    def refusal(self, caller: CertificateFacts) -> str:
        """Say why a party with a valid certificate is refused; empty = it is not.

        A connection outlives the authority with which it was opened, so that is compared too.
        """
        if caller.authority not in self.identity.authority_ids:
            return "it is of an authority that was replaced"
        return self.removed.refusal(caller)


_credentials: Credentials | None = None


def use_credentials(credentials: Credentials | None) -> None:
    """Use ``credentials`` for all connections opened from now on; None = plain text."""
    global _credentials
    _credentials = credentials


def process_credentials() -> Credentials | None:
    """Return the credentials of this process on connections; None = plain text."""
    return _credentials


def is_encrypted() -> bool:
    """Whether connections of this process, in both directions, are encrypted and authenticated by certificates."""
    return _credentials is not None


@contextmanager
def using_credentials(who: Credentials | None) -> Iterator[None]:
    """Use ``who`` for connections opened in a block."""
    before = _credentials
    use_credentials(who)
    try:
        yield
    finally:
        use_credentials(before)


def use_credentials_from(folder: Path) -> Credentials:
    """Use the identity in a folder from now on; raises ``TrustError``."""
    from ringtune.transport.identity import read_identity

    credentials = Credentials(read_identity(folder, time.time()))
    use_credentials(credentials)
    return credentials


def use_credentials_of_user(*, insecure: bool) -> Path | None:
    """Use this user's identity from now on; plain text with ``insecure``, or without an identity.

    Returns the folder of the identity; None = plain text.
    """
    folder = None if insecure else find_user_trust()
    if folder is None:
        use_credentials(None)
    else:
        use_credentials_from(folder)
    return folder


def refuse_both(folder: Path | None, *, insecure: bool) -> None:
    """Refuse a folder of certificates together with ``--insecure``, which means plain text; raises ``UsageError``."""
    if folder is not None and insecure:
        raise UsageError("--trust encrypts and --insecure does not; leave one of them out")
