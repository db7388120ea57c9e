"""Grants on the wire: a turn names its operation table by digest, and a node gets each table once.

::

    grant 1   tables {A}   turns 2 A, 3 A
    grant 2                turns 4 A
    grant 3   tables {B}   turns 5 A, 6 B

One writer for each node, because each is told on its own. A grant may be sent again as it is; the reader keeps the last
tables, so that it knows them whatever comes twice.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Sequence
from typing import Final

from ringtune.errors import IntegrityError, PlanError
from ringtune.files.strict import parse_json
from ringtune.rpc.codecs.codec import turn_from_proto, turn_to_proto
from ringtune.schedule.course import TABLES_AT_ONCE, Course
from ringtune.schedule.operations.table import Operations
from ringtune.schedule.turns.turns import StepKind, Turn
from ringtune.v1 import control_pb2

KEPT_TABLES: Final = TABLES_AT_ONCE
"""How many tables a node keeps."""


class GrantWriter:
    """Writes the grants for one node.

    Args:
        run_id: of the run.
        placement_number: of the placement.
    """

    def __init__(self, run_id: str, placement_number: int = 0) -> None:
        self._run_id, self._placement_number = run_id, placement_number
        self._sent: Operations | None = None

    def request(self, turns: Sequence[Turn], *, keep_from_step: int = 0) -> control_pb2.GrantRequest:
        """Write a grant, with the tables that the node does not have from the grant before."""
        request = control_pb2.GrantRequest(
            run_id=self._run_id,
            placement_number=self._placement_number,
            turns=[turn_to_proto(turn) for turn in turns],
            keep_from_step=keep_from_step,
        )
        for turn, message in zip(turns, request.turns, strict=True):
            if turn.operations is None:
                continue
            table = table_to_proto(turn.operations)
            message.operations = table.digest
            if turn.operations != self._sent:
                request.tables.append(table)
                self._sent = turn.operations
        return request


class GrantReader:
    """Reads the grants of one run; safe for threads.

    Args:
        course: of the run.
    """

    def __init__(self, course: Course) -> None:
        self._course = course
        self._tables: dict[str, Operations] = {}
        self._lock = threading.Lock()

    def turns(self, request: control_pb2.GrantRequest) -> tuple[Turn, ...]:
        """Read the turns of a grant.

        Raises:
            IntegrityError: one is not readable, or its table is missing, damaged or of another course.
        """
        with self._lock:
            for message in request.tables:
                self._tables.pop(message.digest, None)
                self._tables[message.digest] = table_from_proto(message, self._course)
            turns = tuple(self._turn(message) for message in request.turns)
            for digest in list(self._tables)[:-KEPT_TABLES]:
                del self._tables[digest]
        return turns

    def _turn(self, message: control_pb2.TurnMessage) -> Turn:
        turn = turn_from_proto(message, self._tables)
        if turn.kind is StepKind.TRAIN and self._course.choice is not None and turn.operations is None:
            raise IntegrityError(
                f"turn {turn.index} of the grant trains without a table of operations; use one version on all machines"
            )
        return turn


@functools.lru_cache(maxsize=KEPT_TABLES)
def table_to_proto(operations: Operations) -> control_pb2.TableMessage:
    """Translate a table into its message, which nobody changes."""
    text = json.dumps(operations.to_json(), separators=(",", ":"))
    return control_pb2.TableMessage(digest=operations.digest, table_json=text.encode())


def table_from_proto(message: control_pb2.TableMessage, course: Course) -> Operations:
    """Translate a message into its table.

    Raises:
        IntegrityError: it is not readable, has another digest, or is not of this course.
    """
    name = f"the table {message.digest[:12]!r} of the grant"
    try:
        operations = Operations.from_json(parse_json(message.table_json), where="table")
        course.decided((), operations)
    except (PlanError, ValueError) as error:
        raise IntegrityError(f"{name} can't be used: {error}; use one version on all machines") from error
    if operations.digest != message.digest:
        raise IntegrityError(f"{name} has the digest {operations.digest[:12]}; use one version on all machines")
    return operations
