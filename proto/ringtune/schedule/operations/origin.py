"""What decides which rows the batches of an operation table have: a table says nothing of other ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ringtune.errors import PlanError
from ringtune.files.strict import read_dataclass, read_value


@dataclass(frozen=True, kw_only=True, slots=True)
class TableOrigin:
    """The values of a run from which its batches and their micro-batches follow.

    Attributes:
        seed: of the run.
        batch_size: rows of one step.
        microbatches: of one batch.
        num_blocks: of the model.
        owners: (node, train rows) of each, sorted.
    """

    seed: int
    batch_size: int
    microbatches: int
    num_blocks: int
    owners: tuple[tuple[str, int], ...]

    def require(self, run: TableOrigin) -> None:
        """Refuse a run with other batches.

        Raises:
            PlanError: says which values differ.
        """
        before, now = self._values(), run._values()
        told = [
            f"{name} {before.get(name, 'none')}, not {now.get(name, 'none')}"
            for name in {**before, **now}
            if before.get(name) != now.get(name)
        ]
        if told:
            raise PlanError(f"the table is of a run with {'; '.join(told)}: its batches have other rows")

    def _values(self) -> dict[str, int]:
        numbers = {"seed": self.seed, "batch_size": self.batch_size, "microbatches": self.microbatches}
        owners = {f"train rows of owner {node}": rows for node, rows in self.owners}
        return {**numbers, "num_blocks": self.num_blocks, **owners}

    def to_json(self) -> dict[str, Any]:
        """Write it as a JSON-able table."""
        return {**dataclasses.asdict(self), "owners": dict(self.owners)}

    @staticmethod
    def from_json(value: object, *, where: str) -> TableOrigin:
        """Read what ``to_json`` wrote.

        Raises:
            PlanError: a field is missing, unknown, or of another type.
        """
        owners = value.get("owners") if isinstance(value, Mapping) else None
        if not isinstance(owners, Mapping):
            raise PlanError(f"{where} has to be an object with owners and their train rows; take another file")
        pairs = [
            (str(node), read_value(int, rows, where=f"{where}.owners.{node}", error=PlanError))
            for node, rows in sorted(owners.items())
        ]
        return read_dataclass(TableOrigin, value, where=where, error=PlanError, given={"owners": tuple(pairs)})
