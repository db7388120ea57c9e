"""The keeper of a coordinator's trust: gives certificates, renews its own, and knows whose hold no longer."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path
from typing import Final

from coordinator.trust.authority import Authority
from coordinator.trust.folder import JOIN_PORT, has_authority, make_token
from coordinator.trust.register import Register
from ringtune.errors import StorageError, TrustError
from ringtune.trust.certificates import CertificateFacts, key_fingerprint, requested_key
from ringtune.trust.identity import Identity, has_identity, read_identity, write_identity
from ringtune.trust.parties import COORDINATOR, Party, node_party
from ringtune.trust.speaking import Speaker
from ringtune.trust.tokens import secret_hash

_LOG = logging.getLogger(__name__)
_GUEST_TTL_S: Final = 600.0
_GUEST_DAYS: Final = 1.0
_AGAIN_S: Final = 600.0
GUEST = re.compile(r"eval-[0-9a-f]{8}")
"""Names of nodes that a user's machine may have invited by itself, for one evaluation."""


class Keeper:
    """Keeps the trust of one folder while a coordinator runs; safe for threads.

    Args:
        folder: as ``coordinator.trust.folder.init_trust`` made it.

    Attributes:
        speaker: the coordinator's own identity.

    Raises:
        TrustError: there is no authority, or others can read its key.
    """

    def __init__(self, folder: Path) -> None:
        if not has_authority(folder):
            raise TrustError(
                f"{folder} has no authority; make one with 'ringtune coordinator init', or correct --trust"
            )
        self._folder = folder
        self._authority = Authority.read(folder)
        self._register = Register(folder)
        self.speaker = Speaker(self._own())
        self._not_before_unix_s = 0.0
        self._look()

    def _own(self) -> Identity:
        """Read the coordinator's identity; make a new one where it is gone, has expired, or is of another authority."""
        try:
            found = read_identity(self._folder, time.time())
            if found.authority_pem == self._authority.certificate_pem:
                return found
        except TrustError as error:
            if has_identity(self._folder):
                _LOG.warning("the coordinator makes itself a new certificate: %s", error)
        return self._new_own()

    def _new_own(self) -> Identity:
        identity = self._authority.identity(COORDINATOR, time.time())
        self._register.add_certificate(identity.certificate_pem)
        write_identity(self._folder, identity)
        return identity

    def renew_own(self, now_unix_s: float) -> None:
        """Renew the coordinator's certificate at two thirds of its life; where that fails, again after a while."""
        if now_unix_s < max(self.speaker.identity.facts.renew_at_unix_s, self._not_before_unix_s):
            return
        try:
            self.speaker.renew(self._new_own())
        except StorageError as error:
            self._not_before_unix_s = now_unix_s + _AGAIN_S
            _LOG.warning("the coordinator's certificate can't be renewed yet: %s", error)

    def serves_at(self, join_port: int) -> None:
        """Note for new tokens where those without a certificate are answered."""
        self._register.note(JOIN_PORT, str(join_port))

    @property
    def authority_pem(self) -> bytes:
        """The certificate of the authority, which anybody may see."""
        return self._authority.certificate_pem

    def certify(self, secret: str, request_pem: bytes) -> bytes:
        """Give a certificate for a token.

        Raises:
            TokenError: the token is wrong, used or expired.
            TrustError: the request is none.
        """
        key, now_unix_s = requested_key(request_pem), time.time()

        def issue(party: Party) -> bytes:
            _LOG.info("%s gets a certificate for its token", party)
            return self._authority.issue(party, key, now_unix_s, **({"days": _GUEST_DAYS} if _is_guest(party) else {}))

        pem = self._register.redeem(secret_hash(secret), key_fingerprint(key), now_unix_s, issue)
        self._look()
        return pem

    def renew(self, caller: CertificateFacts, request_pem: bytes) -> bytes:
        """Give a certificate in the name of somebody who has one.

        Raises:
            TrustError: the request is none.
        """
        pem = self._authority.issue(caller.party, requested_key(request_pem), time.time())
        self._register.add_certificate(pem)
        return pem

    def invite(self, node: str) -> str:
        """Make a token for a node that joins for one evaluation.

        Raises:
            TrustError: it has not the name of such a node.
        """
        party = node_party(node)
        if not _is_guest(party):
            raise TrustError(f"{party} is no guest; make its token with 'ringtune coordinator token {node}'")
        return str(make_token(self._folder, party, time.time() + _GUEST_TTL_S))

    def remove(self, party: Party, reason: str) -> int:
        """Let all certificates of a party hold no longer, from this moment on; return how many.

        Raises:
            TrustError: it never had any.
        """
        number = self._register.remove(party, reason)
        self._look()
        return number

    def _look(self) -> None:
        self.speaker.removed = {each.serial: each.reason for each in self._register.removed(time.time())}


def _is_guest(party: Party) -> bool:
    return GUEST.fullmatch(party.name) is not None
