"""Answers of nodes, on their way to the run's thread, and how to read them."""

from __future__ import annotations

from typing import NamedTuple

from ringtune.costs.profile import NodeFacts
from ringtune.errors import IntegrityError
from ringtune.files.pieces import Pieces
from ringtune.files.strict import read_object
from ringtune.rounds import rounds
from ringtune.v1 import control_pb2


class Reported(NamedTuple):
    """A node's report of what happened in the run."""

    request: control_pb2.ReportRequest


class Facts(NamedTuple):
    """A node's facts as JSON text that is not checked yet, the states of its shards, and the files beside them."""

    node: str
    facts_json: str
    shards: tuple[control_pb2.ShardState, ...] = ()
    saved: tuple[control_pb2.SavedPart, ...] = ()

    @staticmethod
    def of(node: str, reply: control_pb2.InspectReply) -> Facts:
        """Make it of what a node answered."""
        return Facts(node, reply.facts_json, tuple(reply.shards), tuple(reply.saved))


class NodePrepared(NamedTuple):
    """The answer of a node that is prepared: the bytes of weights that it holds."""

    node: str
    hosted_bytes: int


class Files(NamedTuple):
    """A node's results by file name."""

    node: str
    files: dict[str, Pieces]


class NodeRested(NamedTuple):
    """A node rests; with the text of its ``totals.json`` of the placement that it leaves."""

    rested: rounds.Rested
    totals_json: str


class NodeMoved(NamedTuple):
    """A node has moved; with the bytes of weights that it holds now."""

    moved: rounds.Moved
    hosted_bytes: int


Answer = Reported | Facts | NodePrepared | NodeRested | NodeMoved | Files


def read_facts(facts: Facts) -> NodeFacts:
    """Read the facts of a node from their JSON text.

    Raises:
        IntegrityError: not JSON, or the facts of another node.
        PlanError: another schema.
    """
    found = NodeFacts.from_json(read_object(facts.facts_json, f"the facts of node {facts.node}"))
    if found.node != facts.node:
        raise IntegrityError(f"node {facts.node} sent the facts of node {found.node}; use one version on all machines")
    return found
