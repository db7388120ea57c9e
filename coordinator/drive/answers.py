"""What nodes answered, on its way to the run's thread, and how it is read."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from ringtune.costs.profile import NodeFacts
from ringtune.errors import IntegrityError
from ringtune.v1 import control_pb2


class Reported(NamedTuple):
    """A node's report."""

    request: control_pb2.ReportRequest


class Facts(NamedTuple):
    """A node's facts, not read yet."""

    node: str
    facts_json: str
    shards: tuple[control_pb2.ShardState, ...] = ()


class NodePrepared(NamedTuple):
    """A node is prepared, and holds so many bytes of weights."""

    node: str
    hosted_bytes: int


class Files(NamedTuple):
    """A node's results by file name."""

    node: str
    files: dict[str, bytes]


Answer = Reported | Facts | NodePrepared | Files


def read_facts(facts: Facts) -> NodeFacts:
    """The facts of a node.

    Raises:
        IntegrityError: not JSON, or the facts of another node.
        PlanError: another schema.
    """
    found = NodeFacts.from_json(read_object(facts.facts_json, f"the facts of node {facts.node}"))
    if found.node != facts.node:
        raise IntegrityError(f"node {facts.node} sent the facts of node {found.node}; use one version on all machines")
    return found


def read_object(content: str | bytes, what: str) -> dict[str, Any]:
    """A JSON object.

    Args:
        content: its text.
        what: for the message.

    Raises:
        IntegrityError: it is none.
    """
    try:
        value = json.loads(content)
    except ValueError as error:
        raise IntegrityError(f"{what} is not JSON: {error}; use one version on all machines") from error
    if not isinstance(value, dict):
        raise IntegrityError(f"{what} is not a JSON object; use one version on all machines")
    return value
