"""Where the micro-batches of an item enter the ring, and where their hidden state is kept for a later visit.

::

    slices a [0,2)  b [2,4)  c [4,6)   owner o   the blocks [0, 5) are frozen

    first visit, keeps 4    o | E  >h0@a      a | <h0 f f >h2@b    b | <h2 f f >h4@c    c | <h4  W  f F >h6@o
    later visit, enters 4   o |               a |                  b |                  c | R  f F >h6@o

The coordinator decides it when it grants a turn, and the turn says it of each of its items; nodes and simulator go by
that. So whoever lost what it kept is no longer counted on from the next turn on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from ringtune.errors import PlanError
from ringtune.schedule.actions import Leg, Op

EXACT: Final = "float32"
ROUNDED: Final = "bfloat16"
ITEM_BYTES: Final = {"float64": 8, EXACT: 4, ROUNDED: 2}
"""Bytes of a number, for each type in which hidden states are kept."""

DEFAULT_MAX_BYTES: Final = 1 << 30


class Passage(NamedTuple):
    """Where every micro-batch of an item enters the ring, and where it is kept; 0 = at the embedding, and nowhere.

    Attributes:
        enters: the boundary at which its host reads the hidden state that it has kept.
        keeps: the boundary at which its host keeps the hidden state.
    """

    enters: int = 0
    keeps: int = 0


WHOLE: Final = Passage()
"""The passage of an item whose micro-batches are embedded, and not kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixCache:
    """How hosts keep hidden states that enter their slices, of rows that come again.

    Attributes:
        max_bytes: that a host keeps at most.
        dtype: in which it keeps them, one of ``ITEM_BYTES``; that of the computation changes no result.
    """

    max_bytes: int = DEFAULT_MAX_BYTES
    dtype: str = EXACT

    def __post_init__(self) -> None:
        """Refuse a limit that is negative, and an unknown dtype.

        Raises:
            PlanError: names it.
        """
        if self.max_bytes < 0:
            raise PlanError(f"the cache's max_bytes is {self.max_bytes}, it has to be at least 0")
        if self.dtype not in ITEM_BYTES:
            raise PlanError(f"the cache's dtype {self.dtype!r} is not one of {', '.join(ITEM_BYTES)}")


def passage_at(passages: Sequence[Passage], offset: int) -> Passage:
    """The passage of the item at a position of its turn; every one is whole where the turn says nothing."""
    return passages[offset] if passages else WHOLE


def check_passage(passage: Passage, highest: int) -> None:
    """Refuse a passage that no coordinator decides.

    Args:
        passage: of an item.
        highest: the highest boundary below which nothing gets a gradient, and above which there is a block.

    Raises:
        PlanError: it is beyond that, or the micro-batch is kept where it does not pass.
    """
    if not (0 <= passage.enters <= highest and 0 <= passage.keeps <= highest) or (passage.enters and passage.keeps):
        raise PlanError(
            f"an item enters at block {passage.enters} and is kept at block {passage.keeps}, but the frozen blocks of "
            f"its way end at {highest}; use one version on all machines"
        )


def with_cache(parts: Iterable[Leg], passage: Passage) -> Iterator[Leg]:
    """Yield a segment's forward legs, and where its input of one block is read or kept."""
    for leg in parts:
        for op, boundary in ((Op.READ, passage.enters), (Op.KEEP, passage.keeps)):
            if boundary and leg.start == boundary:
                yield Leg(op, boundary, boundary + 1)
        yield leg
