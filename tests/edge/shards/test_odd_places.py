"""What is no file where a node's folder should have one: never followed, opened or deleted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edge.shards.kept import Kept
from edge.shards.state_folder import RunShards, StateFolder
from ringtune.files.pieces import Pieces

RUN = "r20260101-000000-00000000"


@pytest.mark.parametrize("kind", ["link", "link to nothing", "folder", "pipe"])
def test_what_is_no_file_in_the_place_of_a_shard_is_damaged_and_in_nobodys_way(tmp_path: Path, kind: str) -> None:
    """It is never followed, opened or deleted; the next shard of that step is written, what a link leads to stays."""
    run = StateFolder(tmp_path / "state").run(RUN)
    first, second = (run.write(step, Pieces.of(b"abc"), node="a") for step in (2, 4))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"abc")
    run.path(4).unlink()
    match kind:
        case "link":
            run.path(4).symlink_to(elsewhere)
        case "link to nothing":
            run.path(4).symlink_to(tmp_path / "nothing")
        case "folder":
            run.path(4).mkdir()
            (run.path(4) / "kept").write_bytes(b"x")
        case _:
            os.mkfifo(run.path(4))
    assert "is damaged (a link or folder is in its place)" in run.problem(4, second.sha256, node="a")
    assert run.problem(2, first.sha256, node="a") == ""
    assert run.steps() == (2,) and run.size_bytes() == 3
    assert run.write(4, Pieces.of(b"new"), node="a").size_bytes == 3
    assert run.path(4).read_bytes() == b"new" and elsewhere.read_bytes() == b"abc"
    run.keep_from(5)
    assert run.steps() == () and elsewhere.read_bytes() == b"abc"
    assert len(list(run.folder.rglob("kept"))) == (kind == "folder")


def test_link_in_the_place_of_a_runs_folder_is_not_followed(tmp_path: Path) -> None:
    """Nothing is read, cleaned or dropped behind it."""
    elsewhere = tmp_path / "elsewhere"
    shard = RunShards(elsewhere).write(2, Pieces.of(b"abc"), node="a")
    (elsewhere / "mine.tmp").write_bytes(b"")
    (elsewhere / "finished").write_bytes(b"")
    with StateFolder(tmp_path / "state") as state:
        (state.path / RUN).symlink_to(elsewhere)
        assert "is damaged" in state.run(RUN).problem(2, shard.sha256, node="a")
        state.drop_old_runs("r20260101-000000-00000001", Kept(days=0.0))
        state.drop_moments()
    assert {path.name for path in elsewhere.iterdir()} == {"step-2.safetensors", "mine.tmp", "finished"}
