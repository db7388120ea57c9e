"""The ``ringtune`` command: finds the commands of all packages by entry point, and imports one when it is called.

A package adds a command with an entry point in the group ``ringtune.commands`` (name -> ``module:app``, a
``typer.Typer`` or a function). Such a module imports nothing heavy at its top, so that ``ringtune --help`` stays fast.

Exit codes are those of ``ringtune.errors``; 70 is a bug of RingTune.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import pkgutil
import sys
import traceback
from collections.abc import Mapping
from typing import Annotated, Any, Final, NoReturn

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from ringtune import __version__, targets_of
from ringtune.errors import InterruptedRunError, RingTuneError, StorageError, UsageError, internal_error
from ringtune.machine.process import guard_outputs, lost_output, mark_command_process
from ringtune.options import RENAMED, echo
from ringtune.texts import indented, log_to_stderr, shown

GROUP = "ringtune.commands"
BUG_EXIT_CODE = 70
HELP_OPTIONS = ["-h", "--help"]
PANELS: Final[Mapping[str, tuple[str, ...]]] = {
    "Data and jobs": ("init", "plan", "measure"),
    "Runs": ("demo", "train", "status", "logs", "stop", "runs", "fetch"),
    "Results": ("eval", "predict", "chat", "serve", "export", "audit", "page"),
    "Boards": ("coordinator", "node", "join", "nodes", "doctor"),
    "Predictions": ("sim", "what-if"),
}
"""Panels of the help with their commands, in the order in which a user needs them."""


def command_targets() -> dict[str, str]:
    """Find every command: name -> ``module:attribute``, sorted by name."""
    return targets_of(GROUP)


def all_commands() -> dict[str, Any]:
    """Load all commands and sub-commands, keyed by their words, such as ``coordinator token``."""
    commands: dict[str, Any] = {}
    for name, target in command_targets().items():
        command = commands[name] = _load(name, target)
        for below, inner in getattr(command, "commands", {}).items():
            commands[f"{name} {below}"] = inner
    return commands


def _load(name: str, target: str) -> Any:
    try:
        target_object = pkgutil.resolve_name(target)
    except ModuleNotFoundError as error:
        return _missing(name, str(error.name))
    app = target_object if isinstance(target_object, typer.Typer) else typer.Typer(add_completion=False)
    if app is not target_object:
        app.command(name)(target_object)
    return _prepared(name, typer.main.get_command(app))


def _prepared(name: str, command: Any) -> Any:
    """Set name and help of a command and its sub-commands, and join the lines of each help paragraph.

    An app with a callback has no name of its own, and the parser keeps the line breaks of later paragraphs.
    """
    command.name = name
    command.context_settings.setdefault("help_option_names", HELP_OPTIONS)
    command.help = "\n\n".join(" ".join(lines.split()) for lines in (command.help or "").split("\n\n"))
    _without_types(command.get_params(typer.Context(command, help_option_names=HELP_OPTIONS)))
    for below, inner in getattr(command, "commands", {}).items():
        _prepared(below, inner)
    return command


def _without_types(parameters: list[Any]) -> list[Any]:
    """Show no placeholder for a value where an option takes none."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False) or getattr(parameter, "count", False):
            parameter.metavar = parameter.metavar or ""
    return parameters


def _missing(name: str, module: str) -> Any:
    """Make a command that only names the Python package that it lacks."""
    app = typer.Typer(add_completion=False)

    @app.command(
        name,
        help=f"(needs the Python package {module!r}, which is not installed)",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
    def _explain() -> None:
        from ringtune.hints import hint_to_install

        raise RingTuneError(f"'ringtune {name}' needs the Python package {module!r}: {hint_to_install('node')}")

    return _prepared(name, typer.main.get_command(app))


class LazyGroup(TyperGroup):
    """Group of commands that are imported when they are called."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        self._targets = command_targets()
        self.commands = dict[str, Any](dict.fromkeys(self._targets))

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options before the command."""
        return _without_types(super().get_params(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command with this name; None if there is none."""
        if cmd_name in self._targets and self.commands[cmd_name] is None:
            self.commands[cmd_name] = command = _load(cmd_name, self._targets[cmd_name])
            command.rich_help_panel = next((panel for panel, names in PANELS.items() if cmd_name in names), None)
        return self.commands.get(cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands: those in no panel first, then those of the panels in order."""
        order = [name for names in PANELS.values() for name in names]
        return sorted(self.commands, key=lambda name: (name in order, order.index(name) if name in order else 0))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options before the command; show the help without any arguments."""
        if not args:
            return super().parse_args(ctx, args)
        try:
            return super().parse_args(ctx, args)
        except TyperException as error:
            _refuse(error, str(ctx.command_path))

    def invoke(self, ctx: Any) -> Any:
        """Run the command; turn an error of RingTune into a message and an exit code."""
        try:
            result = super().invoke(ctx)
            _require_printed(str(ctx.invoked_subcommand))
            return result
        except RingTuneError as error:
            _show(error)
            raise typer.Exit(error.exit_code) from error
        except TyperException as error:  # an unknown option or command, a value of the wrong type
            command = " ".join(filter(None, (ctx.command_path, ctx.invoked_subcommand)))
            _refuse(error, command)
        except (OSError, RuntimeError) as error:  # pathlib makes the second one of a loop of links
            cause = error if isinstance(error, OSError) else error.__context__
            if not isinstance(cause, OSError) or cause.filename is None:
                raise
            wrong = internal_error(cause)
            if cause.errno in _NO_PATH:
                wrong = UsageError(f"{shown(str(cause.filename))} can't be used as a path: {cause.strerror}")
            _show(wrong)
            raise typer.Exit(wrong.exit_code) from error
        except KeyboardInterrupt as error:
            _show(InterruptedRunError("stopped by Ctrl-C"))
            raise typer.Exit(InterruptedRunError.exit_code) from error


def _require_printed(command: str) -> None:
    """Fail if a command's result is its printed text and that could not be written.

    A broken pipe is no error: the reader, such as ``head``, has read enough.
    """
    lost = lost_output() if command in _PRINTED else None
    if lost is not None and lost.errno != errno.EPIPE:
        raise StorageError(f"standard output can't be written: {lost.strerror}; make room and call it again")


def _refuse(error: TyperException, command: str) -> NoReturn:
    old = str(getattr(error, "option_name", ""))
    new = RENAMED.get((command.rpartition(" ")[2], old))
    what = f"{old} is called {new} now" if new else error.format_message().rstrip(".")
    _show(UsageError(f"{what}; see '{command} --help'"))
    raise typer.Exit(UsageError.exit_code) from error


def _show(error: RingTuneError) -> None:
    name = type(error).__name__
    if "--json" in sys.argv:
        echo(json.dumps({"event": "error", "error": name, "message": str(error), "exit_code": error.exit_code}))
    echo(f"error: {indented(str(error))}", err=True)
    logging.getLogger(__name__).debug("the error came from here", exc_info=error)


_PRINTED = frozenset({"doctor", "eval", "logs", "nodes", "plan", "predict", "runs", "sim", "status", "what-if"})
"""Commands that have printed text as their result."""
_NO_PATH = (errno.ENAMETOOLONG, errno.ELOOP)
_EXIT_CODES = (
    "Exit codes: 0 done; 1 the run failed; 2 the command line makes no sense; 3 nobody answers, a port is busy, "
    "or a certificate or token is not accepted; "
    "4 a node died, hung or missed a deadline; 5 job, data, model or plan is wrong; 6 it does not fit in memory; "
    "7 damaged bytes; 8 busy, or the name is taken; 9 a disk is full, a folder can't be written or a file is gone; "
    "70 a bug of ringtune; 130 Ctrl-C in every command, also SIGTERM or a closed terminal where a run is saved; "
    "143 a node got SIGTERM; 129 a node's terminal was closed."
)

app = typer.Typer(
    cls=LazyGroup,
    name="ringtune",
    no_args_is_help=True,
    context_settings={"help_option_names": HELP_OPTIONS},
    pretty_exceptions_enable=False,
    help="Fine-tune one transformer together on the devices that hold the data.",
    epilog=_EXIT_CODES,
)


def _print_version(is_set: bool) -> None:
    if is_set:
        echo(f"ringtune {__version__}")
        raise typer.Exit


@app.callback()
def options(
    verbose: Annotated[int, typer.Option("--verbose", "-v", count=True, help="Log more; twice for debugging.")] = 0,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of every command."""
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    log_to_stderr(level)


def main() -> None:
    """Run the command line as the main program of a process, with a grace time after a signal to end."""
    mark_command_process()
    guard_outputs()
    run_typed()


def run_typed() -> None:
    """Run the command line in the current process and exit; an error that is not RingTune's exits with code 70."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # RingTune's errors say more than the logs of the C core
    try:
        app()
    except KeyboardInterrupt:  # before a command began, or while the process ends
        sys.exit(InterruptedRunError.exit_code)
    except Exception:
        echo(traceback.format_exc(), err=True)
        echo(f"error: this is a bug of ringtune {__version__}; please report the lines above", err=True)
        sys.exit(BUG_EXIT_CODE)


if __name__ == "__main__":
    main()
