"""Tables as people have them: every form gives the same rows, and all that is wrong is told at once, by its lines."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import time
import tracemalloc
import zipfile
from pathlib import Path

import pytest

from ringtune.config.sections import Data
from ringtune.errors import DataError
from ringtune.job.rows import read_rows
from ringtune.models.family import CLASSIFICATION
from ringtune.storage import tables, text_files
from ringtune.storage.tables import Record, RowAccount, table_rows
from tests.support.cases import cases

ROWS = [("größer, als; gedacht", "gut"), ('ein "Wort"\nund noch eins', "schlecht"), ("x\ty|z", "gut")] * 2
COLUMNS = {"data.text": "text"}


def read(path: Path, columns: dict[str, str] | None = None) -> tuple[list[Record], RowAccount]:
    """Read a table, with its account."""
    account = RowAccount(path)
    return list(table_rows(path, COLUMNS if columns is None else columns, account)), account


def csv_text(separator: str = ",", *, line_end: str = "\n") -> str:
    """The rows under a header, as text with a separator."""
    file = io.StringIO(newline="")
    writer = csv.writer(file, delimiter=separator, lineterminator=line_end)
    writer.writerows([("text", "label"), *ROWS])
    return file.getvalue()


@cases("packed", [False, True])
@cases("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
@cases("separator", [",", ";", "\t", "|"])
def test_table_is_the_same_in_every_form(tmp_path: Path, separator: str, encoding: str, packed: bool) -> None:
    """Separator, encoding, line ends, ``sep=``, suffix and gzip are found; what is no comma and no UTF-8 is told."""
    for suffix in (".csv", ".tsv"):
        for first, line_end in (("", "\n"), ("", "\r\n"), (f"sep={separator}\r\n", "\r\n")):
            content = (first + csv_text(separator, line_end=line_end)).encode(encoding)
            path = tmp_path / f"rows{suffix}{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(content) if packed else content)
            rows, account = read(path)
            assert [(row["text"], row["label"]) for _, row in rows] == ROWS
            assert not account.problems()
            told = " ".join(account.notes)
            assert ("Windows-1252" in told, "UTF-16" in told) == (encoding == "cp1252", encoding == "utf-16")
            if not first:
                assert ("between its columns" in told) is (separator != ("\t" if suffix == ".tsv" else ","))


def test_table_of_a_list_is_that_of_its_lines(tmp_path: Path) -> None:
    """Whatever its line ends; a row has the line in which it begins, and what is wrong in one leaves the others."""
    rows = [{"text": text, "label": label} for text, label in ROWS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    wanted = [row for _, row in read(tmp_path / "rows.jsonl")[0]]
    for suffix, indent, encoding in ((".json", 1, "utf-8-sig"), (".json", None, "utf-16"), (".json.gz", 2, "utf-8")):
        content = f"\n{json.dumps(rows, indent=indent)}\r\n".encode(encoding)
        path = tmp_path / f"rows{suffix}"
        path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
        found, account = read(path)
        assert [row for _, row in found] == wanted and not account.problems()
        assert [line for line, _ in found] == ([2] * 6 if indent is None else [*range(3, 27, 4)])
    path = tmp_path / "bad.json"
    for text, message in (
        ('{"text": "x"}', "is no list; write .* or an object a line in a .jsonl file"),
        (
            '[{"text": "x"},\n7,\n{"text": "y", "text": "z"}]',
            "2 rows .*JSON object in line 2; .*'text' twice in line 3",
        ),
        ('[{"text": "x"}\n{"text": "y"}]', "line 2: .*a comma or the end of the list is missing"),
        ('[{"text": "x"}]\n[]', "line 1: .*a comma or the end of the list is missing"),
        ('[{"text": "x"},\n', "line 2: it is not JSON: Expecting value; correct it; what follows is not read"),
        ('[{"text": "x"},]', "line 1: it is not JSON: "),
        ('[{"label": "x"}]', "has no column 'text'"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            list(table_rows(path, COLUMNS))
    path.write_text(" [ ] ")
    assert read(path)[0] == []


def test_table_of_a_spreadsheet_is_that_of_its_csv(tmp_path: Path) -> None:
    """Empty rows and cells, numbers and dates are as in a csv file; other sheets are told."""
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    for row in (("text", "label"), (), *ROWS, ("einer", 7)):
        book.active.append(row)
    book.create_sheet("Notizen").append(("x",))
    book.save(tmp_path / "rows.xlsx")
    rows, account = read(tmp_path / "rows.xlsx")
    assert [(row["text"], row["label"]) for _, row in rows] == [*ROWS, ("einer", "7")]
    assert [line for line, _ in rows][:2] == [3, 4]
    assert account.notes == [f"{tmp_path / 'rows.xlsx'}: only the sheet 'Sheet' is read, not 'Notizen'"]
    (tmp_path / "no.xlsx").write_bytes(b"PK\x03\x04")
    name, content = "xl/worksheets/sheet1.xml", bytearray((tmp_path / "rows.xlsx").read_bytes())
    with zipfile.ZipFile(tmp_path / "rows.xlsx") as archive:
        at = archive.getinfo(name).header_offset + 30 + len(name)
    content[at : at + 4] = b"\xff" * 4  # no block that can be unpacked
    (tmp_path / "torn.xlsx").write_bytes(content)
    for damaged in ("no", "torn"):
        with pytest.raises(DataError, match=rf"{damaged}\.xlsx is no readable spreadsheet"):
            read(tmp_path / f"{damaged}.xlsx")


def test_packed_table_may_be_padded_but_not_without_end(tmp_path: Path) -> None:
    """A sparse file ends with any number of zeros, and Python's reader takes them one by one, as a name in a header."""
    path, content = tmp_path / "rows.csv.gz", gzip.compress(csv_text(",").encode())
    path.write_bytes(content + bytes(500))
    assert [(row["text"], row["label"]) for _, row in read(path)[0]] == ROWS
    with path.open("r+b") as file:
        file.truncate(1 << 32)
    told = r"\(more than 65,536 zeros follow it, or its name is longer\); pack it again"
    with pytest.raises(DataError, match=told):
        read(path)
    path.write_bytes(content[:3] + b"\x08" + content[4:10] + b"n" * 100_000 + b"\0" + content[10:])
    with pytest.raises(DataError, match=told):
        read(path)


@pytest.mark.parametrize(("limit", "place"), [("ROWS", (9, 1)), ("CELLS", (2, 99)), ("BYTES", (2, 1))])
def test_spreadsheet_that_stands_for_far_more_than_its_bytes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, place: tuple[int, int]
) -> None:
    """A cell far away, which may stand for two billion empty rows in a kilobyte, and packed texts."""
    openpyxl = pytest.importorskip("openpyxl")
    path, book = tmp_path / "far.xlsx", openpyxl.Workbook()
    book.active.append(("text", "label"))
    book.active.cell(*place, "x" * 1000)
    book.save(path)
    assert read(path)[1].columns == ("text", "label")
    monkeypatch.setattr(tables, f"_MAX_SHEET_{limit}", 8)
    monkeypatch.setattr(tables, "_MAX_SHEET_FACTOR", 0)
    with pytest.raises(
        DataError, match=r"most of them empty; save it as CSV|unpacks to [0-9,]+ bytes, .* own; save it as CSV"
    ):
        read(path)


def test_spreadsheet_of_many_empty_sheets_is_not_looked_through_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of thousands of sheets may stand for a million empty rows; a few before the first with rows are usual."""
    openpyxl = pytest.importorskip("openpyxl")
    path, book = tmp_path / "sheets.xlsx", openpyxl.Workbook()
    for _ in range(30):
        book.create_sheet()
    for sheet in book.worksheets:
        sheet.cell(8, 1).font = openpyxl.styles.Font(bold=True)
    book.worksheets[2].append(("text", "label"))
    book.worksheets[3].append(("words", "label"))
    book.save(path)
    _, account = read(path)
    assert account.columns == ("text", "label") and "not 'Sheet3'" in account.notes[0]
    monkeypatch.setattr(tables, "_MAX_SHEET_ROWS", 9)
    with pytest.raises(DataError, match="up to the sheet 'Sheet4' are more than 9 rows"):
        read(path)


def test_table_that_is_longer_than_the_sample_keeps_every_line(tmp_path: Path) -> None:
    """The separator is found in the first characters, and the line in which they end is read once."""
    for line_end in ("\n", "\r\n"):
        lines = [f"{'w' * (at % 97)} {at};{at % 2}" for at in range(3000)]
        (tmp_path / "rows.csv").write_bytes(line_end.join(["text;label", *lines]).encode())
        rows, _ = read(tmp_path / "rows.csv")
        assert [f"{row['text']};{row['label']}" for _, row in rows] == lines
        assert rows[-1][0] == 3001


def test_table_may_begin_with_empty_lines(tmp_path: Path) -> None:
    """As it may have some between its rows; numbers of lines stay those of the file."""
    path = tmp_path / "rows.csv"
    path.write_text("\n\ntext,label\na,b\n\nc,d\n")
    assert read(path)[0] == [(4, {"text": "a", "label": "b"}), (6, {"text": "c", "label": "d"})]
    path.write_text("\n\ntext,text\na,b\n")
    with pytest.raises(DataError, match=r"rows\.csv, line 3 gives columns 1 and 2 the same name"):
        read(path)


def test_table_tells_all_that_is_wrong_at_once(tmp_path: Path) -> None:
    """Every bad row of a file by its line, with a bounded list, and what leaves the empty ones out."""
    path = tmp_path / "rows.csv"
    path.write_text("text,label\n" + "a,\n" * 8 + "a,b,c\n" + "a,b\n" + ",b\n")
    with pytest.raises(DataError) as raised:
        read_rows(path, CLASSIFICATION, Data())
    assert str(raised.value) == (
        f"{path}: 10 rows can't be used: column 'label' is empty in lines 2, 3, 4, 5, 6 and 3 more; the row has 3 "
        "cells, the header has 2 columns in line 10; column 'text' is empty in line 12; correct or remove them, or set "
        "data.missing = 'skip' (in predict and eval --missing=skip) to leave out the 9 with an empty cell"
    )
    path.write_text("text,label\n" + "a,\n" * 8 + "a,b\n,b\na,c\n")
    found = read_rows(path, CLASSIFICATION, Data(missing="skip"))
    assert (found.labels, found.left_out) == (("b", "c"), {"column 'label' is empty": 8, "column 'text' is empty": 1})
    with pytest.raises(DataError, match="has no columns 'a' and 'b'"):
        read(path, {"data.text": "a", "data.label": "b", "data.user": "text"})


def test_table_refuses_what_is_no_unicode_text(tmp_path: Path) -> None:
    """Half an emoji and a zero character are legal JSON, and no tokenizer takes them; 1.0 is a class, 0.5 is none."""
    path = tmp_path / "rows.jsonl"
    rows = [{"text": text, "label": label} for text, label in (("\ud83d", 1.0), ("a\0", 1.0), ("a", 0.5), ("a", 1.0))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError) as raised:
        read_rows(path, CLASSIFICATION, Data(missing="skip"))
    for line, problem in (
        (1, "half of a surrogate pair"),
        (2, "a zero character"),
        (3, "not a class name but a float"),
    ):
        assert problem in str(raised.value) and f"in line {line}" in str(raised.value)
    path.write_text(json.dumps(rows[-1]))
    assert read_rows(path, CLASSIFICATION, Data()).labels == ("1.0",)


def test_text_without_line_ends_is_read_up_to_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of zeros takes no room on a disk, and would fill the memory."""
    monkeypatch.setattr(text_files, "_MAX_LINE", 30)
    (path := tmp_path / "rows.csv").write_text("text,label\na,b\n")
    assert text_files.text_form(path).encoding == "utf-8-sig"
    with path.open("ab") as file:
        file.truncate(1 << 20)
    with pytest.raises(DataError, match=r"rows\.csv, line 3 has 30 bytes or more; divide it into lines"):
        text_files.text_form(path)
    monkeypatch.setattr(tables, "MAX_ROW_BYTES", 30)
    monkeypatch.setattr(tables, "MAX_BYTES", 30)
    for name, first in (
        ("u.csv", "text,label\na,b\n"),
        ("u.csv", "sep=;\ntext;label\n"),
        ("u.jsonl", '{"text": "x"}\n\n'),
    ):
        path = tmp_path / name
        path.write_bytes((first + "x" * 100 + "\nmore").encode("utf-16"))
        assert re.search(r"line 3: it has more than .* lines below are not read", read(path)[1].problems())
    (path := tmp_path / "u.conll").write_bytes(f"a O\nb O\n{'x' * 100} O\n".encode("utf-16"))
    assert len(list(tables.tagged_rows(path, account := RowAccount(path), words="words", tags="tags"))) == 1
    assert "line 3: it has more than" in account.problems()
    (path := tmp_path / "u.json").write_bytes(f'[{{"text": "{"x" * 30}"}}]'.encode("utf-16"))
    with pytest.raises(DataError, match=r"more than 30 characters, and is read whole; write rows as \.jsonl"):
        read(path)


CANARY = "canaryinarow"


@cases(
    ("name", "content"),
    [
        ("rows.csv", f"text,label\n{CANARY},{CANARY},{CANARY}\n"),
        ("rows.csv", f"text,label\n{CANARY}\n"),
        ("rows.csv", f'text,label\n"{CANARY}\n'),
        ("rows.csv", f"{CANARY},good\n{CANARY},bad\n"),
        ("rows.csv", f"{CANARY},{CANARY}\ntext,good\n"),
        ("rows.csv", f"{CANARY};good\n{CANARY};bad\n"),
        ("rows.csv", f"text,label\n{CANARY},\n"),
        ("rows.csv", f"text,label\n{CANARY}é,é\né,\xff\n"),
        ("rows.jsonl", f'{{"text": "{CANARY}", "label": ["{CANARY}"]}}\n'),
        ("rows.jsonl", f'{{"text": "{CANARY}", "label": {{"{CANARY}": 1}}}}\n'),
        ("rows.jsonl", f'{{"text": ["{CANARY}"], "label": "good"}}\n'),
        ("rows.jsonl", f'{{"text": "{CANARY}", "label": null}}\n'),
        ("rows.jsonl", f'{{"text": "{CANARY}", "label": {CANARY}}}\n'),
        ("rows.jsonl", f'"{CANARY}"\n'),
        ("rows.jsonl", f'{{"text": "{CANARY}\n'),
        ("rows.jsonl", f'{{"text": "{CANARY}\\ud83d", "label": 1}}\n'),
    ],
)
def test_error_about_a_row_has_nothing_of_the_row(tmp_path: Path, name: str, content: str) -> None:
    """It goes to the coordinator and the user, whose rows these are not; a first line may be a row too."""
    path = tmp_path / name
    path.write_bytes(content.encode("utf-8" if "\xff" not in content else "cp1252").replace(b"\xff", b"\x81"))
    with pytest.raises(DataError) as raised:
        read_rows(path, CLASSIFICATION, Data())
    assert CANARY not in str(raised.value)
    assert path.name in str(raised.value)


def test_table_of_very_many_columns_is_refused_before_its_rows(tmp_path: Path) -> None:
    """Named by the header, or row by row by its keys; as many columns as are read are."""
    most = tables.MAX_COLUMNS
    for suffix, more, line in ((".csv", 0, 0), (".csv", 1, 1), (".jsonl", 0, 0), (".jsonl", 1, most), (".json", 1, 1)):
        names = [f"c{number}" for number in range(most + more - 1)]
        rows = [json.dumps({"text": "x", name: 0}) for name in names]
        path = tmp_path / f"rows{suffix}"
        content = {".jsonl": "\n".join(rows), ".json": f"[{','.join(rows)}]"}
        path.write_text(content.get(suffix, f"text,{','.join(names)}\nx,y\n"))
        if not more:
            assert read(path)[1].columns == ("text", *names)
            continue
        with pytest.raises(DataError, match=f"line {line}: there are more than {most:,} columns"):
            read(path)


def test_name_that_occurs_twice_is_found_without_comparing_each_with_all(tmp_path: Path) -> None:
    """40,000 keys of a row take less than a second."""
    begin_s, path = time.process_time(), tmp_path / "rows.jsonl"
    keys = ", ".join(f'"{key}": 0' for key in [*range(40_000), "1" * 9999, "1" * 9999])
    path.write_text(f'{{"text": "x", {keys}}}')
    _, account = read(path)
    assert time.process_time() - begin_s < 5 and "it has the key '111" in account.problems()
    assert len(account.problems()) < 500


def test_short_rows_take_no_memory_for_all_columns(tmp_path: Path) -> None:
    """Empty columns, which the file does not have in the row, are not kept with what is."""
    path = tmp_path / "rows.csv"
    path.write_text(f"text,label,{','.join(map(str, range(1000)))}\n" + "x,y\n" * 1000)
    tracemalloc.start()
    try:
        assert len(read_rows(path, CLASSIFICATION, Data(train=str(path))).rows) == 1000
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
