"""Texts of other machines, made safe for terminals and logs: printable, and of bounded length.

A terminal obeys escape sequences in a text: they move its cursor, hide lines and set its title.
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
"""Longest message that is printed; RingTune's longest, of a plan that does not fit, is half as long."""
_MAX_LOGGED: Final = 20_000
_MAX_KEYS: Final = 1000
LIBRARY_LOGS: Final = ("grpc._common", "grpc._server", "grpc._channel")
"""Loggers of libraries that write a record for a message of any peer."""
MAX_NAME: Final = 120
"""Longest name that is printed inside a message."""
_HIDDEN: Final = re.compile(r"[^\S\n ]|[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


_OBEYED: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]|\r(?!\n)")


def inert(text: str) -> str:
    r"""Escape what a terminal obeys; blanks, line ends and characters that are joined stay as they are."""
    return _OBEYED.sub(lambda sign: sign[0].encode("unicode_escape").decode(), text)


def printable(text: str, *, most: int = MAX_CHARACTERS) -> str:
    r"""Escape control characters other than line ends, and cut the middle out of a longer text.

    Example: the escape sequence that clears a screen becomes the four characters ``\x1b`` and ``[2J``.
    """
    if len(text) > most:
        kept = most // 2
        text = f"{text[:kept]} … {len(text) - 2 * kept:,} characters … {text[-kept:]}"
    return _HIDDEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def indented(text: str) -> str:
    """Indent the lines after the first one, of an error or a record of a log: no text in it forges another one."""
    return text.replace("\n", "\n  ")


def one_line(text: str, *, most: int = MAX_CHARACTERS) -> str:
    r"""Escape line ends too, of a text that is one entry of a list or table: with them it could forge another one."""
    return printable(text, most=most).replace("\n", r"\n")


def shown(name: str) -> str:
    """Quote a name from another machine for a message, on one line."""
    return repr(printable(name, most=MAX_NAME))


def visible(label: str) -> str:
    """Return the name of a class on one short line: in quotes if it has blanks at an end or invisible characters."""
    shown_whole = label == label.strip() and label.isprintable() and label
    return printable(label if shown_whole else repr(label), most=MAX_NAME)


def listed(names: Sequence[str], most: int) -> str:
    """List names, of many the first ones: ``a, b and 3 more``."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def counted(count: int, what: str) -> str:
    """Write a number of things: ``1 step``, ``4,000 steps``."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


class RepeatCounter:
    """Counts repeated events and selects the 1st, 10th, 100th, ... of each kind for the log.

    Of 20,000 refused frames of one peer five are logged. Safe for threads.
    """

    def __init__(self) -> None:
        self._counts: Counter[Hashable] = Counter()
        self._lock = threading.Lock()

    def told(self, key: Hashable) -> int:
        """Count one more event of a kind; return the count if it is to be logged (a power of ten), else 0.

        Kinds after the first 1,000 are counted together.
        """
        with self._lock:
            key = key if key in self._counts or len(self._counts) < _MAX_KEYS else None
            self._counts[key] += 1
            count = self._counts[key]
        return count if str(count).rstrip("0") == "1" else 0


def times(count: int) -> str:
    """Write a count to append to a log line; empty for 1."""
    return f" ({count:,} times by now)" if count > 1 else ""


class _RepeatFilter(logging.Filter):
    """Passes the 1st, 10th, 100th, ... record of a place in a library, since a peer can cause one for each message."""

    def __init__(self) -> None:
        super().__init__()
        self._repeats = RepeatCounter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Decide whether to log a record, and add the count to it."""
        count = self._repeats.told((record.name, record.lineno))
        record.msg = f"{record.msg}{times(count)}"
        return count > 0


class PlainFormatter(logging.Formatter):
    """Formats log lines with ``printable``; tracebacks stay whole up to 20,000 characters.

    Only records begin at the start of a line.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        text = printable(super().format(record), most=_MAX_LOGGED if record.exc_info else MAX_CHARACTERS)
        return indented(text)


def log_to_stderr(level: int | str, stream: TextIO | None = None) -> None:
    """Send this process's log records from ``level`` on to ``stream``, by default standard error."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(PlainFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
    for name in LIBRARY_LOGS:
        logger = logging.getLogger(name)
        for old in [entry for entry in logger.filters if isinstance(entry, _RepeatFilter)]:
            logger.removeFilter(old)
        logger.addFilter(_RepeatFilter())
