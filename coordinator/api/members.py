"""``ringtune.connect``: a handle to a coordinator, its nodes and its stored runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.api.arguments import JobLike
from coordinator.api.output import Table
from coordinator.api.run import Run
from coordinator.client.connection import Connection
from coordinator.client.detached_runs import fetch_run, kept_record
from coordinator.screen.listing import nodes_json, runs_json, status_json
from ringtune.transport.credentials import process_credentials, using_credentials

if TYPE_CHECKING:
    from coordinator.api.plan import PlannedJob


class Coordinator:
    """A handle to a coordinator, made by ``connect``. Each call opens a connection, so there is nothing to close."""

    def __init__(self, address: str, *, insecure: bool = False) -> None:
        self.address = address
        self._insecure = insecure

    def __repr__(self) -> str:
        return f"Coordinator({self.address!r})"

    def train(self, job: JobLike = None, **options: Any) -> Run:
        """Train a job on the coordinator's nodes; options as of ``ringtune.train``."""
        from coordinator.api.train import train

        return train(job, coordinator=self.address, insecure=self._insecure, **options)

    def plan(self, job: JobLike = None, **options: Any) -> PlannedJob:
        """Plan a job for the coordinator's nodes; options as of ``ringtune.plan``."""
        from coordinator.api.plan import plan

        return plan(job, coordinator=self.address, insecure=self._insecure, **options)

    def nodes(self) -> Table:
        """Return the joined nodes: name, state, rows, cores, memory in bytes, address."""
        with self._connected() as client:
            return Table(nodes_json(client.nodes()))

    def runs(self) -> Table:
        """Return the stored runs, oldest first; raises ``RingTuneError``."""
        with self._connected() as client:
            return Table(runs_json(client.runs()))

    def status(self) -> dict[str, Any]:
        """Return the present state: the run with phase, step and loss, and every node with its state."""
        with self._connected() as client:
            return status_json(client.status())

    def fetch(self, run_id: str = "", out: str | PathLike[str] | None = None, *, replace: bool = False) -> Run:
        """Write the files of a stored run into a folder, as ``ringtune fetch`` does.

        Args:
            run_id: of the run; empty = the only one that was not fetched yet.
            out: folder for the run's files; None = one named by the id.
            replace: replace the files of an earlier run in the folder.

        Raises:
            RingTuneError: there is no such run, or the folder can't be used.
        """
        with self._connected() as client:
            record = kept_record(client, run_id)
            folder = Path(run_id or record.run_id) if out is None else Path(out)
            fetch_run(client, record, folder, replace=replace)
        return Run(folder, insecure=self._insecure)

    @contextmanager
    def _connected(self) -> Iterator[Connection]:
        with using_credentials(process_credentials()), Connection(self.address, insecure=self._insecure) as client:
            yield client


def connect(address: str, *, insecure: bool = False) -> Coordinator:
    """Connect to a coordinator.

    ``address`` is ``host:port`` of its ``--bind``. With ``insecure`` it may be on another machine without encryption;
    for trusted networks only.

    Raises:
        UsageError: the address is invalid, or leaves this machine without ``insecure``; or the versions differ.
        ConnectionFailedError: nothing answers there.
        TrustError: one side refuses the other's certificate.
    """
    made = Coordinator(address, insecure=insecure)
    with made._connected():
        return made
