"""What the nodes of a run hand in at its end: it lies on the coordinator's disk until it is sent to the submitter."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from coordinator.drive.agent_calls import AgentCalls
from coordinator.drive.answers import Files
from coordinator.records.events import EventSink
from coordinator.records.file_events import send_file
from coordinator.records.result_checks import MAX_CONFIG_BYTES, Wanted, check_parts
from coordinator.records.result_files import result_folder, users_folders
from ringtune.costs.profile import ModelFacts
from ringtune.errors import IntegrityError
from ringtune.files.durable import storage_errors
from ringtune.files.pieces import Pieces
from ringtune.files.strict import read_object
from ringtune.jobs.job import Job
from ringtune.jobs.result import result_of, result_of_user
from ringtune.rounds import rounds
from ringtune.schedule.plan import Plan
from ringtune.schedule.whose_rows.users import user_sets

_TOTALS = "totals.json"
_MAX_RESULT_BYTES = 1 << 38


class Results:
    """The files of all nodes of one run."""

    def __init__(self) -> None:
        self._model: ModelFacts | None = None
        self._holder = ""
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._files: dict[str, dict[str, Pieces]] = {}

    def expect(self, model: ModelFacts) -> None:
        """Note the sizes of the model, with which parts are compared."""
        self._model = model

    def folder_of(self, node: str, *, with_head: bool = False) -> Path:
        """Make an empty folder for what a node sends; one sends what is in no block.

        A node sends again where the run goes on without another one.

        Raises:
            StorageError: the temporary folder has no room.
        """
        with storage_errors(Path("any temporary folder")):
            place = tempfile.gettempdir()
        with storage_errors(Path(place)):
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="ringtune-", dir=place, ignore_cleanup_errors=True)
            self._holder = node if with_head else self._holder
            return Path(tempfile.mkdtemp(prefix=f"{node}-", dir=self._folder.name))

    def ask(
        self,
        command: rounds.Collect,
        calls: AgentCalls,
        job: Job,
        part: Plan,
        put: Callable[[Files | rounds.Progressed], None],
        *,
        goes_on: bool = False,
    ) -> None:
        """Ask a node for what it trained, and that trains on or not; ``put`` takes its files, and hears of bytes."""
        node, with_head, with_private = command
        calls.collect(
            self.folder_of(node, with_head=with_head),
            max_bytes=self.most_bytes(node, job, part),
            with_head=with_head,
            with_private=with_private,
            goes_on=goes_on,
            users=user_sets(part.course),
            on_result=lambda files: put(Files(node, files)),
            on_progress=lambda: put(rounds.Progressed(node)),
        )

    def most_bytes(self, node: str, job: Job, part: Plan) -> int:
        """More than what a node sends takes."""
        return Wanted(job, part, self._model, self._holder).most_bytes(node) if self._model else _MAX_RESULT_BYTES

    def take(self, node: str, files: dict[str, Pieces]) -> None:
        """Take the files of a node, which lie in its folder."""
        self._files[node] = files

    def totals(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each node with its own totals of the run.

        Raises:
            IntegrityError: they are no JSON object.
        """
        for node, files in self._files.items():
            yield node, read_object(bytes(_small(files, _TOTALS, node)), f"{_TOTALS} of node {node}")

    def send(
        self, job: Job, emit: EventSink, *, users: Sequence[str] = (), part: Plan | None = None, below: str = ""
    ) -> None:
        """Send the adapter or model of the run of ``job``, merged from what the nodes sent; or that of each user.

        Args:
            job: of the run.
            emit: sends an event to the submitter.
            users: who have adapters of their own; where there is a plan it says so.
            part: of the plan that holds at the end; what the nodes sent is compared with it.
            below: begins each path in the run's folder.

        Raises:
            IntegrityError: a file is missing, broken, not as the plan has it, or not the same everywhere.
        """
        sent = self._files
        if part is not None:  # a node that was lost may have sent something before
            sent = {node: files for node, files in self._files.items() if node in part.nodes}
        if part is not None and self._model is not None:
            users = user_sets(part.course)
            check_parts(sent, Wanted(job, part, self._model, self._holder))
        result = result_of(job)
        if users:
            found = users_folders(sent, {user: result_of_user(job, user) for user in users})
        else:
            found = {f"{result.folder}/{name}": made for name, made in result_folder(sent, result).items()}
        for path, content in sorted(found.items()):
            send_file(below + path, content, emit)

    def drop(self) -> None:
        """Delete all files."""
        if self._folder is not None:
            self._folder.cleanup()


def _small(files: Mapping[str, Pieces], name: str, node: str) -> Pieces:
    """Return a file that is read whole.

    Raises:
        IntegrityError: it is too long for that.
    """
    found = files.get(name, Pieces.of(b""))
    if found.size_bytes > MAX_CONFIG_BYTES:
        raise IntegrityError(f"node {node} sent {name} of {found.size_bytes:,} bytes; use one version on all machines")
    return found
