"""Write the folder of a run that a coordinator keeps, from its events."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from coordinator.kept_runs.record import RunRecord, chain_of
from coordinator.kept_runs.taking_up import last_of
from coordinator.run_folder.checkpoints import RunCheckpoints
from coordinator.run_folder.event_files import EventFiles
from coordinator.run_folder.fetched_folder import fetched_folder
from coordinator.run_folder.place import RunPlace, read_place
from coordinator.run_folder.saved_run import read_json
from coordinator.submit.connection import Connection
from coordinator.submit.find_run import only_run
from ringtune.errors import BusyError, IntegrityError, UsageError
from ringtune.hints import hint
from ringtune.v1 import control_pb2


def kept_record(client: Connection, run_id: str) -> RunRecord:
    """Find the run that is to be fetched: the last one of those that go on with it.

    Args:
        client: of the coordinator.
        run_id: of the run; empty = the only one that is new.

    Raises:
        UsageError: the coordinator does not keep it, or there is more than one new run, or none.
    """
    records = {record.run_id: record for record in client.runs()}
    if not run_id:
        new = only_run(list(records.values()), lambda record: record.has_books and not record.is_fetched, "new run")
        run_id = new.run_id
    if run_id not in records:
        raise UsageError(f"run {run_id} is not kept there; 'ringtune runs' lists those that are")
    return records[last_of(records, run_id)]


def fetch_run(
    client: Connection,
    record: RunRecord,
    out: Path,
    *,
    replace: bool,
    say: Callable[[str], object] = lambda line: None,
) -> None:
    """Write what a coordinator keeps of a run into a folder, and tell it that this was done.

    A run that goes on another one gets the files of both, as if one submitter had followed them. Of a run that is
    under way the folder gets what there is; it can be fetched again. Files that are there stay until all have come;
    those of another run are then put aside.

    Args:
        client: of the coordinator.
        record: of the run.
        out: folder of the run; made if it is not there.
        replace: whether files of a run there may be replaced.
        say: takes a line on what was put aside.

    Raises:
        RingTuneError: the folder holds another run, can't be written, or the connection is lost.
    """
    events = client.events(record.run_id, wait=False, whole=True, with_files=True)
    first = next(events, control_pb2.RunEvent())
    has_beginning = first.run_id == record.first_run
    place = RunPlace(run_id=record.run_id, coordinator=client.address, is_local=False, pid=os.getpid())
    before = read_place(out) if out.is_dir() else None
    chain = chain_of({known.run_id: known for known in client.runs()}, record.run_id)
    is_same = before is not None and before.run_id in {known.run_id for known in chain}
    goes_on = not has_beginning
    with fetched_folder(out, replace=replace, goes_on=goes_on, is_same=is_same, say=say) as folder:
        place.write(folder.path)
        write = EventFiles(folder, on_saved=lambda _run_id, _step: None)
        write(first)
        for event in events:
            write(event)
    client.fetched(record.run_id)


def bring_up_to_date(client: Connection, out: Path) -> str:
    """Fetch what a run has done since its folder was written, before it is gone on with.

    Returns:
        What was fetched, in words; empty = nothing.

    Raises:
        BusyError: the run goes on.
        RingTuneError: it can't be fetched.
    """
    place = read_place(out) if out.is_dir() else None
    try:
        records = {record.run_id: record for record in client.runs()}
    except UsageError:  # the coordinator keeps none
        return ""
    if place is None or place.run_id not in records:
        return ""
    record = records[last_of(records, place.run_id)]
    if record.state == "running":
        follow = hint("logs", record.run_id, "--follow", coordinator=client.address)
        raise BusyError(f"run {record.run_id} of {out} goes on; follow it with '{follow}'")
    if _is_up_to_date(record, out):
        return ""
    fetch_run(client, record, out, replace=True)
    return f"fetched what run {record.run_id} did without this folder, up to step {record.steps_done}"


def _is_up_to_date(record: RunRecord, out: Path) -> bool:
    """Whether a folder has what a run that is over has left: its own report if it is done, else its last checkpoint."""
    if record.state != "done":
        return record.saved_step < 0 or record.saved_step in RunCheckpoints(out).steps()[:1]
    try:
        is_its_report = read_json(out / "report.json").get("run_id") == record.run_id
    except IntegrityError:  # there is none
        return False
    return is_its_report and not (out / "trace.json.part").exists()
