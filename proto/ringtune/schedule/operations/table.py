"""Operation tables: what each subnet of each block does for each micro-batch of each batch.

Embedding and head are always full. A table speaks of train items only; evaluations and scores run every block. It is
keyed by (owner, batch id), so that a batch meets the same operations in every pass over the rows. For a model of four
blocks with one subnet each and two micro-batches::

    owner a, batch 0:   1131   micro-batch 0 passes block 2 by
                        1211   micro-batch 1 runs block 1 without a graph
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringtune.errors import PlanError
from ringtune.files.digests import json_digest
from ringtune.files.strict import check_keys, read_value
from ringtune.schedule.operations.codes import CODES, block_row
from ringtune.schedule.operations.packing import pack, unpack


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchOperations:
    """The operations of one batch.

    Attributes:
        owner: whose batch.
        batch_id: which of its batches (``BatchStream.batch_id``).
        rows: per micro-batch the codes of all subnets, from block 0 on.
    """

    owner: str
    batch_id: int
    rows: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Operations:
    """A table of operations; a batch that it does not name is all full.

    Attributes:
        batches: each batch once.
        subnets: of each block; 1 = a block is one subnet.
    """

    batches: tuple[BatchOperations, ...] = ()
    subnets: int = 1
    _hash: int = field(default=0, init=False, repr=False, compare=False)
    _rows: dict[tuple[str, int], tuple[str, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Compute the hash once: a table is part of a course, which is in the key of many caches.

        Rows are looked up for every item. A cache outside would compare whole tables, where two are equal.
        """
        object.__setattr__(self, "_hash", hash((self.batches, self.subnets)))
        self._rows.update({(entry.owner, entry.batch_id): entry.rows for entry in self.batches})

    def __hash__(self) -> int:
        """The hash of all fields, computed once."""
        return self._hash

    def check(self, *, num_blocks: int, microbatches: int, batches: Mapping[str, int]) -> None:
        """Refuse a table that does not fit so many blocks, micro-batches, and batches of each owner.

        Raises:
            PlanError: a batch twice, an unknown owner, or a row of another length or with another code.
        """
        if self.subnets < 1:
            raise PlanError(f"operations have {self.subnets} subnets a block, it has to be at least 1")
        length, seen = num_blocks * self.subnets, set()
        for entry in self.batches:
            name = f"operations of batch {entry.batch_id} of owner {entry.owner}"
            if (entry.owner, entry.batch_id) in seen:
                raise PlanError(f"{name} stand twice")
            seen.add((entry.owner, entry.batch_id))
            if not 0 <= entry.batch_id < batches.get(entry.owner, 0):
                known = ", ".join(f"{owner} with {count}" for owner, count in batches.items())
                raise PlanError(f"{name} are of no batch of this run, whose owners have batches: {known}")
            if len(entry.rows) != microbatches:
                raise PlanError(f"{name} are for {len(entry.rows)} micro-batches, a batch has {microbatches}")
            for row in entry.rows:
                if len(row) != length or not CODES.issuperset(row):
                    raise PlanError(f"{name} have a row {row!r}, it has to be {length} of {', '.join(sorted(CODES))}")

    def rows_of(self, owner: str, batch_id: int) -> tuple[str, ...]:
        """The rows of one batch; empty = all full."""
        return self._rows.get((owner, batch_id), ())

    def block_rows(self) -> frozenset[tuple[str, str]]:
        """Every (owner, row of whole blocks) that the table has."""
        return _block_rows(self)

    # ---- files ------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Write the table as a JSON-able one; what several batches do alike is written once.

        ``rows`` has micro-batches, codes of each, and packed codes, in the order of first use. A batch is its owner,
        its id, and where in ``rows`` it stands.
        """
        places: dict[tuple[str, ...], int] = {}
        batches = [[entry.owner, entry.batch_id, places.setdefault(entry.rows, len(places))] for entry in self.batches]
        rows = [[len(each), len(each[0]) if each else 0, pack("".join(each))] for each in places]
        return {"subnets": self.subnets, "rows": rows, "batches": batches}

    @staticmethod
    def from_json(value: object, *, where: str = "operations") -> Operations:
        """Read what ``to_json`` wrote.

        Raises:
            PlanError: a field is missing or unknown, or codes are not readable.
        """
        if not isinstance(value, Mapping):
            raise PlanError(f"{where} has to be a table; plan anew")
        check_keys(value, ("subnets", "rows", "batches"), where=where, error=PlanError)
        subnets = read_value(int, value.get("subnets"), where=f"{where}.subnets", error=PlanError)
        entries, codes = value.get("batches"), value.get("rows")
        if not isinstance(entries, list):
            raise PlanError(f"{where}.batches has to be a list; plan anew")
        if not isinstance(codes, list):
            raise PlanError(f"{where}.rows has to be a list; plan anew")
        shared: dict[str, str] = {}
        rows = [_rows(each, shared, f"{where}.rows[{at}]") for at, each in enumerate(codes)]
        batches = tuple(_batch(entry, rows, f"{where}.batches[{at}]") for at, entry in enumerate(entries))
        if tuple(dict.fromkeys(entry.rows for entry in batches)) != tuple(rows):
            raise PlanError(f"{where}.rows have to be distinct and in the order in which batches use them; plan anew")
        return Operations(subnets=subnets, batches=batches)

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON form."""
        return json_digest(self.to_json())


@functools.lru_cache(maxsize=64)
def _block_rows(table: Operations) -> frozenset[tuple[str, str]]:
    return frozenset((entry.owner, block_row(row, table.subnets)) for entry in table.batches for row in entry.rows)


def _any_bool(*values: object) -> bool:
    return any(isinstance(value, bool) for value in values)


def _rows(value: object, shared: dict[str, str], where: str) -> tuple[str, ...]:
    match value:
        case [int(count), int(length), str(packed)] if min(count, length) > 0 and not _any_bool(count, length):
            codes = unpack(packed, count * length)
            found = (codes[at : at + length] for at in range(0, len(codes), length))
            return tuple(shared.setdefault(row, row) for row in found)
    raise PlanError(f"{where} is not [micro-batches, codes of each, packed codes]; plan anew")


def _batch(value: object, rows: Sequence[tuple[str, ...]], where: str) -> BatchOperations:
    match value:
        case [str(owner), int(batch_id), int(at)] if 0 <= at < len(rows) and not _any_bool(batch_id, at):
            return BatchOperations(owner=owner, batch_id=batch_id, rows=rows[at])
    raise PlanError(f"{where} is not [owner, batch id, place in rows], of {len(rows)}; plan anew")
