"""Which rows form which batch: pure functions of (seed, owner, counters), the same on every machine.

The composition of a batch depends on (seed, owner) only, so that a batch keeps its id and rows for the whole run, and
operation tables can be keyed by it; only the order of batches changes from pass to pass.
"""

from __future__ import annotations

import functools
from typing import Final

from ringtune.errors import DataError
from ringtune.schedule.rows.random_stream import RandomStream

_PASSES_AT_ONCE: Final = 128


def num_batches(rows: int, batch_size: int) -> int:
    """How many batches so many rows are; the last one need not be full."""
    return -(-rows // batch_size)


class BatchStream:
    """An owner's endless sequence of training batches.

    Every batch has exactly ``batch_size`` rows: the last one of a pass over the rows wraps around to the first rows. An
    owner with fewer rows has one batch, of all its rows: no batch has a row twice.

    Args:
        num_rows: rows of the owner.
        batch_size: rows of a batch, at most.
        seed: of the run.
        owner: its node name.

    Raises:
        DataError: no rows, or an empty batch.
    """

    def __init__(self, num_rows: int, batch_size: int, seed: int, owner: str) -> None:
        if num_rows < 1:
            raise DataError(f"owner {owner} has no rows; give it data or leave it out")
        if batch_size < 1:
            raise DataError(f"batch_size is {batch_size}, it has to be at least 1")
        self.num_rows = num_rows
        self.batch_size = min(batch_size, num_rows)
        self.num_batches = num_batches(num_rows, batch_size)
        self._seed = seed
        self._owner = owner
        self._latest: tuple[int, tuple[int, ...]] = (-1, ())  # a pass and its order; replaced as one, threads share it
        self._places: dict[int, dict[int, int]] = {}

    @functools.cached_property
    def _rows(self) -> tuple[int, ...]:
        return tuple(RandomStream("rows", self._seed, self._owner).permutation(self.num_rows))

    def batch_id(self, batch_index: int) -> int:
        """Which of the owner's ``num_batches`` fixed batches comes at this position of the stream.

        Each pass over the rows has every batch once. Positions may be asked in any order; neighbours are cheap.
        """
        pass_index, position = divmod(batch_index, self.num_batches)
        known, order = self._latest
        if pass_index != known:
            order = self._order(pass_index)
            self._latest = pass_index, order
        return order[position]

    def position(self, batch_id: int, pass_index: int) -> int:
        """The position of the stream at which a batch comes in a pass; the way back from ``batch_id``."""
        places = self._places.get(pass_index)
        if places is None:
            places = {batch: place for place, batch in enumerate(self._order(pass_index))}
            self._places[pass_index] = places
            if len(self._places) > _PASSES_AT_ONCE:
                self._places.pop(min(self._places), None)
        return pass_index * self.num_batches + places[batch_id]

    def _order(self, pass_index: int) -> tuple[int, ...]:
        return tuple(RandomStream("order", self._seed, self._owner, pass_index).permutation(self.num_batches))

    def rows(self, batch_index: int) -> tuple[int, ...]:
        """Row indices of the batch at this position of the stream; ``batch_size`` of them."""
        first = self.batch_id(batch_index) * self.batch_size
        return tuple(self._rows[(first + offset) % self.num_rows] for offset in range(self.batch_size))


def eval_rows(num_rows: int, batch_size: int, batch_index: int) -> tuple[int, ...]:
    """Row indices of an evaluation batch, in file order; the last batch may be short."""
    first = batch_index * batch_size
    return tuple(range(first, min(first + batch_size, num_rows)))
