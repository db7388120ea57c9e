"""Choose as whom a process speaks, from what its user said and what is on its disk."""

from __future__ import annotations

import time
from pathlib import Path

from ringtune.errors import UsageError
from ringtune.trust.places import found_user_trust
from ringtune.trust.speaking import Speaker, speak_as


def speak_from(folder: Path) -> Speaker:
    """Speak with the identity of a folder from now on.

    Raises:
        TrustError: it is missing, damaged, readable for others, or does not hold now.
    """
    from ringtune.trust.identity import read_identity

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
    folder = None if insecure else found_user_trust()
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
