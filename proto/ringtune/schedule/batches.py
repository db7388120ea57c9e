"""Which rows form which batch: pure functions of (seed, owner, counters), the same on every machine.

Shares of a split depend on (seed, number of shares, rule) only; the composition of a batch on (seed,
owner) only, so that a batch keeps its id and rows for the whole run and later parts (operation tables,
activation caches) can be keyed by it; only the order of batches changes from epoch to epoch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ringtune.errors import DataError
from ringtune.jobs.sections import split_alpha
from ringtune.schedule.random_stream import RandomStream


def split_rows(
    num_rows: int,
    *,
    num_owners: int,
    share: int,
    seed: int,
    split: str = "iid",
    labels: Sequence[str] | None = None,
) -> tuple[int, ...]:
    """Row indices of one share, ascending; the shares of a split are disjoint and cover all rows.

    Args:
        num_rows: rows of the whole file.
        num_owners: number of shares.
        share: which one, in ``[0, num_owners)``.
        seed: of the run.
        split: ``iid`` (sizes differ by one at most) or ``dirichlet:ALPHA`` (class shares drawn per class).
        labels: class name of every row; needed for dirichlet.

    Returns:
        At least one row.

    Raises:
        DataError: fewer rows than owners, no such share, or labels are missing.
        JobError: an unknown rule.
    """
    if not 0 <= share < num_owners:
        raise DataError(f"share {share} is not in [0, {num_owners})")
    if num_rows < num_owners:
        raise DataError(f"{num_rows} rows can't be shared by {num_owners} owners; give more rows or fewer owners")
    alpha = split_alpha(split)
    if alpha is None:
        order = RandomStream("split", seed).permutation(num_rows)
        start, stop = (num_rows * index // num_owners for index in (share, share + 1))
        return tuple(sorted(order[start:stop]))
    if labels is None or len(labels) != num_rows:
        raise DataError(f"a dirichlet split needs the label of each of the {num_rows} rows")
    return _dirichlet_shares(labels, num_owners, alpha, seed)[share]


def _dirichlet_shares(labels: Sequence[str], num_owners: int, alpha: float, seed: int) -> list[tuple[int, ...]]:
    """Deal the rows of each class out in proportions drawn from a Dirichlet distribution.

    An owner left without a row gets one from the largest share, because an owner without data is none.

    Source: Hsu et al. 2019, "Measuring the effects of non-identical data distribution".
    """
    shares: list[list[int]] = [[] for _ in range(num_owners)]
    for name in sorted(set(labels)):
        stream = RandomStream("dirichlet", seed, name)
        rows = [row for row, label in enumerate(labels) if label == name]
        order = stream.permutation(len(rows))
        bounds = _cumulative(stream.dirichlet(alpha, num_owners), len(rows))
        for owner, (start, stop) in enumerate(itertools.pairwise(bounds)):
            shares[owner] += [rows[position] for position in order[start:stop]]
    for share in shares:
        if not share:
            largest = max(range(num_owners), key=lambda owner: (len(shares[owner]), -owner))
            share.append(shares[largest].pop())
    return [tuple(sorted(share)) for share in shares]


def _cumulative(proportions: Sequence[float], total: int) -> list[int]:
    """Bounds ``0 .. total`` that cut a list in these proportions.

    Proportions are rounded to 2**-32 first, so that a last digit that differs between two machines'
    mathematical libraries does not move a row.
    """
    weights = [round(proportion * 2**32) for proportion in proportions]
    running = [0, *itertools.accumulate(weights)]
    return [total * part // running[-1] for part in running]


class BatchStream:
    """An owner's endless sequence of training batches.

    Every batch has exactly ``batch_size`` rows: the last one of an epoch wraps around to the first rows.

    Args:
        num_rows: rows of the owner.
        batch_size: rows of a batch.
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
        self.batch_size = batch_size
        self.num_batches = -(-num_rows // batch_size)
        self._seed = seed
        self._owner = owner
        self._rows = RandomStream("rows", seed, owner).permutation(num_rows)
        self._epoch = -1
        self._order: tuple[int, ...] = ()

    def batch_id(self, batch_index: int) -> int:
        """Which of the owner's ``num_batches`` fixed batches comes at this position of the stream.

        Each epoch passes every batch once. Positions may be asked in any order; neighbours are cheap.
        """
        epoch, position = divmod(batch_index, self.num_batches)
        if epoch != self._epoch:
            self._order = RandomStream("order", self._seed, self._owner, epoch).permutation(self.num_batches)
            self._epoch = epoch
        return self._order[position]

    def rows(self, batch_index: int) -> tuple[int, ...]:
        """Row indices of the batch at this position of the stream; ``batch_size`` of them."""
        first = self.batch_id(batch_index) * self.batch_size
        return tuple(self._rows[(first + offset) % self.num_rows] for offset in range(self.batch_size))


def eval_rows(num_rows: int, batch_size: int, batch_index: int) -> tuple[int, ...]:
    """Row indices of an evaluation batch: in file order, the last one may be short."""
    first = batch_index * batch_size
    return tuple(range(first, min(first + batch_size, num_rows)))
