"""What has to come of a fault, stated as data, and what came of it on a ``BoardRing``."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from coordinator.run.run_text import is_step
from tests.support.board_ring import NAMES, START_S, STEPS, BoardRing
from tests.support.board_run import LOOK_S, RUN_S, BoardRun, Said, listening
from tests.support.results import largest_difference
from tests.support.strikes import STRIKES

EQUAL = 1e-9
_LOST, _GOES_ON = " is lost", "continues from step"


class Outcome(StrEnum):
    """What comes of a fault. Weights and books are in each case those of the undisturbed run."""

    UNHARMED = "nobody is declared lost, and the run comes to its end"
    WITHOUT = "the run goes on without it and comes to its end; it is a member again when it is healed"
    RESUMED = "the run ends with an error that says why; healed and resumed it comes to its end"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A row of the matrix: what happens to whom, and what comes of it.

    Attributes:
        name: of the scenario in the list of faults, as F4.
        strike: of ``STRIKES``.
        victim: node or coordinator.
        seconds: until it is healed.
        outcome: what has to come of it.
        code: exit code of a run that ends.
        says: what is in the error of a run that ends.
        detected_s: most seconds until the run knows, where somebody is lost or the run ends.
    """

    name: str
    strike: str
    victim: str
    seconds: float
    outcome: Outcome
    code: int = 0
    says: str = ""
    detected_s: float = 0.0

    @property
    def title(self) -> str:
        """Name, victim, strike and how long."""
        return f"{self.name} {self.victim}: {self.strike} for {self.seconds:g} s"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What came of a row once.

    Attributes:
        problems: what was not as stated; empty = all was.
        code: exit code of the run.
        message: of its error.
        detection_s: from the fault until the run said that somebody is lost, or ended; None = it did neither.
        recovery_s: from the fault until the run trained on; None = nobody was lost.
        rejoined_s: from the healing until the victim was a member again; None = it never was none.
        steps_lost: steps that are missing in the books, or there twice.
        steps_repeated: that were done again.
        difference: of the largest trained value, to the undisturbed run.
        wall_s: of the run, without a resumed part.
    """

    problems: tuple[str, ...]
    code: int
    message: str
    detection_s: float | None
    recovery_s: float | None
    rejoined_s: float | None
    steps_lost: int
    steps_repeated: int
    difference: float
    wall_s: float


class Matrix:
    """Carries rows out on a ring."""

    def __init__(self, ring: BoardRing) -> None:
        self._ring = ring
        run = ring.train()
        _wait(run)
        assert run.code == 0, run.running.words()
        self._wanted = _trained(run.out)
        ring.wait_idle()

    def carry_out(self, row: Row, *, strike_at: int) -> Trial:
        """Let the fault happen once, after so many steps; afterwards all is as before."""
        ring, strike = self._ring, STRIKES[row.strike]
        if strike.prefix is not None:
            ring.restart(row.victim, prefix=strike.prefix(ring, row.victim))
        began_s = time.monotonic()
        run = ring.train()
        with listening(run, ring.said):
            struck_s, rejoined_s = self._strike(run, row, strike_at)
            _wait(run)
        wall_s = time.monotonic() - began_s
        ring.wait_idle()
        again = ring.train("--resume", out=run.out) if run.code else None
        if again is not None:
            _wait(again)
            ring.wait_idle()
        found = _found(run, again or run, ring.said, struck_s, self._wanted)
        if strike.prefix is not None:
            ring.restart(row.victim)
        problems = tuple(problems_of(row, found, is_resumed=again is not None))
        return Trial(problems=problems, rejoined_s=rejoined_s, wall_s=wall_s, **found)

    def _strike(self, run: BoardRun, row: Row, strike_at: int) -> tuple[float, float | None]:
        """Let it happen in mid-run and heal it; return when it happened, and how soon the victim was back."""
        ring, strike = self._ring, STRIKES[row.strike]
        run.until_steps(strike_at)
        struck_s = time.monotonic()
        strike.begin(ring, row.victim)
        try:
            _wait(run, until_s=struck_s + row.seconds)
        finally:
            strike.heal(ring, row.victim)
        return struck_s, self._rejoined_s(row.victim, time.monotonic())

    def _rejoined_s(self, victim: str, healed_s: float) -> float | None:
        """Seconds until the victim is a member, if it is none now."""
        if victim not in NAMES or self._is_member(victim):
            return None
        while not self._is_member(victim):
            assert time.monotonic() < healed_s + START_S, f"{victim} does not come back: {self._ring.members()}"
            time.sleep(LOOK_S)
        return time.monotonic() - healed_s

    def _is_member(self, name: str) -> bool:
        return str(self._ring.members().get(name, ["lost"])[0]) != "lost"


def _wait(run: BoardRun, *, until_s: float | None = None) -> None:
    """Look at a run until it has ended; or until a moment, if that comes first."""
    deadline_s = time.monotonic() + RUN_S if until_s is None else until_s
    while run.code is None and time.monotonic() < deadline_s:
        run.look()
        time.sleep(LOOK_S)
    run.look()
    assert until_s is not None or run.code is not None, f"the run does not end: {run.running.words()}"


def _trained(out: Path) -> dict[str, Any]:
    return load_file(out / "adapter/adapter.safetensors") | load_file(out / "adapter/model_head.safetensors")


def _found(
    run: BoardRun, ended: BoardRun, coordinator: Said, struck_s: float, wanted: dict[str, Any]
) -> dict[str, Any]:
    """What times, books and weights say."""
    notes = (said.first_s("note", after_s=struck_s, text=_LOST) for said in (run, coordinator))
    lost_s = min(filter(None, (*notes, run.first_s("error", after_s=struck_s))), default=None)
    on_s = run.first_s("note", after_s=lost_s, text=_GOES_ON) if lost_s else None
    on_s = run.first_s("step", after_s=on_s) if on_s else None
    steps = [line["step"] for line in ended.books() if is_step(line)]
    said = run.steps() + (ended.steps() if ended is not run else [])
    return {
        "code": run.code or 0,
        "message": run.message,
        "detection_s": lost_s - struck_s if lost_s else None,
        "recovery_s": on_s - struck_s if on_s else None,
        "steps_lost": len(set(range(1, STEPS + 1)) ^ set(steps)) + len(steps) - len(set(steps)),
        "steps_repeated": len(said) - len(set(said)),
        "difference": largest_difference(_trained(ended.out), wanted) if ended.code == 0 else float("inf"),
    }


def problems_of(row: Row, found: dict[str, Any], *, is_resumed: bool) -> list[str]:
    """Say what is not as a row states it."""
    problems = []
    if found["difference"] > EQUAL:
        problems.append(f"weights differ by {found['difference']:g}")
    if found["steps_lost"]:
        problems.append(f"{found['steps_lost']} steps are missing or twice in the books")
    match row.outcome:
        case Outcome.UNHARMED:
            if is_resumed or found["detection_s"] is not None:
                problems.append(f"not unharmed, detected after {found['detection_s']} s: {found['message']!r}")
        case Outcome.WITHOUT:
            if is_resumed or found["recovery_s"] is None:
                problems.append(f"did not go on without it: {found['message']!r}")
        case Outcome.RESUMED:
            if not is_resumed or row.says not in found["message"] or found["code"] != row.code:
                problems.append(f"did not end with {row.code} and {row.says!r}: {found['code']}, {found['message']!r}")
    if row.detected_s and not (found["detection_s"] is not None and found["detection_s"] <= row.detected_s):
        problems.append(f"detected after {found['detection_s']} s, not within {row.detected_s:g} s")
    return problems
