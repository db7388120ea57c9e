"""Faults of processes of a ``BoardRing`` in mid-run, what has to come of each, stated as data, and what came of it.

Each strike is a pair of functions of the ring and of whom it hits: what happens, and how it is healed. A strike that
needs a process to be started in another way, with a small file system or a clock of its own, says with which words
before its command.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from coordinator.run.run_text import is_step
from deploy.testbed.network import HUB_ADDRESS, UPLINK, address
from deploy.testbed.processes import call
from tests.bench.testbed_runs import set_rate
from tests.support.board_ring import (
    LOOK_S,
    NAMES,
    RUN_S,
    SLICES,
    START_S,
    STEPS,
    BoardRing,
    BoardRun,
    Said,
    board_ring,
    listening,
    small_disk,
)
from tests.support.results import largest_difference, trained_in
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


NOBODY_MAC: Final = "02:00:00:00:00:99"
"""The hardware address of nobody: packets to it are lost, and nobody is told."""
DISK_SIZE: Final = "4m"
_MBIT_BYTES = 125_000
_HOG_BYTES, _ROOM_BYTES = 64 << 20, 24 << 20
_FILLER = "filler"
_MIN_CORES = 0.1

Act = Callable[[BoardRing, str], None]


def _nothing(ring: BoardRing, who: str) -> None:
    """Do nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Strike:
    """Something that happens.

    Attributes:
        begin: lets it happen to somebody.
        heal: undoes it.
        prefix: words before the command of whom it hits; None = as all are started.
        lacks: why this machine can't let it happen; empty if it can.
    """

    begin: Act
    heal: Act = _nothing
    prefix: Callable[[BoardRing, str], tuple[str, ...]] | None = None
    lacks: Callable[[], str] = str


def _signal(number: signal.Signals) -> Act:
    return lambda ring, who: ring.processes[who].process.send_signal(number)


def _start_again(ring: BoardRing, who: str) -> None:
    ring.restart(who)


def _hog(ring: BoardRing, who: str) -> None:
    """Let another process of the board take the memory that is left: the kernel ends the largest, which is the node."""
    ring.bed.lower_memory(who, ring.bed.memory_use(who).all_bytes + _ROOM_BYTES)
    code = f"held = [bytes(1 << 20).replace(bytes(1), b'x') for _ in range({_HOG_BYTES >> 20})]; input()"
    ring.bed.start(f"hog-{who}", (sys.executable, "-I", "-S", "-c", code), on=who)


def _free(ring: BoardRing, who: str) -> None:
    ring.bed.restore_memory(who)
    ring.restart(who)


def _port(ring: BoardRing, who: str) -> str:
    return f"p{NAMES.index(who)}"


def _link(state: str) -> Act:
    return lambda ring, who: _call("ip", "-n", ring.bed.layout.hub, "link", "set", _port(ring, who), state)


def _call(*words: str) -> None:
    call(words)


def _deaf(to: Callable[[BoardRing, str], list[str]], *, healed: bool) -> Act:
    """What a board sends to some addresses is lost; what they send comes."""

    def act(ring: BoardRing, who: str) -> None:
        for peer in to(ring, who):
            there = ("ip", "-n", ring.bed.namespace(who), "neigh")
            if healed:
                _call(*there, "del", peer, "dev", UPLINK)
            else:
                _call(*there, "replace", peer, "lladdr", NOBODY_MAC, "nud", "permanent", "dev", UPLINK)

    return act


def _coordinator_of(ring: BoardRing, who: str) -> list[str]:
    return [HUB_ADDRESS]


def _next_of(ring: BoardRing, who: str) -> list[str]:
    hosts = [node for node, _, _ in SLICES]
    layout = ring.bed.layout
    return [address(layout, layout.board(hosts[(hosts.index(who) + 1) % len(hosts)]))]


def _all_of(ring: BoardRing, who: str) -> list[str]:
    layout = ring.bed.layout
    return [HUB_ADDRESS, *(address(layout, board) for board in layout.boards if board.name != who)]


def _rate(mbit_per_s: float | None) -> Act:
    def act(ring: BoardRing, who: str) -> None:
        usual = ring.bed.layout.board(who).up_bytes_per_s
        set_rate(ring.bed.layout, usual if mbit_per_s is None else mbit_per_s * _MBIT_BYTES, only=who)

    return act


def _cores(cores: float | None) -> Act:
    def act(ring: BoardRing, who: str) -> None:
        ring.bed.set_cores(who, ring.bed.layout.board(who).cpu_cores if cores is None else cores)

    return act


def _on_small_disk(ring: BoardRing, who: str) -> tuple[str, ...]:
    return small_disk(ring.state_of(who), DISK_SIZE)


def _seen_by(ring: BoardRing, who: str) -> Path:
    """The folder as its process sees it, whose mounts nobody else has."""
    pid = ring.processes[who].process.pid
    return Path(f"/proc/{pid}/root{ring.state_of(who)}")


def _fill(ring: BoardRing, who: str) -> None:
    with (_seen_by(ring, who) / _FILLER).open("wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 16)):
                pass
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def _empty(ring: BoardRing, who: str) -> None:
    (_seen_by(ring, who) / _FILLER).unlink()


def _among_its_mounts(ring: BoardRing, who: str, *words: str) -> None:
    _call("nsenter", "--mount", "--target", str(ring.processes[who].process.pid), "--", *words)


def _read_only(ring: BoardRing, who: str) -> None:
    """Mount the folder once more over itself; files that are open stay writable, so whom it hits has to open others."""
    folder = str(ring.state_of(who))
    _among_its_mounts(ring, who, "mount", "--bind", folder, folder)
    _among_its_mounts(ring, who, "mount", "-o", "remount,bind,ro", folder)


def _writable(ring: BoardRing, who: str) -> None:
    _among_its_mounts(ring, who, "umount", str(ring.state_of(who)))


def faketime() -> Path | None:
    """The library that shifts a process's clock: of the Python package ``libfaketime``, or of the system."""
    spec = importlib.util.find_spec("libfaketime")
    roots = [Path(place) for place in (spec.submodule_search_locations or [])] if spec is not None else []
    found = [path for root in roots for path in sorted(root.rglob("libfaketime.so.1"))]
    found += sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    return found[0] if found else None


def with_clock(offset: str) -> tuple[str, ...]:
    """Words before a command whose clock is so far off, as ``-2h`` or ``+400d``; what measures durations is right."""
    settings = {"LD_PRELOAD": str(faketime()), "FAKETIME": offset, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    return ("env", *(f"{name}={value}" for name, value in settings.items()))


def _why_no_clock() -> str:
    return "" if faketime() else "libfaketime is not there; pip install libfaketime"


def _clock(offset: str) -> Strike:
    return Strike(begin=_nothing, prefix=lambda ring, who: with_clock(offset), lacks=_why_no_clock)


def _why_no_group() -> str:
    return "" if os.geteuid() == 0 else "the user is not root"


STRIKES: Final[Mapping[str, Strike]] = {
    "stopped": Strike(begin=_signal(signal.SIGSTOP), heal=_signal(signal.SIGCONT)),
    "killed": Strike(begin=_signal(signal.SIGKILL), heal=_start_again),
    "out of memory": Strike(begin=_hog, heal=_free, lacks=_why_no_group),
    "link down": Strike(begin=_link("down"), heal=_link("up")),
    "unheard by all": Strike(begin=_deaf(_all_of, healed=False), heal=_deaf(_all_of, healed=True)),
    "unheard by the coordinator": Strike(
        begin=_deaf(_coordinator_of, healed=False), heal=_deaf(_coordinator_of, healed=True)
    ),
    "unheard by the next": Strike(begin=_deaf(_next_of, healed=False), heal=_deaf(_next_of, healed=True)),
    "link of 2 Mbit/s": Strike(begin=_rate(2.0), heal=_rate(None)),
    "link of 0.5 Mbit/s": Strike(begin=_rate(0.5), heal=_rate(None)),
    "link of 0.2 Mbit/s": Strike(begin=_rate(0.2), heal=_rate(None)),
    "a quarter of its processor": Strike(begin=_cores(_MIN_CORES), heal=_cores(None)),
    "disk full": Strike(begin=_fill, heal=_empty, prefix=_on_small_disk),
    "disk read-only": Strike(begin=_read_only, heal=_writable, prefix=_on_small_disk),
    "clock 2 h behind": _clock("-2h"),
    "clock 2 h ahead": _clock("+2h"),
    "clock 400 d ahead": _clock("+400d"),
}
"""Everything that may happen, by name."""
