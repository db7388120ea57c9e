"""Write the table of calls in ``docs/how/trust.md``: who may make which call: ``python -m docs.make_trust``.

Each cell is found by the checks that a call passes: the permission of the role (``ringtune.transport.parties``), and
between nodes the access lists of a small run (``ringtune.schedule.access``) with hosts, owners and a helper, at the
moment of a move or a recovery.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from docs.make_job import filled
from ringtune.errors import TrustError
from ringtune.schedule.access import (
    AccessRight,
    NodeCall,
    State,
    audit_rights,
    copy_rights,
    fetch_rights,
    inspected_rights,
    link_rights,
)
from ringtune.schedule.course import Course
from ringtune.schedule.methods import Everything
from ringtune.schedule.placement import Helper, Placement, Slice
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import Owner
from ringtune.schedule.turns import StartPoint
from ringtune.transport.parties import COORDINATOR, Party, find_permission, node_party, require_permission
from ringtune.v1 import control_pb2, ring_pb2, trust_pb2, weights_pb2

PAGE: Final = Path(__file__).parent / "how" / "trust.md"
BEGIN: Final = "<!-- written by python -m docs.make_trust -->"
OPEN_SERVICE: Final = "Joining"
"""The service without certificates, at a port of its own."""

BY_DIGEST: Final[Mapping[str, str]] = {
    "Weights.Manifest": "with the manifest's digest",
    "Weights.Fetch": "by digests in the manifest",
}
"""Calls between nodes that ask for content by its digest, which the coordinator gives to nodes of the run."""

_OF_STATE: Final[Mapping[State, str]] = {
    State.TURN: "in a recovery",
    State.PAUSE: "in a move",
    State.DISK: "of the resumed run's disks",
    State.AUDIT: "what is repeated in an audit",
}
_ADMINISTRATOR: Final = "administrator"
_KINDS: Final[Mapping[str, Party | None]] = {
    "coordinator": COORDINATOR,
    "host, copy holder": node_party("host"),
    "owner": node_party("owner"),
    "helper": node_party("helper"),
    "member beside the run, drained": node_party("beside"),
    "guest": node_party("eval-0123abcd"),
    "submitter": Party("submitter", "user"),
    _ADMINISTRATOR: Party("submitter", "administrator"),
    "removed, stranger": None,
}


def calls() -> list[str]:
    """Every call of the wire, such as ``Snapshots.Keep``."""
    modules = (control_pb2, ring_pb2, trust_pb2, weights_pb2)
    services = [service for module in modules for service in module.DESCRIPTOR.services_by_name.values()]
    return [f"{service.name}.{method.name}" for service in services for method in service.methods]


def _plan(*helpers: Helper) -> Plan:
    course = Course(
        num_blocks=4,
        num_steps=8,
        local_iterations=2,
        method=Everything(),
        batch_size=4,
        microbatches=2,
        max_length=16,
        hidden_size=32,
        owners=tuple(Owner(node=node, train_rows=8, eval_rows=0) for node in ("owner", "owner-2")),
    )
    slices = (Slice(node="host", start=0, stop=2), Slice(node="host-2", start=2, stop=4))
    return Plan(course, (Placement(slices=slices, helpers=helpers, copies=True),))


def rights() -> list[AccessRight]:
    """All rows of all nodes of the small run, with and without a helper."""
    rights: list[AccessRight] = []
    for plan in (_plan(), _plan(Helper(node="helper", start=2, stop=4))):
        start = StartPoint.of(plan.course)
        for node in plan.nodes:
            rights += link_rights("r", plan, node, None) + copy_rights("r", plan, node, None)
            rights += audit_rights("r", plan, node)
            rights += inspected_rights("r", plan.nodes, shards_run="r")
        rights += fetch_rights("r", plan, start, 0, None) + fetch_rights("r", plan, start, 0, 2)
    return rights


def _of_rows(call: str, node: str, rows: list[AccessRight]) -> str:
    """The part of the run in the rows of a node, in words."""
    allowed = [row for row in rows if (row.call, row.node) == (call, node)]
    if call == NodeCall.LINK and allowed:
        return "its links of the schedule"
    if call == NodeCall.PROBE and allowed:
        return "yes"
    if call == NodeCall.KEEP:
        parts = {"the head" if row.is_head else "its blocks" for row in allowed}
        return " and ".join(sorted(parts)) + ", to the copy holder" if parts else ""
    taken = {_OF_STATE[row.state] for row in allowed if row.blocks is None or row.blocks or row.is_head}
    audited = {_OF_STATE[State.AUDIT]} & taken
    moved = "what it takes over: " + ", ".join(sorted(taken - audited)) if taken - audited else ""
    return "; ".join([*filter(None, [moved]), *audited])


def cell(call: str, kind: str, rows: list[AccessRight]) -> str:
    """What a kind of caller may call; empty = it is refused.

    Raises:
        TrustError: the call has no permission.
        ValueError: it is a call between nodes, and no list has rows of it.
    """
    service, _, name = call.partition(".")
    if service == OPEN_SERVICE:
        return "with a token"
    method, party = f"/ringtune.v1.{service}/{name}", _KINDS[kind]
    permission = find_permission(method)
    if permission is None:
        raise TrustError(f"nobody may call {method}")
    if party is None:
        return ""
    try:
        require_permission(party, method)
    except TrustError:
        return ""
    if permission.of_administrators and kind != _ADMINISTRATOR:
        return ""
    if permission.sender:
        return "as a guest" if party.is_guest and name == "Join" else "in its own name"
    if party.role != "node" or service == "Coordinator" or service == "Membership":
        return "yes"
    return BY_DIGEST[call] if call in BY_DIGEST else _of_rows(NodeCall(call), party.name, rows)


def table() -> Iterator[str]:
    """Yield the lines of the table; calls with equal cells share one."""
    rows = rights()
    yield f"| call | {' | '.join(_KINDS)} |"
    yield "|---" * (len(_KINDS) + 1) + "|"
    cells = [(call.partition("."), tuple(cell(call, kind, rows) for kind in _KINDS)) for call in calls()]
    for (service, answers), group in itertools.groupby(cells, lambda each: (each[0][0], each[1])):
        names = ", ".join(name[2] for name, _ in group)
        yield f"| `{service}`: {names} | {' | '.join(answer or '-' for answer in answers)} |"


def page() -> str:
    """The page with the present table."""
    return filled(PAGE.read_text(encoding="utf-8"), BEGIN, "".join(f"{line}\n" for line in table()))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
