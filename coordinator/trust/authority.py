"""The certificate authority of one coordinator: its key signs the certificates of all who take part."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ringtune.errors import TrustError
from ringtune.files.durable import write_durably
from ringtune.files.owned import make_private_folder
from ringtune.trust.certificates import BACKDATED_S, key_pem, make_key, read_certificate, read_key
from ringtune.trust.identity import Identity, read_private
from ringtune.trust.parties import ANY_MEMBER, Party
from ringtune.trust.places import AUTHORITY

DAYS: Final = 30.0
"""How long a certificate holds."""
_AUTHORITY_DAYS: Final = 3650.0
_DAY_S: Final = 86400.0
_BETWEEN = b"-----END PRIVATE KEY-----\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Authority:
    """The authority with its private key.

    Attributes:
        key: signs.
        certificate_pem: by which others know it.
    """

    key: ec.EllipticCurvePrivateKey
    certificate_pem: bytes

    def __repr__(self) -> str:
        """The authority without its key, for logs."""
        return "Authority()"

    @classmethod
    def make(cls, now_unix_s: float) -> Authority:
        """Make a new authority."""
        key = make_key()
        name = _common_name("ringtune authority")
        certificate = (
            _builder(name, name, key.public_key(), now_unix_s, _AUTHORITY_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(key=key, certificate_pem=certificate.public_bytes(serialization.Encoding.PEM))

    @classmethod
    def read(cls, folder: Path) -> Authority:
        """Read the authority of a folder.

        Raises:
            TrustError: it is missing, damaged, or others may read its key.
        """
        path = folder / AUTHORITY
        key, end, certificate = read_private(path, what="authority").partition(_BETWEEN)
        authority = cls(key=read_key(key + end), certificate_pem=certificate)
        if read_certificate(certificate).public_key() != authority.key.public_key():
            raise TrustError(f"{path} is damaged: key and certificate do not belong together; restore both")
        return authority

    def write(self, folder: Path) -> None:
        """Write it, for this user's eyes only.

        Raises:
            StorageError: it can't be written.
        """
        make_private_folder(folder)
        write_durably(folder / AUTHORITY, key_pem(self.key) + self.certificate_pem, mode=0o600)

    def issue(self, party: Party, key: ec.EllipticCurvePublicKey, now_unix_s: float, *, days: float = DAYS) -> bytes:
        """Issue a certificate, PEM.

        Args:
            party: whom it names.
            key: its bearer's.
            now_unix_s: the clock of this machine.
            days: how long it holds.
        """
        issuer = read_certificate(self.certificate_pem).subject
        names = [party.server_name, *([ANY_MEMBER] if party.serves else [])]
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if party.serves else [])]
        certificate = (
            _builder(_common_name(party.name), issuer, key, now_unix_s, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM)

    def identity(self, party: Party, now_unix_s: float, *, days: float = DAYS) -> Identity:
        """Make a new key and its certificate."""
        key = make_key()
        certificate_pem = self.issue(party, key.public_key(), now_unix_s, days=days)
        return Identity.of(key_pem(key), certificate_pem, self.certificate_pem)


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now_unix_s: float, days: float
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_date(now_unix_s - BACKDATED_S))
        .not_valid_after(_date(now_unix_s + days * _DAY_S))
    )


def _date(unix_s: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(int(unix_s), datetime.UTC)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
