"""Count the rows of a node's files before there is a job, as far as their form alone tells it."""

from __future__ import annotations

from pathlib import Path

from ringtune.files.tables import TABLE_SUFFIXES, table_rows
from ringtune.files.text_files import form_suffix
from ringtune.jobs.split import even_share


def count_rows(path: Path | None, share: tuple[int, int]) -> int | None:
    """Count one share of a table's rows; None for other files, which only a job's task tells how to read.

    Example: part 1 of 4 of 10 rows has the rows [2, 5), which are 3. A job with another split gives a node others.

    Args:
        path: of the file; None = there is none.
        share: which part of the rows: (index, number of parts).

    Raises:
        DataError: the file is not readable.
    """
    if path is None or form_suffix(path) not in TABLE_SUFFIXES:
        return None
    count, (index, parts) = sum(1 for _ in table_rows(path, {})), share
    return len(even_share(count, num_owners=parts, share=index))
