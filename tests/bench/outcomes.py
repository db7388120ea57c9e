"""``make faults``: what else may happen to a process, its link, its disk, its memory or its clock in mid-run.

Each row says what has to come of it; it is carried out on boards of the testbed (``tests/support/board_ring``) with a
lease of 5 s, several times, and its outcome measured: a part of ``build/bench/trust.json``. Kills at chosen places,
delays and lost calls are ``tests.bench.fault_matrix``'s, a killed coordinator ``tests.bench.coordinator_death``'s.

``python -m tests.bench.outcomes [--repeats 3] [--minutes 10] [--only TEXT] [--go-on]``; exit code 1 if anything came
otherwise, 77 if this machine can't.
"""

from __future__ import annotations

import dataclasses
import random
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from tests.bench.trust import Case, carry_out_part, read_options
from tests.support.board_ring import LEASE_S, STEPS
from tests.support.outcomes import STRIKES, Matrix, Outcome, Row, board_matrix

SHORT_S, LONG_S = 0.4 * LEASE_S, 1.8 * LEASE_S
KNOWN_S = LEASE_S + 3.0
"""How soon a loss is known at the latest: a lease, a beat that is due, a second for the node to speak for itself."""
ENDS_S = 60.0
"""Longer than a run: it is healed when the run has ended."""
STRIKE_AT, LATEST_STRIKE = 40, 3 * STEPS // 4
COORDINATOR = "coordinator"
UNHARMED, WITHOUT, RESUMED = Outcome.UNHARMED, Outcome.WITHOUT, Outcome.RESUMED


def _unharmed(name: str, strike: str, *victims: str, seconds: float = SHORT_S) -> list[Row]:
    return [Row(name=name, strike=strike, victim=victim, seconds=seconds, outcome=UNHARMED) for victim in victims]


def _lost(name: str, strike: str) -> list[Row]:
    """A host is gone for longer than its lease, and an owner."""
    host = Row(name=name, strike=strike, victim="c", seconds=LONG_S, outcome=WITHOUT, detected_s=KNOWN_S)
    owner = dataclasses.replace(host, victim="a", outcome=RESUMED, code=4, says="a owns rows, which no other node has")
    return [host, owner]


ROWS: tuple[Row, ...] = (
    *_unharmed("F2", "stopped", "a", "c"),
    *_lost("F2", "stopped"),
    *_unharmed("F3", "stopped", COORDINATOR),
    *_unharmed("F3", "stopped", COORDINATOR, seconds=LONG_S),
    *_unharmed("F3", "stopped", COORDINATOR, seconds=8 * LEASE_S),
    *_unharmed("F4", "link down", "a", "c"),
    *_lost("F4", "link down"),
    *_unharmed("F5", "unheard by all", "a", "c"),
    *_lost("F5", "unheard by all"),
    *_unharmed("F5", "unheard by the coordinator", "c"),
    Row(
        name="F5", strike="unheard by the coordinator", victim="c", seconds=LONG_S, outcome=WITHOUT, detected_s=KNOWN_S
    ),
    *_unharmed("F5", "unheard by the next", "c", seconds=LONG_S),
    *_unharmed("F5", "unheard by the next", "c", seconds=100.0),
    *_unharmed("F6", "link of 2 Mbit/s", "c", seconds=15.0),
    *_unharmed("F6", "link of 0.5 Mbit/s", "c", seconds=15.0),
    *_unharmed("F6", "link of 0.2 Mbit/s", "c", seconds=15.0),
    Row(name="F10", strike="disk full", victim="c", seconds=ENDS_S, outcome=WITHOUT, detected_s=KNOWN_S),
    Row(name="F10", strike="disk full", victim=COORDINATOR, seconds=ENDS_S, outcome=RESUMED, code=9, says="space"),
    Row(name="F12", strike="disk read-only", victim="c", seconds=ENDS_S, outcome=WITHOUT, detected_s=KNOWN_S),
    Row(name="F16", strike="out of memory", victim="c", seconds=ENDS_S, outcome=WITHOUT, detected_s=KNOWN_S),
    *_unharmed("F15", "clock 2 h behind", "a", "c", COORDINATOR, seconds=1.0),
    *_unharmed("F15", "clock 2 h ahead", "c", seconds=1.0),
    *_unharmed("F15", "clock 400 d ahead", "c", seconds=1.0),
    *_unharmed("F17", "a quarter of its processor", "c", seconds=LONG_S),
)


def boards(folder: Path, _: str) -> AbstractContextManager[Matrix]:
    """The ring of every row."""
    return board_matrix(folder, "rtfaults")


def _case(row: Row, group: str = "", strike_at: int = STRIKE_AT) -> Case:
    name = f"{row.title}, after step {strike_at}"
    return Case(f"{group}{row.title}", name, lambda matrix: matrix.carry_out(row, strike_at=strike_at))


def soak(minutes: float, seed: int) -> Iterator[Case]:
    """Random rows at random steps for so many minutes."""
    rng, until_s = random.Random(seed), time.monotonic() + 60 * minutes
    able = [row for row in ROWS if not STRIKES[row.strike].lacks()]
    while time.monotonic() < until_s:
        yield _case(rng.choice(able), "soak: ", rng.randint(1, LATEST_STRIKE))


def main() -> int:
    """Read the command line, carry the rows out."""
    options = read_options(
        __doc__,
        repeats=(3, "of each row"),
        minutes=(0.0, "of random rows at random steps afterwards"),
        seed=(0, "of the random rows"),
    )
    lacks = {row: why for row in ROWS if (why := STRIKES[row.strike].lacks())}
    fixed = [_case(row) for row in ROWS if row not in lacks for _ in range(options.repeats)]
    skipped = {row.title: {"skipped": why} for row, why in lacks.items()}
    drawn = soak(options.minutes, options.seed)
    return carry_out_part("outcomes", fixed, boards, options, drawn=drawn, known=skipped)


if __name__ == "__main__":
    sys.exit(main())
