"""The certificate authority of a coordinator: certificates, join tokens, revocations, and their files.

::

    DIR/authority.pem        key and certificate of the authority
    DIR/authority-next.pem   those of the one that replaces it, while it is rotated (``coordinator.server.rotation``)
    DIR/identity.pem         key and certificate of the coordinator
    DIR/admin/identity.pem   those of the first user: for commands on this machine
    DIR/register.sqlite      tokens and certificates, valid and revoked

A token is consumed in the transaction that stores its certificate, so no crash makes two certificates of one token. A
request repeated with the same token and key, after a lost answer, gets the same certificate.

Each removal of a party begins its next *generation*; a certificate has the number of its generation in its subject, a
renewed one that of the certificate before. Certificates of earlier generations are refused, however many there are: one
entry in the list that nodes get. So a renewal that races with the removal of its party gets nothing of use.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import math
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coordinator.server.rotation import MAX_GONE, Phase, Rotation, RotationState
from ringtune.errors import BusyError, StorageError, TokenError, TrustError, UsageError
from ringtune.storage.durable import drop_file, make_private_folder, storage_errors, write_durably
from ringtune.texts import RepeatCounter, listed, printable, times
from ringtune.transport import parties
from ringtune.transport.credentials import Credentials, Removal, Removals
from ringtune.transport.identity import (
    BACKDATED_S,
    OWN_RUNS,
    RENEW_LEFT_S,
    CertificateFacts,
    Identity,
    authority_id,
    facts_of,
    fingerprint,
    has_identity,
    key_fingerprint,
    key_pem,
    make_key,
    read_certificate,
    read_identity,
    read_key,
    read_private,
    requested_key,
    utc,
    write_identity,
)
from ringtune.transport.open_calls import TokenBucket
from ringtune.transport.parties import (
    ADMINISTRATOR,
    ANY_MEMBER,
    AUTHORITY,
    COORDINATOR,
    INVALID,
    NODE_ROLE,
    SUBMITTER_ROLE,
    Party,
    Token,
    make_secret,
    node_party,
    secret_hash,
)

if TYPE_CHECKING:
    from coordinator.server.database import Database

_LOG = logging.getLogger(__name__)
FILE: Final = "register.sqlite"
_VERSION: Final = 1
_BUSY_S: Final = 10.0
_DAY_S: Final = 86400.0
_TABLES: Final = """
CREATE TABLE tokens (
    secret_sha256 TEXT PRIMARY KEY, role TEXT NOT NULL, name TEXT NOT NULL, ends_unix_s REAL NOT NULL,
    key_sha256 TEXT, certificate BLOB, invited_by TEXT
);
CREATE TABLE certificates (
    serial TEXT PRIMARY KEY, role TEXT NOT NULL, name TEXT NOT NULL, ends_unix_s REAL NOT NULL, removed TEXT,
    sha256 TEXT
);
CREATE TABLE notes (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE generations (
    role TEXT NOT NULL, name TEXT NOT NULL, generation INTEGER NOT NULL, reason TEXT NOT NULL,
    ends_unix_s REAL NOT NULL, PRIMARY KEY (role, name)
);
"""
"""``generations`` has one row for each party that was ever removed."""
_REMOVED_WITHOUT_GENERATION: Final = """
SELECT sha256 FROM certificates LEFT JOIN generations USING (role, name) WHERE removed NOT NULL AND generation IS NULL
"""
_MAX_REASON: Final = 200


class Register:
    """The register of one folder; safe for threads and for several processes.

    The file is made if it is missing. With a database that coordinators share the register is there, and the file is
    only how it begins.

    Raises ``StorageError``: it can't be used, is damaged or of another version; or what was removed would be accepted
    again: it is missing although there is an authority, or is of a build whose removals had no generations.
    """

    def __init__(self, folder: Path, shared: Database | None = None) -> None:
        self._path, self._shared = folder / FILE, shared
        self._lock = threading.Lock()  # SQLite's own wait is unfair: many renewals would starve a removal
        self._refused = RepeatCounter()
        with contextlib.suppress(FileExistsError), _storage_errors(self._path):
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        with self._transaction() as database:
            (version,) = database.execute("PRAGMA user_version").fetchone()
            if version == 0:
                if has_authority(folder):  # ``init_trust`` writes that last
                    raise StorageError(
                        f"{self._path} is missing or empty, and what it removed would be accepted again; restore a "
                        "copy, or begin anew with 'ringtune coordinator init' in an empty folder"
                    )
                for statement in filter(str.strip, _TABLES.split(";")):
                    database.execute(statement)
                database.execute(f"PRAGMA user_version = {_VERSION}")
            elif version != _VERSION:
                raise StorageError(
                    f"{self._path} is of version {version}, here is {_VERSION}; use the ringtune that wrote it"
                )
            elif database.execute(_REMOVED_WITHOUT_GENERATION).fetchone():
                raise StorageError(
                    f"{self._path} is of an earlier ringtune, and what it removed would be accepted again; restore a "
                    "later copy, or begin anew with 'ringtune coordinator init' in an empty folder"
                )
            _check_content(database)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection in a transaction: committed at the end, rolled back after an exception."""
        with self._lock, _storage_errors(self._path):
            if self._shared is not None:
                with self._shared.small_database(FILE, self._content) as database:
                    yield database
                return
            database = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None)
            try:
                database.execute("PRAGMA synchronous = FULL")
                database.execute("BEGIN IMMEDIATE")
                with database:
                    yield database
            finally:
                database.close()

    def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Return the rows of a query in a transaction of its own."""
        with self._transaction() as database:
            return database.execute(query, values).fetchall()

    def _content(self) -> bytes:
        if not self._path.stat().st_size:  # just made
            return b""
        with contextlib.closing(sqlite3.connect(self._path, timeout=_BUSY_S)) as database:
            return database.serialize()

    # ---- tokens -----------------------------------------------------------------------------------

    def add_token(
        self,
        secret_sha256: str,
        party: Party,
        ends_unix_s: float,
        *,
        is_administrator: bool = False,
        invited_by: str = "",
    ) -> None:
        """Store a new token: the hash of its secret, its party, the end of its validity, and the user of a guest.

        Raises ``BusyError``: a guest of this name has joined, or another user has invited one.
        """
        role = ADMINISTRATOR if is_administrator else party.role
        taken = "SELECT 1 FROM tokens WHERE role = ? AND name = ? AND (key_sha256 IS NOT NULL OR invited_by != ?)"
        with self._transaction() as database:
            if invited_by and database.execute(taken, (*_key(party), invited_by)).fetchone():
                raise BusyError(f"a guest {party.name} was invited already; take another name")
            database.execute(
                "INSERT INTO tokens (secret_sha256, role, name, ends_unix_s, invited_by) VALUES (?, ?, ?, ?, ?)",
                (secret_sha256, role, party.name, ends_unix_s, invited_by),
            )

    def redeem(
        self, secret_sha256: str, key_sha256: str, now_unix_s: float, issue: Callable[[Party, int, bool], bytes]
    ) -> bytes:
        """Return the certificate for a token; earlier certificates of its party are revoked; raises ``TokenError``.

        ``key_sha256`` is the hash of the public key for the certificate; ``issue`` makes the certificate, PEM, of a
        party and generation, and for an administrator.
        """
        with self._transaction() as database:
            row = database.execute(
                "SELECT role, name, ends_unix_s, key_sha256, certificate FROM tokens WHERE secret_sha256 = ?",
                (secret_sha256,),
            ).fetchone()
            if row is None:
                return self._refuse("it is of no known token")
            role, name, ends_unix_s, used_by, certificate = row
            party = Party(SUBMITTER_ROLE if role == ADMINISTRATOR else role, name)
            if now_unix_s > ends_unix_s:
                return self._refuse(f"the token of {party} has expired")
            if used_by is not None:
                return bytes(certificate) if used_by == key_sha256 else self._refuse(f"the token of {party} is used")
            _remove(database, party, f"{party} has joined again with a later token")
            _forget_expired(database, now_unix_s)
            pem = issue(party, _removal_of(database, party).generation, role == ADMINISTRATOR)
            _write_down(database, pem)
            database.execute(
                "UPDATE tokens SET key_sha256 = ?, certificate = ? WHERE secret_sha256 = ?",
                (key_sha256, pem, secret_sha256),
            )
        return pem

    def _refuse(self, why: str) -> bytes:
        count = self._refused.told(why)
        if count:
            _LOG.warning("a join token is refused: %s%s", why, times(count))
        raise TokenError(INVALID)

    # ---- certificates -----------------------------------------------------------------------------

    def add_certificate(self, pem: bytes) -> None:
        """Store a certificate issued without a token, such as those of ``init_trust``."""
        with self._transaction() as database:
            _write_down(database, pem)

    def renew(self, caller: CertificateFacts, now_unix_s: float, issue: Callable[[], bytes]) -> bytes:
        """Return a new certificate, made by ``issue``, for one that is not removed; raises ``TrustError``.

        It is of the caller's generation, so whichever comes first, this or a removal, the removal holds. For one that
        is not in the register, as after its restoration or made by who has a copy of the key, there is none of another
        authority, also later.
        """
        with self._transaction() as database:
            if reason := Removals([_removal_of(database, caller.party)]).refusal(caller):
                raise TrustError(f"the certificate of {caller.party} is refused: {reason}; join with a new token")
            row = database.execute("SELECT sha256 FROM certificates WHERE serial = ?", (caller.serial,)).fetchone()
            is_known = row == (caller.sha256,)
            _forget_expired(database, now_unix_s)
            pem = issue()
            if not is_known and facts_of(pem).authority != caller.authority:
                raise TrustError(
                    f"the certificate of {caller.party} is not in the register, and the new authority replaces only "
                    "those that are; join with a new token"
                )
            _write_down(database, pem, is_known=is_known)
        return pem

    def remove(self, party: Party, reason: str) -> int:
        """Revoke all certificates and open tokens of a party, and of a user's guests; return the number of its own.

        Raises ``TrustError``: it never had any.
        """
        with self._transaction() as database:
            roles = (party.role, ADMINISTRATOR if party.role == SUBMITTER_ROLE else "")
            database.execute(
                "DELETE FROM tokens WHERE role IN (?, ?) AND name = ? AND key_sha256 IS NULL", (*roles, party.name)
            )
            if party.role == SUBMITTER_ROLE:
                guests = database.execute(
                    "SELECT role, name FROM tokens WHERE invited_by = ?", (party.name,)
                ).fetchall()
                database.execute("DELETE FROM tokens WHERE invited_by = ? AND key_sha256 IS NULL", (party.name,))
                for role, name in guests:
                    _remove(database, Party(role, name), f"{reason}, who invited it")
            number = _remove(database, party, reason)
            known = database.execute("SELECT 1 FROM certificates WHERE role = ? AND name = ?", _key(party)).fetchone()
            if known is None:
                raise TrustError(f"{party} has no certificate of this coordinator; 'ringtune nodes' lists the nodes")
        return number

    def inviter(self, guest: Party) -> str:
        """Return the user whose invitation a guest has used; empty if there is none."""
        rows = self._rows(
            "SELECT invited_by FROM tokens WHERE role = ? AND name = ? AND key_sha256 IS NOT NULL "
            "ORDER BY ends_unix_s DESC",
            *_key(guest),
        )
        return rows[0][0] or "" if rows else ""

    def removed(self, now_unix_s: float) -> Removals:
        """Return the removals of parties whose certificates have not all expired."""
        rows = self._rows(
            "SELECT reason, role, name, generation FROM generations WHERE ends_unix_s > ? ORDER BY role, name",
            now_unix_s,
        )
        return Removals(Removal(reason, Party(role, name), number) for reason, role, name, number in rows)

    def parties(self, now_unix_s: float) -> tuple[list[Party], list[Party]]:
        """Return the nodes and users with a certificate that holds, and those with an open token.

        Guests, who have theirs for a day, are left out.
        """
        with self._transaction() as database:
            certified = database.execute(
                "SELECT DISTINCT role, name FROM certificates WHERE removed IS NULL AND ends_unix_s > ?", (now_unix_s,)
            ).fetchall()
            invited = database.execute(
                "SELECT DISTINCT role, name FROM tokens WHERE key_sha256 IS NULL AND ends_unix_s > ?", (now_unix_s,)
            ).fetchall()
        columns = (
            [Party(SUBMITTER_ROLE if role == ADMINISTRATOR else role, name) for role, name in rows]
            for rows in (certified, invited)
        )
        held, open_ = (
            [party for party in parties if party != COORDINATOR and not party.is_guest] for parties in columns
        )
        return held, open_

    # ---- notes ------------------------------------------------------------------------------------

    def change_notes(self, before: tuple[str, str], after: Mapping[str, str]) -> bool:
        """Store values in one transaction if one of before, (key, value), is still there; return whether it was."""
        with self._transaction() as database:
            row = database.execute("SELECT value FROM notes WHERE key = ?", before[:1]).fetchone()
            is_same = (str(row[0]) if row else "") == before[1]
            if is_same:
                database.executemany("INSERT OR REPLACE INTO notes (key, value) VALUES (?, ?)", after.items())
        return is_same

    def note(self, key: str, value: str) -> None:
        """Store a value for other processes that use the register."""
        with self._transaction() as database:
            database.execute("INSERT OR REPLACE INTO notes (key, value) VALUES (?, ?)", (key, value))

    def noted(self, key: str) -> str:
        """Return a stored value; empty if there is none."""
        rows = self._rows("SELECT value FROM notes WHERE key = ?", key)
        return str(rows[0][0]) if rows else ""


def _check_content(database: sqlite3.Connection) -> None:
    """Refuse damaged pages, and values of another type than their column's, with ``sqlite3.DatabaseError``."""
    (found,) = database.execute("PRAGMA quick_check(1)").fetchone()
    columns = database.execute(
        "SELECT tables.name, columns.name, lower(columns.type) FROM sqlite_master AS tables, "
        "pragma_table_info(tables.name) AS columns WHERE tables.type = 'table'"
    ).fetchall()
    for table, column, kind in columns if found == "ok" else ():
        wrong = f"SELECT 1 FROM {table} WHERE typeof({column}) NOT IN (?, 'null')"  # noqa: S608 - names of ``_TABLES``
        if database.execute(wrong, (kind,)).fetchone():
            found = f"{column} of {table} has a value of another type"
    if found != "ok":
        raise sqlite3.DatabaseError(found)


def _key(party: Party) -> tuple[str, str]:
    return party.role, party.name


def _write_down(database: sqlite3.Connection, pem: bytes, *, is_known: bool = True) -> None:
    """Store a certificate; ``is_known``: whether that which it replaces, if any, was stored."""
    facts = facts_of(pem)
    database.execute(
        "INSERT INTO certificates (serial, role, name, ends_unix_s, sha256) VALUES (?, ?, ?, ?, ?)",
        (facts.serial, *_key(facts.party), facts.ends_unix_s, facts.sha256 if is_known else ""),
    )


def _remove(database: sqlite3.Connection, party: Party, reason: str) -> int:
    """Refuse all certificates of a party from now on; a later one is of the next generation."""
    reason = printable(reason, most=_MAX_REASON)
    number = database.execute(
        "UPDATE certificates SET removed = ? WHERE role = ? AND name = ? AND removed IS NULL", (reason, *_key(party))
    ).rowcount
    if number:
        database.execute(
            "INSERT OR REPLACE INTO generations (role, name, generation, reason, ends_unix_s) "
            "SELECT role, name, ?, ?, max(ends_unix_s) FROM certificates WHERE role = ? AND name = ?",
            (_removal_of(database, party).generation + 1, reason, *_key(party)),
        )
    return number


def _removal_of(database: sqlite3.Connection, party: Party) -> Removal:
    """Return the last removal of a party; of generation 0 if there was none."""
    row = database.execute(
        "SELECT reason, generation FROM generations WHERE role = ? AND name = ?", _key(party)
    ).fetchone()
    return Removal(row[0], party, row[1]) if row else Removal("", party, 0)


def _forget_expired(database: sqlite3.Connection, now_unix_s: float) -> None:
    """Delete expired certificates, and tokens that expired more than a day ago."""
    database.execute("DELETE FROM certificates WHERE ends_unix_s < ?", (now_unix_s,))
    database.execute("DELETE FROM tokens WHERE ends_unix_s < ?", (now_unix_s - _DAY_S,))


@contextlib.contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    """Turn errors of the disk or database into a ``StorageError`` that names the file."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        raise StorageError(f"can't use {path}: {error.strerror}; check the folder") from error
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the second one of a damaged name in SQLite's message
        is_busy = getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_BUSY
        remedy = (
            "another process uses it, try again"
            if is_busy
            else "restore it, or begin anew with 'ringtune coordinator init'"
        )
        raise StorageError(f"can't use {path}: {error}; {remedy}") from error


DAYS: Final = 365.0
"""Validity of a certificate of a node or user; the coordinator's is valid as long as its authority."""
_AUTHORITY_DAYS: Final = 3650.0
_BETWEEN = b"-----END PRIVATE KEY-----\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Authority:
    """The authority with its private key and its certificate."""

    key: ec.EllipticCurvePrivateKey
    certificate_pem: bytes

    def __repr__(self) -> str:
        """Return a text without the key, for logs."""
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
    def read(cls, folder: Path, name: str = AUTHORITY) -> Authority:
        """Read the authority of a folder; ``name`` is that of the file; raises ``TrustError``."""
        path = folder / name
        key, end, certificate = read_private(path, what="authority").partition(_BETWEEN)
        try:
            authority = cls(key=read_key(key + end), certificate_pem=certificate)
            is_pair = read_certificate(certificate).public_key() == authority.key.public_key()
        except TrustError as error:
            raise TrustError(f"{path} is damaged: it is no key with its certificate; restore a copy") from error
        if not is_pair:
            raise TrustError(f"{path} is damaged: key and certificate do not belong together; restore both")
        return authority

    def write(self, folder: Path, name: str = AUTHORITY) -> None:
        """Write key and certificate to a file of a folder, readable by this user only; raises ``StorageError``."""
        make_private_folder(folder)
        write_durably(folder / name, key_pem(self.key) + self.certificate_pem, mode=0o600)

    def issue(
        self,
        party: Party,
        key: ec.EllipticCurvePublicKey,
        now_unix_s: float,
        *,
        days: float = DAYS,
        generation: int = 0,
        has_own_runs_only: bool = False,
    ) -> bytes:
        """Issue a certificate, PEM; raises ``TrustError``.

        Valid for ``days``, but at most as long as the authority. For the other arguments see ``CertificateFacts``.
        """
        issuer = read_certificate(self.certificate_pem)
        ends_unix_s = issuer.not_valid_after_utc.timestamp()
        if now_unix_s >= ends_unix_s:
            raise TrustError(
                f"the authority has expired on {utc(ends_unix_s)}, and this machine's clock says {utc(now_unix_s)}; "
                "set the clock, or make another one with 'ringtune coordinator init --trust DIR'"
            )
        days = min(days, (ends_unix_s - now_unix_s) / _DAY_S)
        names = [party.server_name, *([ANY_MEMBER] if party.serves else [])]
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if party.serves else [])]
        certificate = (
            _builder(_subject(party, generation, has_own_runs_only), issuer.subject, key, now_unix_s, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM)

    def identity(self, party: Party, now_unix_s: float, **how: Any) -> Identity:
        """Make a new key and its certificate; ``how`` as for ``issue``."""
        key = make_key()
        certificate_pem = self.issue(party, key.public_key(), now_unix_s, **how)
        return Identity.of(key_pem(key), certificate_pem, self.certificate_pem)

    def own_identity(self, now_unix_s: float) -> Identity:
        """Make the coordinator's identity, valid as long as the authority: both keys are on the same disk."""
        return self.identity(COORDINATOR, now_unix_s, days=_AUTHORITY_DAYS)


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _subject(party: Party, generation: int, has_own_runs_only: bool) -> x509.Name:
    unit = [x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, OWN_RUNS)] if has_own_runs_only else []
    later = [x509.NameAttribute(NameOID.GENERATION_QUALIFIER, str(generation))] if generation else []
    return x509.Name([*_common_name(party.name), *unit, *later])


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


ADMIN: Final = Party(SUBMITTER_ROLE, parties.ADMIN)
JOIN_PORT: Final = "join_port"
"""Key of a note in the register: last port at which callers without a certificate were served."""
_AUTHORITY: Final = "authority_sha256"
"""Key of a note in the register: authority of the coordinator that acts, and the last that a rotation has made."""
_ROTATION: Final = "rotation"
"""Key of a note in the register: the rotation that is under way; empty = none."""
_REPLACED: Final = "replaced_sha256"
"""Key of a note in the register: authorities that rotations have replaced, with blanks between them."""
NEXT: Final = "authority-next.pem"
_MAX_VERSION: Final = 64
"""Longest kept text of the authorities that a node says it trusts; those of a rotation are shorter."""
_LOOK_S: Final = 1.0
"""Least time between two looks at who needs the old authority, as the register may be on another machine."""
NO_AUTHORITY: Final = "{folder} has no authority; make one with 'ringtune coordinator init', or correct --trust"


def has_authority(folder: Path) -> bool:
    """Whether a folder has an authority."""
    return (folder / parties.AUTHORITY).is_file()


def init_trust(folder: Path, now_unix_s: float) -> Authority:
    """Make an authority, with the identities of the coordinator and of its first user.

    The authority's file is written last: without it the folder does not count, so an interrupted call can be repeated.

    Raises:
        UsageError: there is one already.
        StorageError: the folder can't be written.
    """
    if has_authority(folder):
        raise UsageError(
            f"{folder} has an authority already, which nodes and users trust; give another --trust, or remove the "
            "folder to begin anew"
        )
    make_private_folder(folder)
    authority = Authority.make(now_unix_s)
    register = Register(folder)
    admin = authority.identity(ADMIN, now_unix_s)
    for identity, place in ((authority.own_identity(now_unix_s), folder), (admin, folder / ADMIN.name)):
        register.add_certificate(identity.certificate_pem)
        write_identity(place, identity)
    register.note(_AUTHORITY, fingerprint(authority.certificate_pem))
    authority.write(folder)
    return authority


def make_token(
    folder: Path,
    party: Party,
    ends_unix_s: float,
    *,
    is_administrator: bool = False,
    invited_by: str = "",
    shared: Database | None = None,
) -> Token:
    """Make a join token; the register stores only the hash of its secret; raises ``TrustError`` or ``StorageError``.

    A user without ``is_administrator`` has a part in the own runs only; a guest is removed with the user who invited
    it. ``shared`` has the register where coordinators share a database.
    """
    if not has_authority(folder):
        raise TrustError(NO_AUTHORITY.format(folder=folder))
    register = Register(folder, shared)
    authority = _acting_authority(folder, register)
    token = Token(party, int(register.noted(JOIN_PORT) or 0), fingerprint(authority.certificate_pem), make_secret())
    register.add_token(
        secret_hash(token.secret), party, ends_unix_s, is_administrator=is_administrator, invited_by=invited_by
    )
    return token


def _acting_authority(folder: Path, register: Register) -> Authority:
    """Read the authority of a folder; that of the rotation that is over, if its file was not put in place yet."""
    authority, acting = Authority.read(folder), register.noted(_AUTHORITY)
    if acting in ("", fingerprint(authority.certificate_pem)) or not (folder / NEXT).is_file():
        return authority
    after = Authority.read(folder, NEXT)
    return after if fingerprint(after.certificate_pem) == acting else authority


_GUEST_TTL_S: Final = 600.0
_GUEST_DAYS: Final = 1.0
_RENEWALS: Final = 6
"""Most renewals of a party in ``_RENEWALS_S``. A node tries every ten minutes, and does so only while it fails."""
_RENEWALS_S: Final = 3600.0
_INVITATIONS: Final = 60
"""Most invitations of a user within a minute: each is a row of the register for a day."""


_MAX_NAMED: Final = 20


class TrustKeeper:
    """The trust of one folder while a coordinator runs; safe for threads.

    Args:
        folder: made by ``init_trust``.
        shared: has the register where coordinators share a database, which have copies of one folder.

    Attributes:
        credentials: the coordinator's own identity, and the revoked certificates.
        last_state: of the rotation, at the last look of ``advance``; None = none is under way.

    Raises:
        TrustError: there is no authority, or other users of this machine can read its key.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time, shared: Database | None = None) -> None:
        if not has_authority(folder):
            raise TrustError(NO_AUTHORITY.format(folder=folder))
        self._folder, self._clock, self._shared = folder, clock, shared
        self._lock = threading.Lock()
        self._renewals = TokenBucket(_RENEWALS, _RENEWALS / _RENEWALS_S, now_s=clock)
        self._moves = TokenBucket(_RENEWALS, _RENEWALS / _RENEWALS_S, now_s=clock)
        self._invitations = TokenBucket(_INVITATIONS, _INVITATIONS / 60.0, now_s=clock)
        self._register = Register(folder, shared)
        self._rotating = threading.RLock()  # held while the rotation changes
        self._versions: dict[str, str] = {}
        self._looked_unix_s = -math.inf
        self.last_state: RotationState | None = None
        self._authority, self._next, self._rotation = self._read_authorities()
        self.credentials = Credentials(self._own())
        self._look()

    def _read_authorities(self) -> tuple[Authority, Authority | None, Rotation | None]:
        """Return the authority whose certificate the coordinator shows, the next one, and the rotation under way."""
        authority = _acting_authority(self._folder, self._register)
        if authority.certificate_pem != Authority.read(self._folder).certificate_pem:
            self._put_in_place(authority)
        noted = self._register.noted(_ROTATION)
        rotation = Rotation.parse(noted) if noted else None
        return authority, self._next_of(rotation), rotation

    def _put_in_place(self, authority: Authority) -> None:
        authority.write(self._folder)
        with storage_errors(self._folder / NEXT):
            drop_file(self._folder / NEXT)

    def _next_of(self, rotation: Rotation | None) -> Authority | None:
        if rotation is None or not (self._folder / NEXT).is_file():
            return None
        following = Authority.read(self._folder, NEXT)
        return following if following.certificate_pem == rotation.new else None

    def _own(self) -> Identity:
        """Read the coordinator's identity; make a new one if it is missing, ends soon, or is of another authority."""
        now_unix_s, identity = self._clock(), None
        try:
            identity = read_identity(self._folder, now_unix_s)
        except TrustError as error:
            if has_identity(self._folder):
                _LOG.warning("the coordinator makes itself a new certificate: %s", error)
        is_right = (
            identity is not None
            and identity.facts.ends_unix_s - now_unix_s > RENEW_LEFT_S
            and identity.facts.authority == authority_id(self._authority.certificate_pem)
        )
        if identity is not None and is_right and identity.authorities == self._trusted:
            return identity
        if identity is None or not is_right:
            identity = self._authority.own_identity(now_unix_s)
            self._register.add_certificate(identity.certificate_pem)
        identity = Identity.of(identity.key_pem, identity.certificate_pem, *self._trusted)
        write_identity(self._folder, identity)
        return identity

    def serves_at(self, join_port: int) -> None:
        """Store the port for callers without a certificate; new tokens contain it."""
        self._register.note(JOIN_PORT, str(join_port))

    @property
    def authority_pem(self) -> bytes:
        """The public certificate of the authority of the coordinator's own certificate."""
        return self._authority.certificate_pem

    @property
    def authorities(self) -> tuple[bytes, ...]:
        """The certificates of the authorities that members are to trust, the one that signs first.

        They are those that this process trusts, and so change with the certificate that it shows: a member that was
        told of the new authority alone would refuse a coordinator that still shows a certificate of the old one.
        """
        return self.credentials.identity.authorities

    @property
    def _trusted(self) -> tuple[bytes, ...]:
        rotation = self._rotation
        if rotation is None:
            return (self._authority.certificate_pem,)
        return rotation.authorities if self._next is not None else (rotation.old, rotation.new)

    @property
    def _signing(self) -> Authority:
        """The authority for new certificates."""
        is_new = self._rotation is not None and self._rotation.phase is Phase.ISSUING
        return self._next if is_new and self._next is not None else self._authority

    def certify(self, secret: str, request_pem: bytes) -> bytes:
        """Return a certificate for a token.

        Raises:
            TokenError: the token is wrong, used or expired.
            TrustError: ``request_pem`` is no valid certificate request.
        """
        key, now_unix_s = requested_key(request_pem), self._clock()

        def issue(party: Party, generation: int, is_administrator: bool) -> bytes:
            _LOG.info("%s gets a certificate for its token", party)
            return self._signing.issue(
                party,
                key,
                now_unix_s,
                days=_GUEST_DAYS if party.is_guest else DAYS,
                generation=generation,
                has_own_runs_only=party.role == SUBMITTER_ROLE and not is_administrator,
            )

        pem = self._register.redeem(secret_hash(secret), key_fingerprint(key), now_unix_s, issue)
        self._look()
        return pem

    def renew(self, caller: CertificateFacts, request_pem: bytes) -> bytes:
        """Return a certificate with a new key for a caller who has a valid one; a guest's ends when its own does.

        Raises ``TrustError`` or ``BusyError``.
        """
        key, now_unix_s = requested_key(request_pem), self._clock()
        left_days = (caller.ends_unix_s - now_unix_s) / _DAY_S

        def issue() -> bytes:
            days = left_days if caller.party.is_guest else DAYS
            return self._signing.issue(
                caller.party,
                key,
                now_unix_s,
                days=days,
                generation=caller.generation,
                has_own_runs_only=caller.has_own_runs_only,
            )

        if not self._renewals.take(caller.party):
            raise BusyError(f"{caller.party} has renewed its certificate {_RENEWALS} times within an hour; try later")
        return self._register.renew(caller, now_unix_s, issue)

    def invite(self, node: str, *, user: str) -> str:
        """Make a token for a node of a user that joins for one evaluation; raises ``TrustError`` or ``BusyError``."""
        party = node_party(node)
        if not party.is_guest:
            raise TrustError(f"{party} is no guest; make its token with 'ringtune coordinator token {node}'")
        if not self._invitations.take(user):
            raise BusyError(f"{user} has invited {_INVITATIONS} nodes within a minute; try in a minute")
        ends_unix_s = self._clock() + _GUEST_TTL_S
        return str(make_token(self._folder, party, ends_unix_s, invited_by=user, shared=self._shared))

    def require_inviter(self, node: str, user: str) -> None:
        """Refuse a guest of another user, with ``TrustError``: that one's rows are for the own evaluation alone."""
        party = node_party(node)
        if party.is_guest and self._register.inviter(party) != user:
            raise TrustError(f"{party} is a guest of another user, who alone may evaluate its rows")

    def remove(self, party: Party, reason: str) -> int:
        """Revoke all certificates of a party at once, also of a user's guests; return the number of its own.

        Raises ``TrustError``: it never had any.
        """
        number = self._register.remove(party, reason)
        self._look()
        return number

    # ---- rotation ---------------------------------------------------------------------------------

    def rotate(self, within_s: float) -> None:
        """Begin to replace the authority by a new one; the old one is trusted for ``within_s`` seconds at most.

        Raises:
            UsageError: a rotation is under way.
            InterruptedRunError: this coordinator does not hold the lease of its database.
            StorageError: the folder can't be written.
        """
        with self._rotating:
            if self._rotation is not None:
                raise UsageError(
                    f"the authority is rotated already, since {utc(self._rotation.began_unix_s)}; 'ringtune "
                    "coordinator rotate --status' shows for whom it waits"
                )
            now_unix_s = self._clock()
            after = Authority.make(now_unix_s)
            rotation = Rotation(
                old=self._authority.certificate_pem,
                new=after.certificate_pem,
                began_unix_s=now_unix_s,
                ends_unix_s=now_unix_s + within_s,
            )
            self._require_lease()
            after.write(self._folder, NEXT)  # before the rotation counts
            self._change(rotation)
            self._looked_unix_s = -math.inf

    def _require_lease(self) -> None:
        if self._shared is not None:
            self._shared.require_lease()

    def _change(self, after: Rotation | None) -> None:
        """Store the state of the rotation, and speak accordingly; None = it is over."""
        self._require_lease()
        before = self._rotation
        notes = {_ROTATION: after.to_text() if after else ""}
        if after is None and before is not None:
            replaced = f"{self._register.noted(_REPLACED)} {fingerprint(before.old)}".strip()
            notes |= {_AUTHORITY: fingerprint(before.new), _REPLACED: replaced}
        if not self._register.change_notes((_ROTATION, before.to_text() if before else ""), notes):
            _LOG.warning("another coordinator has changed the rotation of the authority; its state is taken")
        self._authority, self._next, self._rotation = self._read_authorities()
        identity = self._own()
        if identity != self.credentials.identity:
            self.credentials.identity = identity

    def heard(self, caller: CertificateFacts, authorities_version: str) -> None:
        """Note the authority of a caller's certificate, and of a node which authorities it trusts, empty = unknown."""
        if self._rotation is None:
            return
        with self._rotating:
            if (rotation := self._rotation) is None:
                return
            if caller.party.role == NODE_ROLE:
                self._versions[caller.party.name] = authorities_version[:_MAX_VERSION]
            is_of_new = caller.authority == authority_id(rotation.new)
            after = rotation.heard(str(caller.party), is_of_new=is_of_new)
            if after != rotation and self._moves.take(caller.party):  # who calls with both would keep the disk busy
                self._change(after)

    def advance(self, members: Collection[str], *, is_settled: bool) -> str:
        """Go on with the rotation where that is due; return a line about it, empty = nothing has changed.

        Args:
            members: living and recently lost nodes.
            is_settled: as for ``Rotation.advanced``.
        """
        if self._rotation is None:
            return ""
        with self._rotating:
            rotation, now_unix_s = self._rotation, self._clock()
            if rotation is None or abs(now_unix_s - self._looked_unix_s) < _LOOK_S:
                return ""
            self._looked_unix_s = now_unix_s
            if self._next is None and self._next_of(rotation) is not None:  # the key was copied here meanwhile
                self._change(rotation)
            if len(self._versions) > len(members) + MAX_GONE:
                self._versions = {node: self._versions[node] for node in {*members} & self._versions.keys()}
            if (fewer := rotation.without_gone(members)) is not rotation:
                self._change(fewer)
                rotation = fewer
            state = self.last_state = self.rotation_state(members)
            if state is None or state.problem:
                return ""
            after = rotation.advanced(
                now_unix_s, unconfirmed=state.unconfirmed, waiting=state.waiting, is_settled=is_settled
            )
            if after is rotation:
                return ""
            self._change(after)
            self.last_state = state._replace(rotation=after) if after else None
        late = state.unconfirmed if after else state.waiting
        if after is not None:
            named = f"; not confirmed by {listed(late, _MAX_NAMED)}" if late else ""
            return f"certificates are of the new authority from now on{named}"
        named = f"; shut out until they join with a new token: {listed(late, _MAX_NAMED)}" if late else ""
        return f"the old authority is trusted no longer{named}"

    def rotation_state(self, members: Collection[str]) -> RotationState | None:
        """Return how far the rotation is, given the living and recently lost nodes; None = none is under way."""
        with self._rotating:
            if (rotation := self._rotation) is None:
                return None
            held, invited = self._register.parties(self._clock())
            needed = {str(party) for party in held} | {str(node_party(name)) for name in members}
            waiting = sorted(needed - rotation.moved) + sorted(f"the token of {party}" for party in invited)
            missing = (
                f"{self._folder} has no {NEXT}; copy it from the coordinator that acted before, until then the old "
                "authority signs and stays trusted"
            )
            return RotationState(
                rotation,
                rotation.unconfirmed(self._versions, members) if rotation.phase is Phase.INTRODUCING else [],
                waiting,
                str(self._folder),
                "" if self._next is not None else missing,
            )

    def takeover_problem(self) -> str:
        """Say why a standby can't act: it lacks the key of the authority that signs; empty = it can."""
        noted = self._register.noted(_ROTATION)
        rotation, missing = Rotation.parse(noted) if noted else None, ""
        try:
            acting = fingerprint(_acting_authority(self._folder, self._register).certificate_pem)
            if rotation is not None and rotation.phase is Phase.ISSUING and self._next_of(rotation) is None:
                missing = NEXT
            elif acting in self._register.noted(_REPLACED).split():
                missing = AUTHORITY
        except TrustError:
            return f"{AUTHORITY} or {NEXT} in {self._folder} can't be read; copy it again, if it is not being copied"
        if not missing:
            return ""
        return (
            f"certificates are of a new authority, whose key {self._folder} lacks; copy {missing} from the trust "
            "folder of the coordinator that acts, or acted last"
        )

    def begin_to_act(self) -> str:
        """Read the register again, which another coordinator may have changed; return a warning, empty = none.

        The warning is that coordinators of one database, or register and authority of one folder, have other
        authorities: members refuse one of them, and removals of one are not known.
        """
        self._look()
        with self._rotating:
            self._authority, self._next, self._rotation = self._read_authorities()
            self.credentials.identity = self._own()
            state = self.rotation_state(())
        before, now = self._register.noted(_AUTHORITY), fingerprint(self.authority_pem)
        self._register.note(_AUTHORITY, now)
        if before in ("", now):
            return state.problem if state else ""
        return (
            f"the authority in {self._folder} is not that of the coordinator that acted before: nodes with its "
            "certificates refuse this one; copy its trust folder, or give them new tokens"
        )

    def _look(self) -> None:
        with self._lock:  # else an older list could take the place of a newer one
            self.credentials.removed = self._register.removed(self._clock())
