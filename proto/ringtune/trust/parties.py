"""Who takes part, as certificates name them: a role and a name, written as one DNS name.

::

    pi-4.node.ringtune                   the node pi-4
    alice.submitter.ringtune             a user who submits jobs
    coordinator.coordinator.ringtune     the coordinator
    member.ringtune                      any of those who serve others: coordinator and nodes

Addresses are in no certificate, because boards change them: whoever connects says whom it expects instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, cast

from ringtune.errors import TrustError
from ringtune.ids import NODE_NAME, check_node_name

Role = Literal["coordinator", "node", "submitter"]
COORDINATOR_ROLE: Final = "coordinator"
NODE_ROLE: Final = "node"
SUBMITTER_ROLE: Final = "submitter"
ROLES: Final[tuple[Role, ...]] = (COORDINATOR_ROLE, NODE_ROLE, SUBMITTER_ROLE)
ANY_MEMBER: Final = "member.ringtune"
_SERVER_NAME = re.compile(rf"(?P<name>{NODE_NAME.pattern})\.(?P<role>{'|'.join(ROLES)})\.ringtune")


@dataclass(frozen=True, slots=True)
class Party:
    """Somebody who has a certificate.

    Attributes:
        role: what its bearer is.
        name: of the node or user.

    Raises:
        UsageError: nobody may be called so.
    """

    role: Role
    name: str

    def __post_init__(self) -> None:
        """Refuse a name that is not allowed."""
        check_node_name(self.name)

    @property
    def server_name(self) -> str:
        """The DNS name in its certificate."""
        return f"{self.name}.{self.role}.ringtune"

    @property
    def serves(self) -> bool:
        """Whether others connect to it."""
        return self.role != SUBMITTER_ROLE

    def __str__(self) -> str:
        """The party in words: ``node pi-4``."""
        return "the coordinator" if self.role == COORDINATOR_ROLE else f"{self.role} {self.name}"


COORDINATOR: Final = Party(COORDINATOR_ROLE, "coordinator")


def node_party(name: str) -> Party:
    """Return the node of that name as a party."""
    return Party(NODE_ROLE, name)


def party_of(names: Iterable[str]) -> Party:
    """Return the party that the DNS names of a certificate stand for.

    Raises:
        TrustError: none of them is a party's, or more than one.
    """
    names = list(names)
    found = [match for match in map(_SERVER_NAME.fullmatch, names) if match and ".." not in match["name"]]
    if len(found) != 1:
        raise TrustError(f"a certificate for {', '.join(names) or 'nobody'} names no member of ringtune; join anew")
    return Party(cast(Role, found[0]["role"]), found[0]["name"])
