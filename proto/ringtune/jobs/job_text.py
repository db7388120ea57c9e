"""Read the text of a job file, and say in the user's words what is wrong with it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Final

from ringtune.errors import JobError
from ringtune.files.given_files import read_given

MAX_BYTES: Final = 4_000_000
"""Most bytes of a job file; one with every key has two thousand, and given operation tables come on top."""

_PLACE = re.compile(r"\(at line (\d+), column (\d+)\)")
_KEY = re.compile(r"\s*(?:\[+\s*(?P<section>[^]]*)|(?P<key>[\w.\"'-]+)\s*=)")


def read_job_text(path: Path) -> str:
    """Read a job file; a byte order mark, as some editors write it, is dropped.

    Raises:
        JobError: no such file, a folder, too large, or not UTF-8.
    """
    try:
        if path.is_dir():
            raise JobError(f"{path} is a folder; give the job file in it, such as {path / 'job.toml'}")
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise JobError(f"{path} has {size:,} bytes, a job file has at most {MAX_BYTES:,}; is it another file?")
        return read_given(path, encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise JobError(f"can't read the job file {path}: {reason}") from error


def parse_tables(text: str, *, source: str) -> dict[str, Any]:
    """Read TOML.

    Args:
        text: of the file.
        source: where it came from, for messages.

    Raises:
        JobError: not TOML; names the line, and for common slips the remedy.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise JobError(f"{source}: not valid TOML: {error}{_advice(text, str(error))}") from error
    except RecursionError as error:
        raise JobError(f"{source}: not valid TOML: it is nested too deeply") from error
    except ValueError as error:  # a number of thousands of digits
        raise JobError(f"{source}: not valid TOML: a number is too long") from error


def _advice(text: str, problem: str) -> str:
    """What to do about a slip that is known; empty if it is not."""
    place = _PLACE.search(problem)
    line = text.splitlines()[int(place[1]) - 1] if place and int(place[1]) <= len(text.splitlines()) else ""
    found = _KEY.match(line)
    name = (found["section"] or found["key"] or "").strip() if found else ""
    if problem.startswith(("Cannot overwrite a value", "Cannot declare", "Cannot mutate", "Cannot redefine")):
        return f"; {name or 'a key'} stands twice, keep one"
    if "Unescaped '\\'" in problem or ("\\" in line and "Invalid hex" in problem):
        return "; a backslash has a meaning in double quotes, write the path with / or in 'single quotes'"
    if "Invalid value" in problem and name:
        return f"; put the text behind {name} in quotes"
    return ""
