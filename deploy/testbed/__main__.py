"""The commands of ``python -m deploy.testbed``: check, run, verify, clean."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from deploy.testbed.agents import AgentSetup
from deploy.testbed.boards import load_layout
from deploy.testbed.capabilities import SKIPPED_EXIT_CODE, MissingCapability, describe_capabilities, find_capabilities
from deploy.testbed.cleanup import clean as clean_all
from deploy.testbed.testbed import DAY_S, Testbed
from deploy.testbed.verify import table
from deploy.testbed.verify import verify as measure
from ringtune.errors import InterruptedRunError, RingTuneError

_FOLDER = Path("build/testbed")
_Boards = Annotated[Path, typer.Argument(help="The file of boards (boards.toml).")]
_Folder = Annotated[Path, typer.Option(help="Where logs and the states of the agents go.")]

app = typer.Typer(
    name="python -m deploy.testbed",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="This machine as several boards: network namespaces, shaped links, processor quotas, memory limits.",
    epilog="Exit codes are those of ringtune; 77: this machine lacks something, with the reason.",
)


@app.command()
def check() -> None:
    """Show what this machine can do, a line each; exits with 77 if no testbed is possible."""
    if not describe_capabilities(find_capabilities(), write=typer.echo):
        raise typer.Exit(SKIPPED_EXIT_CODE)


@app.command()
def run(
    boards: _Boards,
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND ...", help="What to run; {coordinator} becomes its HOST:PORT.")
    ],
    data: Annotated[Path | None, typer.Option(help="Rows that the boards without own ones share.")] = None,
    eval_data: Annotated[Path | None, typer.Option(help="Evaluation rows beside --data.")] = None,
    model: Annotated[Path | None, typer.Option(help="Model folder that replaces the job's.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads of each agent.")] = 1,
    lease_s: Annotated[float, typer.Option("--lease", min=0.1, help="The coordinator's lease, in seconds.")] = 10.0,
    join_s: Annotated[float, typer.Option(min=1, help="How long to wait for all agents, in seconds.")] = 180.0,
    timeout_s: Annotated[float, typer.Option(min=1, help="When to end the command, in seconds.")] = DAY_S,
    folder: _Folder = _FOLDER,
) -> None:
    """Build the boards, start a coordinator and an agent on each, run a command beside the coordinator, remove all."""
    layout = load_layout(boards)
    setup = AgentSetup(data=_whole(data), eval_data=_whole(eval_data), model=_whole(model), threads=threads)
    with Testbed(layout, folder=folder) as bed:
        _show_notes(bed)
        address = bed.start_coordinator(lease_s=lease_s)
        bed.start_agents(setup, join_s=join_s)
        typer.echo(f"{len(layout.boards)} boards have joined {address}; logs: {bed.folder / 'logs'}", err=True)
        code = bed.run(command, timeout_s=timeout_s)
        for line in bed.ended():
            typer.echo(line, err=True)
    raise typer.Exit(code)


@app.command()
def verify(
    boards: _Boards,
    duration_s: Annotated[float, typer.Option("--seconds", min=1, help="Length of each measurement.")] = 4.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON line a board.")] = False,
    folder: _Folder = _FOLDER,
) -> None:
    """Measure rates, round trips and shares with the neighbours busy; exits with 1 if one is not as wanted."""
    with Testbed(load_layout(boards), folder=folder) as bed:
        _show_notes(bed)
        measured = measure(bed, duration_s=duration_s, note=lambda text: typer.echo(text, err=True))
    for line in [json.dumps(dataclasses.asdict(result)) for result in measured] if as_json else table(measured):
        typer.echo(line)
    deviations = [line for result in measured for line in result.deviations()]
    for line in deviations:
        typer.echo(line, err=True)
    if deviations:
        raise typer.Exit(1)


@app.command()
def clean(
    force: Annotated[bool, typer.Option("--force", help="Remove also a testbed whose process still runs.")] = False,
) -> None:
    """Remove what killed testbeds have left: their processes, namespaces and control groups."""
    for line in clean_all(force=force) or ["nothing is left of any testbed"]:
        typer.echo(line)


def main() -> int:
    """Run the command line; gives the exit code."""
    signal.signal(signal.SIGTERM, _end)
    try:
        app()
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except MissingCapability as reason:
        typer.echo(f"skipped: this machine can't: {reason}", err=True)
        return SKIPPED_EXIT_CODE
    except RingTuneError as error:
        typer.echo(f"error: {error}", err=True)
        return error.exit_code
    except KeyboardInterrupt:
        typer.echo("error: stopped by Ctrl-C", err=True)
        return InterruptedRunError.exit_code
    return 0


def _end(number: int, frame: object) -> NoReturn:
    """SIGTERM: leave the contexts in order."""
    sys.exit(128 + number)


def _show_notes(bed: Testbed) -> None:
    for note in bed.notes:
        typer.echo(f"note: {note}", err=True)


def _whole(path: Path | None) -> Path | None:
    return None if path is None else path.resolve()


if __name__ == "__main__":
    sys.exit(main())
