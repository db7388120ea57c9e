"""Files and paths that a job or a command may name and that are none: an error of ours, at once."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import numpy
import pytest
from typer.testing import CliRunner

from coordinator.api.arguments import parse_changes
from coordinator.api.estimates import Archive
from coordinator.planner.given_plan import read_given_plan, read_profile
from edge.data.images import Images
from ringtune.cli import app
from ringtune.costs.memory_sizes import held_bytes
from ringtune.errors import DataError, IntegrityError, JobError, ModelError, PlanError, UsageError
from ringtune.job.job import load_job, parse_job
from ringtune.models.folder import read_headers
from ringtune.storage.gguf import is_gguf, read_gguf_header
from ringtune.storage.pieces import FilePieces
from ringtune.storage.strict import MAX_JSON_BYTES, read_given, read_json
from ringtune.storage.tensor_files import read_safetensors_header
from tests.support.cases import cases

LONG = "x" * 3000
DIGITS = "1" * 5000


@cases("key", ["model.path", "data.train", "data.eval", "data.text"])
@cases("path", [LONG, "y/" * 3000])
def test_path_that_no_system_has_is_refused_in_the_job(key: str, path: str) -> None:
    """Named and cut, before a system is asked: on a node it would be an error of the system there."""
    section, name = key.split(".")
    lines: dict[str, dict[str, str]] = {"model": {"path": "m"}}
    lines.setdefault(section, {})[name] = path
    text = "".join(f"[{part}]\n" + "".join(f'{k} = "{v}"\n' for k, v in keys.items()) for part, keys in lines.items())
    with pytest.raises(JobError, match="is no path") as caught:
        parse_job(text, source="test")
    assert key in str(caught.value) and len(str(caught.value)) < 400


@cases("text", [f"[train]\nseed = {DIGITS}\n", f"a = {'[' * 50_000}", "[train]\nmax_steps = 1" + "0" * 20])
def test_numbers_and_lists_without_end_are_no_job(text: str) -> None:
    """Five thousand digits, fifty thousand brackets, more steps than anybody takes."""
    with pytest.raises(JobError):
        parse_job(text, source="test")


@cases("value", [DIGITS, "[" * 50_000])
def test_changes_without_end_are_refused(value: str) -> None:
    """As above, of ``--set``."""
    with pytest.raises(UsageError, match="no text and no number"):
        parse_changes([f"train.seed={value}"])


def test_pipe_or_loop_in_the_place_of_a_file_is_refused_at_once(tmp_path: Path) -> None:
    """A pipe would be waited for without end."""
    pipe, loop = tmp_path / "pipe", tmp_path / "loop"
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    for path in (pipe, loop, tmp_path):
        with pytest.raises(JobError):
            load_job(path)
        with pytest.raises(PlanError):
            read_given_plan(path)
        with pytest.raises(PlanError):
            read_profile(path)
        with pytest.raises(OSError, match=r"pipe|folder|symbolic|levels"):
            read_given(path)


def test_pipe_in_the_place_of_weights_is_refused_at_once(tmp_path: Path) -> None:
    """Also of one of several files, which an index names; a device is no file either."""
    pipe = tmp_path / "a.safetensors"
    os.mkfifo(pipe)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "a.safetensors"}}')
    for path in (pipe, Path("/dev/zero")):
        for read in (read_safetensors_header, read_gguf_header):
            with pytest.raises(ModelError, match="it is a pipe or device, no file"):
                read(path)
        assert not is_gguf(path)
        with pytest.raises(IntegrityError, match="it is a pipe or device, no file"):
            list(FilePieces(path))
    with pytest.raises(ModelError, match=r"a\.safetensors: it is a pipe or device, no file"):
        read_headers(tmp_path)


def test_json_of_very_many_bytes_is_not_read(tmp_path: Path) -> None:
    """As values it would take thirty times as much memory."""
    with (path := tmp_path / "long.json").open("wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(OSError, match="it has more than 134,217,728 bytes"):
        read_json(path)


def test_json_that_is_nested_too_deeply_is_no_json(tmp_path: Path) -> None:
    """A ``ValueError`` as any other, which readers expect."""
    path = tmp_path / "deep.json"
    path.write_text("[" * 200_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json(path)


@cases("command", [["sim"], ["eval"], ["export"], ["plan"], ["what-if"]])
def test_very_long_path_of_a_command_is_no_bug(command: list[str]) -> None:
    """Exit 2 or 5 with a short text, not 70 with a traceback."""
    ended = CliRunner().invoke(app, [*command, LONG])
    assert ended.exit_code in (2, 5) and len(ended.output) < 4500


def write_odd_zip(path: Path) -> None:
    """An npz file that says it needs a version of zip that there is not."""
    numpy.savez(path, image=numpy.zeros((4, 1, 12, 12), dtype="uint8"), label=numpy.array([0, 1, 0, 1]))
    content = bytearray(path.read_bytes())
    at = content.find(b"PK\x01\x02")
    while at >= 0:
        content[at + 6 : at + 8] = (999).to_bytes(2, "little")
        at = content.find(b"PK\x01\x02", at + 4)
    path.write_bytes(content)
    with pytest.raises(NotImplementedError):
        zipfile.ZipFile(path)


def test_zip_of_a_later_version_is_no_readable_archive(tmp_path: Path) -> None:
    """At the planner, at a node, and where its size is asked for."""
    path = tmp_path / "odd.npz"
    write_odd_zip(path)
    with pytest.raises(DataError, match=r"odd\.npz"):
        Archive(path)
    assert held_bytes(path) == 0
    reader = Images.__new__(Images)
    reader._image, reader._label = "image", "label"
    with pytest.raises(DataError, match="no readable npz file"):
        reader._read_npz(path)
