"""Options that several commands share: each has one meaning, one placeholder and one help text.

``tests/contract/test_command_line.py`` checks that over all commands. The environment variable ``RINGTUNE_COORDINATOR``
stands for the option ``--coordinator``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from ringtune.texts import inert

COORDINATOR_VARIABLE: Final = "RINGTUNE_COORDINATOR"
DEFAULT_COORDINATOR: Final = "127.0.0.1:7070"
"""Default address at which ``ringtune coordinator`` listens and other commands connect."""

RENAMED: Final[Mapping[tuple[str, str], str]] = {
    ("demo", "--nodes"): "--local",
    ("export", "--to"): "--out",
    ("measure", "--out"): "--save",
    ("what-if", "--set"): "--change",
}
"""(command, old name of an option) -> new name; the old name is refused with a message that names the new one."""


def coordinator_option(*instead: str) -> Any:
    """Make the option ``--coordinator``, which the environment variable may set.

    The variable does not count if one of the parameters ``instead`` is set, which replace a coordinator.
    """

    def choose(context: typer.Context, parameter: typer.CallbackParam, value: str) -> str:
        source = context.get_parameter_source(parameter.name or "")
        is_from_environment = source is not None and source.name == "ENVIRONMENT"
        return "" if is_from_environment and any(context.params.get(name) for name in instead) else value

    return typer.Option(
        "--coordinator",
        metavar="HOST:PORT",
        envvar=COORDINATOR_VARIABLE,
        callback=choose,
        help="Where the coordinator listens; with a standby both addresses, with a comma between them.",
    )


Coordinator = Annotated[str, coordinator_option()]
CoordinatorOrLocal = Annotated[str, coordinator_option("local")]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Allow other machines. Nothing is encrypted: trusted networks only.")
]
Trust = Annotated[
    Path | None,
    typer.Option(
        "--trust",
        metavar="DIR",
        help="Folder of keys and certificates; with one, all is encrypted. Default: in the user's state folder.",
    ),
]
Web = Annotated[
    str,
    typer.Option(
        "--web",
        metavar="HOST:PORT",
        help="Show the run on a page there, with figures at /metrics; beyond this machine a token is needed.",
    ),
]
WebToken = Annotated[
    Path | None,
    typer.Option(
        "--web-token",
        metavar="FILE",
        help="File with the token of pages and figures; made if it is not there. Default: a new token each time.",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="Join with the token in this file, or on standard input with '-'; needed once.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, an object a line.")]
Local = Annotated[int, typer.Option("--local", metavar="N", min=0, help="Start N nodes on this machine.")]
Nodes = Annotated[
    int,
    typer.Option(
        "--nodes", metavar="N", min=0, help="Wait for N nodes of the coordinator; 0 = use those that have joined."
    ),
]
JoinS = Annotated[
    float, typer.Option("--join-s", metavar="SECONDS", min=0, help="How long a node may take to join, in seconds.")
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Replace a key of the job, e.g. --set train.seed=1."),
]
JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="The job file (job.toml).")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run: the --out of 'ringtune train'.")]
User = Annotated[
    str,
    typer.Option(
        "--user",
        metavar="NAME",
        help="User of the adapters, if each has their own. Default, in collaboration only: the sum of all.",
    ),
]
MaxNewTokens = Annotated[
    int,
    typer.Option("--max-new-tokens", metavar="N", min=1, max=4096, help="Most tokens that a language model generates."),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        metavar="NUMBER",
        min=0.0,
        max=100.0,
        help="Temperature at which a language model draws tokens, within the top_k and top_p of its "
        "generation_config.json; 0 = always the likeliest.",
    ),
]
Columns = Annotated[
    list[str] | None,
    typer.Option("--column", metavar="KEY=COLUMN", help="Name a column of the rows, e.g. --column label=mood."),
]
Missing = Annotated[
    str,
    typer.Option(
        "--missing", metavar="error|skip", help="Refuse or skip rows with an empty cell. Default: as in the run's job."
    ),
]
ModelFolder = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Model folder on this machine; replaces the run's model.path.")
]
Replace = Annotated[bool, typer.Option("--replace", help="Move an earlier run's files to another folder.")]
Trace = Annotated[
    Path | None,
    typer.Option(metavar="TRACE|RUN", help="Draw times from a recorded run, stragglers included, not medians."),
]
TraceSeed = Annotated[int, typer.Option(help="Random seed for sampling recorded times if the plan was changed.")]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json, or the folder of a run.")]
ProfileFile = Annotated[
    Path | None,
    typer.Option("--profile", metavar="FILE", help="Times that 'ringtune measure' or a run wrote (profile.json)."),
]
MicrobatchChoices = Annotated[
    str,
    typer.Option(
        "--microbatches", metavar="N,N|auto", help="Let the planner choose one of these in place of the job's."
    ),
]
WireChoices = Annotated[
    str, typer.Option("--wire", metavar="TYPE,TYPE", help="Let the planner choose one of these in place of the job's.")
]


def show(value: Mapping[str, Any] | list[dict[str, Any]], lines: Iterable[str], *, as_json: bool) -> None:
    """Print the result of a command: ``lines``, or with ``--json`` each object of ``value`` on a line."""
    objects = [value] if isinstance(value, Mapping) else value
    for line in map(json.dumps, objects) if as_json else lines:
        echo(line)


def echo(text: str, *, err: bool = False) -> None:
    """Print lines to standard output or error; a terminal obeys nothing in them, as other machines may have written it.

    All text of the commands is printed by this function; the linter refuses ``typer.echo``.
    """
    typer.echo(inert(text), err=err)  # noqa: TID251
