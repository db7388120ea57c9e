"""The tables that a run has chosen, each with its step: what ``operations.json`` holds, and what repeats the run."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ringtune.errors import PlanError
from ringtune.files.strict import check_keys, read_value
from ringtune.schedule.operations.origin import TableOrigin
from ringtune.schedule.operations.table import Operations

SCHEMA: Final = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenTable:
    """A table that holds from the train turn that begins at ``step`` on.

    Attributes:
        step: at a turn boundary.
        operations: the table.
        origin: of the run that chose it; None = unknown, it is written by hand.
    """

    step: int
    operations: Operations
    origin: TableOrigin | None = None

    def to_json(self) -> dict[str, Any]:
        """Write it as a JSON-able table."""
        value = {"step": self.step, "operations": self.operations.to_json()}
        return value if self.origin is None else {**value, "origin": self.origin.to_json()}

    @staticmethod
    def from_json(value: object, *, where: str = "the table") -> GivenTable:
        """Read what ``to_json`` wrote.

        Raises:
            PlanError: a field is missing or unknown, or the table is not readable.
        """
        if not isinstance(value, Mapping):
            raise PlanError(f"{where} has to be an object with step and operations; take another file")
        check_keys(value, ("step", "operations", "origin"), where=where, error=PlanError)
        step = read_value(int, value.get("step"), where=f"{where}.step", error=PlanError)
        origin = TableOrigin.from_json(value["origin"], where=f"{where}.origin") if "origin" in value else None
        operations = Operations.from_json(value.get("operations"), where=f"{where}.operations")
        return GivenTable(step=step, operations=operations, origin=origin)


def check_tables(tables: Sequence[GivenTable]) -> None:
    """Refuse tables that no run has chosen: none for its first step, out of order, or of different subnets.

    Raises:
        PlanError: says which.
    """
    steps = [table.step for table in tables]
    if steps[:1] != [0] or any(later <= earlier for earlier, later in itertools.pairwise(steps)):
        raise PlanError(f"operation tables have to begin at step 0 and be in order, they are of steps {steps}")
    if len({table.operations.subnets for table in tables}) != 1:
        raise PlanError("operation tables are of different numbers of subnets a block; they have to be of one run")


def table_before(tables: Sequence[GivenTable], step: int) -> Operations | None:
    """The table that was in force until a turn boundary, whatever begins to hold there; None if there was none."""
    return next((table.operations for table in reversed(tables) if table.step < step), None)


def tables_to_json(tables: Sequence[GivenTable]) -> dict[str, Any]:
    """Write the content of ``operations.json``."""
    return {"schema": SCHEMA, "tables": [table.to_json() for table in tables]}


def tables_text(tables: Sequence[str]) -> str:
    """Write the content of ``operations.json`` of tables that are JSON text already."""
    return f'{{"schema": {SCHEMA}, "tables": [{", ".join(tables)}]}}'


def tables_from_json(value: object) -> tuple[GivenTable, ...]:
    """Read the content of ``operations.json``, or a bare table as the only one.

    Raises:
        PlanError: it is neither, or no run has chosen such tables.
    """
    if not isinstance(value, Mapping):
        raise PlanError("operation tables have to be a JSON object; give the operations.json of a run")
    if "tables" not in value:
        return (GivenTable(step=0, operations=Operations.from_json(value)),)
    check_keys(value, ("schema", "tables"), where="", error=PlanError)
    entries = value["tables"]
    if value.get("schema") == SCHEMA and entries == []:
        raise PlanError("operation tables are none: the list has no table; the run has chosen none yet")
    if value.get("schema") != SCHEMA or not isinstance(entries, list):
        raise PlanError(
            f"operation tables of schema {value.get('schema')!r} are not a list of schema {SCHEMA}; use the version "
            "that wrote them"
        )
    tables = tuple(GivenTable.from_json(entry, where=f"tables[{at}]") for at, entry in enumerate(entries))
    check_tables(tables)
    return tables
