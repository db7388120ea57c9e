"""Where identities are kept by default, and where a user's is found; light, for the start of every command.

::

    ~/.local/state/ringtune-coordinator/trust         the coordinator's authority and identity
    ~/.local/state/ringtune-coordinator/trust/admin   the first user's, on the coordinator's machine
    ~/.local/state/ringtune-user/trust                a user's, on another machine
    ~/.local/state/ringtune/NAME/trust                a node's
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from platformdirs import user_state_path

from ringtune.errors import TrustError

VARIABLE: Final = "RINGTUNE_TRUST"
"""Variable of the environment: the folder of the user's identity, for commands that talk to a coordinator."""
IDENTITY: Final = "identity.pem"
AUTHORITY: Final = "authority.pem"
ADMIN: Final = "admin"


def coordinator_trust() -> Path:
    """Return the trust folder of a coordinator of this user."""
    return user_state_path("ringtune-coordinator") / "trust"


def user_trust() -> Path:
    """Return the folder of this user's identity as one who joins with a token: the variable's, else the user's own."""
    named = os.environ.get(VARIABLE, "")
    return Path(named) if named else user_state_path("ringtune-user") / "trust"


def node_trust(state: Path) -> Path:
    """Return the folder of a node's identity in its state folder."""
    return state / "trust"


def found_user_trust() -> Path | None:
    """Find the folder of this user's identity: the variable's, else the user's own, else the coordinator's admin.

    Raises:
        TrustError: the variable names a folder without an identity.
    """
    named = os.environ.get(VARIABLE, "")
    if named and not (Path(named) / IDENTITY).is_file():
        raise TrustError(f"{VARIABLE}={named} has no {IDENTITY}; correct it, or get one with 'ringtune join'")
    if named:
        return Path(named)
    places = (user_trust(), coordinator_trust() / ADMIN)
    return next((place for place in places if (place / IDENTITY).is_file()), None)
