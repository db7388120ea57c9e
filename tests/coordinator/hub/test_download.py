"""What a hub answers: nothing of it becomes a path or a file before it was checked."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.hub import download
from coordinator.hub.download import FILES, HubFile, store, wanted_files
from ringtune.errors import BusyError, DeadlineError, IntegrityError
from ringtune.files.owned import FileLock
from ringtune.models.hub import HubId, cached_folder
from tests.contract.models.test_hub import COMMIT

WANTED = HubId("acme", "mini", "v1")
CONTENT = {"config.json": b"{}", "model.safetensors": b"weights" * 9, "vocab.txt": b""}


def git_digest(content: bytes) -> str:
    """As git names a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def entry(name: str, content: bytes = b"", **changes: Any) -> Any:
    """A line of the hub's listing; weights are large files."""
    large = SimpleNamespace(sha256=hashlib.sha256(content).hexdigest()) if name.endswith("safetensors") else None
    told = {"rfilename": name, "size": len(content), "blob_id": git_digest(content), "lfs": large}
    return SimpleNamespace(**told | changes)


LISTED = wanted_files(entry(name, content) for name, content in CONTENT.items())


class Hub:
    """Answers with content by name, in pieces."""

    def __init__(self, content: dict[str, bytes]) -> None:
        self.content, self.asked = content, list[str]()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[Iterable[bytes]]:
        """Answer."""
        self.asked.append(name)
        yield [self.content[name][:3], self.content[name][3:]]


def tree(folder: Path) -> set[str]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_model_is_fetched_whole_and_found(tmp_path: Path) -> None:
    """All files under the commit, the revision names it, and the second time nobody is asked."""
    hub = Hub(CONTENT)
    for _ in range(2):
        folder = store(WANTED, COMMIT, LISTED, tmp_path, hub)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == CONTENT
    assert cached_folder(WANTED, tmp_path) == folder
    assert hub.asked == sorted(CONTENT)


@pytest.mark.parametrize("name", CONTENT)
@pytest.mark.parametrize("damage", ["short", "long", "other"])
def test_file_with_another_digest_is_not_used(tmp_path: Path, name: str, damage: str) -> None:
    """Small files too; what came whole stays for the next try, and the cache lacks the model until then."""
    good = CONTENT[name]
    bad = {"short": good[:-1], "long": good + b"x", "other": good[:-1] + b"?"}[damage]
    if bad == good:
        bad = b"?"
    with pytest.raises(IntegrityError, match=name):
        store(WANTED, COMMIT, LISTED, tmp_path, Hub({**CONTENT, name: bad}))
    assert cached_folder(WANTED, tmp_path) is None
    again = Hub(CONTENT)
    assert cached_folder(WANTED, tmp_path) is None and store(WANTED, COMMIT, LISTED, tmp_path, again)
    assert again.asked == [file.name for file in LISTED if file.name >= name]


ODD = st.one_of(
    st.text("./\\amdel-\n", max_size=9),
    st.builds("{}{}".format, st.sampled_from(["../", "/", "a/", "model-../", "./", "..\\"]), st.sampled_from(FILES)),
)


@settings(max_examples=50)
@given(names=st.lists(ODD | st.sampled_from(FILES), max_size=6))
def test_names_that_lead_elsewhere_are_not_fetched(names: list[str]) -> None:
    """Whatever a hub lists: a name without a folder, of what we read."""
    for file in wanted_files(map(entry, names)):
        assert Path(file.name).name == file.name and file.name in names and ".." not in Path(file.name).parts
        assert not file.name.endswith((".bin", ".py"))


@pytest.mark.parametrize("commit", ["", "../../../../outside", "main", "A" * 40, COMMIT + "\n", "/" + COMMIT])
def test_commit_that_is_none_is_refused(tmp_path: Path, commit: str) -> None:
    """It would be a path; nothing is asked or written."""
    hub = Hub(CONTENT)
    with pytest.raises(IntegrityError, match="the hub answers with commit"):
        store(WANTED, commit, LISTED, tmp_path, hub)
    assert not hub.asked and not tree(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"blob_id": "../../../outside"},
        {"blob_id": None},
        {"size": None},
        {"size": -1},
        {"lfs": SimpleNamespace(sha256="x")},
    ],
)
def test_file_without_a_digest_is_refused(changes: dict[str, Any]) -> None:
    """An ETag of any form is not asked for; the listing has to tell size and digest."""
    with pytest.raises(IntegrityError, match=r"no size and digest of config\.json"):
        wanted_files([entry("config.json", **changes)])


def test_fetching_ends_where_nothing_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then is no progress."""
    clock = iter(range(0, 10_000, 7))
    monkeypatch.setattr(download, "time", SimpleNamespace(monotonic=lambda: next(clock)))

    @contextlib.contextmanager
    def trickle(name: str) -> Iterator[Iterable[bytes]]:
        yield iter(lambda: b"x", b"")

    with pytest.raises(DeadlineError, match=r"config\.json: 9 bytes came in 60 s"):
        store(WANTED, COMMIT, [HubFile("config.json", 10_000, "0" * 40)], tmp_path, trickle)


def test_model_is_fetched_by_one_process(tmp_path: Path) -> None:
    """A second one is told which process is at it."""
    place = tmp_path / "models--acme--mini"
    place.mkdir()
    with FileLock(place / "lock", busy=""), pytest.raises(BusyError, match="fetches acme/mini@v1"):
        store(WANTED, COMMIT, LISTED, tmp_path, Hub(CONTENT))
