"""What a node holds for a moment: pieces of what passes through it.

Measured by ``python -m tests.support.saving_memory``: a head with moments of 50 MB is saved, loaded, sent, taken over
and collected with 0 to 12 MB more than before, most of it messages of a link (4 MiB each) and buffers.
"""

from __future__ import annotations

from typing import Final

_MOST_PASSING_BYTES: Final = 12 << 20


def passing_bytes(moved_bytes: int) -> int:
    """Bytes that saving, loading, sending or taking over so many bytes holds besides them at most.

    Example: 12 MiB for a head of 100 MiB; for one of 1 MiB no more than 2 MiB, which is all of it twice.
    """
    return min(_MOST_PASSING_BYTES, 2 * moved_bytes)
