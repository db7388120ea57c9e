"""A node's memory as a sum of terms: so many equal things of so many bytes each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from ringtune.quantities import format_bytes

PART_WORDS: Final = {
    "weights": "hosted blocks, and an owner's embedding, that do not train, or all that trains in full training",
    "adapters": "the adapters of hosted blocks, with earlier versions of them, and those that are fitted for others",
    "optimizer": "gradients and moments of what trains, without an adapter run's head",
    "activations": "what forwards keep for their backwards, and the work space of a block",
    "head": "an owner's head, and the work space of its loss",
    "data": "an owner's rows and tokenizer, and operation tables",
    "buffers": "tensors that are on their way or wait",
    "device": "what CUDA takes of an accelerator besides tensors: context, code of kernels, work space of cuBLAS",
    "kept": "what trained, as it was at the ends of the last turns, and copies of the host before in the ring",
    "passing": "what is there for a moment: work space of an update, pieces of what is saved or handed over",
}
"""What a node's memory is reported by, with its meaning."""

PARTS: Final = tuple(PART_WORDS)
"""The names of these parts, in the order of a report."""


class Term(NamedTuple):
    """So many equal things in memory at once.

    Attributes:
        part: one of ``PARTS``.
        what: in words.
        number: how many.
        each_bytes: of one.
    """

    part: str
    what: str
    number: int
    each_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all these things together: ``number * each_bytes``."""
        return self.number * self.each_bytes


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """What one node holds at the moment of the run when it holds most.

    Attributes:
        terms: everything, none of them counted twice.
    """

    terms: tuple[Term, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of all terms together."""
        return sum(term.number * term.each_bytes for term in self.terms)

    def parts(self) -> dict[str, int]:
        """Bytes by part, in the order of ``PARTS``."""
        found = dict.fromkeys(PARTS, 0)
        for term in self.terms:
            found[term.part] += term.total_bytes
        return found

    def __str__(self) -> str:
        """Print the total and its parts: ``4.0 MiB (weights 3.0 MiB, head 1.0 MiB)``."""
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.parts().items() if size)
        return f"{format_bytes(self.total_bytes)} ({parts})"
