"""Who may call what: one row for each call of the wire, and the field of its request that names its sender.

A call that has no row is refused. The plan says more of links: ``edge.wire.checks.check_hello`` looks there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ringtune.errors import TrustError
from ringtune.texts import shown
from ringtune.trust.parties import COORDINATOR_ROLE, NODE_ROLE, SUBMITTER_ROLE, Party, Role


@dataclass(frozen=True, slots=True)
class Permission:
    """Who may make a call.

    Attributes:
        roles: of those who may.
        sender: field of the request that has to be the caller's name; empty = it names no sender.
    """

    roles: frozenset[Role]
    sender: str = ""


_COORDINATOR: Final = Permission(frozenset({COORDINATOR_ROLE}))
_NODES: Final = Permission(frozenset({NODE_ROLE}))
_ITSELF: Final = Permission(frozenset({NODE_ROLE}), sender="node")
_USERS: Final = Permission(frozenset({SUBMITTER_ROLE}))
_ANYBODY: Final = Permission(frozenset({NODE_ROLE, SUBMITTER_ROLE}))

PERMISSIONS: Final[Mapping[str, Mapping[str, Permission]]] = {
    "Coordinator": {
        "Join": _ITSELF,
        "Heartbeat": _ITSELF,
        "Leave": _ITSELF,
        "Report": _ITSELF,
        "Nodes": _ANYBODY,  # a node looks for others that have the model
        "Status": _ANYBODY,  # so does the doctor
        "Run": _USERS,
        "Measure": _USERS,
        "Evaluate": _USERS,
        "Runs": _USERS,
        "Follow": _USERS,
        "Fetched": _USERS,
        "Drain": _USERS,
        "Noted": _USERS,
    },
    "Membership": {"Renew": _ANYBODY, "Invite": _USERS, "Remove": _USERS, "DrainNode": _USERS},
    "Agent": {
        "Inspect": _COORDINATOR,
        "Prepare": _COORDINATOR,
        "Load": _COORDINATOR,
        "FetchAhead": _COORDINATOR,
        "Rest": _COORDINATOR,
        "Move": _COORDINATOR,
        "Grant": _COORDINATOR,
        "Collect": _COORDINATOR,
        "Release": _COORDINATOR,
        "MeasureLink": _COORDINATOR,
    },
    "Probe": {"Link": _NODES},
    "Snapshots": {"Fetch": _NODES, "Keep": _NODES},
    "Ring": {"Link": _NODES},
    "Weights": {"Manifest": _NODES, "Fetch": _NODES},
}
"""Service -> call -> who may. ``Joining`` is not here: it is for those without a certificate, on a port of its own."""


def permission_of(method: str) -> Permission:
    """Return who may call a method, as gRPC names it: ``/ringtune.v1.Agent/Grant``.

    Raises:
        TrustError: nobody may.
    """
    service, _, call = method.rpartition("/")
    found = PERMISSIONS.get(service.removeprefix("/ringtune.v1."), {}).get(call)
    if found is None:
        raise TrustError(f"nobody may call {method}; use one version on all machines")
    return found


def require_permission(caller: Party, method: str) -> None:
    """Refuse a call that the caller's role may not make.

    Raises:
        TrustError: names both.
    """
    permission = permission_of(method)
    if caller.role not in permission.roles:
        roles = " or a ".join(sorted(permission.roles))
        raise TrustError(f"{caller} may not call {method.rpartition('.')[2]}, only a {roles} may; ask where that runs")


def require_sender(caller: Party | None, name: str) -> None:
    """Refuse a message in another node's name.

    Args:
        caller: who has sent it; None = nobody knows, in plain text.
        name: the node that the message says it is from.

    Raises:
        TrustError: names both.
    """
    if caller is not None and (caller.role != NODE_ROLE or caller.name != name):
        raise TrustError(
            f"{caller} speaks as node {shown(name)}, which its certificate does not allow; start it with "
            f"--name {caller.name}, or join with a token for the other name"
        )
