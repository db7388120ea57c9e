"""Where a user's identity is looked for, and where joining puts it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringtune.errors import TrustError
from ringtune.trust.places import ADMIN, IDENTITY, VARIABLE, coordinator_trust, found_user_trust, user_trust


def identity_in(folder: Path) -> Path:
    """A folder with an identity."""
    folder.mkdir(parents=True)
    (folder / IDENTITY).touch()
    return folder


def test_user_joins_where_commands_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder that the variable names, and nowhere else; before that the error says how to get an identity."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "own"))
    assert user_trust() == tmp_path / "own"
    with pytest.raises(TrustError, match=r"has no identity\.pem; .* 'ringtune join'"):
        found_user_trust()
    identity_in(user_trust())
    assert found_user_trust() == tmp_path / "own"


def test_user_without_a_variable_has_its_own_identity_before_the_admins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the machine of the coordinator its first user's serves, until the user joins."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert found_user_trust() is None
    admin = identity_in(coordinator_trust() / ADMIN)
    assert found_user_trust() == admin
    own = identity_in(user_trust())
    assert found_user_trust() == own != admin
