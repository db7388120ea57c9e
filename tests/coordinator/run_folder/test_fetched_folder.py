"""A run's folder that is written anew, beside the files that it replaces."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.run_folder import fetched_folder as module
from coordinator.run_folder.fetched_folder import fetched_folder
from coordinator.run_folder.place import RunPlace, read_place
from coordinator.run_folder.saved_run import read_run
from ringtune.errors import StorageError
from ringtune.files.durable import rename_durably
from tests.support.saved_runs import write_run

PLACE = RunPlace(run_id="r20260102-030405-00000000", coordinator="x:1", is_local=False, pid=1)


def fetch(out: Path) -> None:
    """Replace a run's folder by a small one."""
    with fetched_folder(out, replace=True, goes_on=False) as folder:
        PLACE.write(folder.path)
        for name in ("plan.json", "report.json", "checkpoints/step-8.json", "adapter/adapter.safetensors"):
            folder.write_text(name, "{}")


def test_fetched_folder_goes_on_with_a_copy(tmp_path: Path) -> None:
    """Metrics grow in the copy; the log of the command stays, and what the run put away is gone from its old place."""
    out = write_run(tmp_path / "run")
    (out / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n', encoding="utf-8")
    (out / "run.log").write_text("said", encoding="utf-8")
    with fetched_folder(out, replace=False, goes_on=True) as folder:
        folder.add_metrics('{"kind": "train", "step": 2}')
        folder.go_back_to(2)
        assert len((out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 1
    assert len((out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 2
    assert (out / "run.log").read_text(encoding="utf-8") == "said"
    assert not (out / "report.json").exists() and not (out / "adapter").exists()
    assert (out / "parts/1/adapter/adapter.safetensors").is_file()
    assert not (out / "fetching").exists()


def test_fetched_folder_has_the_users_of_the_run_that_came_and_no_other(tmp_path: Path) -> None:
    """A user of the run that was there before is not left among them."""
    out = tmp_path / "run"
    for users in (("anna", "ben"), ("anna",)):
        with fetched_folder(out, replace=True, goes_on=False) as folder:
            for user in users:
                folder.write_text(f"users/{user}/adapter.safetensors", "{}")
        assert sorted(path.name for path in (out / "users").iterdir()) == list(users)


def test_fetched_folder_keeps_what_the_same_run_has_not_written(tmp_path: Path) -> None:
    """A note and a link of the user's are put aside, and this is told; the run's own earlier files go."""
    out, said = tmp_path / "run", list[str]()

    def fetch_again(step: int) -> None:
        with fetched_folder(out, replace=True, goes_on=False, is_same=True, say=said.append) as folder:
            for name in ("plan.json", f"checkpoints/step-{step}.json", "adapter/adapter.safetensors"):
                folder.write_text(name, str(step))

    fetch_again(4)
    (out / "metrics.jsonl.part").write_bytes(b"{")
    fetch_again(8)
    assert not list(tmp_path.glob("run.replaced-*")) and not said, "all of it was the run's"
    (out / "adapter/notes.txt").write_text("mine", encoding="utf-8")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/plan.json").write_text("mine", encoding="utf-8")
    (out / "checkpoints/link").symlink_to(tmp_path / "elsewhere")
    fetch_again(12)
    (aside,) = tmp_path.glob("run.replaced-*")
    left = sorted(str(path.relative_to(aside)) for path in aside.rglob("*") if not path.is_dir() or path.is_symlink())
    assert left == ["adapter/notes.txt", "checkpoints/link"]
    assert (aside / "adapter/notes.txt").read_text(encoding="utf-8") == "mine"
    assert (tmp_path / "elsewhere/plan.json").is_file()
    assert said == [f"files that the run has not written are in {aside}"]
    assert (out / "adapter/adapter.safetensors").read_text(encoding="utf-8") == "12"


@pytest.mark.parametrize("calls", range(5))
def test_fetched_folder_that_is_cut_short_does_not_look_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """Wherever the change ends, the folder tells its place, and has a report and checkpoints only if it has all."""
    out = write_run(tmp_path / "run")
    (out / "checkpoints").mkdir()
    left = [calls]

    def rename_some(path: Path, target: Path) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise StorageError("killed")
        rename_durably(path, target)

    monkeypatch.setattr(module, "rename_durably", rename_some)
    with pytest.raises(StorageError, match="killed"):
        fetch(out)
    assert read_place(out) == (PLACE if calls else None)
    has = [(out / name).exists() for name in ("adapter", "plan.json", "checkpoints/step-8.json", "report.json")]
    assert has == [number < calls - 1 for number in range(4)]
    (aside,) = tmp_path.glob("run.replaced-*")
    assert read_run(aside).report["steps"] == 8, "the earlier run is whole"
