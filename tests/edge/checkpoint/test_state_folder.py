"""A node's folder: one writer, whole files and what is kept, files beside shards, and no odd places."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from edge.checkpoint.retention import FinishedRun, RetentionLimits
from edge.checkpoint.shard_saver import Saver, ShardRequest, check_shards, open_saver
from edge.checkpoint.snapshots import SnapshotFile, block_digests, shard_digests
from edge.checkpoint.state_folder import (
    RunShards,
    StateFolder,
    claim_state_folder,
    require_state_folder,
    room_bytes,
)
from edge.checkpoint.turn_snapshots import save_turns
from ringtune.errors import (
    BusyError,
    DataError,
    DeadlineError,
    DivergedError,
    IntegrityError,
    InterruptedRunError,
    StorageError,
    UsageError,
)
from ringtune.run_control.checkpoint import SavedPart
from ringtune.schedule.plan import Plan
from ringtune.storage.pieces import Piece, Pieces
from ringtune.storage.tensor_files import TensorFile, TensorPieces, write_tensors
from tests.support.plans import make_plan
from tests.support.processes import running_python

RUN = "r20260101-000000-00000000"
SLICES = [("a", 0, 2), ("b", 2, 4)]
PLAN = make_plan(SLICES, ["a"], num_steps=8, checkpoint_every=2)
QUIET = make_plan(SLICES, ["a"], num_steps=8)


class FakeModel:
    """Saves a text, and takes it back."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.loaded: list[Any] = []

    def shard(self, metadata: Any, *, with_head: bool) -> Pieces:
        """The content of every shard."""
        self.asked.append((dict(metadata), with_head))
        return write_tensors({}, metadata={"step": metadata["step"]})

    def load_shard(self, data: Pieces, metadata: Any, *, with_head: bool) -> None:
        """Remember it."""
        self.loaded.append(bytes(data))


_HOLD = """
import sys, threading
from pathlib import Path
from edge.checkpoint.state_folder import StateFolder
with StateFolder(Path(sys.argv[1]), "a"):
    print("locked", flush=True)
    threading.Event().wait(600.0)
"""


def test_room_for_a_run_counts_what_a_killed_run_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its optimizer state is removed by the next run; its shards stay. A folder that is not there yet has a disk.

    Nothing is known of a path below a file.
    """
    (tmp_path / "file").write_bytes(b"")
    assert room_bytes(tmp_path / "file" / "below" / "it") is None
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    run = StateFolder(tmp_path, "a").run(RUN)
    run.moments.mkdir(parents=True)
    (run.moments / "3.safetensors").write_bytes(bytes(50))
    run.path(6).write_bytes(bytes(7))
    assert room_bytes(tmp_path) == 1050
    assert room_bytes(tmp_path / "new") == 1000


def test_state_folder_lets_one_process_write(tmp_path: Path) -> None:
    """A second one is told so, and a killed one leaves no lock behind."""
    with (
        running_python(_HOLD, tmp_path) as process,
        pytest.raises(BusyError, match=f"another agent, process {process.pid}, uses the folder"),
    ):
        StateFolder(tmp_path, "a", timeout_s=0.0)
    StateFolder(tmp_path, "a", timeout_s=30.0).close()


def test_state_folder_of_an_earlier_version_is_recognised(tmp_path: Path) -> None:
    """It gets the marker, and with it stays a node's whatever else is put there."""
    for number, files in enumerate(
        (
            [],
            [".ringtune-node.0a1b2c3d.tmp"],
            ["lock", "profile.json", "profile.json.0a1b2c3d.tmp", ".ringtune-node.9ef17562.tmp", "trust/identity.pem"],
            [f"{RUN}/rows", f"{RUN}/moments/1", f"{RUN}/finished"],
            [f"{RUN}/step-2.safetensors", "notes.txt"],
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(b"")
        require_state_folder(folder)
        claim_state_folder(folder)
        (folder / "other").write_bytes(b"")
        claim_state_folder(folder)
        assert (folder / ".ringtune-node").is_file()
        assert all((folder / name).is_file() for name in files)


def test_state_folder_is_no_folder_of_somebody_else(tmp_path: Path) -> None:
    """Nothing is written into a folder with a file of the user's, or with runs that were fetched.

    A file where the folder should be is an error of storage; a run's id, which comes over the wire, leads nowhere else.
    """
    for number, file in enumerate(("thesis.tex", f"{RUN}/job.toml")):
        folder = tmp_path / str(number)
        (folder / file).parent.mkdir(parents=True)
        (folder / file).write_bytes(b"mine")
        for refuse in (require_state_folder, claim_state_folder):
            with pytest.raises(UsageError, match=rf"is not the folder of a node: it holds {file[:5]}.* such as"):
                refuse(folder)
        assert [path.name for path in folder.iterdir()] == [file.partition("/")[0]]
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="can't write"):
        StateFolder(tmp_path / "file", "a")
    with StateFolder(tmp_path / "state", "a") as state:
        for name in ("..", "r", "r20260101-000000-00000000/x"):
            with pytest.raises(UsageError, match="run id"):
                state.run(name)


def test_shards_are_read_only_with_the_right_digest(tmp_path: Path) -> None:
    """A missing, torn or changed shard is named and never used."""
    with StateFolder(tmp_path, "a") as folder:
        shards = folder.run(RUN)
        shard = shards.write(4, Pieces.of(b"content"))
        assert bytes(shards.read(4, shard.sha256)) == b"content"
        with pytest.raises(IntegrityError, match=r"node a has no shard .*step-8\.safetensors"):
            shards.read(8, shard.sha256)
        for damage in (b"conten", b"contenT", b""):
            shards.path(4).write_bytes(damage)
            assert "step-4.safetensors is damaged" in shards.problem(4, shard.sha256)


def test_shards_survive_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names node and step, and the shard that was there stays as it was."""
    with StateFolder(tmp_path, "a") as folder:
        shards = folder.run(RUN)
        before = shards.write(4, Pieces.of(b"content"))

        def full(_: int) -> NoReturn:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        for step in (4, 6):
            with pytest.raises(StorageError, match=rf"node a did not save step {step}: .*No space left"):
                shards.write(step, Pieces.of(b"new"))
        assert shards.steps() == (4,)
        assert shards.problem(4, before.sha256) == ""


RUNS = [f"r202601{day:02}-000000-00000000" for day in range(2, 16)]


def runs_left(folder: Path) -> list[str]:
    """Names of the runs that still have shards."""
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir())


def test_state_folder_never_drops_a_run_that_can_be_gone_on_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Fourteen runs that were stopped are all there when the fifteenth begins; what needs much room is named."""
    with StateFolder(tmp_path, "a") as folder:
        for name in RUNS:
            folder.run(name).write(2, Pieces.of(b"x" * 100))
        (folder.path / RUNS[3] / "step-4.safetensors.0a.tmp").write_text("torn")
        folder.drop_old_runs(RUN, RetentionLimits(days=0.0, size_bytes=1000))
    assert runs_left(tmp_path) == RUNS
    assert [entry.name for entry in (tmp_path / RUNS[3]).iterdir()] == ["step-2.safetensors"]
    assert f"14 runs that never finished keep 1.4 KiB in {tmp_path}, the oldest is {RUNS[0]}" in caplog.text


def test_state_folder_drops_finished_runs_by_size_oldest_first(tmp_path: Path) -> None:
    """A device that trains for years does not fill up: of six finished runs of 100 bytes the newest three stay."""
    with StateFolder(tmp_path, "a") as folder:
        for index, name in enumerate(RUNS[:8]):
            folder.run(name).write(2, Pieces.of(b"x" * 100))
            if index not in (0, 4):
                folder.run(name).finish()
                os.utime(tmp_path / name / "finished", (1e9 + index, 1e9 + index))
        (tmp_path / "lost+found").mkdir()
        folder.drop_old_runs(RUN, RetentionLimits(days=1e9, size_bytes=350))
    assert runs_left(tmp_path) == sorted(["lost+found", *(RUNS[index] for index in (0, 4, 5, 6, 7))])


def test_finished_runs_go_by_age_and_size_but_the_newest_only_by_age() -> None:
    """Runs of 3, 6 and 5 bytes that ended after 1, 2 and 3 days, looked at after 3.5 days."""
    day_s = 86_400.0
    runs = [FinishedRun(name, day * day_s, size) for name, day, size in (("a", 1, 3), ("b", 2, 6), ("c", 3, 5))]

    def dropped(days: float, size_bytes: int) -> list[str]:
        kept = RetentionLimits(days=days, size_bytes=size_bytes)
        return sorted(run.run_id for run in kept.to_drop(runs, now_unix_s=3.5 * day_s))

    assert dropped(10.0, 14) == []
    assert dropped(10.0, 13) == ["a"]
    assert dropped(10.0, 10) == ["a", "b"]
    assert dropped(10.0, 0) == ["a", "b"]
    assert dropped(2.0, 14) == ["a"]
    assert dropped(0.0, 14) == ["a", "b", "c"]
    with pytest.raises(UsageError, match="--keep-days"):
        RetentionLimits(days=-1.0)
    with pytest.raises(UsageError, match="--keep-size"):
        RetentionLimits(size_bytes=-1)


def test_saver_of_a_finished_run_marks_it_and_of_one_that_goes_on_takes_the_mark_away(tmp_path: Path) -> None:
    """A finished run that is trained further can be interrupted again, and is then as precious as any other."""
    saver = Saver(tmp_path, RUN, PLAN, "a")
    saver.save(4, FakeModel(), with_head=False)
    saver.close()
    with StateFolder(tmp_path, "a") as folder:
        assert not folder.run(RUN).is_finished()
    saver = Saver(tmp_path, RUN, PLAN, "a")
    saver.open()
    saver.close(is_finished=True)
    with StateFolder(tmp_path, "a") as folder:
        assert folder.run(RUN).is_finished()
    saver = Saver(tmp_path, RUN, PLAN, "a", kept=RetentionLimits(days=0.0))
    saver.open()
    saver.close()
    with StateFolder(tmp_path, "a") as folder:
        assert not folder.run(RUN).is_finished()
        assert folder.run(RUN).steps() == (4,)


@pytest.mark.parametrize(("before", "now", "is_refused"), [("x", "x", False), ("x", "y", True), ("", "y", False)])
def test_saver_does_not_go_on_with_other_rows(tmp_path: Path, before: str, now: str, is_refused: bool) -> None:
    """The owner and the remedy are named; a run of an earlier version kept no digest, and goes on."""
    saver = Saver(tmp_path, RUN, PLAN, "a", rows=before)
    shard, _ = saver.save(4, FakeModel(), with_head=False)
    saver.close()
    saver, model = Saver(tmp_path, RUN, PLAN, "a", rows=now), FakeModel()
    if is_refused:
        with pytest.raises(DataError, match=r"owner a: its rows, or their order.*put the files back.*without --resume"):
            saver.load(4, shard.sha256, model, with_head=False)
    else:
        saver.load(4, shard.sha256, model, with_head=False)
    assert bool(model.loaded) is not is_refused
    saver.close()


def test_saver_names_the_file_of_a_shard_that_can_not_be_gone_on_with(tmp_path: Path) -> None:
    """Whatever is wrong with it has a node and a path."""

    class Failing(FakeModel):
        """Finds the shard bad on the way."""

        error: Exception

        def load_shard(self, data: Pieces, metadata: Any, *, with_head: bool) -> None:
            """Fail."""
            raise self.error

    saver, model = Saver(tmp_path, RUN, PLAN, "a"), Failing()
    shard, _ = saver.save(4, model, with_head=False)
    for error, kind, message in (
        (IntegrityError("the shard is of node 'b', not 'a'"), IntegrityError, ": the shard is of node 'b'"),
        (DivergedError("not finite"), DivergedError, ": not finite"),
    ):
        model.error = error
        with pytest.raises(kind, match=rf"node a, .*step-4\.safetensors.*{message}"):
            saver.load(4, shard.sha256, model, with_head=False)
    saver.close()


@pytest.mark.parametrize(
    ("plan", "is_resumed", "is_needed"), [(PLAN, False, True), (QUIET, True, True), (QUIET, False, False)]
)
def test_open_saver_needs_a_folder_only_if_the_plan_does(
    tmp_path: Path, plan: Plan, is_resumed: bool, is_needed: bool
) -> None:
    """Without checkpoints nothing is written or locked before someone interrupts the run.

    The state of inactive units has to go somewhere, too, and so has the best result.
    """
    with pytest.raises(UsageError, match=r"node a has no folder for the best result; .* leave train\.keep_best out"):
        open_saver(None, QUIET, "a", RUN, is_resumed=False, keeps_best=True, timeout_s=1.0)
    with pytest.raises(UsageError, match=r"node a has no folder for the optimizer state .* or set hift\.state"):
        open_saver(None, QUIET, "a", RUN, is_resumed=False, keeps_state=True, timeout_s=1.0)
    if is_needed:
        with pytest.raises(UsageError, match="--state DIR"):
            open_saver(None, plan, "a", RUN, is_resumed=is_resumed, timeout_s=1.0)
    else:
        assert open_saver(None, plan, "a", RUN, is_resumed=is_resumed, timeout_s=1.0) is None
    saver = open_saver(tmp_path / "state", plan, "a", RUN, is_resumed=is_resumed, timeout_s=1.0)
    assert saver is not None
    assert (tmp_path / "state").exists() is is_needed
    saver.close()


def test_check_shards_answers_for_each(tmp_path: Path) -> None:
    """Empty means intact; a node without a folder says so."""
    saver = Saver(tmp_path, RUN, PLAN, "a")
    shard, _ = saver.save(4, FakeModel(), with_head=False)
    saver.close()
    asked = [ShardRequest(8, shard.sha256), ShardRequest(4, shard.sha256)]
    problems = check_shards(tmp_path, "a", RUN, asked, timeout_s=1.0)
    assert "has no shard" in problems[0]
    assert problems[1] == ""
    assert all("--state" in problem for problem in check_shards(None, "a", RUN, asked, timeout_s=1.0))


def test_moments_of_a_killed_run_go_when_the_folder_is_opened_again(tmp_path: Path) -> None:
    """They are scratch; shards of any run stay."""
    for run_id, has_shard in (("r20260101-000000-aaaaaaaa", True), ("r20260101-000000-bbbbbbbb", False)):
        shards = RunShards(tmp_path / run_id, "a")
        shards.moments.mkdir(parents=True)
        (shards.moments / "3.safetensors").write_bytes(b"state")
        if has_shard:
            shards.path(4).write_bytes(b"shard")
    with StateFolder(tmp_path, "a") as folder:
        folder.drop_moments()
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "lock",
        "r20260101-000000-aaaaaaaa",
        "step-4.safetensors",
    ]


RUN_OF_PARTS, LATER = "r20260101-000000-00000000", "r20260101-000000-11111111"


def file_of(*blocks: int, head: bytes = b"") -> bytes:
    """A file with a tensor of one byte for each block, perhaps with a head as a shard has it."""
    found = {f"adapter/{block}.up": TensorPieces("U8", (1,), Pieces.of(bytes([block]))) for block in blocks}
    if head:
        found["head"] = TensorPieces("U8", (len(head),), Pieces.of(head))
    return bytes(write_tensors(found))


@pytest.fixture
def parts(tmp_path: Path) -> RunShards:
    """Of node c in a run."""
    return RunShards(tmp_path / RUN_OF_PARTS, "c")


def names(content: Pieces) -> list[str]:
    """The tensors of a file."""
    return sorted(TensorFile(content, where="it").infos)


def test_parts_are_found_by_step_and_attempt(parts: RunShards) -> None:
    """Two files of one step are joined; those of another attempt are not."""
    parts.write_part(8, RUN_OF_PARTS, file_of(0, 1), is_head=False)
    parts.write_part(8, RUN_OF_PARTS, file_of(2), is_head=False)
    parts.write_part(8, RUN_OF_PARTS, file_of(2), is_head=False)
    parts.write_part(8, LATER, file_of(3), is_head=False)
    parts.write_part(8, RUN_OF_PARTS, b"head", is_head=True)
    assert sorted(parts.parts()) == [
        SavedPart(8, RUN_OF_PARTS, (), has_head=True),
        SavedPart(8, RUN_OF_PARTS, (0, 1)),
        SavedPart(8, RUN_OF_PARTS, (2,)),
        SavedPart(8, LATER, (3,)),
    ]
    part = parts.part(8, RUN_OF_PARTS, 1, 3)
    assert names(part) == ["adapter/1.up", "adapter/2.up"]
    assert TensorFile(part, where="it").metadata["ringtune"] == f'{{"run": "{RUN_OF_PARTS}", "step": "8"}}'
    assert bytes(parts.head(8, RUN_OF_PARTS)) == b"head"
    with pytest.raises(
        IntegrityError, match=rf"node c has no whole file with blocks \[3\] of run {RUN_OF_PARTS} after step 8"
    ):
        parts.part(8, RUN_OF_PARTS, 2, 4)
    with pytest.raises(IntegrityError, match="no head"):
        parts.head(8, LATER)


def test_damaged_part_is_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Truncated or flipped: another file with the same blocks is taken, or the blocks are missing."""
    for size in (0, 30, -1):
        folder = tmp_path / str(size) / RUN_OF_PARTS
        parts = RunShards(folder, "c")
        parts.write_part(8, RUN_OF_PARTS, file_of(0, 1), is_head=False)
        (path,) = folder.iterdir()
        content = path.read_bytes()
        path.write_bytes(content[:size] if size >= 0 else content[:-1] + bytes([content[-1] ^ 1]))
        caplog.clear()
        assert parts.parts() == () and "is damaged" in caplog.text
        with pytest.raises(IntegrityError, match="no whole file"):
            parts.part(8, RUN_OF_PARTS, 0, 2)
        parts.write_part(8, RUN_OF_PARTS, file_of(0, 1, 2), is_head=False)
        assert names(parts.part(8, RUN_OF_PARTS, 0, 2)) == ["adapter/0.up", "adapter/1.up"]


def test_blocks_of_a_shard_are_copied_to_another_disk(tmp_path: Path) -> None:
    """As a file of this attempt, without the head; there they are a part like any other. Damage is not copied."""
    saver = Saver(tmp_path, RUN, PLAN, "c")
    model = FakeModel()
    model.shard = lambda metadata, *, with_head: Pieces.of(file_of(0, 1, 2, head=b"head"))  # type: ignore[method-assign]
    saver.save(8, model, with_head=True)
    other = RunShards(tmp_path / "d" / RUN_OF_PARTS, "d")
    other.write_part(8, LATER, saver.saved_blocks(8, LATER, 0, 2), is_head=False)
    assert other.parts() == (SavedPart(8, LATER, (0, 1)),)
    assert names(other.part(8, LATER, 1, 2)) == ["adapter/1.up"]
    path, blocks = RunShards(tmp_path / RUN, "c").path(8), saver.saved_blocks(8, LATER, 0, 2)
    kept = path.read_bytes()
    path.unlink()
    with pytest.raises(IntegrityError, match=r"step-8\.safetensors can't be read: No such file .*; check the disk"):
        bytes(blocks)
    path.write_bytes(kept[:-1] + b"x")
    with pytest.raises(IntegrityError, match="is damaged"):
        saver.saved_blocks(8, LATER, 0, 2)
    saver.close()


def test_best_result_is_written_once_however_often_it_is_asked_for(tmp_path: Path) -> None:
    """Calls overlap where one is repeated, or comes after the run trains on: weights of two steps are never mixed."""
    saver = Saver(tmp_path, RUN, PLAN, "c")
    reached, goes_on = threading.Event(), threading.Event()

    def slow() -> Iterator[Piece]:
        reached.set()
        assert goes_on.wait(30.0)
        yield b"of 8"

    def keep(step: int, content: Pieces, timeout_s: float = 30.0) -> None:
        saver.keep_best(step, {"blocks": content, "head": Pieces.of(b"h")}, timeout_s=timeout_s)

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(keep, 8, Pieces(4, slow))
        assert reached.wait(30.0)
        with pytest.raises(DeadlineError, match=r"node c: waited 0\.00 ms for the best result of step 8"):
            keep(8, Pieces.of(b"trained on"), 0.0)
        assert best_steps(saver.open()) == [], "a half file is none"
        again = threads.submit(keep, 8, Pieces.of(b"trained on"))
        goes_on.set()
        first.result(30.0)
        again.result(30.0)
    assert bytes(saver.open().best(8)["blocks"]) == b"of 8"
    keep(12, Pieces.of(b"of 12"))
    keep(8, Pieces.of(b"late"))
    assert best_steps(saver.open()) == [12]
    saver.close()
    with pytest.raises(InterruptedRunError):
        keep(16, Pieces.of(b"of 16"))
    assert best_steps(saver.open()) == [12]


def best_steps(parts: RunShards) -> list[int]:
    """The steps of which a node has the best result whole."""
    return [part.step for part in parts.parts() if part.is_best]


def test_best_results_stay_as_long_as_they_are_needed(parts: RunShards) -> None:
    """The newest one, and those that a resumed run may need; what is written again replaces what was there."""
    parts.keep_best(4, {"blocks": Pieces.of(b"4"), "head": Pieces.of(b"h")})
    parts.keep_best(8, {"blocks": Pieces.of(b"first"), "head": Pieces.of(b"h")}, needed_steps=[4])
    assert best_steps(parts) == [4, 8]
    parts.keep_best(8, {"blocks": Pieces.of(b"again")}, needed_steps=[4, 8])
    assert {name: bytes(content) for name, content in parts.best(8).items()} == {"blocks": b"again"}
    parts.keep_best(12, {"blocks": Pieces.of(b"12")}, needed_steps=[8])
    assert best_steps(parts) == [8, 12]
    assert {name: bytes(content) for name, content in parts.best(12).items()} == {"blocks": b"12"}


@pytest.mark.parametrize("damage", ["flipped", "gone", "cut off"])
def test_best_result_that_is_not_whole_is_not_used(parts: RunShards, tmp_path: Path, damage: str) -> None:
    """A file is damaged or missing, or the power went before the last one was there."""
    parts.keep_best(4, {"blocks": Pieces.of(b"4"), "head": Pieces.of(b"h")})
    assert best_steps(parts) == [4]
    path = tmp_path / RUN_OF_PARTS / ("best-4.json" if damage == "cut off" else "best-4-head")
    path.write_bytes(b"x") if damage == "flipped" else path.unlink()
    assert best_steps(parts) == []
    with pytest.raises(IntegrityError, match=r"is damaged|no best result of step 4|best-4-head can't be read"):
        parts.best(4)


def test_blocks_and_head_of_a_shard_are_a_part_too(parts: RunShards, tmp_path: Path) -> None:
    """By the digest of the manifest; a shard with another one is damaged."""
    shard = RunShards(tmp_path / RUN_OF_PARTS, "c").write(8, Pieces.of(file_of(0, 1, head=b"head")))
    assert names(parts.part(8, RUN_OF_PARTS, 0, 1, sha256=shard.sha256)) == ["adapter/0.up"]
    assert bytes(parts.head(8, RUN_OF_PARTS, sha256=shard.sha256)) == b"head"
    with pytest.raises(IntegrityError, match="digest differs"):
        parts.part(8, RUN_OF_PARTS, 0, 1, sha256="0" * 64)


def test_links_and_other_files_are_no_parts(parts: RunShards, tmp_path: Path) -> None:
    """A link is not followed, and a name of another form is left alone."""
    parts.write_part(8, RUN_OF_PARTS, file_of(0), is_head=False)
    (path,) = (tmp_path / RUN_OF_PARTS).iterdir()
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    (tmp_path / RUN_OF_PARTS / f"copy-8-{RUN_OF_PARTS}-x.safetensors").write_bytes(b"")
    assert parts.parts() == ()
    parts.keep_from(100)
    assert len(list((tmp_path / RUN_OF_PARTS).iterdir())) == 2


def test_units_of_a_shard_have_the_digests_of_their_parts(parts: RunShards) -> None:
    """What another node gets of it, a few of its blocks or the head, is compared with them."""
    content = Pieces.of(file_of(1, 2, head=b"abc"))
    told = shard_digests(content, 4)
    shard = parts.write(4, content)
    for block in (1, 2):
        part = parts.part(4, RUN_OF_PARTS, block, block + 1, sha256=shard.sha256)
        assert block_digests(part) == {block: told.pop(block)}
    assert told == {4: parts.head(4, RUN_OF_PARTS, sha256=shard.sha256).sha256()}


def test_turns_of_a_lost_run_are_saved_in_place_of_those_before(tmp_path: Path) -> None:
    """Those of an earlier loss go, but not what is beside a shard of a checkpoint; rows are remembered."""
    files = [SnapshotFile(step, file_of(step), is_head=False) for step in (8, 12)]
    assert save_turns(
        tmp_path, "c", RUN_OF_PARTS, RUN_OF_PARTS, [*files, SnapshotFile(12, b"h", is_head=True)], rows="ab"
    ) == (8, 12)
    later = [SnapshotFile(16, file_of(5), is_head=False)]
    assert save_turns(tmp_path, "c", RUN_OF_PARTS, LATER, later) == (16,)
    with StateFolder(tmp_path, "a") as folder:
        shards = folder.run(RUN_OF_PARTS)
        assert shards.parts() == (SavedPart(16, LATER, (5,)),) and shards.rows() == "ab"
        shards.write(16, Pieces.of(file_of(5)))
    assert save_turns(tmp_path, "c", RUN_OF_PARTS, LATER, [SnapshotFile(20, file_of(5), is_head=False)]) == (20,)
    assert [part.step for part in shards.parts()] == [16, 20]


@pytest.mark.parametrize("kind", ["link", "link to nothing", "folder", "pipe"])
def test_what_is_no_file_in_the_place_of_a_shard_is_damaged_and_in_nobodys_way(tmp_path: Path, kind: str) -> None:
    """It is never followed, opened or deleted; the next shard of that step is written, what a link leads to stays."""
    run = StateFolder(tmp_path / "state", "a").run(RUN)
    first, second = (run.write(step, Pieces.of(b"abc")) for step in (2, 4))
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
    assert "is damaged (a link or folder is in its place)" in run.problem(4, second.sha256)
    assert run.problem(2, first.sha256) == ""
    assert run.steps() == (2,) and run.size_bytes() == 3
    assert run.write(4, Pieces.of(b"new")).size_bytes == 3
    assert run.path(4).read_bytes() == b"new" and elsewhere.read_bytes() == b"abc"
    run.keep_from(5)
    assert run.steps() == () and elsewhere.read_bytes() == b"abc"
    assert len(list(run.folder.rglob("kept"))) == (kind == "folder")


def test_link_in_the_place_of_a_runs_folder_is_not_followed(tmp_path: Path) -> None:
    """Nothing is read, cleaned or dropped behind it."""
    elsewhere = tmp_path / "elsewhere"
    shard = RunShards(elsewhere, "a").write(2, Pieces.of(b"abc"))
    (elsewhere / "mine.tmp").write_bytes(b"")
    (elsewhere / "finished").write_bytes(b"")
    with StateFolder(tmp_path / "state", "a") as state:
        (state.path / RUN).symlink_to(elsewhere)
        assert "is damaged" in state.run(RUN).problem(2, shard.sha256)
        state.drop_old_runs("r20260101-000000-00000001", RetentionLimits(days=0.0))
        state.drop_moments()
    assert {path.name for path in elsewhere.iterdir()} == {"step-2.safetensors", "mine.tmp", "finished"}


def test_full_disk_costs_the_last_turns_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said in the log; the run goes on from its newest checkpoint."""

    def full(*_: object, **__: object) -> None:
        raise StorageError("no room")

    monkeypatch.setattr(RunShards, "write_part", full)
    assert save_turns(tmp_path, "c", RUN_OF_PARTS, RUN_OF_PARTS, [SnapshotFile(8, file_of(0), is_head=False)]) == ()
