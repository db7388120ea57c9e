"""The trust folder of a coordinator: its authority, its own identity, the first user's, and the register.

::

    DIR/authority.pem        key and certificate of the authority
    DIR/identity.pem         the coordinator's own
    DIR/admin/identity.pem   the first user's: for commands on this machine
    DIR/register.sqlite      tokens and certificates
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from coordinator.trust.authority import Authority
from coordinator.trust.register import Register
from ringtune.errors import TrustError, UsageError
from ringtune.files.owned import make_private_folder
from ringtune.trust import places
from ringtune.trust.certificates import fingerprint
from ringtune.trust.identity import write_identity
from ringtune.trust.parties import COORDINATOR, SUBMITTER_ROLE, Party
from ringtune.trust.tokens import Token, make_secret, secret_hash

ADMIN: Final = Party(SUBMITTER_ROLE, places.ADMIN)
JOIN_PORT: Final = "join_port"
"""Note in the register: where the coordinator last answered those without a certificate."""
NO_AUTHORITY: Final = "{folder} has no authority; make one with 'ringtune coordinator init', or correct --trust"


def has_authority(folder: Path) -> bool:
    """Whether a folder has an authority."""
    return (folder / places.AUTHORITY).is_file()


def init_trust(folder: Path, now_unix_s: float) -> Authority:
    """Make an authority, with the identities of the coordinator and of its first user.

    The authority's file comes last: without it the folder does not count, and a second try begins anew.

    Raises:
        UsageError: there is one already.
        StorageError: the folder can't be written.
    """
    if has_authority(folder):
        raise UsageError(
            f"{folder} has an authority already, and whoever joined believes it; take another --trust, or remove the "
            "folder to begin anew"
        )
    make_private_folder(folder)
    authority = Authority.make(now_unix_s)
    register = Register(folder)
    for party, place in ((COORDINATOR, folder), (ADMIN, folder / ADMIN.name)):
        identity = authority.identity(party, now_unix_s)
        register.add_certificate(identity.certificate_pem)
        write_identity(place, identity)
    authority.write(folder)
    return authority


def make_token(folder: Path, party: Party, ends_unix_s: float) -> Token:
    """Make a join token; the register gets the hash of its secret.

    Raises:
        TrustError: the folder has no authority.
        StorageError: the register can't be written.
    """
    if not has_authority(folder):
        raise TrustError(NO_AUTHORITY.format(folder=folder))
    register = Register(folder)
    token = Token(
        party,
        int(register.noted(JOIN_PORT) or 0),
        fingerprint(Authority.read(folder).certificate_pem),
        make_secret(),
    )
    register.add_token(secret_hash(token.secret), party, ends_unix_s)
    return token
