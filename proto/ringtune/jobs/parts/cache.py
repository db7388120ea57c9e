"""The section of a job that lets hosts keep hidden states of rows that come again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ringtune.errors import JobError
from ringtune.jobs.sections import AUTO, check_choice
from ringtune.schedule.passage import DEFAULT_MAX_BYTES, EXACT, ROUNDED, PrefixCache

OFF: Final = "off"
_PREFIXES: Final = (OFF, AUTO)
_DTYPES: Final = (EXACT, ROUNDED)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSettings:
    """``[cache]``: hidden states that hosts keep of rows that come again, where the blocks below stay frozen.

    Attributes:
        prefix: off, or auto = each host keeps on its disk what enters its slice where that saves work; hosts then keep
            hidden states of rows of others until the run ends.
        max_bytes: bytes that a host keeps at most; rows count as if they had ``train.max_length`` tokens.
        dtype: number type in which they are kept; float32 changes no result, bfloat16 takes half the room and rounds.
    """

    prefix: str = OFF
    max_bytes: int = DEFAULT_MAX_BYTES
    dtype: str = EXACT

    def __post_init__(self) -> None:
        """Refuse an unknown word, and a negative limit."""
        check_choice("cache.prefix", self.prefix, _PREFIXES)
        check_choice("cache.dtype", self.dtype, _DTYPES)
        if self.max_bytes < 0:
            raise JobError(f"cache.max_bytes is {self.max_bytes}, it has to be at least 0")

    def of_placement(self, computed: str) -> PrefixCache | None:
        """How hosts keep hidden states, where these are computed in a type; None if they do not."""
        if self.prefix == OFF:
            return None
        return PrefixCache(max_bytes=self.max_bytes, dtype=self.dtype if self.dtype == ROUNDED else computed)
