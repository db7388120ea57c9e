"""``ringtune join``: exchange a user's join token for a certificate on another machine."""

from __future__ import annotations

from pathlib import Path

from ringtune import options


def join(
    coordinator: options.Coordinator = options.DEFAULT_COORDINATOR,
    token_file: options.TokenFile = Path("-"),
    trust: options.Trust = None,
    json: options.Json = False,
) -> None:
    """Exchange a user's join token for a certificate, so that commands on this machine may use the coordinator.

    A node joins by itself: 'ringtune node --token-file FILE'.
    """
    from edge.cli.enrollment import read_token
    from ringtune.errors import TokenError
    from ringtune.transport.enrollment import join as join_with
    from ringtune.transport.parties import SUBMITTER_ROLE, user_trust

    token = read_token(token_file or Path("-"))
    if token.party.role != SUBMITTER_ROLE:
        raise TokenError(f"the token is for {token.party}; give it to 'ringtune node --token-file FILE'")
    folder = trust or user_trust()
    identity = join_with(coordinator, token, folder)
    ends = identity.facts.ends_unix_s
    told = {"event": "joined", "party": str(identity.party), "trust": str(folder), "ends_unix_s": ends}
    options.show(told, [f"{identity.party} has a certificate in {folder}"], as_json=json)
