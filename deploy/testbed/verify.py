"""Does the testbed give what was asked? Rates, round trips and processor shares, measured with the neighbours busy.

First all boards compute at once: each has to get its share. Then board after board its link is measured, up and
down, while every other board computes and sends as much as it can.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.testbed import processes
from deploy.testbed.boards import Board
from deploy.testbed.network import PAYLOAD_SHARE, address
from deploy.testbed.processes import Running
from deploy.testbed.testbed import Testbed
from ringtune.errors import DeadlineError, RingTuneError
from ringtune.quantities import format_seconds

_PORT = 7099
_PROBE = (sys.executable, "-I", "-S", str(Path(__file__).with_name("probe.py")))
# A board of a twentieth of a core needs this long to start Python.
_START_S = 30.0
_PINGS = 200
_FEW_PINGS = 20
# A shaper that works is this close; a busy machine's timers cost a little.
SHARE_TOLERANCE, RATE_TOLERANCE = 0.05, 0.05
_LATE_S = 0.003


@dataclass(frozen=True, kw_only=True, slots=True)
class BoardCheck:
    """One board, wanted and measured; rates are payload of TCP.

    Attributes:
        wanted_up_bytes_per_s: rate of its link, less the headers.
        up_bytes_per_s: to the hub.
        wanted_down_bytes_per_s: rate of its link, less the headers.
        down_bytes_per_s: from the hub.
        wanted_round_trip_s: both ways.
        neighbour_round_trip_s: median, to the next board; None if there is none.
    """

    board: str
    wanted_cores: float
    cpu_cores: float
    wanted_up_bytes_per_s: float
    up_bytes_per_s: float
    wanted_down_bytes_per_s: float
    down_bytes_per_s: float
    wanted_round_trip_s: float
    round_trip_s: float
    neighbour_round_trip_s: float | None

    def deviations(self) -> list[str]:
        """What is not as wanted, with both numbers."""
        lines = []
        for what, nominal, got, tolerance, scale, unit in (
            ("share", self.wanted_cores, self.cpu_cores, SHARE_TOLERANCE, 1.0, "cores"),
            ("up rate", self.wanted_up_bytes_per_s, self.up_bytes_per_s, RATE_TOLERANCE, 1e-6, "MB/s"),
            ("down rate", self.wanted_down_bytes_per_s, self.down_bytes_per_s, RATE_TOLERANCE, 1e-6, "MB/s"),
        ):
            if abs(got / nominal - 1) > tolerance:
                lines.append(
                    f"board {self.board}: {what} is {got * scale:.3f} {unit}, wanted are {nominal * scale:.3f}, more "
                    f"than {tolerance:.0%} apart"
                )
        if not self.wanted_round_trip_s <= self.round_trip_s <= 1.1 * self.wanted_round_trip_s + _LATE_S:
            lines.append(
                f"board {self.board}: a round trip takes {format_seconds(self.round_trip_s)}, wanted are "
                f"{format_seconds(self.wanted_round_trip_s)}"
            )
        return lines


def verify(
    bed: Testbed, *, duration_s: float = 4.0, note: Callable[[str], object] = lambda text: None
) -> list[BoardCheck]:
    """Measure every board; raises ``RingTuneError``.

    Nothing may run in the testbed ``bed``. ``note`` gets a line now and then.
    """
    bed.start("serve-hub", (*_PROBE, "serve", bed.address, f"{_PORT}"))
    for board in bed.layout.boards:
        bed.start(f"serve-{board.name}", (*_PROBE, "serve", address(bed.layout, board), f"{_PORT}"), on=board.name)
    note(f"all {len(bed.layout.boards)} boards compute ...")
    shares = _shares(bed, duration_s)
    checks = []
    for board in bed.layout.boards:
        note(f"link of {board.name}, the others compute and send ...")
        checks.append(_link(bed, board, duration_s, shares[board.name]))
    return checks


def _shares(bed: Testbed, duration_s: float) -> dict[str, float]:
    burning = {board.name: _burn(bed, board, duration_s) for board in bed.layout.boards}
    return {name: _result(running, duration_s)["cpu_cores"] for name, running in burning.items()}


def _burn(bed: Testbed, board: Board, duration_s: float) -> Running:
    return bed.start(f"burn-{board.name}", (*_PROBE, "burn", f"{duration_s}"), on=board.name)


def _link(bed: Testbed, board: Board, duration_s: float, cpu_cores: float) -> BoardCheck:
    boards = bed.layout.boards
    index = boards.index(board)
    here = address(bed.layout, board)
    busy = [running for other in boards if other is not board for running in _keep_busy(bed, other)]
    try:
        trip_s = _ask(bed, board, "ping", bed.address, f"{_PINGS}", on=board.name)["median_s"]
        beyond_s = None
        if len(boards) > 1:
            beyond = address(bed.layout, boards[(index + 1) % len(boards)])
            beyond_s = _ask(bed, board, "ping", beyond, f"{_FEW_PINGS}", on=board.name)["median_s"]
        up = _ask(bed, board, "send", bed.address, f"{duration_s}", on=board.name, duration_s=duration_s)
        down = _ask(bed, board, "send", here, f"{duration_s}", on="", duration_s=duration_s)
    finally:
        processes.stop(busy)
    return BoardCheck(
        board=board.name,
        wanted_cores=board.cpu_cores,
        cpu_cores=cpu_cores,
        wanted_up_bytes_per_s=board.up_bytes_per_s * PAYLOAD_SHARE,
        up_bytes_per_s=up["bytes_per_s"],
        wanted_down_bytes_per_s=board.down_bytes_per_s * PAYLOAD_SHARE,
        down_bytes_per_s=down["bytes_per_s"],
        wanted_round_trip_s=2 * board.latency_s,
        round_trip_s=trip_s,
        neighbour_round_trip_s=beyond_s,
    )


def _keep_busy(bed: Testbed, board: Board) -> list[Running]:
    """Computing and sending, until stopped."""
    forever_s = "86400"
    sender = (*_PROBE, "send", bed.address, f"{_PORT}", forever_s)
    return [
        bed.start(f"busy-burn-{board.name}", (*_PROBE, "burn", forever_s), on=board.name),
        bed.start(f"busy-send-{board.name}", sender, on=board.name),
    ]


def _ask(
    bed: Testbed, board: Board, what: str, host: str, argument: str, *, on: str, duration_s: float = 0.0
) -> dict[str, float]:
    running = bed.start(f"{what}-{board.name}", (*_PROBE, what, host, f"{_PORT}", argument), on=on)
    return _result(running, duration_s)


def _result(running: Running, duration_s: float) -> dict[str, float]:
    code = running.wait(duration_s + _START_S)
    if code is None:
        raise DeadlineError(f"{running.name} gave no result in {duration_s + _START_S:g} s; see {running.log}")
    if code:
        raise RingTuneError(f"{running.name} ended with {code}: {running.last_words()}; see {running.log}")
    return dict(json.loads(running.last_words()))


def table(measured: Sequence[BoardCheck]) -> list[str]:
    """Wanted and measured, a line for each board."""
    width = max(5, *(len(check.board) for check in measured))
    lines = [
        f"{'board':<{width}}  {'cores':^15}  {'up, MB/s':^15}  {'down, MB/s':^15}  {'round trip':^19}  to the next",
        f"{'':<{width}}" + "  wanted      got" * 3 + "   wanted        got  board",
    ]
    for check in measured:
        beyond = "-" if check.neighbour_round_trip_s is None else format_seconds(check.neighbour_round_trip_s)
        lines.append(
            f"{check.board:<{width}}  {check.wanted_cores:>6.3f}  {check.cpu_cores:>7.3f}"
            f"  {check.wanted_up_bytes_per_s / 1e6:>6.2f}  {check.up_bytes_per_s / 1e6:>7.2f}"
            f"  {check.wanted_down_bytes_per_s / 1e6:>6.2f}  {check.down_bytes_per_s / 1e6:>7.2f}"
            f"  {format_seconds(check.wanted_round_trip_s):>7}  {format_seconds(check.round_trip_s):>9}  {beyond}"
        )
    return lines
