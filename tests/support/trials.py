"""What came of a run that was disturbed, said in one way by everything that disturbs runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

EQUAL = 1e-9
"""Largest difference of a trained value to the undisturbed run, in float64."""
POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What came of one run.

    Attributes:
        problems: what is not as it has to be; empty = the trial is good.
        wall_s: of the whole trial.
        error: with which the run ended and had to be resumed or fetched; empty = it came to its end by itself.
        figures: what was counted or measured besides, by name; those in seconds end in ``_s``.
    """

    problems: tuple[str, ...]
    wall_s: float
    error: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


def differences(difference: float, lines: Sequence[object], wanted: Sequence[object]) -> list[str]:
    """Say in what a run is not the undisturbed one: its largest difference of a weight, the lines of its books."""
    problems = [f"weights differ by {difference:g}"] if difference > EQUAL else []
    if lines != wanted:
        odd = [str(line) for line in wanted if lines.count(line) != 1]
        problems.append(f"{len(lines)} lines of books in place of {len(wanted)}; missing or twice: {', '.join(odd)}")
    return problems


def wait_until(is_so: Callable[[], bool], why: Callable[[], object], *, within_s: float) -> None:
    """Look again and again; fails with the reason if it is not so in time."""
    deadline_s = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline_s, why()
        time.sleep(POLL_S)
