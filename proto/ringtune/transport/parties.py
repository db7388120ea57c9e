"""Parties (role and name), the permission of each call, join tokens, and the folders of identities.

A certificate names a party by one DNS name::

    pi-4.node.ringtune                   the node pi-4
    alice.submitter.ringtune             a user: an administrator, or one with a part in the own runs only
    coordinator.coordinator.ringtune     the coordinator
    member.ringtune                      any server: coordinator and nodes

Certificates have no addresses, because boards change them: a caller names the expected party instead.

Permissions have one row for each call, with the request's field for the sender's name. A call without a row is refused.
With which part of a run a node may call another one is in ``ringtune.schedule.access``.

A join token is the right to one certificate, with the hash of the coordinator's authority. As text, in one line without
spaces::

    ringtune1:node:pi-4:7071:<SHA-256 of the authority's certificate, hex>:<secret>

The coordinator stores only the hash of the secret.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, cast

from platformdirs import user_state_path

from ringtune.errors import TokenError, TrustError
from ringtune.ids import NODE_NAME, check_node_name
from ringtune.texts import shown

Role = Literal["coordinator", "node", "submitter"]
COORDINATOR_ROLE: Final = "coordinator"
NODE_ROLE: Final = "node"
SUBMITTER_ROLE: Final = "submitter"
ROLES: Final[tuple[Role, ...]] = (COORDINATOR_ROLE, NODE_ROLE, SUBMITTER_ROLE)
ADMINISTRATOR: Final = "administrator"
"""Of a token: a submitter with a part in all runs, and in the membership."""
ANY_MEMBER: Final = "member.ringtune"
GUEST: Final = re.compile(r"eval-[0-9a-f]{8}")
"""Reserved names: those of nodes that a user's machine invites for one evaluation."""
_SERVER_NAME = re.compile(rf"(?P<name>{NODE_NAME.pattern})\.(?P<role>{'|'.join(ROLES)})\.ringtune")


@dataclass(frozen=True, slots=True)
class Party:
    """Holder of a certificate."""

    role: Role
    name: str

    def __post_init__(self) -> None:
        check_node_name(self.name)

    @property
    def server_name(self) -> str:
        """DNS name in its certificate."""
        return f"{self.name}.{self.role}.ringtune"

    @property
    def serves(self) -> bool:
        """Whether others connect to it."""
        return self.role != SUBMITTER_ROLE

    @property
    def is_guest(self) -> bool:
        """Whether it is a node for one evaluation, by its name: certificate of a day, and no host of others' blocks."""
        return self.role == NODE_ROLE and GUEST.fullmatch(self.name) is not None

    def __str__(self) -> str:
        """Write the party in words: ``node pi-4``."""
        return "the coordinator" if self.role == COORDINATOR_ROLE else f"{self.role} {self.name}"


COORDINATOR: Final = Party(COORDINATOR_ROLE, "coordinator")


def node_party(name: str) -> Party:
    """Return the party of a node."""
    return Party(NODE_ROLE, name)


def party_of(names: Iterable[str]) -> Party:
    """Return the party in the DNS names of a certificate; raises ``TrustError`` unless exactly one is a party's."""
    names = list(names)
    matches = [match for match in map(_SERVER_NAME.fullmatch, names) if match and ".." not in match["name"]]
    if len(matches) != 1:
        raise TrustError(f"a certificate for {', '.join(names) or 'nobody'} names no member of ringtune; join anew")
    return Party(cast(Role, matches[0]["role"]), matches[0]["name"])


@dataclass(frozen=True, slots=True)
class Permission:
    """Callers of a call.

    Attributes:
        roles: permitted roles.
        sender: field of the request that must be the caller's name; empty = none.
        of_administrators: whether of users only administrators may make it.
        is_urgent: whether it has threads of its own, since a run would end without it.
        first_message_s: time limit of the first message; 256 s for 8 MiB at 32 KiB/s, 60 s for chunks of 1 MiB.
    """

    roles: frozenset[Role]
    sender: str = ""
    of_administrators: bool = False
    is_urgent: bool = False
    first_message_s: float = 256.0


_COORDINATOR: Final = Permission(frozenset({COORDINATOR_ROLE}), is_urgent=True)
_NODES: Final = Permission(frozenset({NODE_ROLE}), first_message_s=60.0)
_ITSELF: Final = Permission(frozenset({NODE_ROLE}), sender="node", is_urgent=True, first_message_s=10.0)
_COORDINATOR_OR_NODES: Final = Permission(frozenset({COORDINATOR_ROLE, NODE_ROLE}), first_message_s=60.0)
_USERS: Final = Permission(frozenset({SUBMITTER_ROLE}))
_ADMINISTRATORS: Final = Permission(frozenset({SUBMITTER_ROLE}), of_administrators=True)
_ANYBODY: Final = Permission(frozenset({NODE_ROLE, SUBMITTER_ROLE}))

_AGENT_CALLS: Final = (
    *("Inspect", "Prepare", "Load", "FetchAhead", "Rest", "Move", "Grant", "Collect", "Release", "Alive"),
    *("MeasureLink", "Repeat"),
)
PERMISSIONS: Final[Mapping[str, Mapping[str, Permission]]] = {
    "Coordinator": {
        **dict.fromkeys(("Join", "Heartbeat", "Leave", "Report"), _ITSELF),
        "Nodes": _ANYBODY,  # a node searches others that have the model
        "Status": Permission(frozenset(ROLES)),  # the doctor makes it as whoever its machine is
        **dict.fromkeys(("Run", "Measure", "Evaluate", "Runs", "Follow", "Fetched", "Drain", "Noted"), _USERS),
    },
    "Membership": {
        "Renew": _ANYBODY,
        "Invite": _USERS,
        **dict.fromkeys(("Remove", "DrainNode", "Rotate"), _ADMINISTRATORS),
    },
    "Agent": dict.fromkeys(_AGENT_CALLS, _COORDINATOR),
    "Probe": {"Link": _NODES},
    "Snapshots": {"Fetch": _NODES, "Keep": _NODES},
    "Ring": {"Link": _NODES},
    "Weights": {"Manifest": _COORDINATOR_OR_NODES, "Fetch": _NODES},
}
"""Service -> call -> permission. ``Joining`` is missing: it needs no certificate, and has a port of its own."""


def find_permission(method: str) -> Permission | None:
    """Return the permission of a method such as ``/ringtune.v1.Agent/Grant``; None if it has none."""
    service, _, call = method.rpartition("/")
    return PERMISSIONS.get(service.removeprefix("/ringtune.v1."), {}).get(call)


def require_permission(caller: Party, method: str) -> Permission:
    """Return the permission of a call; refuse one that the caller's role may not make; raises ``TrustError``."""
    permission = find_permission(method)
    if permission is None:
        raise TrustError(f"nobody may call {method}; use one version on all machines")
    if caller.role not in permission.roles:
        roles = " or a ".join(sorted(permission.roles))
        raise TrustError(f"{caller} may not call {method.rpartition('.')[2]}, only a {roles} may; ask where that runs")
    return permission


def require_sender(caller: Party | None, name: str) -> None:
    """Refuse a message in another node's name, with ``TrustError``; ``caller`` is None in plain text."""
    if caller is not None and (caller.role != NODE_ROLE or caller.name != name):
        raise TrustError(
            f"{caller} speaks as node {shown(name)}, which its certificate does not allow; start it with "
            f"--name {caller.name}, or join with a token for the other name"
        )


_PREFIX: Final = "ringtune1"
_SECRET_BYTES: Final = 32
_TEXT = re.compile(
    rf"{_PREFIX}:(?P<role>node|submitter):(?P<name>{NODE_NAME.pattern}):(?P<port>[0-9]{{1,5}})"
    r":(?P<hash>[0-9a-f]{64}):(?P<secret>[A-Za-z0-9_-]{43})"
)
INVALID: Final = (
    "the join token is not valid: it is wrong, used or expired; make a new one with 'ringtune coordinator token NAME'"
)
"""One text for all reasons, so that attempts reveal nothing."""


@dataclass(frozen=True, slots=True)
class Token:
    """A join token.

    Attributes:
        party: of the certificate.
        port: of the coordinator for callers without a certificate; 0 = the port after its own.
        authority_sha256: of the authority's certificate, hex.
        secret: known to the bearer only.
    """

    party: Party
    port: int
    authority_sha256: str
    secret: str

    def __str__(self) -> str:
        """Write the token with its secret."""
        return f"{_PREFIX}:{self.party.role}:{self.party.name}:{self.port}:{self.authority_sha256}:{self.secret}"

    def __repr__(self) -> str:
        """Write the party without the secret, for logs."""
        return f"Token({self.party})"


def make_secret() -> str:
    """Make the secret of a new token."""
    return secrets.token_urlsafe(_SECRET_BYTES)


def secret_hash(secret: str) -> str:
    """Hash a secret for storage; it is random, so one SHA-256 is enough."""
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


def parse_token(text: str) -> Token:
    """Parse a token; white space around it is ignored; raises ``TokenError``."""
    match = _TEXT.fullmatch(text.strip())
    if match is None or ".." in match["name"] or int(match["port"]) > 65535:
        raise TokenError(
            "the join token is damaged; it is one line that begins with 'ringtune1:', as the coordinator printed it"
        )
    return Token(Party(cast(Role, match["role"]), match["name"]), int(match["port"]), match["hash"], match["secret"])


VARIABLE: Final = "RINGTUNE_TRUST"
"""Environment variable with the folder of the user's identity, for commands that call a coordinator."""
IDENTITY: Final = "identity.pem"
AUTHORITY: Final = "authority.pem"
ADMIN: Final = "admin"
"""Folder of the first user's identity, in the coordinator's trust folder."""


def coordinator_trust() -> Path:
    """Return the trust folder of this user's coordinator; by default ``~/.local/state/ringtune-coordinator/trust``."""
    return user_state_path("ringtune-coordinator") / "trust"


def user_trust() -> Path:
    """Return the folder in which ``ringtune join`` stores this user's identity: in ``VARIABLE``, else the default."""
    named = os.environ.get(VARIABLE, "")
    return Path(named) if named else user_state_path("ringtune-user") / "trust"


def node_trust(state: Path) -> Path:
    """Return the folder of a node's identity in its state folder; by default ``~/.local/state/ringtune/NAME/trust``."""
    return state / "trust"


def find_user_trust() -> Path | None:
    """Find the folder of this user's identity; None if there is none; raises ``TrustError``.

    It is the folder in the variable ``VARIABLE``; else the default one, else that of the coordinator's admin, if it has
    an identity.
    """
    named = os.environ.get(VARIABLE, "")
    if named and not (Path(named) / IDENTITY).is_file():
        raise TrustError(f"{VARIABLE}={named} has no {IDENTITY}; correct it, or get one with 'ringtune join'")
    if named:
        return Path(named)
    places = (user_trust(), coordinator_trust() / ADMIN)
    return next((place for place in places if (place / IDENTITY).is_file()), None)
