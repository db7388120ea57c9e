"""What subnets count for a micro-batch, as nodes report it: numbers only."""

from __future__ import annotations

from typing import NamedTuple


class BlockScores(NamedTuple):
    """The scores of one block's subnets for one micro-batch.

    Attributes:
        owner: whose batch.
        batch_id: which of its batches.
        micro: which micro-batch of it.
        block: which block.
        values: for each score of ``Choice.scores``, in that order, one number for each subnet.
    """

    owner: str
    batch_id: int
    micro: int
    block: int
    values: tuple[tuple[float, ...], ...]
