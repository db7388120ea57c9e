"""The identity of a process: its private key, its certificate, and the authority that it believes, in one file.

One file, so that it is replaced in one step. It lies in a folder that nobody else can enter (0700) and can be read by
nobody else (0600); an identity that others could read is refused.
"""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ringtune.errors import TrustError
from ringtune.files.durable import write_durably
from ringtune.files.owned import make_private_folder
from ringtune.trust.certificates import CertificateFacts, facts_of, has_key, is_issued_by
from ringtune.trust.parties import Party
from ringtune.trust.places import IDENTITY

_BLOCK = re.compile(rb"-----BEGIN ([A-Z ]+)-----\n.*?-----END \1-----\n", re.DOTALL)
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_PRIVATE_FILE: Final = 0o600


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Who a process is, with the proof.

    Attributes:
        key_pem: its private key.
        certificate_pem: its certificate.
        authority_pem: the certificate of the authority that signed it, and signs all others.
        facts: what the certificate says.
    """

    key_pem: bytes
    certificate_pem: bytes
    authority_pem: bytes
    facts: CertificateFacts

    def __repr__(self) -> str:
        """The identity without its key, for logs."""
        return f"Identity({self.facts.party})"

    @property
    def party(self) -> Party:
        """Who the process is."""
        return self.facts.party

    @classmethod
    def of(cls, key_pem: bytes, certificate_pem: bytes, authority_pem: bytes) -> Identity:
        """Make an identity of parts that belong together.

        Raises:
            TrustError: the certificate is of another key, or not signed by the authority.
        """
        facts = facts_of(certificate_pem)
        if not has_key(certificate_pem, key_pem):
            raise TrustError(f"the certificate of {facts.party} is for another private key; join with a new token")
        if not is_issued_by(certificate_pem, authority_pem):
            raise TrustError(f"the certificate of {facts.party} is of another authority; join with a new token")
        return cls(key_pem=key_pem, certificate_pem=certificate_pem, authority_pem=authority_pem, facts=facts)


def has_identity(folder: Path) -> bool:
    """Whether a folder has an identity."""
    return (folder / IDENTITY).is_file()


def read_identity(folder: Path, now_unix_s: float) -> Identity:
    """Read the identity of a folder.

    Args:
        folder: where it is.
        now_unix_s: the clock of this machine.

    Raises:
        TrustError: it is missing, damaged, readable for others, or does not hold now.
    """
    path = folder / IDENTITY
    content = read_private(path, what="certificate")
    blocks = [(match[1], match[0]) for match in _BLOCK.finditer(content)]
    if [kind for kind, _ in blocks] != [b"PRIVATE KEY", b"CERTIFICATE", b"CERTIFICATE"]:
        raise TrustError(f"{path} is damaged: it has no key with two certificates; join with a new token")
    try:
        identity = Identity.of(*(block for _, block in blocks))
    except TrustError as error:
        raise TrustError(f"{path}: {error}") from error
    problem = identity.facts.problem_at(now_unix_s)
    if problem:
        raise TrustError(f"the certificate {path} of {identity.party} {problem}")
    return identity


def write_identity(folder: Path, identity: Identity) -> None:
    """Write an identity in one step, for this user's eyes only.

    Raises:
        StorageError: it can't be written.
    """
    make_private_folder(folder)
    content = identity.key_pem + identity.certificate_pem + identity.authority_pem
    write_durably(folder / IDENTITY, content, mode=_PRIVATE_FILE)


def read_private(path: Path, *, what: str) -> bytes:
    """Read a file that only this user may read.

    Args:
        path: of the file.
        what: it should have, for messages.

    Raises:
        TrustError: it is missing, or others may read it too.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode & _OTHERS:
                raise TrustError(
                    f"{path} can be read by other users (mode {mode:04o}); if nobody did, 'chmod 600 {path}', else "
                    "join with a new token"
                )
            return file.read()
    except OSError as error:
        raise TrustError(
            f"can't read the {what} {path}: {error.strerror}; join with a token, or correct the folder"
        ) from error
