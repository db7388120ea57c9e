"""Certificates, keys and certificate requests, and the identity of a process: key, certificate, authorities.

An identity is one file, so that it is replaced in one step. Its folder has the mode 0700, the file 0600; an identity
that others could read is refused.

Import this module only where it is needed: the library takes tens of milliseconds to load.
"""

from __future__ import annotations

import hashlib
import re
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ringtune.errors import TrustError
from ringtune.storage.durable import make_private_folder, write_durably
from ringtune.transport.parties import ANY_MEMBER, IDENTITY, Party, party_of

BACKDATED_S: Final = 48 * 3600.0
"""A certificate is valid from this time before its issue, as boards without a battery start in the past."""
RENEW_LEFT_S: Final = 90 * 86400.0
"""A certificate is renewed this time before its end, or when a third of its life is left, if that is less."""
OWN_RUNS: Final = "own runs"
"""Unit in the certificate of a user who is no administrator."""
_UNREADABLE: Final = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.ExtensionNotFound,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)
"""Errors of the library for forged input, which have no common base class."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CertificateFacts:
    """Facts of a party's certificate.

    Attributes:
        generation: number of removals of the party before its issue.
        has_own_runs_only: whether it is of a user who is no administrator.
        authority: identifier of the key that has signed it, as ``authority_id``.
    """

    party: Party
    serial: str
    begins_unix_s: float
    ends_unix_s: float
    generation: int = 0
    has_own_runs_only: bool = False
    authority: str = ""
    sha256: str = ""

    @property
    def renew_at_unix_s(self) -> float:
        """Time from which on it is renewed; that of a guest is not."""
        if self.party.is_guest:
            return self.ends_unix_s
        life_s = self.ends_unix_s - self.begins_unix_s - BACKDATED_S
        return self.ends_unix_s - min(RENEW_LEFT_S, life_s / 3)

    def problem_at(self, now_unix_s: float) -> str:
        """Say why it is not valid at a time; empty = it is."""
        if now_unix_s < self.begins_unix_s:
            begins, now = utc(self.begins_unix_s), utc(now_unix_s)
            return f"is not valid before {begins}, and this machine's clock says {now}; set the clock"
        if now_unix_s > self.ends_unix_s:
            ends, now = utc(self.ends_unix_s), utc(now_unix_s)
            return (
                f"has expired on {ends}, and this machine's clock says {now}; set the clock, or join with a new token"
            )
        return ""


def utc(unix_s: float) -> str:
    """Write a time: ``2026-11-23 14:05 UTC``."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(unix_s))


def read_certificate(pem: bytes) -> x509.Certificate:
    """Parse one certificate; raises ``TrustError`` for other content."""
    try:
        return x509.load_pem_x509_certificate(pem)
    except _UNREADABLE as error:
        raise TrustError("a certificate can't be read; join anew with a new token") from error


def facts_of(pem: bytes) -> CertificateFacts:
    """Parse the facts of a party's certificate; raises ``TrustError`` if it names no party."""
    certificate = read_certificate(pem)
    try:
        return _facts_of(certificate)
    except _UNREADABLE as error:  # the library reads the parts of a certificate as they are asked for
        raise TrustError("a certificate names nobody; join anew with a new token") from error


def _facts_of(certificate: x509.Certificate) -> CertificateFacts:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return CertificateFacts(
        party=party_of(name for name in names.get_values_for_type(x509.DNSName) if name != ANY_MEMBER),
        serial=f"{certificate.serial_number:x}",
        begins_unix_s=certificate.not_valid_before_utc.timestamp(),
        ends_unix_s=certificate.not_valid_after_utc.timestamp(),
        generation=_generation_of(certificate),
        has_own_runs_only=any(
            each.value == OWN_RUNS
            for each in certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATIONAL_UNIT_NAME)
        ),
        authority=_signer_of(certificate),
        sha256=certificate.fingerprint(hashes.SHA256()).hex(),
    )


def _signer_of(certificate: x509.Certificate) -> str:
    try:
        extension = certificate.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value
    except x509.ExtensionNotFound:
        return ""
    return (extension.key_identifier or b"").hex()


def _generation_of(certificate: x509.Certificate) -> int:
    attributes = certificate.subject.get_attributes_for_oid(NameOID.GENERATION_QUALIFIER)
    text = str(attributes[0].value) if attributes else "0"
    if len(attributes) > 1 or not re.fullmatch(r"[0-9]{1,9}", text):
        raise TrustError("a certificate has no readable generation; join anew with a new token")
    return int(text)


def is_issued_by(pem: bytes, authority_pem: bytes) -> bool:
    """Whether the authority has signed the certificate."""
    try:
        read_certificate(pem).verify_directly_issued_by(read_certificate(authority_pem))
    except (InvalidSignature, *_UNREADABLE):
        return False
    return True


def authority_id(pem: bytes) -> str:
    """Return the identifier of an authority's key, hex, which the certificates that it signs have too."""
    try:
        return read_certificate(pem).extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value.digest.hex()
    except _UNREADABLE as error:
        raise TrustError("a certificate is of no authority; join anew with a new token") from error


def began_unix_s(pem: bytes) -> float:
    """Return the begin of a certificate's validity."""
    return read_certificate(pem).not_valid_before_utc.timestamp()


def authorities_version(authorities: Iterable[bytes]) -> str:
    """Return a digest of certificates of authorities and their order."""
    return hashlib.sha256(b"".join(authorities)).hexdigest()[:16]


def fingerprint(pem: bytes) -> str:
    """Return the SHA-256 of a certificate, hex."""
    return read_certificate(pem).fingerprint(hashes.SHA256()).hex()


# ---- keys and requests -----------------------------------------------------------------------------


def make_key() -> ec.EllipticCurvePrivateKey:
    """Make a private key."""
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Write a private key as PEM, without a password: the file's permissions protect it."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def read_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    """Parse a private key of an elliptic curve; raises ``TrustError`` for other content."""
    try:
        key = serialization.load_pem_private_key(pem, None)
    except _UNREADABLE as error:
        raise TrustError("a private key can't be read; join anew with a new token") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise TrustError("a private key is not of an elliptic curve; join anew with a new token")
    return key


def has_key(pem: bytes, private_key_pem: bytes) -> bool:
    """Whether a certificate is for this private key; raises ``TrustError`` if one of them can't be parsed."""
    try:
        certified = read_certificate(pem).public_key()
    except _UNREADABLE as error:
        raise TrustError("the key of a certificate can't be read; join anew with a new token") from error
    return certified == read_key(private_key_pem).public_key()


def make_request(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Make a certificate request, PEM; the coordinator sets the name."""
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM)


def requested_key(request_pem: bytes) -> ec.EllipticCurvePublicKey:
    """Return the public key of a certificate request signed with the private one; else raise ``TrustError``."""
    try:
        request = x509.load_pem_x509_csr(request_pem)
        key = request.public_key()
        is_signed = request.is_signature_valid
    except _UNREADABLE as error:
        raise TrustError("a certificate request can't be read; use one version on all machines") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1) or not is_signed:
        raise TrustError("a certificate request is not signed with a P-256 key; use one version on all machines")
    return key


def key_fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    """Return the SHA-256 of a public key, hex."""
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()


def sign(content: bytes, identity: Identity) -> tuple[bytes, bytes]:
    """Return the signature of some bytes with the private key, and the certificate that it is checked with, PEM."""
    return read_key(identity.key_pem).sign(content, _ECDSA), identity.certificate_pem


def signature_problem(
    content: bytes, signature: bytes, certificate_pem: bytes, authorities: Iterable[bytes], who: Party
) -> str:
    """Say why some bytes are not signed by a party with a certificate of an authority; empty if they are.

    The certificate has to be alone, without the text that PEM permits around it, as it is stored.
    """
    try:
        certificate = read_certificate(certificate_pem)
        key = certificate.public_key()
        is_issued = any(is_issued_by(certificate_pem, authority) for authority in authorities)
        is_alone = certificate.public_bytes(serialization.Encoding.PEM) == certificate_pem
        if facts_of(certificate_pem).party != who or not is_issued or not is_alone:
            return f"the certificate is not one of {who}"
        if not isinstance(key, ec.EllipticCurvePublicKey):
            return "the certificate has no key of an elliptic curve"
        key.verify(signature, content, _ECDSA)
    except (InvalidSignature, TrustError, *_UNREADABLE):
        return "the signature is not valid"
    return ""


_ECDSA: Final = ec.ECDSA(hashes.SHA256())
_BLOCK = re.compile(rb"-----BEGIN ([A-Z ]+)-----\n.*?-----END \1-----\n", re.DOTALL)
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_PRIVATE_FILE: Final = 0o600


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Party of a process, with private key, certificate and authorities.

    Attributes:
        authorities: certificates, PEM, of the trusted authorities: the one that signs new certificates, and while the
            authority is rotated the other one.
        authority_ids: of them (``authority_id``), in the same order.
    """

    key_pem: bytes
    certificate_pem: bytes
    authorities: tuple[bytes, ...]
    authority_ids: tuple[str, ...]
    facts: CertificateFacts

    def __repr__(self) -> str:
        """Return the party only, for logs."""
        return f"Identity({self.facts.party})"

    @property
    def party(self) -> Party:
        """Party of the process."""
        return self.facts.party

    @property
    def authorities_pem(self) -> bytes:
        """The certificates of the authorities in one text."""
        return b"".join(self.authorities)

    @property
    def authorities_version(self) -> str:
        """Digest of the trusted authorities."""
        return authorities_version(self.authorities)

    @property
    def is_of_signing_authority(self) -> bool:
        """Whether its certificate is of the authority that signs new ones."""
        return self.facts.authority == self.authority_ids[0]

    @classmethod
    def of(cls, key_pem: bytes, certificate_pem: bytes, *authorities: bytes) -> Identity:
        """Build an identity from its parts; raises ``TrustError``."""
        facts = facts_of(certificate_pem)
        if not has_key(certificate_pem, key_pem):
            raise TrustError(f"the certificate of {facts.party} is for another private key; join with a new token")
        if not any(is_issued_by(certificate_pem, authority) for authority in authorities):
            raise TrustError(f"the certificate of {facts.party} is of another authority; join with a new token")
        return cls(
            key_pem=key_pem,
            certificate_pem=certificate_pem,
            authorities=authorities,
            authority_ids=tuple(map(authority_id, authorities)),
            facts=facts,
        )


def has_identity(folder: Path) -> bool:
    """Whether a folder has an identity."""
    return (folder / IDENTITY).is_file()


def read_identity(folder: Path, now_unix_s: float) -> Identity:
    """Read the identity in a folder; raises ``TrustError``."""
    path = folder / IDENTITY
    content = read_private(path, what="certificate")
    blocks = [(match[1], match[0]) for match in _BLOCK.finditer(content)]
    first, *others = (kind for kind, _ in blocks) if blocks else [b""]
    if first != b"PRIVATE KEY" or len(others) < 2 or set(others) != {b"CERTIFICATE"}:
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
    """Write an identity in one step, readable for this user only; raises ``StorageError`` if it can't be written."""
    make_private_folder(folder)
    content = identity.key_pem + identity.certificate_pem + identity.authorities_pem
    write_durably(folder / IDENTITY, content, mode=_PRIVATE_FILE)


def read_private(path: Path, *, what: str) -> bytes:
    """Read a file that only this user may read; ``what`` names its content in messages; raises ``TrustError``."""
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
