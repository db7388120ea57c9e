"""Tables of an owner: what a file has before its header, and where errors say it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringtune.errors import DataError
from ringtune.files.tables import read_table


def test_table_may_begin_with_empty_lines(tmp_path: Path) -> None:
    """As it may have some between its rows; numbers of lines stay those of the file."""
    path = tmp_path / "rows.csv"
    path.write_text("\n\ntext,label\na,b\n\nc,d\n")
    rows = read_table(path, {"data.text": "text"})
    assert rows == [(4, {"text": "a", "label": "b"}), (6, {"text": "c", "label": "d"})]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("\ntext;label\na;b\n", r"rows\.csv, line 2 is separated by semicolons"),
        ("\n\ntext,text\na,b\n", r"rows\.csv, line 3 has the column 'text' twice"),
        ("\n\n", r"rows\.csv has no rows"),
    ],
)
def test_table_names_the_line_of_its_header(tmp_path: Path, content: str, message: str) -> None:
    """Which is not always the first one."""
    path = tmp_path / "rows.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        read_table(path, {"data.text": "text"})
