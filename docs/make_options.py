"""Write ``docs/options.md``, every option of every command, from the command line: ``python -m docs.make_options``."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import Any

from docs.make_job import table
from ringtune import cli, options
from ringtune.transport import parties

PAGE = Path(__file__).parent / "options.md"
_BEGIN = f"""\
# Every option of every command

Written by `python -m docs.make_options` from the command line; do not edit it here. An option has one meaning wherever
it is. Every command has `-h`, `--help` and `--json`. `ringtune --install-completion` completes commands in a shell.

- `--coordinator` is the address of a coordinator. Without it `{options.COORDINATOR_VARIABLE}` of the environment
  counts. Without both a command that can't do without one asks `{options.DEFAULT_COORDINATOR}`, where
  `ringtune coordinator` listens by itself; if none listens there, `ringtune node` looks for one on the local network.
  `--local N`, and for `plan` also `--assume N`, `--memory SIZE` and `--profile FILE`, say that none is asked: then the
  environment does not count; `--coordinator ""` says so too. An address beyond this machine needs a certificate, or
  `--insecure` on the command line: no variable stands for that.
- `--trust` is a folder of keys and certificates. `{parties.VARIABLE}` of the environment names that of the user's, for
  commands that talk to a coordinator.
- `--out DIR` is a folder that is written, `--save FILE` a file.
- `--local N` starts N nodes on this machine, `--nodes N` waits for N nodes of a coordinator, `--assume N` plans for N
  equal nodes that are not there.
- `--set KEY=VALUE` replaces a key of the job, `--change KEY=VALUE` of `what-if` changes nodes, links, keys of a plan.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([_BEGIN, _arguments(), _options(), _renamed()])


def _arguments() -> str:
    rows = []
    for name, command in cli.all_commands().items():
        given = [each for each in command.params if each.param_type_name == "argument"]
        rows += [(f"`ringtune {name} {each.metavar}`", each.help or "") for each in given]
    return f"## Arguments\n\n{table(('command', 'what it is'), rows)}"


def _options() -> str:
    """A row for each option and each way in which commands describe it."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, command in cli.all_commands().items():
        for each in command.params:
            if each.param_type_name == "option" and not each.hidden and each.opts != ["--json"]:
                written = "/".join([*each.opts, *each.secondary_opts])
                found[f"{written} {each.metavar or ''}".strip(), f"{each.help}{_default(each)}"].append(name)
    rows = [(f"`{option}`", ", ".join(names), text) for (option, text), names in sorted(found.items())]
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
