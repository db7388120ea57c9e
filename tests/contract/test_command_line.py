"""The command line as one thing: every command has the same habits, and an option means the same wherever it is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import typer
from rich.text import Text
from typer.testing import CliRunner

from ringtune import cli, options
from ringtune.errors import UsageError
from tests.contract.test_hints import commands
from tests.support.cases import cases
from tests.support.sources import ROOT

LIMIT_S = 120.0
PLACES = ("--coordinator", "--bind")
NEEDS_A_COORDINATOR = {"coordinator rotate", "fetch", "join", "logs", "nodes", "page", "runs", "status", "stop"}
NEEDS_A_COORDINATOR |= {f"nodes {below}" for below in ("drain", "remove", "show")}
"""Commands that make no sense without a coordinator, or ask it for what is no folder; others may do without."""


MEANINGS = {
    "--bind": "address at which this process serves",
    "--cache": "folder for what was fetched and can be fetched again",
    "--data": "file of rows on this machine",
    "--eval-data": "file of rows on this machine to evaluate on",
    "--keep-days": "how long something that is done stays in --state",
    "--keep-size": "how much room what is done may take in --state",
    "--memory": "budget of a node",
    "--model": "folder of a base model on this machine",
    "--out": "folder that the command writes",
    "--role": "what somebody is, or shall be",
    "--save": "file that the command writes its result to",
    "--seed": "of the draws of a command",
    "--state": "folder for what has to outlive the process",
}
"""What an option is whose text differs between commands; the others have one text, mostly from ``ringtune.options``."""


def parameters() -> Iterator[tuple[str, Any]]:
    """(command, option or argument) of the whole command line."""
    for name, command in commands().items():
        for parameter in command.params:
            yield name, parameter


def uses(option: str) -> dict[str, Any]:
    """The commands that have an option, with what it is there."""
    return {name: parameter for name, parameter in parameters() if option in parameter.opts}


def shapes() -> dict[str, set[tuple[str | None, bool, bool]]]:
    """Option -> its placeholder, whether it may be repeated, and whether it is a switch; one of each if all agree."""
    found = defaultdict(set)
    for _, parameter in parameters():
        if parameter.param_type_name == "option":
            shape = (parameter.metavar, parameter.multiple, bool(parameter.is_flag))
            found[parameter.opts[0]].add(shape)
    return found


@cases("name", sorted(commands()))
def test_command_line_has_help_and_json_everywhere(name: str) -> None:
    """``-h`` explains (``--help``: test_installs), ``--json`` is for machines, no option is without a word about it."""
    command = commands()[name]
    shown = CliRunner().invoke(cli.app, [*name.split(), "-h"])
    assert (shown.exit_code, "Usage" in shown.output) == (0, True)
    assert "--json" in {option for parameter in command.params for option in parameter.opts}
    assert command.help
    assert [parameter.name for parameter in command.params if not parameter.help] == []
    for told in (command.help, *(parameter.help for parameter in command.params)):
        assert Text.from_markup(told).plain == told  # what looks like markup is not shown


def test_command_line_options_have_one_shape() -> None:
    """An option has the same placeholder in every command, takes a value or none, and is repeated or not."""
    assert {option: found for option, found in shapes().items() if len(found) > 1} == {}


def test_command_line_options_have_one_text_or_a_meaning_that_is_written_down() -> None:
    """Who gives an option's name to another thing has to say here what the two have in common."""
    texts = defaultdict(set)
    for _, parameter in parameters():
        if parameter.param_type_name == "option":
            texts[parameter.opts[0]].add(parameter.help)
    assert {option for option, found in texts.items() if len(found) > 1} == set(MEANINGS)


def test_command_line_options_of_files_and_folders_say_which() -> None:
    """``--out`` is a folder and ``--save`` a file, whatever the command writes; no path is without a placeholder."""
    wanted = {"--out": "DIR", "--save": "FILE", "--profile": "FILE", "--model": "DIR", "--coordinator": "HOST:PORT"}
    found = shapes()
    assert {option: {metavar for metavar, _, _ in found[option]} for option in wanted} == {
        option: {metavar} for option, metavar in wanted.items()
    }


def test_command_line_finds_its_coordinator_in_one_way() -> None:
    """Option, variable of the environment, and the default of those that can't do without are the same everywhere."""
    found = uses("--coordinator")
    assert {parameter.envvar for parameter in found.values()} == {options.COORDINATOR_VARIABLE}
    assert {parameter.required for parameter in found.values()} == {False}
    assert {name for name, parameter in found.items() if parameter.default} == NEEDS_A_COORDINATOR
    assert {parameter.default for parameter in found.values()} == {"", options.DEFAULT_COORDINATOR}
    assert uses("--bind")["coordinator"].default == options.DEFAULT_COORDINATOR


def test_command_line_leaves_this_machine_only_with_insecure() -> None:
    """A command that talks to an address has ``--insecure``, no other has; no variable stands for it.

    ``join`` and ``coordinator rotate`` have none: they are about certificates, which makes no sense in plain text. Nor
    has ``serve``: beyond this machine it asks for a token, as pages do.
    """
    others = {"join", "coordinator rotate", "serve"}
    assert set(uses("--insecure")) == {name for place in PLACES for name in uses(place)} - others
    assert {parameter.envvar for parameter in uses("--insecure").values()} == {None}
    assert {parameter.default for parameter in uses("--insecure").values()} == {False}


def test_command_line_sets_keys_of_a_job_only() -> None:
    """``--set`` replaces a key of the job that the command reads, and every such command has it."""
    with_job = {name for name, parameter in parameters() if parameter.metavar == "JOB" and parameter.opts == ["job"]}
    assert set(uses("--set")) == with_job


def test_command_line_refuses_old_names_with_the_new_ones() -> None:
    """An older name is an error that says the name that counts now."""
    for (command, old), new in options.RENAMED.items():
        assert command in uses(new)
        assert command not in uses(old)
        refused = CliRunner().invoke(cli.app, [command, old, "x"])
        assert refused.exit_code == UsageError.exit_code
        assert f"{old} is called {new} now" in refused.stderr


def told(arguments: list[str], *, variable: str = "10.0.0.1:7", instead: tuple[str, ...] = ("local",)) -> str:
    """The coordinator that a command is given, with the variable set."""
    app = typer.Typer()
    seen: list[str] = []

    @app.command()
    def _ask(coordinator: str = options.coordinator_option(*instead), local: int = 0) -> None:
        seen.append(coordinator)

    result = CliRunner().invoke(app, arguments, env={options.COORDINATOR_VARIABLE: variable})
    assert result.exit_code == 0, result.output
    return seen[0]


def test_command_line_variable_stands_for_the_option() -> None:
    """The option wins over the variable, and so does what says that there is no coordinator."""
    assert told([]) == "10.0.0.1:7"
    assert told(["--coordinator", "10.0.0.2:7"]) == "10.0.0.2:7"
    assert told(["--local", "2"]) == ""
    assert told(["--local", "2", "--coordinator", "10.0.0.2:7"]) == "10.0.0.2:7"
    assert told(["--coordinator", ""]) == ""


def test_command_line_variable_allows_no_other_machine_by_itself() -> None:
    """An address in the environment is no permission to leave this machine unencrypted."""
    asked = CliRunner().invoke(cli.app, ["nodes"], env={options.COORDINATOR_VARIABLE: "10.0.0.1:7070"})
    assert asked.exit_code == UsageError.exit_code
    assert "add --insecure" in asked.stderr


def test_command_line_completes_in_a_shell() -> None:
    """The shell's completion finds commands, which are only imported when they are asked for."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT / "proto"), str(ROOT))),
        "_RINGTUNE_COMPLETE": "complete_bash",
        "COMP_WORDS": "ringtune sta",
        "COMP_CWORD": "1",
    }
    code = "from ringtune import cli; cli.app(prog_name='ringtune')"
    done = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, env=environment, check=False
    )
    assert done.stdout.split() == ["status"]
