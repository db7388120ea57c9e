"""Texts of other machines, made fit to be shown and logged: printable, and of bounded length.

A terminal obeys what is in a text: escapes move its cursor, hide lines and set its title.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import Final

MOST_CHARACTERS: Final = 4000
"""Longest message that is shown; the longest of our own, of a plan that does not fit, is half as long."""
_MOST_LOGGED: Final = 20_000
MOST_NAME: Final = 120
"""Longest name that is shown inside of a message."""
_HIDDEN: Final = re.compile(r"[^\S\n ]|[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


def printable(text: str, *, most: int = MOST_CHARACTERS) -> str:
    r"""Return a text of another machine so that it may be printed: line ends stay, other controls are escaped.

    Of a longer text the middle is left out. Example: ``\x1b[2J`` stands for the escape that clears a screen.
    """
    if len(text) > most:
        kept = most // 2
        text = f"{text[:kept]} … {len(text) - 2 * kept:,} characters … {text[-kept:]}"
    return _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shown(name: str) -> str:
    """Return a name that somebody else gave for use in a message, in quotes and on one line."""
    return repr(printable(name, most=MOST_NAME))


class PlainFormatter(logging.Formatter):
    """Writes log lines that are fit to be shown, whatever texts of others are in them; tracebacks stay whole."""

    def format(self, record: logging.LogRecord) -> str:
        """Write a record."""
        return printable(super().format(record), most=_MOST_LOGGED if record.exc_info else MOST_CHARACTERS)


def log_to_stderr(level: int | str) -> None:
    """Let this process log to its standard error from ``level`` on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
