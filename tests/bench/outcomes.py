"""``make faults``: what else may happen to a process, its link, its disk, its memory or its clock in mid-run.

Each row says what has to come of it; it is carried out on boards of the testbed (``tests/support/board_ring``) with a
lease of 5 s, several times, and its outcome measured: a part of ``build/bench/trust.json``. Kills at chosen places,
delays and lost calls are ``tests.bench.fault_matrix``'s, a killed coordinator ``tests.bench.coordinator_death``'s.

``python -m tests.bench.outcomes [--repeats 3] [--only TEXT] [--go-on]``; exit code 1 if anything came otherwise, 77 if
this machine can't.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deploy.testbed.capabilities import SKIPPED_EXIT_CODE, MissingCapability
from tests.bench.kept_trials import KeptTrials
from tests.bench.trust_figures import known_part, spread, write_part
from tests.support.board_ring import LEASE_S, board_ring
from tests.support.outcomes import Matrix, Outcome, Row
from tests.support.strikes import STRIKES

PART, BED = "outcomes", "rtfaults"
SHORT_S, LONG_S = 0.4 * LEASE_S, 1.8 * LEASE_S
KNOWN_S = LEASE_S + 3.0
"""How soon a loss is known at the latest: a lease, a beat that is due, a second for the node to speak for itself."""
COORDINATOR = "coordinator"
UNHARMED, WITHOUT, RESUMED = Outcome.UNHARMED, Outcome.WITHOUT, Outcome.RESUMED


def _unharmed(name: str, strike: str, *victims: str, seconds: float = SHORT_S) -> list[Row]:
    return [Row(name=name, strike=strike, victim=victim, seconds=seconds, outcome=UNHARMED) for victim in victims]


def _lost(name: str, strike: str, seconds: float = LONG_S) -> list[Row]:
    """A host is gone for longer than its lease, and an owner."""
    host = Row(name=name, strike=strike, victim="c", seconds=seconds, outcome=WITHOUT, detected_s=KNOWN_S)
    owner = dataclasses.replace(host, victim="a", outcome=RESUMED, code=4, says="a owns rows, which no other node has")
    return [host, owner]


ROWS: tuple[Row, ...] = (
    *_unharmed("F2", "stopped", "a", "c"),
    *_lost("F2", "stopped"),
    *_unharmed("F3", "stopped", COORDINATOR),
    Row(
        name="F3",
        strike="stopped",
        victim=COORDINATOR,
        seconds=LONG_S,
        outcome=RESUMED,
        code=4,
        says="is lost",
    ),
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
    Row(name="F10", strike="disk full", victim="c", seconds=SHORT_S, outcome=RESUMED, code=9, says="node c"),
    Row(name="F10", strike="disk full", victim=COORDINATOR, seconds=SHORT_S, outcome=RESUMED, code=9, says="space"),
    Row(name="F12", strike="disk read-only", victim="c", seconds=SHORT_S, outcome=RESUMED, code=9, says="node c"),
    Row(
        name="F12", strike="disk read-only", victim=COORDINATOR, seconds=20.0, outcome=RESUMED, code=9, says="Read-only"
    ),
    Row(name="F16", strike="out of memory", victim="c", seconds=SHORT_S, outcome=WITHOUT, detected_s=KNOWN_S),
    *_unharmed("F15", "clock 2 h behind", "a", "c", COORDINATOR, seconds=1.0),
    *_unharmed("F15", "clock 2 h ahead", "c", seconds=1.0),
    *_unharmed("F15", "clock 400 d ahead", "c", seconds=1.0),
    *_unharmed("F17", "a quarter of its processor", "c", seconds=LONG_S),
)


def carry_out(rows: Iterable[Row], repeats: int, kept: KeptTrials) -> None:
    """Carry rows out until so many trials of each are kept; a ring on which something went wrong is built anew."""
    ahead = [row for row in rows for _ in range(repeats - len(kept.of(row.title))) if not STRIKES[row.strike].lacks()]
    while ahead:
        with tempfile.TemporaryDirectory(prefix="ringtune-outcomes-") as folder:
            try:
                with board_ring(Path(folder), name=BED) as ring:
                    matrix = Matrix(ring)
                    while ahead:
                        row = ahead.pop(0)
                        _keep(kept, row, dataclasses.asdict(matrix.carry_out(row)))
            except AssertionError as error:
                _keep(kept, row, {"problems": [f"no outcome: {error}"]})


def _keep(kept: KeptTrials, row: Row, trial: dict[str, Any]) -> None:
    kept.add(row.title, trial)
    sys.stdout.write(json.dumps({"row": row.title, **trial}) + "\n")
    sys.stdout.flush()


def figures_of(row: Row, trials: list[dict[str, Any]]) -> dict[str, Any]:
    """What trust.json says of a row."""
    found: dict[str, Any] = {"stated": str(row.outcome), "exit_code": row.code, "trials": len(trials)}
    if why := STRIKES[row.strike].lacks():
        return found | {"skipped": why}
    found["as_stated"] = sum(not trial["problems"] for trial in trials)
    found["problems"] = [problem for trial in trials for problem in trial["problems"]]
    whole = [trial for trial in trials if "wall_s" in trial]
    for name in ("detection_s", "recovery_s", "rejoined_s"):
        seconds = [trial[name] for trial in whole if trial[name] is not None]
        if seconds:
            found[name.removesuffix("_s")] = spread(seconds)
    for name in ("steps_lost", "steps_repeated", "difference"):
        found[f"most_{name}"] = max((trial[name] for trial in whole), default=None)
    return found


def main() -> int:
    """Read the command line, carry the rows out, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="of each row")
    parser.add_argument("--only", default="", help="only the rows with this text")
    parser.add_argument("--go-on", action="store_true", help="with what earlier calls have carried out")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # which removes the boards
    rows = [row for row in ROWS if options.only in row.title]
    kept = KeptTrials(PART, go_on=options.go_on)
    try:
        carry_out(rows, options.repeats, kept)
    except MissingCapability as reason:
        sys.stderr.write(f"skipped: this machine can't: {reason}\n")
        return SKIPPED_EXIT_CODE
    figures = {row.title: figures_of(row, kept.of(row.title)) for row in rows}
    write_part(PART, {**known_part(PART), **figures})
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")
    return 0 if all("skipped" in one or one["as_stated"] == one["trials"] for one in figures.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
