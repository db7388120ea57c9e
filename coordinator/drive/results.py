"""What the nodes of a run hand in at its end: it lies on the coordinator's disk until it is sent to the submitter."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from coordinator.records.events import EventSink
from coordinator.records.file_events import send_file
from coordinator.records.result_files import result_folder, users_folders
from ringtune.files.durable import storage_errors
from ringtune.files.pieces import Pieces
from ringtune.files.strict import read_object
from ringtune.jobs.job import Job
from ringtune.jobs.result import result_of, result_of_user

_TOTALS = "totals.json"


class Results:
    """The files of all nodes of one run."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._files: dict[str, dict[str, Pieces]] = {}

    def folder_of(self, node: str) -> Path:
        """Make an empty folder for what a node sends.

        Raises:
            StorageError: the temporary folder has no room.
        """
        with storage_errors(Path("any temporary folder")):
            place = tempfile.gettempdir()
        with storage_errors(Path(place)):
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="ringtune-", dir=place, ignore_cleanup_errors=True)
            folder = Path(self._folder.name) / node
            folder.mkdir()
            return folder

    def take(self, node: str, files: dict[str, Pieces]) -> None:
        """Take the files of a node, which lie in its folder."""
        self._files[node] = files

    def totals(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each node with its own totals of the run.

        Raises:
            IntegrityError: they are no JSON object.
        """
        for node, files in self._files.items():
            yield node, read_object(bytes(files.get(_TOTALS, Pieces.of(b""))), f"{_TOTALS} of node {node}")

    def send(self, job: Job, emit: EventSink, *, users: Sequence[str] = ()) -> None:
        """Send the adapter or model of the run of ``job``, merged from what the nodes sent; or that of each user.

        Raises:
            IntegrityError: a file is missing, broken, or not the same everywhere.
        """
        result = result_of(job)
        if users:
            found = users_folders(self._files, {user: result_of_user(job, user) for user in users})
        else:
            found = {f"{result.folder}/{name}": made for name, made in result_folder(self._files, result).items()}
        for path, content in sorted(found.items()):
            send_file(path, content, emit)

    def drop(self) -> None:
        """Delete all files."""
        if self._folder is not None:
            self._folder.cleanup()
