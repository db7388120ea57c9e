"""Rows of each owner and of each batch: pure functions of the seed, equal on every machine.

Random numbers are SHA-256 in counter mode, keyed by their purpose. All derived distributions are implemented here,
because ``random`` guarantees equal numbers across platforms and versions only for its basic generator, not for
``shuffle`` or distributions, and numpy and torch guarantee less.

The composition of a batch depends on (seed, owner) only, so that a batch keeps its id and rows for the whole run, and
operation tables can be keyed by it; only the order of batches changes from pass to pass.

With ``--local N`` the division of a file among owners depends on (seed, number of owners, rule), not on the number of
nodes, so that more nodes train the same batches.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import math
import struct
from collections import deque
from collections.abc import Sequence
from typing import Final

from ringtune.errors import DataError, JobError


class RandomStream:
    """A stream of random numbers for one purpose.

    ``key`` is the purpose, such as ``("order", seed, owner, pass_index)``; different keys give independent streams.
    """

    def __init__(self, *key: str | int) -> None:
        text = "".join(f"{len(str(part))}:{part}," for part in key)
        self._prefix = hashlib.sha256(text.encode()).digest()
        self._counter = 0
        self._words: list[int] = []

    def word(self) -> int:
        """Return the next number of 64 bits."""
        if not self._words:
            digest = hashlib.sha256(self._prefix + struct.pack("<Q", self._counter)).digest()
            self._words = list(reversed(struct.unpack("<4Q", digest)))
            self._counter += 1
        return self._words.pop()

    def below(self, bound: int) -> int:
        """Return a number in ``[0, bound)`` without bias, by rejection."""
        limit = (1 << 64) - (1 << 64) % bound
        while (word := self.word()) >= limit:
            continue
        return word % bound

    def uniform(self) -> float:
        """Return a number above 0 and at most 1, with 53 random bits."""
        return ((self.word() >> 11) + 0.5) / (1 << 53)

    def normal(self) -> float:
        """Return a standard normal number (Box-Muller)."""
        radius = math.sqrt(-2.0 * math.log(self.uniform()))
        return radius * math.cos(2.0 * math.pi * self.uniform())

    def log_gamma_variate(self, shape: float) -> float:
        """Return the logarithm of a gamma-distributed number; the number itself underflows for tiny shapes.

        Source: Marsaglia and Tsang 2000; shapes below 1 by ``gamma(a) = gamma(a + 1) * u ** (1 / a)``.
        """
        if shape < 1:
            return self.log_gamma_variate(shape + 1) + math.log(self.uniform()) / shape
        d = shape - 1 / 3
        c = 1 / math.sqrt(9 * d)
        while True:
            x = self.normal()
            v = (1 + c * x) ** 3
            if v > 0 and math.log(self.uniform()) < 0.5 * x * x + d - d * v + d * math.log(v):
                return math.log(d) + math.log(v)

    def dirichlet(self, alpha: float, size: int) -> tuple[float, ...]:
        """Return shares with sum 1 from a symmetric Dirichlet distribution, more uneven for smaller ``alpha``."""
        logs = [self.log_gamma_variate(alpha) for _ in range(size)]
        largest = max(logs)
        weights = [math.exp(value - largest) for value in logs]
        total = math.fsum(weights)
        return tuple(weight / total for weight in weights)

    def permutation(self, size: int) -> tuple[int, ...]:
        """Return the numbers of ``[0, size)`` in random order (Fisher-Yates)."""
        order = list(range(size))
        for last in range(size - 1, 0, -1):
            other = self.below(last + 1)
            order[last], order[other] = order[other], order[last]
        return tuple(order)


_PASSES_AT_ONCE: Final = 128


def num_batches(rows: int, batch_size: int) -> int:
    """Number of batches of ``rows`` rows; the last one may be short."""
    return -(-rows // batch_size)


class BatchStream:
    """An owner's infinite sequence of training batches; raises ``DataError``.

    Every batch has exactly ``batch_size`` rows: the last one of a pass is filled up with the first rows. An owner with
    fewer rows has one batch, of all its rows, so that no batch has a row twice.
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
        self._latest: tuple[int, tuple[int, ...]] = (-1, ())  # pass, order; replaced as one, as threads share it
        self._places: dict[int, dict[int, int]] = {}

    @functools.cached_property
    def _rows(self) -> tuple[int, ...]:
        return tuple(RandomStream("rows", self._seed, self._owner).permutation(self.num_rows))

    def batch_id(self, batch_index: int) -> int:
        """Return the id, below ``num_batches``, of the batch at this position of the stream.

        Each pass over the rows has every batch once. Positions may be asked for in any order; those of one pass are
        fast.
        """
        pass_index, position = divmod(batch_index, self.num_batches)
        known, order = self._latest
        if pass_index != known:
            order = self._order(pass_index)
            self._latest = pass_index, order
        return order[position]

    def position(self, batch_id: int, pass_index: int) -> int:
        """Return the position of a batch in the stream, in a pass; the inverse of ``batch_id``."""
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
        """Return the ``batch_size`` row indices of the batch at this position of the stream."""
        first = self.batch_id(batch_index) * self.batch_size
        return tuple(self._rows[(first + offset) % self.num_rows] for offset in range(self.batch_size))


def eval_rows(num_rows: int, batch_size: int, batch_index: int) -> tuple[int, ...]:
    """Row indices of an evaluation batch, in file order; the last batch may be short."""
    first = batch_index * batch_size
    return tuple(range(first, min(first + batch_size, num_rows)))


def pack_rows(lengths: Sequence[int], size: int) -> tuple[tuple[int, ...], ...]:
    """Pack rows into sequences of at most ``size`` tokens; no row is cut; raises ``DataError``.

    The longest row is taken first, and goes to the sequence with the least room that is enough (best fit decreasing);
    equal rows in their order, and of equal sequences to the one that has waited longest. The rows of a sequence are in
    ascending order.

    Example: lengths 3, 6, 2, 5 with 8 tokens give (1, 2) and (0, 3).

    Source: Ding et al. 2024, "Fewer truncations improve language modeling".
    """
    sequences: list[list[int]] = []
    room: dict[int, deque[int]] = {}  # tokens that are left -> sequences
    rooms: list[int] = []  # keys of ``room``, ascending
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        if lengths[row] > size:
            raise DataError(f"a row has {lengths[row]} tokens, a sequence has {size}; cut the row")
        place = bisect.bisect_left(rooms, lengths[row])
        if place < len(rooms):
            left = rooms[place]
            sequence = room[left].popleft()
            if not room[left]:
                del room[left], rooms[place]
        else:
            left, sequence = size, len(sequences)
            sequences.append([])
        sequences[sequence].append(row)
        left -= lengths[row]
        if left not in room:
            room[left] = deque()
            bisect.insort(rooms, left)
        room[left].append(sequence)
    return tuple(tuple(sorted(rows)) for rows in sequences)


SPLITS: Final = "'iid' or 'dirichlet:ALPHA' with ALPHA above 0"


def split_alpha(split: str) -> float | None:
    """Return ALPHA of ``dirichlet:ALPHA``, None for ``iid``; raises ``JobError`` for another text."""
    if split == "iid":
        return None
    kind, colon, text = split.partition(":")
    try:
        alpha = float(text) if kind == "dirichlet" and colon else 0.0
    except ValueError:
        alpha = 0.0
    if not 0 < alpha < float("inf"):
        raise JobError(f"data.split is {split!r}, it has to be {SPLITS}")
    return alpha


def even_share(num_rows: int, *, num_owners: int, share: int) -> range:
    """Rows of one even share; the shares cover all rows, and their sizes differ by at most one.

    Example: share 1 of 4 of 10 rows has the rows [2, 5).
    """
    return range(num_rows * share // num_owners, num_rows * (share + 1) // num_owners)


def hold_out(num_rows: int, *, share: float, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Divide the rows of a file into training and evaluation rows, before they are divided among owners.

    The rows are drawn by the seed, so that they are equal on every machine and in a resumed run. Both are indices,
    ascending; with a share above 0 each has at least one.

    Example: a share of 0.1 of 500 rows gives 450 training and 50 evaluation rows.
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
    num_rows: int, *, num_owners: int, share: int, seed: int, split: str = "iid", labels: Sequence[str] | None = None
) -> tuple[int, ...]:
    """Return the row indices of one share, ascending; shares are disjoint, not empty, and cover all rows.

    ``split`` is ``iid`` (sizes differ by at most one) or ``dirichlet:ALPHA`` (shares drawn for each class, which needs
    the labels of all rows).
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
    """Divide the rows of each class in proportions drawn from a Dirichlet distribution.

    An owner without a row gets one from the largest share.

    Source: Hsu et al. 2019, "Measuring the effects of non-identical data distribution".
    """
    shares: list[list[int]] = [[] for _ in range(num_owners)]
    for name in sorted(set(labels)):
        stream = RandomStream("dirichlet", seed, name)
        rows = [row for row, label in enumerate(labels) if label == name]
        order = stream.permutation(len(rows))
        weights = [round(proportion * 2**32) for proportion in stream.dirichlet(alpha, num_owners)]
        running = [0, *itertools.accumulate(weights)]
        bounds = [len(rows) * part // running[-1] for part in running]
        for owner, (start, stop) in enumerate(itertools.pairwise(bounds)):
            shares[owner] += [rows[position] for position in order[start:stop]]
    for share in shares:
        if not share:
            largest = max(range(num_owners), key=lambda owner: (len(shares[owner]), -owner))
            share.append(shares[largest].pop())
    return [tuple(sorted(share)) for share in shares]
