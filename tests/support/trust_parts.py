"""What tests of trust share: an authority, and processes' identities that take turns in one process."""

from __future__ import annotations

import time
from pathlib import Path

from coordinator.server.certificate_authority import Authority
from ringtune.transport.identity import Identity, write_identity
from ringtune.transport.parties import Party, Role
from ringtune.transport.speaker import Speaker

AUTHORITY = Authority.make(time.time())
DAY_S = 86400.0


def speaker_of(name: str, role: Role = "node", *, authority: Authority = AUTHORITY, later_s: float = 0.0) -> Speaker:
    """Somebody with a certificate that was issued ``later_s`` from now."""
    return Speaker(authority.identity(Party(role, name), time.time() + later_s))


def keep(folder: Path, speaker: Speaker) -> Identity:
    """Write somebody's identity into a folder."""
    write_identity(folder, speaker.identity)
    return speaker.identity
