"""Ids of a hub, and where the cache keeps them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringtune.models.hub import HubId, cached_folder, hub_id, id_of_folder, name_of_folder
from tests.support.model_folder import write_model

COMMIT, OTHER = "0123456789" * 4, "ab" * 20
MINI = HubId("acme", "mini-v2")


def write_cache(cache: Path, *, commit: str = COMMIT, revision: str = "main") -> Path:
    """Write a cache that has a small model; return the folder of its snapshot."""
    place = cache / "models--acme--mini-v2"
    (place / "refs").mkdir(parents=True, exist_ok=True)
    (place / "refs" / revision).write_text(commit)
    return write_model(place / "snapshots" / commit)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("acme/mini-v2", MINI),
        ("acme/mini-v2@main", MINI),
        ("acme/mini-v2@v1.0", HubId("acme", "mini-v2", "v1.0")),
        (f"acme/mini-v2@{COMMIT}", HubId("acme", "mini-v2", COMMIT)),
        ("mini-v2", None),
        ("./models/tiny", None),
        ("/srv/models", None),
        ("a/b/c", None),
        ("../x/y", None),
        ("a/..b", None),
        ("a/b..c", None),
        ("a/b@../../etc", None),
        ("a/b@", None),
        ("~/models", None),
    ],
)
def test_hub_id_is_told_from_a_path(text: str, found: HubId | None) -> None:
    """One slash, no dots that climb; a revision stands behind an @."""
    assert hub_id(text) == found


def test_hub_id_is_written_as_it_is_read() -> None:
    """The usual revision is left out."""
    assert [str(hub_id(text)) for text in ("acme/mini-v2@main", "acme/mini-v2@v1")] == [
        "acme/mini-v2",
        "acme/mini-v2@v1",
    ]


def test_hub_cache_gives_the_snapshot_that_a_revision_names(tmp_path: Path) -> None:
    """A branch by its file, a commit by itself."""
    first, second = write_cache(tmp_path), write_cache(tmp_path, commit=OTHER, revision="v1")
    assert cached_folder(MINI, tmp_path) == first
    assert cached_folder(MINI._replace(revision="v1"), tmp_path) == second
    assert cached_folder(MINI._replace(revision=OTHER), tmp_path) == second
    assert cached_folder(MINI._replace(revision="v2"), tmp_path) is None
    assert cached_folder(MINI._replace(name="other"), tmp_path) is None


@pytest.mark.parametrize("lost", ["config.json", "model.safetensors", "refs"])
def test_hub_cache_lacks_a_model_that_is_not_whole(lost: str, tmp_path: Path) -> None:
    """Other files alone, as pickled weights, are no model; a reference that is no commit names nothing."""
    folder = write_cache(tmp_path)
    if lost == "refs":
        (tmp_path / "models--acme--mini-v2/refs/main").write_text("../../../outside")
    else:
        (folder / lost).rename(folder / "pytorch_model.bin")
    assert cached_folder(MINI, tmp_path) is None


def test_hub_name_of_a_snapshot_is_the_models(tmp_path: Path) -> None:
    """Not its commit; another folder is called what it is called."""
    folder = write_cache(tmp_path)
    assert (id_of_folder(folder), name_of_folder(folder)) == ("acme/mini-v2", "mini-v2")
    assert (id_of_folder(tmp_path / "tiny"), name_of_folder(Path("/snapshots/tiny"))) == ("tiny", "tiny")
