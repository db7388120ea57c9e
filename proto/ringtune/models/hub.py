"""Ids of models on a hub, and where the Hugging Face cache of this machine keeps them; no network is asked here.

The cache has a folder for each model: ``models--OWNER--NAME/refs/REVISION`` names a commit, and
``snapshots/COMMIT`` has its files. What is found is a model folder like any other, and is checked like one.

Source: the documentation of huggingface_hub, "Understand caching".
"""

from __future__ import annotations

import re
from pathlib import Path, PurePath
from typing import Final, NamedTuple

from ringtune.models.tensors import CONFIG_FILE, INDEX_FILE

MAIN: Final = "main"
_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_ID: Final = re.compile(rf"(?P<owner>{_NAME})/(?P<name>{_NAME})(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]{{0,127}}))?")
COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_MOST_REF_BYTES: Final = 128


class HubId(NamedTuple):
    """A model on a hub.

    Attributes:
        owner: who has it there.
        name: of the model.
        revision: branch, tag or commit.
    """

    owner: str
    name: str
    revision: str = MAIN

    @property
    def repository(self) -> str:
        """The id without a revision."""
        return f"{self.owner}/{self.name}"

    def __str__(self) -> str:
        """Write the id as a job does."""
        return self.repository if self.revision == MAIN else f"{self.repository}@{self.revision}"


def hub_id(text: str) -> HubId | None:
    """Read ``OWNER/NAME`` or ``OWNER/NAME@REVISION``; None if a text is no such id, but a path.

    Example: ``sentence-transformers/all-MiniLM-L6-v2`` is one; ``./models/tiny``, ``a/b/c`` and ``tiny`` are not.
    """
    found = _ID.fullmatch(text)
    if found is None or any(".." in part for part in found.groups(default="")):
        return None
    return HubId(found["owner"], found["name"], found["revision"] or MAIN)


def cached_folder(wanted: HubId, cache: Path) -> Path | None:
    """The folder of a model's snapshot in a cache; None if the cache lacks it, its config or its weights.

    Args:
        wanted: the model and its revision.
        cache: folder of the cache.
    """
    place = place_of(wanted, cache)
    commit = wanted.revision if COMMIT.fullmatch(wanted.revision) else _commit_of(place / "refs" / wanted.revision)
    folder = place / "snapshots" / commit
    return folder if commit and _is_whole(folder) else None


def place_of(wanted: HubId, cache: Path) -> Path:
    """The folder of a model in a cache, whichever revisions are there."""
    return cache / f"models--{wanted.owner}--{wanted.name}"


def id_of_folder(folder: PurePath) -> str:
    """The id of a model by its folder: of a snapshot in a cache ``OWNER/NAME``, of another folder its name."""
    place = folder.parent.parent.name.split("--")
    if folder.parent.name == "snapshots" and COMMIT.fullmatch(folder.name) and place[0] == "models":
        return "/".join(place[1:3])
    return folder.name


def name_of_folder(folder: PurePath) -> str:
    """The name of a model by its folder, without who owns it."""
    return id_of_folder(folder).rpartition("/")[2]


def _commit_of(ref: Path) -> str:
    """Read the commit that a revision names; empty where the cache does not know it."""
    try:
        with ref.open("rb") as file:
            text = file.read(_MOST_REF_BYTES).decode("ascii", errors="replace").strip()
    except OSError:
        return ""
    return text if COMMIT.fullmatch(text) else ""


def _is_whole(folder: Path) -> bool:
    """Whether config and weights are there; that an index names files that are not is found when they are read."""
    weights = [*folder.glob("*.safetensors"), *folder.glob(INDEX_FILE)]
    return (folder / CONFIG_FILE).is_file() and any(path.is_file() for path in weights)
