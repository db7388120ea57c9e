"""The token of a page: a new one for each start, or the one in a file, for those who ask every few seconds."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path
from typing import Final

from ringtune.errors import UsageError
from ringtune.files.durable import storage_errors

LEAST_CHARACTERS: Final = 20
_MOST_BYTES: Final = 4096
_RANDOM_BYTES: Final = 24


def make_token() -> str:
    """Make a token: 192 random bits in letters that fit in an address."""
    return secrets.token_urlsafe(_RANDOM_BYTES)


def token_of(file: Path | None) -> str:
    """Read the token of a file; make file and token if it is not there, and a token alone without a file.

    Raises:
        UsageError: others may read the file, or it has no token of some length.
        StorageError: the file can't be read or written.
    """
    if file is None:
        return make_token()
    with storage_errors(file):
        if not file.exists():
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="ascii") as new:
                new.write(token := make_token())
            return token
        with file.open("rb") as old:
            if stat.S_IMODE(os.fstat(old.fileno()).st_mode) & 0o077:
                raise UsageError(f"others may read {file}, which has the token of the page; chmod 600 it")
            content = old.read(_MOST_BYTES)
    token = content.decode("ascii", "replace").strip()
    if len(token) < LEAST_CHARACTERS or not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError(
            f"{file} has no token: one line of at least {LEAST_CHARACTERS} letters; remove it to get a new one"
        )
    return token
