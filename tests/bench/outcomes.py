"""``make faults``: what else may happen to a process, its link, its disk, its memory or its clock in mid-run.

Each row says what has to come of it; it is carried out on boards of the testbed (``tests/support/board_ring``) with a
lease of 5 s, several times, and its outcome measured: a part of ``build/bench/trust.json``. Kills at chosen places,
delays and lost calls are ``tests.bench.fault_matrix``'s, a killed coordinator ``tests.bench.coordinator_death``'s.

``python -m tests.bench.outcomes [--repeats 3] [--minutes 10] [--only TEXT] [--go-on]``; exit code 1 if anything came
otherwise, 77 if this machine can't.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from deploy.testbed.capabilities import SKIPPED_EXIT_CODE, MissingCapability
from tests.bench.trust import KeptTrials, known_part, say, spread, write_part
from tests.support.board_ring import LEASE_S, STEPS, board_ring
from tests.support.outcomes import Matrix, Outcome, Row
from tests.support.strikes import STRIKES

PART, BED = "outcomes", "rtfaults"
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


class Case(NamedTuple):
    """A trial: a row, and after how many steps it happens."""

    row: Row
    strike_at: int = STRIKE_AT


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
    Row(name="F5", strike="unheard by the next", victim="c", seconds=100.0, outcome=WITHOUT),
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


def carry_out(cases: Iterable[Case], kept: KeptTrials) -> None:
    """Carry rows out, and keep the trials; a ring on which something went wrong is built anew."""
    ahead = iter(cases)
    case = next(ahead, None)
    while case is not None:
        with tempfile.TemporaryDirectory(prefix="ringtune-outcomes-") as folder:
            try:
                with board_ring(Path(folder), name=BED) as ring:
                    matrix = Matrix(ring)
                    while case is not None:
                        _keep(kept, case, dataclasses.asdict(matrix.carry_out(case.row, strike_at=case.strike_at)))
                        case = next(ahead, None)
            except AssertionError as error:
                assert case is not None
                _keep(kept, case, {"problems": [f"no outcome: {error}"]})
                case = next(ahead, None)


def whole(rows: Iterable[Row], repeats: int, kept: KeptTrials) -> list[Case]:
    """Every row until so many trials of it are kept."""
    able = [row for row in rows if not STRIKES[row.strike].lacks()]
    return [Case(row) for row in able for _ in range(repeats - len(kept.of(row.title)))]


def soak(minutes: float, seed: int) -> Iterator[Case]:
    """Random rows at random steps for so many minutes."""
    rng, until_s = random.Random(seed), time.monotonic() + 60 * minutes
    able = [row for row in ROWS if not STRIKES[row.strike].lacks()]
    while time.monotonic() < until_s:
        yield Case(rng.choice(able), rng.randint(1, LATEST_STRIKE))


def _keep(kept: KeptTrials, case: Case, trial: dict[str, Any]) -> None:
    kept.add(case.row.title, trial)
    say(json.dumps({"row": case.row.title, "step": case.strike_at, **trial}))


def figures_of(row: Row, trials: list[dict[str, Any]]) -> dict[str, Any]:
    """What trust.json says of a row."""
    found: dict[str, Any] = {"stated": str(row.outcome), "exit_code": row.code, "trials": len(trials)}
    if why := STRIKES[row.strike].lacks():
        return found | {"skipped": why}
    found["as_stated"] = sum(not trial["problems"] for trial in trials)
    found["problems"] = [problem for trial in trials for problem in trial["problems"]]
    ended = [trial for trial in trials if "wall_s" in trial]
    for name in ("detection_s", "recovery_s", "rejoined_s"):
        seconds = [trial[name] for trial in ended if trial[name] is not None]
        if seconds:
            found[name.removesuffix("_s")] = spread(seconds)
    for name in ("steps_lost", "steps_repeated", "difference"):
        found[f"most_{name}"] = max((trial[name] for trial in ended), default=None)
    return found


def main() -> int:
    """Read the command line, carry the rows out, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="of each row")
    parser.add_argument("--minutes", type=float, default=0.0, help="of random rows at random steps afterwards")
    parser.add_argument("--seed", type=int, default=0, help="of the random rows")
    parser.add_argument("--only", default="", help="only the rows with this text")
    parser.add_argument("--go-on", action="store_true", help="with what earlier calls have carried out")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # which removes the boards
    rows = [row for row in ROWS if options.only in row.title]
    kept, drawn = KeptTrials(PART, go_on=options.go_on), KeptTrials(f"{PART}_soak", go_on=False)
    try:
        carry_out(whole(rows, options.repeats, kept), kept)
        carry_out(soak(options.minutes, options.seed), drawn)
    except MissingCapability as reason:
        sys.stderr.write(f"skipped: this machine can't: {reason}\n")
        return SKIPPED_EXIT_CODE
    figures = {row.title: figures_of(row, kept.of(row.title)) for row in rows}
    write_part(PART, {**known_part(PART), **figures})
    if options.minutes:
        soaked = {row.title: figures_of(row, found) for row in ROWS if (found := drawn.of(row.title))}
        write_part(f"{PART}_soak", {"minutes": options.minutes, "seed": options.seed, "rows": soaked})
        figures |= {f"soak: {title}": found for title, found in soaked.items()}
    say(json.dumps(figures, indent=1))
    return 0 if all("skipped" in one or one["as_stated"] == one["trials"] for one in figures.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
