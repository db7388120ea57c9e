"""Which rows of one file each owner gets with ``--local N``: a pure function of (seed, number of owners, rule).

The shares never depend on the number of nodes, so that more nodes train the same batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ringtune.errors import DataError, JobError
from ringtune.schedule.rows.random_stream import RandomStream


def split_alpha(split: str) -> float | None:
    """The concentration of ``dirichlet:ALPHA``; None for ``iid``.

    Raises:
        JobError: neither of the two.
    """
    if split == "iid":
        return None
    kind, colon, text = split.partition(":")
    try:
        alpha = float(text) if kind == "dirichlet" and colon else 0.0
    except ValueError:
        alpha = 0.0
    if not 0 < alpha < float("inf"):
        raise JobError(f"data.split is {split!r}, it has to be 'iid' or 'dirichlet:ALPHA' with ALPHA above 0")
    return alpha


def even_share(num_rows: int, *, num_owners: int, share: int) -> range:
    """Rows of one even share; the shares cover all rows and differ by one row at most.

    Example: share 1 of 4 of 10 rows has the rows [2, 5).
    """
    return range(num_rows * share // num_owners, num_rows * (share + 1) // num_owners)


def hold_out(num_rows: int, *, share: float, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Divide the rows of a file into those to train on and those to evaluate on, before owners share them out.

    The rows are drawn by the seed, so that the same rows are held out on every machine and in a resumed run.

    Example: 0.1 of 500 rows leaves 450 to train on and holds 50 out.

    Args:
        num_rows: rows of the whole file.
        share: of the rows that are held out, as ``data.held_out``.
        seed: of the run.

    Returns:
        Indices of both, ascending; of a share above 0 at least one row each.

    Raises:
        DataError: there are not two rows.
    """
    if not share:
        return tuple(range(num_rows)), ()
    if num_rows < 2:
        raise DataError(
            f"data.held_out = {share:g} needs a row to train on and one to hold out, and rows = {num_rows}; give more "
            "rows, or set data.held_out = 0"
        )
    count = min(max(1, round(num_rows * share)), num_rows - 1)
    order = RandomStream("held out", seed).permutation(num_rows)
    return tuple(sorted(order[count:])), tuple(sorted(order[:count]))


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
        rows = f"{num_rows} row{'s' if num_rows != 1 else ''}"
        raise DataError(f"{rows} can't be shared by {num_owners} owners; give more rows or fewer owners")
    alpha = split_alpha(split)
    if alpha is None:
        order = RandomStream("split", seed).permutation(num_rows)
        return tuple(sorted(order[place] for place in even_share(num_rows, num_owners=num_owners, share=share)))
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
