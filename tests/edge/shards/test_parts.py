"""Files beside shards: whole or left out, of one attempt, from copies and from a shard; and the turns of a lost run."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge.agent.moving.kept import KeptFile
from edge.agent.moving.leaving import save_turns
from edge.shards.parts import SavedParts
from edge.shards.state_folder import RunShards, StateFolder
from ringtune.errors import IntegrityError, StorageError
from ringtune.files.pieces import Pieces
from ringtune.files.safetensors_stream import TensorFile, TensorPieces, write_tensors
from ringtune.rounds.whereabouts import SavedPart

RUN, LATER = "r20260101-000000-00000000", "r20260101-000000-11111111"


def file_of(*blocks: int, head: bytes = b"") -> bytes:
    """A file with a tensor of one byte for each block, perhaps with a head as a shard has it."""
    found = {f"adapter/{block}.up": TensorPieces("U8", (1,), Pieces.of(bytes([block]))) for block in blocks}
    if head:
        found["head"] = TensorPieces("U8", (len(head),), Pieces.of(head))
    return bytes(write_tensors(found))


@pytest.fixture
def parts(tmp_path: Path) -> SavedParts:
    """Of node c in a run."""
    return SavedParts(RunShards(tmp_path / RUN), "c")


def names(content: Pieces) -> list[str]:
    """The tensors of a file."""
    return sorted(TensorFile(content, where="it").infos)


def test_parts_are_found_by_step_and_attempt(parts: SavedParts) -> None:
    """Two files of one step are joined; those of another attempt are not."""
    parts.write(8, RUN, file_of(0, 1), is_head=False)
    parts.write(8, RUN, file_of(2), is_head=False)
    parts.write(8, RUN, file_of(2), is_head=False)
    parts.write(8, LATER, file_of(3), is_head=False)
    parts.write(8, RUN, b"head", is_head=True)
    assert sorted(parts.found()) == [
        SavedPart(8, RUN, (), has_head=True),
        SavedPart(8, RUN, (0, 1)),
        SavedPart(8, RUN, (2,)),
        SavedPart(8, LATER, (3,)),
    ]
    part = parts.part(8, RUN, 1, 3)
    assert names(part) == ["adapter/1.up", "adapter/2.up"]
    assert TensorFile(part, where="it").metadata["ringtune"] == f'{{"run": "{RUN}", "step": "8"}}'
    assert bytes(parts.head(8, RUN)) == b"head"
    with pytest.raises(IntegrityError, match=rf"node c has no whole file with blocks \[3\] of run {RUN} after step 8"):
        parts.part(8, RUN, 2, 4)
    with pytest.raises(IntegrityError, match="no head"):
        parts.head(8, LATER)


@pytest.mark.parametrize("size", [0, 30, -1])
def test_damaged_part_is_left_out_and_named(
    parts: SavedParts, tmp_path: Path, caplog: pytest.LogCaptureFixture, size: int
) -> None:
    """Truncated or flipped: another file with the same blocks is taken, or the blocks are missing."""
    parts.write(8, RUN, file_of(0, 1), is_head=False)
    (path,) = (tmp_path / RUN).iterdir()
    content = path.read_bytes()
    path.write_bytes(content[:size] if size >= 0 else content[:-1] + bytes([content[-1] ^ 1]))
    assert parts.found() == () and "is damaged" in caplog.text
    with pytest.raises(IntegrityError, match="no whole file"):
        parts.part(8, RUN, 0, 2)
    parts.write(8, RUN, file_of(0, 1, 2), is_head=False)
    assert names(parts.part(8, RUN, 0, 2)) == ["adapter/0.up", "adapter/1.up"]


def test_blocks_and_head_of_a_shard_are_a_part_too(parts: SavedParts, tmp_path: Path) -> None:
    """By the digest of the manifest; a shard with another one is damaged."""
    shard = RunShards(tmp_path / RUN).write(8, Pieces.of(file_of(0, 1, head=b"head")), node="c")
    assert names(parts.part(8, RUN, 0, 1, sha256=shard.sha256)) == ["adapter/0.up"]
    assert bytes(parts.head(8, RUN, sha256=shard.sha256)) == b"head"
    with pytest.raises(IntegrityError, match="digest differs"):
        parts.part(8, RUN, 0, 1, sha256="0" * 64)


def test_links_and_other_files_are_no_parts(parts: SavedParts, tmp_path: Path) -> None:
    """A link is not followed, and a name of another form is left alone."""
    parts.write(8, RUN, file_of(0), is_head=False)
    (path,) = (tmp_path / RUN).iterdir()
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    (tmp_path / RUN / f"copy-8-{RUN}-x.safetensors").write_bytes(b"")
    assert parts.found() == ()
    parts.drop_before(100)
    assert len(list((tmp_path / RUN).iterdir())) == 2


def test_turns_of_a_lost_run_are_saved_in_place_of_those_before(tmp_path: Path) -> None:
    """Those of an earlier loss go, but not what is beside a shard of a checkpoint; rows are remembered."""
    files = [KeptFile(step, file_of(step), is_head=False) for step in (8, 12)]
    assert save_turns(tmp_path, "c", RUN, RUN, [*files, KeptFile(12, b"h", is_head=True)], rows="ab") == (8, 12)
    later = [KeptFile(16, file_of(5), is_head=False)]
    assert save_turns(tmp_path, "c", RUN, LATER, later) == (16,)
    with StateFolder(tmp_path) as folder:
        shards = folder.run(RUN)
        parts = SavedParts(shards, "c")
        assert parts.found() == (SavedPart(16, LATER, (5,)),) and shards.rows() == "ab"
        shards.write(16, Pieces.of(file_of(5)), node="c")
    assert save_turns(tmp_path, "c", RUN, LATER, [KeptFile(20, file_of(5), is_head=False)]) == (20,)
    assert [part.step for part in parts.found()] == [16, 20]


def test_full_disk_costs_the_last_turns_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said in the log; the run goes on from its newest checkpoint."""

    def full(*_: object, **__: object) -> None:
        raise StorageError("no room")

    monkeypatch.setattr(SavedParts, "write", full)
    assert save_turns(tmp_path, "c", RUN, RUN, [KeptFile(8, file_of(0), is_head=False)]) == ()
