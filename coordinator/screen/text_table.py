"""Write tables as text: columns as wide as their widest cell, figures to the right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ringtune.texts import printable

MOST_CELL: Final = 200
"""Longest cell; what nodes say of themselves may be longer."""


def table_lines(titles: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Write a line of titles and one for each row.

    Args:
        titles: of the columns.
        rows: cells, as many as titles.
        left: so many first columns are aligned to the left, the others to the right.
    """
    every = [tuple(titles), *(tuple(printable(cell, most=MOST_CELL) for cell in row) for row in rows)]
    widths = [max(len(row[column]) for row in every) for column in range(len(titles))]
    return ["  ".join(_cell(cell, widths[i], i < left) for i, cell in enumerate(row)).rstrip() for row in every]


def _cell(text: str, width: int, to_left: bool) -> str:
    return text.ljust(width) if to_left else text.rjust(width)
