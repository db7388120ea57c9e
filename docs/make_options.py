"""Write the tables of ``docs/options.md``, of all options of all commands: ``python -m docs.make_options``."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import Any

from docs.make_job import filled, table
from ringtune import cli, options

PAGE = Path(__file__).parent / "options.md"
BEGIN = "<!-- written by python -m docs.make_options -->"


def page() -> str:
    """The page with the present tables."""
    return filled(PAGE.read_text(encoding="utf-8"), BEGIN, "\n".join([_arguments(), _options(), _renamed()]))


def _arguments() -> str:
    rows = []
    for name, command in cli.all_commands().items():
        given = [each for each in command.params if each.param_type_name == "argument"]
        rows += [(f"`ringtune {name} {each.metavar}`", each.help or "") for each in given]
    return f"## Arguments\n\n{table(('command', 'what it is'), rows)}"


def _options() -> str:
    """A row for each option and each way in which commands describe it."""
    commands_of: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, command in cli.all_commands().items():
        for each in command.params:
            if each.param_type_name == "option" and not each.hidden and each.opts != ["--json"]:
                written = "/".join([*each.opts, *each.secondary_opts])
                commands_of[f"{written} {each.metavar or ''}".strip(), f"{each.help}{_default(each)}"].append(name)
    rows = [(f"`{option}`", ", ".join(names), text) for (option, text), names in sorted(commands_of.items())]
    return f"## Options\n\n{table(('option', 'commands', 'what it is'), rows)}"


def _default(option: Any) -> str:
    """The default in words, where it says something."""
    value = option.default
    if value in (None, "", False, True, 0) or callable(value) or option.multiple:
        return ""
    return f" Default: `{os.fspath(value) if isinstance(value, Path) else value}`."


def _renamed() -> str:
    rows = [(f"`{command} {old}`", f"`{new}`") for (command, old), new in sorted(options.RENAMED.items())]
    return f"## Older names\n\nThey are refused with the name that counts now.\n\n{table(('was', 'is'), rows)}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
