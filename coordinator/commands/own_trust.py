"""As whom the coordinator speaks, from the options of its command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ringtune.trust.choosing import refuse_both
from ringtune.trust.places import AUTHORITY, coordinator_trust
from ringtune.trust.speaking import speak_as

if TYPE_CHECKING:
    from coordinator.trust.keeper import Keeper


def keeper_of(trust: Path | None, *, insecure: bool) -> Keeper | None:
    """Speak as the coordinator of a trust folder from now on; in plain text if there is none, or with ``insecure``.

    Args:
        trust: as the user said; None = the default one, if it is there.
        insecure: whether the user wants plain text.

    Raises:
        TrustError: the folder has no authority, or can't be used.
        UsageError: a folder is given together with ``insecure``.
    """
    refuse_both(trust, insecure=insecure)
    folder = trust or coordinator_trust()
    if insecure or (trust is None and not (folder / AUTHORITY).is_file()):
        speak_as(None)
        return None
    from coordinator.trust.keeper import Keeper

    keeper = Keeper(folder)
    speak_as(keeper.speaker)
    return keeper


def authority_of(keeper: Keeper | None) -> str:
    """Return the SHA-256 of the coordinator's authority, hex; empty in plain text."""
    if keeper is None:
        return ""
    from ringtune.trust.certificates import fingerprint

    return fingerprint(keeper.speaker.identity.authority_pem)
