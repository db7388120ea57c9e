"""A reader of bytes of others, and the judge of what it makes of them."""

from __future__ import annotations

import re
import resource
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ringtune.errors import RingTuneError

MAX_S: Final = 1.0
MAX_BYTES: Final = 64 << 20
"""What a call may make this process grow by; an input has some kilobytes."""

MAX_TEXT: Final = 16_000
_FRAME: Final = re.compile(r"/(?:proto|edge|coordinator|sim)/.*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reader:
    """Something that reads bytes of others.

    Attributes:
        name: of it.
        seeds: right inputs.
        read: takes any bytes; every error of ours is an answer.
        is_json: whether the inputs are JSON texts, whose values are replaced by hostile ones.
        repair: makes the digests of a changed JSON text right again; None = it has none.
    """

    name: str
    seeds: tuple[bytes, ...]
    read: Callable[[bytes], object]
    is_json: bool = False
    repair: Callable[[object], object] | None = None


def problem_of(reader: Reader, data: bytes) -> str:
    """Give a reader an input; say what is wrong with its answer, with the place in our code; empty = nothing is."""
    before = _peak_bytes()
    began_s = time.thread_time()
    problem = ""
    try:
        reader.read(data)
    except RingTuneError as error:
        if len(str(error)) > MAX_TEXT:
            problem = f"an error text of {len(str(error)):,} characters"
    except Exception as error:
        problem = f"{type(error).__name__} at {_place(error)}"
    if not problem and time.thread_time() - began_s > MAX_S:
        problem = f"more than {MAX_S:g} s of a processor"
    if not problem and _peak_bytes() - before > MAX_BYTES:
        problem = f"more than {MAX_BYTES >> 20} MiB"
    return f"{reader.name}: {problem}" if problem else ""


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _place(error: Exception) -> str:
    """The last line of ours that an error has passed."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        found = _FRAME.search(frame.filename)
        if found:
            return f"{found[0][1:]}:{frame.lineno}"
    return "the test itself"
