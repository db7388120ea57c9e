"""What tests of trust share: an authority, and processes' identities that take turns in one process."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from coordinator.server.certificate_authority import Authority, TrustKeeper, init_trust, make_token
from ringtune.transport.credentials import Credentials
from ringtune.transport.identity import Identity, write_identity
from ringtune.transport.parties import Party, Role, node_party

AUTHORITY = Authority.make(time.time())
DAY_S = 86400.0


def credentials_of(
    name: str, role: Role = "node", *, authority: Authority = AUTHORITY, later_s: float = 0.0
) -> Credentials:
    """Somebody with a certificate that was issued ``later_s`` from now."""
    return Credentials(authority.identity(Party(role, name), time.time() + later_s))


def keep(folder: Path, credentials: Credentials) -> Identity:
    """Write somebody's identity into a folder."""
    write_identity(folder, credentials.identity)
    return credentials.identity


def trusted(folder: Path) -> TrustKeeper:
    """A keeper of a new trust folder."""
    init_trust(folder / "trust", time.time())
    return TrustKeeper(folder / "trust")


def token_option(folder: Path, name: str) -> list[str]:
    """The option with which a node joins with the token that ``write_tokens`` writes."""
    return ["--token-file", str(folder / f"{name}.token")]


def write_tokens(folder: Path, names: Iterable[str], *, ttl_s: float) -> None:
    """Write a token for each node; the coordinator listens already, as tokens have its port."""
    for name in names:
        token = make_token(folder / "trust", node_party(name), time.time() + ttl_s)
        Path(token_option(folder, name)[1]).write_text(str(token))
