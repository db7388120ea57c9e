"""Rows that a node counts before there is a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge.data.row_count import count_rows
from ringtune.errors import DataError


def test_count_rows_of_a_table_is_that_of_its_share(tmp_path: Path) -> None:
    """Ten records, one over two lines, are shared by four nodes as 2, 3, 2 and 3."""
    table = tmp_path / "rows.csv"
    table.write_text("text,label\n" + "good,a\n" * 9 + '"two\nlines",b\n', encoding="utf-8")
    assert count_rows(table, (0, 1)) == 10
    assert [count_rows(table, (index, 4)) for index in range(4)] == [2, 3, 2, 3]
    lines = tmp_path / "rows.jsonl"
    lines.write_text('{"text": "a"}\n\n{"text": "b"}\n', encoding="utf-8")
    assert count_rows(lines, (0, 1)) == 2


def test_count_rows_leaves_other_forms_to_the_task(tmp_path: Path) -> None:
    """A plain text has as many rows as a job's length makes of it; no file has none."""
    text = tmp_path / "all.txt"
    text.write_text("to be or not to be", encoding="utf-8")
    assert count_rows(text, (0, 1)) is None
    assert count_rows(tmp_path, (0, 1)) is None
    assert count_rows(None, (0, 1)) is None


def test_count_rows_refuses_what_no_run_could_read(tmp_path: Path) -> None:
    """A node says so when it starts."""
    broken = tmp_path / "rows.jsonl"
    broken.write_text("not json\n", encoding="utf-8")
    with pytest.raises(DataError, match="line 1: it is not JSON"):
        count_rows(broken, (0, 1))
