"""Random numbers that are the same on every platform and Python version.

``random`` promises that only for its basic generator, not for ``shuffle`` or the distributions, and
numpy and torch promise less. So numbers come from SHA-256 in counter mode, keyed by what they are for,
and everything derived from them is written out here.
"""

from __future__ import annotations

import hashlib
import math
import struct


class RandomStream:
    """A stream of random numbers for one purpose.

    Args:
        key: what the numbers are for, e.g. ``("order", seed, owner, epoch)``; another key, other numbers.
    """

    def __init__(self, *key: str | int) -> None:
        text = "".join(f"{len(str(part))}:{part}," for part in key)
        self._prefix = hashlib.sha256(text.encode()).digest()
        self._counter = 0
        self._words: list[int] = []

    def word(self) -> int:
        """The next number of 64 bits."""
        if not self._words:
            digest = hashlib.sha256(self._prefix + struct.pack("<Q", self._counter)).digest()
            self._words = list(reversed(struct.unpack("<4Q", digest)))
            self._counter += 1
        return self._words.pop()

    def below(self, bound: int) -> int:
        """A number in ``[0, bound)``, without bias (the uneven rest of the 64-bit range is drawn again)."""
        limit = (1 << 64) - (1 << 64) % bound
        while (word := self.word()) >= limit:
            continue
        return word % bound

    def uniform(self) -> float:
        """A number in (0, 1) with 53 random bits, never 0."""
        return ((self.word() >> 11) + 0.5) / (1 << 53)

    def normal(self) -> float:
        """A standard normal number (Box-Muller)."""
        radius = math.sqrt(-2.0 * math.log(self.uniform()))
        return radius * math.cos(2.0 * math.pi * self.uniform())

    def permutation(self, size: int) -> tuple[int, ...]:
        """The numbers of ``[0, size)`` in random order (Fisher-Yates)."""
        order = list(range(size))
        for last in range(size - 1, 0, -1):
            other = self.below(last + 1)
            order[last], order[other] = order[other], order[last]
        return tuple(order)
