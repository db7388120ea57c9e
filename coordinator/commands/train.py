"""``ringtune train``: run a job, on local processes or on a running coordinator."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def train(
    job: Annotated[Path, typer.Argument(help="The job file (job.toml).")],
    out: Annotated[Path, typer.Option(help="Folder for the run's files.")],
    local: Annotated[int, typer.Option(metavar="N", help="Start N nodes on this machine for the run.")] = 0,
    coordinator: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Run on the nodes of this coordinator instead.")
    ] = "",
    nodes: Annotated[
        int, typer.Option(min=0, help="With --coordinator: wait for so many nodes; 0 = take those that are there.")
    ] = 0,
    join_s: Annotated[float, typer.Option(min=0, help="How long to wait for nodes, in seconds.")] = 60.0,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Replace a key of the job, e.g. --set train.seed=1."),
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Remove an earlier run's files from the folder.")] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow a coordinator on another machine, without encryption.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
) -> None:
    """Train a job; its adapter, metrics, report and trace go to a folder.

    Ctrl-C stops the run and releases every node.
    """
    from coordinator.changes import parse_changes
    from coordinator.progress import make_progress
    from coordinator.run_folder import RunFolder
    from coordinator.training import train_local, train_remote
    from ringtune.errors import UsageError
    from ringtune.job import load_job

    if bool(local) == bool(coordinator):
        raise UsageError("give one of --local N and --coordinator HOST:PORT")
    if nodes and local:
        raise UsageError("--nodes is for --coordinator; --local says how many nodes there are")
    wanted = load_job(job).with_overrides(parse_changes(change or []))
    signal.signal(signal.SIGTERM, _interrupt)
    with RunFolder(out, replace=replace) as folder, make_progress(as_json=json) as progress:
        if local:
            train_local(wanted, local, folder=folder, progress=progress, join_s=join_s)
        else:
            train_remote(
                wanted,
                coordinator,
                folder=folder,
                progress=progress,
                num_nodes=nodes,
                join_s=join_s,
                insecure=insecure,
            )
        progress.note(f"the run's files are in {out}")


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """SIGTERM ends a run like Ctrl-C."""
    raise KeyboardInterrupt
