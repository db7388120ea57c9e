"""Parquet, Arrow and packed text: the same rows as from JSON lines; folders and splits; files that can't be read."""

from __future__ import annotations

import base64
import contextlib
import datetime
import decimal
import gzip
import importlib.util
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ringtune.costs.memory_sizes import held_bytes
from ringtune.errors import DataError
from ringtune.job.job import parse_job, with_absolute_paths
from ringtune.storage import arrow_files, tables, text_files
from ringtune.storage.arrow_files import arrow_files as files_of
from ringtune.storage.arrow_files import arrow_header, arrow_rows, encoded_rows, is_arrow, split_paths
from ringtune.storage.tables import RowAccount, table_rows
from ringtune.storage.text_files import resolved

WORDS = ("a", "", "two words", "\u00e9\u4e2d\U0001f600", 'quoted "x"', "line\nend")


def drawn(num_rows: int) -> list[dict[str, Any]]:
    """Rows of texts, numbers, lists and messages; some cells are null."""
    draws = random.Random("rows")
    return [
        {
            "text": draws.choice((*WORDS, None)),
            "label": draws.choice((0, 1, -(2**40), None)),
            "score": draws.choice((0.5, -1.25, None)),
            "flag": draws.random() < 0.5,
            "words": draws.choices(WORDS, k=draws.randint(0, 3)),
            "messages": [
                {"role": role, "content": draws.choice(WORDS)} | ({"tool": {"x": 1}} if draws.random() < 0.5 else {})
                for role in ("user", "assistant")
            ],
        }
        for _ in range(num_rows)
    ]


def write_parquet(path: Path, table: Any, rows: int = 100) -> None:
    """Write row groups, one with a dictionary and one without."""
    pq.write_table(table, path, row_group_size=rows, compression="zstd", use_dictionary=rows > 50)


def write_stream(path: Path, table: Any, rows: int = 100) -> None:
    """Write a stream, as datasets does."""
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


def write_file(path: Path, table: Any, rows: int = 100) -> None:
    """Write a file of batches with packed buffers."""
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_file(str(path), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows)


WRITERS: tuple[tuple[str, Callable[..., None]], ...] = (
    ("parquet", write_parquet),
    ("arrow", write_stream),
    ("arrow", write_file),
)


def decoded(*files: Path, picture: str = "") -> list[Any]:
    """Header and rows as the reading process would write them, in this process."""
    return [json.loads(line) for line in encoded_rows(files, picture)]


def one_column(path: Path, values: Any, kind: Any = None, metadata: Any = None) -> Path:
    """Write the values as column ``x`` of a Parquet file."""
    schema = pa.schema([("x", kind or pa.array(values).type)], metadata=metadata)
    write_parquet(path, pa.table({"x": pa.array(values, type=kind)}, schema=schema))
    return path


@pytest.mark.parametrize(("suffix", "write"), WRITERS, ids=("parquet", "stream", "file"))
@pytest.mark.parametrize("size", [3, 1000])
def test_rows_are_those_of_json_lines(tmp_path: Path, suffix: str, write: Callable[..., None], size: int) -> None:
    """Values, nulls and lists are equal to those of the same rows as JSON, whatever the size of batches."""
    rows = drawn(150)
    lines = tmp_path / "rows.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    path = tmp_path / f"rows.{suffix}"
    write(path, pa.Table.from_pylist(rows), size)
    (columns, *_), *found = decoded(path)
    wanted = [row for _, row in table_rows(lines, {})]
    assert [dict(zip(columns, values, strict=True)) for values in found] == wanted
    for names in ([], columns[:1], columns[1:], ["none"]):
        header, *some = [json.loads(line) for line in encoded_rows([path], only=names)]
        known = [name for name in columns if name in names]
        assert header[0] == columns and some == [[row.get(name) for name in known] for row in wanted]


def test_process_reads_shards_counts_nulls_and_names_rows(tmp_path: Path) -> None:
    """Rows are counted over all shards; a null and a blank are missing cells; bytes are left out with a note."""
    texts = ["a", None, "b", " ", "c"]
    table = pa.table({"text": texts, "raw": [b"x"] * 5})
    for index in range(2):
        write_parquet(tmp_path / f"train-{index:05}-of-00002.parquet", table)
    account = RowAccount(tmp_path, skips_missing=True, is_own=True)
    found = [(number, row["text"]) for number, row in table_rows(tmp_path, {"data.text": "text"}, account)]
    assert found == [(1, "a"), (3, "b"), (5, "c"), (6, "a"), (8, "b"), (10, "c")]
    assert (account.rows, account.columns) == (10, ("text",))
    assert account.lines_left_out() == ["4 rows are left out: column 'text' is empty (rows 2, 4, 7, 9)"]
    assert account.notes == [f"{tmp_path}: the column 'raw' has bytes and is not read"]
    with pytest.raises(DataError, match=r"column 'raw' is of type binary; write it as texts"):
        list(table_rows(tmp_path, {"data.text": "raw"}))
    with pytest.raises(DataError, match=r"has no column 'sentence'; it has the columns 'text'; set data.text"):
        list(table_rows(tmp_path, {"data.text": "sentence"}, RowAccount(tmp_path, is_own=True)))


def test_values_of_other_types_are_texts(tmp_path: Path) -> None:
    """Times, decimals and encoded texts arrive as texts."""
    when = datetime.datetime(2024, 7, 26, 12, 30, tzinfo=datetime.UTC)
    columns = {
        "day": pa.array([when.date()]),
        "ns": pa.array([1_721_995_200_000_000_001], pa.timestamp("ns")),
        "zone": pa.array([when], pa.timestamp("us", "UTC")),
        "decimal": pa.array([decimal.Decimal("1.50")]),
        "large": pa.array(["x"], pa.large_string()),
        "view": pa.array(["x"], pa.string_view()),
        "coded": pa.array(["x"]).dictionary_encode(),
        "none": pa.nulls(1),
        "map": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
        "inside": pa.array([{"x": [1_721_995_200_000_000_001]}], pa.struct({"x": pa.list_(pa.timestamp("ns"))})),
    }
    path = tmp_path / "types.arrow"
    write_stream(path, pa.table(columns))
    _, values = decoded(path)
    written = ["2024-07-26", "2024-07-26T12:00:00", "2024-07-26T12:30:00+00:00", "1.50", "x", "x", "x", None]
    assert values == [*written, [["k", 1]], {"x": ["2024-07-26T12:00:00"]}]


def test_class_names_and_pictures_of_datasets(tmp_path: Path) -> None:
    """Numbers of a ClassLabel become names; a picture is its bytes; features that can't be read are none."""
    names = {"names": ["O", "B"], "_type": "ClassLabel"}
    features = {"y": names, "tags": {"feature": names, "_type": "List"}, "old": [names], "image": {"_type": "Image"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    columns = {
        "y": pa.array([1, -1, 2]),
        "tags": pa.array([[0, 1], None, []]),
        "old": pa.array([[1], [], [0]]),
        "image": pa.array([{"bytes": b"png", "path": None}, {"bytes": None, "path": "x"}, None]),
    }
    path = tmp_path / "rows.parquet"
    write_parquet(path, pa.table(columns).replace_schema_metadata(metadata))
    classes = {name: ["O", "B"] for name in ("y", "tags", "old")}
    assert arrow_header(path) == (("y", "tags", "old"), {"image": decoded(path)[0][1]["image"]}, ("image",), classes)
    content = {"\0bytes": base64.b64encode(b"png").decode()}
    _, *rows = decoded(path, picture="image")
    bad = "column 'y' has a class without a name in the file's schema"
    assert rows == [["B", ["O", "B"], ["B"], content], [None, None, [], None], bad]
    odd = tmp_path / "odd.parquet"
    for text in ("[", "{}", json.dumps({"info": {"features": {"x": {"names": [1], "_type": "ClassLabel"}}}})):
        assert decoded(one_column(odd, [1], metadata={"huggingface": text}))[1:] == [[1]]


def test_folders_splits_and_shards(tmp_path: Path) -> None:
    """A folder of one split is all of its shards; of several one has to be named; caches are no data."""
    table = pa.table({"x": [1]})
    hub, saved, plain = tmp_path / "hub", tmp_path / "saved", tmp_path / "plain"
    for folder in (hub, saved / "train", saved / "test", plain):
        folder.mkdir(parents=True)
    shards = [hub / f"train-{index:05}-of-00003.parquet" for index in range(3)]
    for path in (*shards, hub / "test-00000-of-00001.parquet", plain / "train.parquet", plain / "dev.parquet"):
        write_parquet(path, table)
    (hub / "README.md").write_text("x")
    (pictures := tmp_path / "pictures" / "cat" / "1.png").parent.mkdir(parents=True)
    write_parquet(tmp_path / "pictures" / "index.parquet", table)
    assert is_arrow(tmp_path / "pictures")
    pictures.touch()
    assert not is_arrow(tmp_path / "pictures")
    for name in ("data-00000-of-00001.arrow", "cache-0123456789abcdef.arrow"):
        write_stream(saved / "train" / name, table)
    (saved / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    state = saved / "train" / "state.json"
    state.write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')

    assert files_of(hub / "train") == tuple(shards)
    assert files_of(shards[1]) == (shards[1],)
    assert held_bytes(hub / "train") == sum(shard.stat().st_size for shard in shards)
    assert files_of(saved / "train") == (saved / "train" / "data-00000-of-00001.arrow",)
    assert split_paths(hub) == [hub / "test", hub / "train"]
    assert split_paths(plain) == [plain / "dev.parquet", plain / "train.parquet"]
    assert split_paths(saved) == [saved / "train", saved / "test"]
    assert split_paths(saved / "train") == [saved / "train"]
    assert all(map(is_arrow, (hub, saved, plain, hub / "test", shards[0], tmp_path / "no.parquet")))
    assert not any(map(is_arrow, (tmp_path, hub / "dev", hub / "README.md", tmp_path / "no" / "train")))
    for path, said in (
        (hub, r"hub has the splits test, train; name one, such as .*hub/test"),
        (saved, r"saved has the splits train, test; name one, such as .*saved/train"),
        (tmp_path / "no.parquet", "no.parquet is not there"),
    ):
        with pytest.raises(DataError, match=said):
            files_of(path)
    for twice in (hub / "train.parquet", hub / "train-00000-of-00001.parquet", hub / "train-00000-of-00003.arrow"):
        twice.write_bytes(b"")
        with pytest.raises(DataError, match=r"train\S+ and train\S+ are no shards of one set, and may have"):
            files_of(hub / "train")
        assert split_paths(hub) == [hub / "test", hub / "train"]
        twice.unlink()
    for gone in (1, 2):
        shards[gone].unlink()
        with pytest.raises(DataError, match=r"hub is not complete: shard 00001-of-00003 is missing"):
            files_of(hub / "train")
    assert files_of(shards[0]) == (shards[0],)
    write_parquet(shards[2], table)
    shards[1].symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=r"train-00001-of-00003.parquet is not there"):
        files_of(hub / "train")
    for text in ('{"_data_files": [{"filename": "../x.arrow"}]}', "[]", "{", '{"_data_files": []}'):
        state.write_text(text)
        with pytest.raises(DataError, match=r"train is no folder of datasets.save_to_disk \(.*\); save it again"):
            files_of(saved / "train")


def test_link_of_a_hubs_cache_keeps_its_name(tmp_path: Path) -> None:
    """The file behind it has no suffix, so that its format would be unknown; other links are followed."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    blob, link = tmp_path / "blobs" / "1f0e", tmp_path / "snapshot" / "train.parquet"
    one_column(blob, [1])
    link.symlink_to(blob)
    (tmp_path / "other.parquet").symlink_to(link)
    job = parse_job('[model]\npath = "m"\n[data]\ntrain = "snapshot/train.parquet"\n', source="test")
    assert with_absolute_paths(job, tmp_path).data.train == str(resolved(link)) == str(tmp_path.resolve() / link)
    assert resolved(tmp_path / "other.parquet").name == "other.parquet"
    assert resolved(tmp_path / "snapshot" / ".." / "blobs") == blob.parent.resolve()
    assert [row["x"] for _, row in table_rows(resolved(link), {})] == [1]


def test_unlike_shards_are_refused(tmp_path: Path) -> None:
    """Shards have the same columns, and a column has one name."""
    first, second = one_column(tmp_path / "a.parquet", [1]), one_column(tmp_path / "b.parquet", ["x"])
    with pytest.raises(DataError, match=r"b.parquet has other columns or types than .*a.parquet"):
        decoded(first, second)
    write_parquet(first, pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"]))
    with pytest.raises(DataError, match=r"a.parquet has the column 'x' twice"):
        decoded(first)


def test_column_that_can_not_be_read_is_named_without_its_values(tmp_path: Path) -> None:
    """Times with nanoseconds in a map, which Python has no type for, and texts that are no UTF-8."""
    kind = pa.map_(pa.string(), pa.timestamp("ns"))
    text = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"]).buffers())
    for values in (pa.array([[("k", 1_721_995_200_000_000_001)]], kind), text):
        write_parquet(tmp_path / "odd.parquet", pa.table({"x": values}))
        said = r"odd.parquet: column 'x' of type .* has a value that can't be read \(\w+Error\); write it as texts"
        with pytest.raises(DataError, match=said):
            decoded(tmp_path / "odd.parquet")
        write_parquet(tmp_path / "odd.parquet", pa.table({"x": values, "text": ["a"]}))
        (found,) = table_rows(tmp_path / "odd.parquet", {"data.text": "text"}, only_needed=True)
        assert found == (1, {"text": "a"}), "a column that nobody reads is not decoded"


def test_cut_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    """A file that is cut at any place, encrypted or of another format is refused with its name."""
    table = pa.Table.from_pylist(drawn(60))
    for suffix, write in WRITERS:
        path = tmp_path / f"rows.{suffix}"
        write(path, table, 20)
        whole = path.read_bytes()
        for share in range(20):
            path.write_bytes(whole[: len(whole) * share // 20])
            with pytest.raises(DataError, match=r"rows\.\w+ (can't be read|is no Arrow file)"):
                decoded(path)
        for content in (b"text,label\na,b\n", b"PAR1" * 3, b"PARE" + whole[4:-4] + b"PARE"):
            path.write_bytes(content)
            with pytest.raises(DataError, match=r"rows\.\w+ (can't be read|is no Arrow file)"):
                decoded(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(DataError, match=r"rows.arrow"):
        files_of(path)


def test_a_few_bytes_do_not_become_gigabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of a row, of all rows and of a batch have limits."""
    bomb = one_column(tmp_path / "bomb.parquet", ["x" * (1 << 19)] * 256)
    assert bomb.stat().st_size < 1 << 15
    with pytest.raises(DataError, match=r"bomb.parquet unpacks to more than 200 times its bytes"):
        list(encoded_rows([bomb], most_bytes=1))
    monkeypatch.setattr(arrow_files, "MAX_ROW_BYTES", 1 << 18)
    assert decoded(bomb)[1] == "it has more than 64 MiB"
    monkeypatch.setattr(arrow_files, "_MEMORY_BYTES", 320 << 20)
    with pytest.raises(DataError, match=r"bomb.parquet.* (needs more memory|needs more than 320 MiB|bad_alloc)"):
        list(table_rows(bomb, {}))


def test_process_that_ends_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its exit code; one that does not start with the reason."""
    path = one_column(tmp_path / "rows.parquet", ["a"])
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(DataError, match=r"rows.parquet can't be read: the process that did so ended with exit code 1"):
        list(table_rows(path, {}))
    monkeypatch.setattr(sys, "executable", "/no/python")
    with pytest.raises(DataError, match=r"the process that reads .*rows.parquet can't be started \(No such file"):
        list(table_rows(path, {}))


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parquet and zstd need the extra."""
    path = one_column(tmp_path / "rows.parquet", ["a"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"needs the package 'pyarrow' \(extra 'rows'\): pip install 'pyarrow>=26,<27'"):
        list(table_rows(path, {}))
    packed = tmp_path / "rows.csv.zst"
    packed.write_bytes(pa.Codec("zstd").compress(b"text\na\n", asbytes=True))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"rows.csv.zst needs the package 'pyarrow' \(extra 'rows'\)"):
        list(table_rows(packed, {}))


def zstd(content: bytes) -> bytes:
    """Pack as zstd, in two frames."""
    half = len(content) // 2
    return b"".join(pa.Codec("zstd").compress(part, asbytes=True) for part in (content[:half], content[half:]))


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".zst", zstd)], ids=("gzip", "zstd"))
def test_packed_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, pack: Callable[[bytes], bytes]
) -> None:
    """Packed files have the rows of plain ones; cut ones and bombs are refused."""
    content = b"".join(b'{"text": "row %d", "label": "a"}\n' % index for index in range(3000))
    csv = b"text,label\n" + b"".join(b"row %d,a\n" % index for index in range(3000))
    listed = b"[" + b",".join(content.splitlines()) + b"]"
    for name, data in (("rows.jsonl", content), ("rows.csv", csv), ("rows.json", listed)):
        path = tmp_path / (name + suffix)
        path.write_bytes(pack(data))
        assert [row["text"] for _, row in table_rows(path, {})] == [f"row {index}" for index in range(3000)]
        path.write_bytes(pack(data)[:-9])
        with pytest.raises(DataError, match=r"is no readable (gzip|zstd) archive \(.*\); pack it again"):
            list(table_rows(path, {}))
    plain = tmp_path / "rows.jsonl"
    plain.write_bytes(pack(content))
    with pytest.raises(
        DataError, match=rf"a (gzip|zstd) archive by its first bytes; give it a further suffix {suffix}"
    ):
        list(table_rows(plain, {}))
    path = tmp_path / f"bomb.jsonl{suffix}"
    path.write_bytes(pack(bytes(1 << 22)))
    monkeypatch.setattr(text_files, "MAX_BYTES", 1 << 20)
    with pytest.raises(DataError, match=rf"bomb.jsonl{suffix} unpacks to more than 200 times its bytes"):
        list(table_rows(path, {}))


def test_a_line_without_end_is_refused_with_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON lines have a limit of their own."""
    monkeypatch.setattr(tables, "MAX_ROW_BYTES", 100)
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n' + json.dumps({"text": "b" * 200}) + "\n")
    with pytest.raises(DataError, match=r"rows.jsonl, line 2: it has more than .* so a line end may be missing"):
        list(table_rows(path, {}))


def test_process_has_no_thread_for_each_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of numpy's takes 40 MiB of the address space: with 64 cores no file could be read."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "64")
    path = one_column(tmp_path / "rows.parquet", ["x" * (1 << 17)] * 4)  # more than a pipe holds: the process waits
    with contextlib.closing(arrow_rows(path)) as rows:
        next(rows)
        (process,) = [one for one in psutil.Process().children() if "ringtune.storage.arrow_files" in one.cmdline()]
        assert process.num_threads() <= 2
