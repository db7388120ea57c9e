"""The register of an authority: join tokens, certificates, and which of them hold no longer; an SQLite file.

A token is consumed in the transaction in which its certificate is written down, so no crash makes two of one. Who
asks again with the same token and the same key, because the answer got lost, gets the same certificate again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ringtune.errors import StorageError, TokenError, TrustError
from ringtune.texts import Repeats, times
from ringtune.trust.certificates import facts_of
from ringtune.trust.parties import Party
from ringtune.trust.tokens import INVALID

_LOG = logging.getLogger(__name__)
FILE: Final = "register.sqlite"
_VERSION: Final = 1
_BUSY_S: Final = 10.0
_TABLES: Final = """
CREATE TABLE tokens (
    secret_sha256 TEXT PRIMARY KEY, role TEXT NOT NULL, name TEXT NOT NULL, ends_unix_s REAL NOT NULL,
    key_sha256 TEXT, certificate BLOB
);
CREATE TABLE certificates (
    serial TEXT PRIMARY KEY, role TEXT NOT NULL, name TEXT NOT NULL, ends_unix_s REAL NOT NULL, removed TEXT
);
CREATE TABLE notes (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class Removed:
    """A certificate that holds no longer.

    Attributes:
        serial: of the certificate.
        reason: why.
    """

    serial: str
    reason: str


class Register:
    """The register in one folder; several processes may use it, and any thread.

    Args:
        folder: of the trust; the file is made if it is missing.

    Raises:
        StorageError: it can't be used, or is of another version.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._refused = Repeats()
        with contextlib.suppress(FileExistsError), _storage_errors(self._path):
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        with self._transaction() as database:
            (version,) = database.execute("PRAGMA user_version").fetchone()
            if version == 0:
                for statement in filter(str.strip, _TABLES.split(";")):
                    database.execute(statement)
                database.execute(f"PRAGMA user_version = {_VERSION}")
            elif version != _VERSION:
                raise StorageError(
                    f"{self._path} is of version {version}, here is {_VERSION}; use the ringtune that wrote it"
                )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Open the file and do what the block does as a whole or not at all."""
        with _storage_errors(self._path):
            database = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None)
            try:
                database.execute("PRAGMA synchronous = FULL")
                database.execute("BEGIN IMMEDIATE")
                with database:
                    yield database
            finally:
                database.close()

    # ---- tokens -----------------------------------------------------------------------------------

    def add_token(self, secret_sha256: str, party: Party, ends_unix_s: float) -> None:
        """Write a new token down: the hash of its secret, for whom it is, and until when."""
        with self._transaction() as database:
            database.execute(
                "INSERT INTO tokens (secret_sha256, role, name, ends_unix_s) VALUES (?, ?, ?, ?)",
                (secret_sha256, party.role, party.name, ends_unix_s),
            )

    def redeem(self, secret_sha256: str, key_sha256: str, now_unix_s: float, issue: Callable[[Party], bytes]) -> bytes:
        """Give a certificate for a token; earlier certificates of the same party hold no longer.

        Args:
            secret_sha256: of the token that was shown.
            key_sha256: of the public key that the certificate is for.
            now_unix_s: the clock of this machine.
            issue: makes the certificate.

        Raises:
            TokenError: the token is wrong, used or expired; the log alone says which.
        """
        with self._transaction() as database:
            found = database.execute(
                "SELECT role, name, ends_unix_s, key_sha256, certificate FROM tokens WHERE secret_sha256 = ?",
                (secret_sha256,),
            ).fetchone()
            if found is None:
                return self._refuse("it is of no token that is known here")
            role, name, ends_unix_s, used_by, certificate = found
            party = Party(role, name)
            if now_unix_s > ends_unix_s:
                return self._refuse(f"the token of {party} has expired")
            if used_by is not None:
                return bytes(certificate) if used_by == key_sha256 else self._refuse(f"the token of {party} is used")
            pem = issue(party)
            _remove(database, party, f"{party} has joined anew with a later token")
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
        """Write down a certificate that was issued without a token: at the beginning, or for an older one."""
        with self._transaction() as database:
            _write_down(database, pem)

    def remove(self, party: Party, reason: str) -> int:
        """Let all certificates and open tokens of a party hold no longer; return how many certificates.

        Raises:
            TrustError: it never had any.
        """
        with self._transaction() as database:
            database.execute("DELETE FROM tokens WHERE role = ? AND name = ? AND key_sha256 IS NULL", _key(party))
            number = _remove(database, party, reason)
            if not number and not _is_known(database, party):
                raise TrustError(f"{party} has no certificate of this coordinator; 'ringtune nodes' lists the nodes")
        return number

    def removed(self, now_unix_s: float) -> tuple[Removed, ...]:
        """List what was removed and has not expired yet."""
        with self._transaction() as database:
            rows = database.execute(
                "SELECT serial, removed FROM certificates WHERE removed NOT NULL AND ends_unix_s > ? ORDER BY serial",
                (now_unix_s,),
            ).fetchall()
        return tuple(Removed(serial, reason) for serial, reason in rows)

    # ---- notes ------------------------------------------------------------------------------------

    def note(self, key: str, value: str) -> None:
        """Keep a value for other processes that use the register."""
        with self._transaction() as database:
            database.execute("INSERT OR REPLACE INTO notes (key, value) VALUES (?, ?)", (key, value))

    def noted(self, key: str) -> str:
        """Return such a value; empty = none was kept."""
        with self._transaction() as database:
            found = database.execute("SELECT value FROM notes WHERE key = ?", (key,)).fetchone()
        return str(found[0]) if found else ""


def _key(party: Party) -> tuple[str, str]:
    return party.role, party.name


def _write_down(database: sqlite3.Connection, pem: bytes) -> None:
    facts = facts_of(pem)
    database.execute(
        "INSERT INTO certificates (serial, role, name, ends_unix_s) VALUES (?, ?, ?, ?)",
        (facts.serial, *_key(facts.party), facts.ends_unix_s),
    )


def _remove(database: sqlite3.Connection, party: Party, reason: str) -> int:
    return database.execute(
        "UPDATE certificates SET removed = ? WHERE role = ? AND name = ? AND removed IS NULL", (reason, *_key(party))
    ).rowcount


def _is_known(database: sqlite3.Connection, party: Party) -> bool:
    found = database.execute("SELECT 1 FROM certificates WHERE role = ? AND name = ?", _key(party)).fetchone()
    return found is not None


@contextlib.contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    """Turn what the disk or the database refuses into a ``StorageError`` that names the file."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        raise StorageError(f"can't use {path}: {error.strerror}; check the folder") from error
    except sqlite3.Error as error:
        raise StorageError(
            f"can't use {path}: {error}; restore it, or begin anew with 'ringtune coordinator init'"
        ) from error
