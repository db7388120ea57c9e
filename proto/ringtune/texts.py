"""Texts of other machines, made fit for screens and logs: printable, and of bounded length.

A terminal obeys escapes in a text: they move its cursor, hide lines and set its title.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Final, TextIO

MAX_CHARACTERS: Final = 4000
"""Longest message that is shown; the longest of our own, of a plan that does not fit, is half as long."""
_MAX_LOGGED: Final = 20_000
_MAX_KEYS: Final = 1000
LIBRARY_LOGS: Final = ("grpc._common", "grpc._server", "grpc._channel")
"""Loggers of libraries into which a stranger's messages write."""
MAX_NAME: Final = 120
"""Longest name that is shown inside of a message."""
_HIDDEN: Final = re.compile(r"[^\S\n ]|[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


def printable(text: str, *, most: int = MAX_CHARACTERS) -> str:
    r"""Return a text of another machine so that it may be printed: line ends stay, other controls are escaped.

    Of a longer text the middle is left out. Example: ``\x1b[2J`` stands for the escape that clears a screen.
    """
    if len(text) > most:
        kept = most // 2
        text = f"{text[:kept]} … {len(text) - 2 * kept:,} characters … {text[-kept:]}"
    return _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shown(name: str) -> str:
    """Return a name from another machine for use in a message, in quotes and on one line."""
    return repr(printable(name, most=MAX_NAME))


def listed(names: Sequence[str], most: int) -> str:
    """List names, of many the first ones: ``a, b and 3 more``."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


class RepeatCounter:
    """Counts what happens again and again, and says when it is worth a line: the 1st, 10th, 100th time and so on.

    Of 20,000 refused frames of one peer five lines are left. Safe for threads.
    """

    def __init__(self) -> None:
        self._counts: Counter[Hashable] = Counter()
        self._lock = threading.Lock()

    def told(self, key: Hashable) -> int:
        """Count one more of a kind; return how many there were if that is worth a line, else 0."""
        with self._lock:
            key = key if key in self._counts or len(self._counts) < _MAX_KEYS else None
            self._counts[key] += 1
            count = self._counts[key]
        return count if str(count).rstrip("0") == "1" else 0


def times(count: int) -> str:
    """Say how often something was there by now, to be put behind a line; nothing for the first time."""
    return f" ({count:,} times by now)" if count > 1 else ""


class _RepeatFilter(logging.Filter):
    """Lets few of many alike records of a library pass: a stranger can make it write one for each message."""

    def __init__(self) -> None:
        super().__init__()
        self._repeats = RepeatCounter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log a record, to which the count is added."""
        count = self._repeats.told((record.name, record.lineno))
        record.msg = f"{record.msg}{times(count)}"
        return count > 0


class PlainFormatter(logging.Formatter):
    """Writes log lines that are fit to be shown, whatever texts of others are in them; tracebacks stay whole."""

    def format(self, record: logging.LogRecord) -> str:
        """Write a record."""
        return printable(super().format(record), most=_MAX_LOGGED if record.exc_info else MAX_CHARACTERS)


def log_to_stderr(level: int | str, stream: TextIO | None = None) -> None:
    """Let this process log to its standard error, or another stream, from ``level`` on."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(PlainFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
    for name in LIBRARY_LOGS:
        logger = logging.getLogger(name)
        for old in [one for one in logger.filters if isinstance(one, _RepeatFilter)]:
            logger.removeFilter(old)
        logger.addFilter(_RepeatFilter())
