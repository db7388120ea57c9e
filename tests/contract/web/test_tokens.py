"""The token of a page: random, or in a file that nobody else may read."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringtune.errors import StorageError, UsageError
from ringtune.web.tokens import LEAST_CHARACTERS, make_token, token_of


def test_token_is_new_each_time() -> None:
    """Two starts have two, of letters that fit in an address."""
    one, two = make_token(), token_of(None)
    assert one != two
    assert len(one) >= LEAST_CHARACTERS
    assert one.replace("-", "").replace("_", "").isalnum()


def test_token_file_is_made_once_and_then_read(tmp_path: Path) -> None:
    """For one user only, and the same token at the next start."""
    file = tmp_path / "token"
    made = token_of(file)
    assert token_of(file) == made
    assert file.stat().st_mode & 0o777 == 0o600


def test_token_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    """With what to do."""
    file = tmp_path / "token"
    token_of(file)
    file.chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        token_of(file)


@pytest.mark.parametrize("content", [b"", b"short", b"two words that are long enough", b"\xff" * 40])
def test_token_file_without_a_token_is_refused(tmp_path: Path, content: bytes) -> None:
    """An empty token would let everybody in, a short one is soon guessed."""
    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_bytes(content)
    with pytest.raises(UsageError, match="has no token"):
        token_of(file)


def test_token_file_in_no_folder_is_an_error_of_storage(tmp_path: Path) -> None:
    """It names the file."""
    with pytest.raises(StorageError, match="missing/token"):
        token_of(tmp_path / "missing" / "token")
