"""The identity of this process on all its connections, or none and plain text; chosen from options and disk.

It is set before the first connection and may be renewed while the process lives; connections that are opened from then
on have the new certificate.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ringtune.errors import UsageError
from ringtune.transport.parties import find_user_trust

if TYPE_CHECKING:
    from ringtune.transport.identity import CertificateFacts, Identity


@dataclass(slots=True)
class Speaker:
    """The identity of a process, and whom it refuses.

    Attributes:
        identity: for connections that are opened from now on.
        removed: serial -> reason, of certificates that hold no longer though they have not expired.
        renew_after_unix_s: the identity is not renewed before, because that has just failed.
    """

    identity: Identity
    removed: Mapping[str, str] = field(default_factory=dict)
    renew_after_unix_s: float = 0.0

    def refusal(self, caller: CertificateFacts) -> str:
        """Say why a party with a valid certificate is refused; empty = it is not."""
        return self.removed.get(caller.serial, "")


_speaker: Speaker | None = None


def speak_as(speaker: Speaker | None) -> None:
    """Open all connections as ``speaker`` from now on; None = in plain text."""
    global _speaker
    _speaker = speaker


def speaker() -> Speaker | None:
    """Return the identity of this process on connections; None = none, in plain text."""
    return _speaker


def is_encrypted() -> bool:
    """Whether connections of this process, to it and from it, are encrypted and authenticated by certificates."""
    return _speaker is not None


@contextmanager
def speaking_as(who: Speaker | None) -> Iterator[None]:
    """Open the connections of a block as ``who``."""
    before = _speaker
    speak_as(who)
    try:
        yield
    finally:
        speak_as(before)


def speak_from(folder: Path) -> Speaker:
    """Speak with the identity of a folder from now on.

    Raises:
        TrustError: it is missing, damaged, readable for others, or does not hold now.
    """
    from ringtune.transport.identity import read_identity

    speaker = Speaker(read_identity(folder, time.time()))
    speak_as(speaker)
    return speaker


def speak_as_user(*, insecure: bool) -> Path | None:
    """Speak as this user from now on; in plain text with ``insecure``, or if the user has no identity.

    Returns:
        The folder of the identity; None = plain text.

    Raises:
        TrustError: the identity can't be used.
    """
    folder = None if insecure else find_user_trust()
    if folder is None:
        speak_as(None)
    else:
        speak_from(folder)
    return folder


def refuse_both(folder: Path | None, *, insecure: bool) -> None:
    """Refuse a folder of certificates together with ``--insecure``, which asks for plain text.

    Raises:
        UsageError: both are given.
    """
    if folder is not None and insecure:
        raise UsageError("--trust encrypts and --insecure does not; leave one of them out")
