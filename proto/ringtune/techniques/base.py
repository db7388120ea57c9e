"""A technique as others see it."""

from __future__ import annotations

from typing import NamedTuple


class DiskTerm(NamedTuple):
    """What a run keeps in a node's folder.

    Attributes:
        what: in words, in the plural.
        size_bytes: at most.
        remedy: how to do without.
    """

    what: str
    size_bytes: int
    remedy: str
