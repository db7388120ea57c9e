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
        key: what the numbers are for, e.g. ``("order", seed, owner, pass_index)``; another key, other numbers.
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
        """A number above 0 and at most 1, with 53 random bits."""
        return ((self.word() >> 11) + 0.5) / (1 << 53)

    def normal(self) -> float:
        """A standard normal number (Box-Muller)."""
        radius = math.sqrt(-2.0 * math.log(self.uniform()))
        return radius * math.cos(2.0 * math.pi * self.uniform())

    def log_gamma_variate(self, shape: float) -> float:
        """The logarithm of a gamma-distributed number; logarithms, because tiny shapes underflow.

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
        """Shares that sum to 1, from the symmetric Dirichlet distribution; small ``alpha``, uneven shares."""
        logs = [self.log_gamma_variate(alpha) for _ in range(size)]
        largest = max(logs)
        weights = [math.exp(value - largest) for value in logs]
        total = math.fsum(weights)
        return tuple(weight / total for weight in weights)

    def permutation(self, size: int) -> tuple[int, ...]:
        """The numbers of ``[0, size)`` in random order (Fisher-Yates)."""
        order = list(range(size))
        for last in range(size - 1, 0, -1):
            other = self.below(last + 1)
            order[last], order[other] = order[other], order[last]
        return tuple(order)
