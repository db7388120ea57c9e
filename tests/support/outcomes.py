"""What has to come of a fault, stated as data, and what came of it on a ``BoardRing``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from coordinator.run.run_text import is_step
from tests.support.board_ring import NAMES, START_S, STEPS, BoardRing, board_ring
from tests.support.board_run import LOOK_S, RUN_S, BoardRun, Said, listening
from tests.support.results import largest_difference, trained_in
from tests.support.strikes import STRIKES
from tests.support.trials import Trial, differences, wait_until

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


class Matrix:
    """Carries rows out on a ring."""

    def __init__(self, ring: BoardRing) -> None:
        self._ring = ring
        run = ring.train()
        _wait(run)
        assert run.code == 0, run.running.words()
        self._wanted = trained_in(run.out)
        ring.wait_idle()

    def carry_out(self, row: Row, *, strike_at: int) -> Trial:
        """Let the fault happen once, after so many steps; afterwards all is as before.

        Figures of the trial: ``detection_s`` from the fault until the run said that somebody is lost, or ended, and
        ``recovery_s`` until it trained on; ``rejoined_s`` from the healing until the victim was a member again;
        ``steps_repeated``, that were done again. ``wall_s`` is without a resumed part.
        """
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
        figures, lines = _figures_of(run, again or run, ring.said, struck_s, self._wanted)
        if rejoined_s is not None:
            figures["rejoined_s"] = rejoined_s
        if strike.prefix is not None:
            ring.restart(row.victim)
        problems = differences(figures["difference"], lines, list(range(1, STEPS + 1)))
        problems += problems_of(row, figures, code=run.code or 0, error=run.message, is_resumed=again is not None)
        return Trial(problems=tuple(problems), wall_s=wall_s, error=run.message, figures=figures)

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
        wait_until(
            lambda: self._is_member(victim),
            lambda: f"{victim} does not come back: {self._ring.members()}",
            within_s=START_S,
        )
        return time.monotonic() - healed_s

    def _is_member(self, name: str) -> bool:
        return str(self._ring.members().get(name, ["lost"])[0]) != "lost"


@contextmanager
def board_matrix(folder: Path, name: str, **more: Any) -> Iterator[Matrix]:
    """A ring on boards that carries rows out."""
    with board_ring(folder, name=name, **more) as ring:
        yield Matrix(ring)


def _wait(run: BoardRun, *, until_s: float | None = None) -> None:
    """Look at a run until it has ended; or until a moment, if that comes first."""
    deadline_s = time.monotonic() + RUN_S if until_s is None else until_s
    while run.code is None and time.monotonic() < deadline_s:
        run.look()
        time.sleep(LOOK_S)
    run.look()
    assert until_s is not None or run.code is not None, f"the run does not end: {run.running.words()}"


def _figures_of(
    run: BoardRun, ended: BoardRun, coordinator: Said, struck_s: float, wanted: Mapping[str, Any]
) -> tuple[dict[str, float], list[int]]:
    """What times and weights say, and the steps of the books."""
    notes = (said.first_s("note", after_s=struck_s, text=_LOST) for said in (run, coordinator))
    lost_s = min(filter(None, (*notes, run.first_s("error", after_s=struck_s))), default=None)
    on_s = run.first_s("note", after_s=lost_s, text=_GOES_ON) if lost_s else None
    on_s = run.first_s("step", after_s=on_s) if on_s else None
    said = run.steps() + (ended.steps() if ended is not run else [])
    figures = {
        "steps_repeated": len(said) - len(set(said)),
        "difference": largest_difference(trained_in(ended.out), dict(wanted)) if ended.code == 0 else float("inf"),
        **({"detection_s": lost_s - struck_s} if lost_s else {}),
        **({"recovery_s": on_s - struck_s} if on_s else {}),
    }
    return figures, [line["step"] for line in ended.books() if is_step(line)]


def problems_of(row: Row, figures: Mapping[str, float], *, code: int, error: str, is_resumed: bool) -> list[str]:
    """Say what is not as a row states it, besides weights and books."""
    problems = []
    detection_s = figures.get("detection_s")
    match row.outcome:
        case Outcome.UNHARMED:
            if is_resumed or detection_s is not None:
                problems.append(f"not unharmed, detected after {detection_s} s: {error!r}")
        case Outcome.WITHOUT:
            if is_resumed or "recovery_s" not in figures:
                problems.append(f"did not go on without it: {error!r}")
        case Outcome.RESUMED:
            if not is_resumed or row.says not in error or code != row.code:
                problems.append(f"did not end with {row.code} and {row.says!r}: {code}, {error!r}")
    if row.detected_s and not (detection_s is not None and detection_s <= row.detected_s):
        problems.append(f"detected after {detection_s} s, not within {row.detected_s:g} s")
    return problems
