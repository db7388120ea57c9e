"""Operation tables: what each block does for each micro-batch of each batch.

====== ============ =============================================================================================
code   operation    meaning, for one micro-batch at one block
====== ============ =============================================================================================
1      full         forward, and backward where the block trains or passes a gradient on
2      forward-only the block contributes to the hidden state, but is no part of the graph: the gradient passes it
                    as it is, and its weights get none
3      shortcut     the block is the identity, for the hidden state and for its gradient
====== ============ =============================================================================================

With h the hidden state and b the block, 2 is ``h + (b(h) - h).detach()`` and 3 is ``h``. Embedding and head are always
full. A table speaks of train items only; evaluations and scores run every block. It is keyed by (owner, batch id), so
that a batch meets the same operations in every pass over the rows. For a model of four blocks and two micro-batches::

    owner a, batch 0:   1131   micro-batch 0 passes block 2 by
                        1211   micro-batch 1 runs block 1 without a graph

Source: D2FT, section II-A (full p_f, forward-only p_o, shortcut p_s, and the residual route past a subnet).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ringtune.errors import PlanError

FULL: Final = "1"
FORWARD_ONLY: Final = "2"
SHORTCUT: Final = "3"
CODES: Final = frozenset({FULL, FORWARD_ONLY, SHORTCUT})


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchOperations:
    """The operations of one batch.

    Attributes:
        owner: whose batch.
        batch_id: which of its batches (``BatchStream.batch_id``).
        rows: per micro-batch one code for each block, from block 0 on.
    """

    owner: str
    batch_id: int
    rows: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Operations:
    """A table of operations; a batch that it does not name is all full.

    Attributes:
        batches: each batch once.
    """

    batches: tuple[BatchOperations, ...] = ()

    def check(self, *, num_blocks: int, microbatches: int, batches: Mapping[str, int]) -> None:
        """Refuse a table that does not fit so many blocks, micro-batches, and batches of each owner.

        Raises:
            PlanError: a batch twice, an unknown owner, or a row of another length or with another code.
        """
        seen = set()
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
                if len(row) != num_blocks or not CODES.issuperset(row):
                    raise PlanError(
                        f"{name} have a row {row!r}, it has to be {num_blocks} of {', '.join(sorted(CODES))}"
                    )

    def by_batch(self) -> dict[tuple[str, int], tuple[str, ...]]:
        """The rows of each batch, by (owner, batch id)."""
        return {(entry.owner, entry.batch_id): entry.rows for entry in self.batches}
