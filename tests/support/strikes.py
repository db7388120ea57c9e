"""What happens to a process of a ``BoardRing`` in mid-run, and how it is healed, by the names that the testbed made.

Each strike is a pair of functions of the ring and of whom it hits. A strike that needs a process to be started in
another way, with a small file system or a clock of its own, says with which words before its command.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deploy.testbed.network import HUB_ADDRESS, UPLINK, address
from deploy.testbed.processes import call
from tests.bench.testbed_runs import set_rate
from tests.support.board_ring import NAMES, SLICES, BoardRing, small_disk

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
