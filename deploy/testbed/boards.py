"""What is wanted: the boards as values, read from ``boards.toml``."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from ringtune.errors import CapacityError, InvalidInputError, UsageError
from ringtune.ids import check_node_name
from ringtune.quantities import format_bytes, parse_bytes
from ringtune.storage.strict import read_dataclass

_BED_NAME = re.compile(r"[a-z][a-z0-9]{0,14}")
# Addresses of one /24, less the hub's, the network's and the broadcast's.
MAX_BOARDS = 253
# The kernel refuses quotas and periods outside these.
_MIN_QUOTA_S, _MIN_PERIOD_S, _MAX_PERIOD_S = 0.001, 0.001, 1.0
_MBIT_BYTES = 125_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Board:
    """One board.

    Attributes:
        cpu_cores: processor seconds per second.
        memory_bytes: limit for all its processes together.
        up_bytes_per_s: rate of what it sends, with Ethernet's headers; 100 Mbit/s are 12.5e6.
        latency_s: what its link adds to each packet, in each direction.
        data: rows that it owns; None = those of all boards, if any.
    """

    name: str
    cpu_cores: float
    memory_bytes: int
    up_bytes_per_s: float
    down_bytes_per_s: float
    latency_s: float = 0.0
    data: Path | None = None
    eval_data: Path | None = None

    def __post_init__(self) -> None:
        """Refuse what no kernel could do."""
        try:
            check_node_name(self.name)
        except UsageError as error:
            raise InvalidInputError(str(error)) from error
        for key, value in (("cpu_cores", self.cpu_cores), ("memory", self.memory_bytes)):
            if value <= 0:
                raise InvalidInputError(f"board {self.name}: {key} is {value:g}, it has to be greater than 0")
        for key, rate in (("up_mbit_per_s", self.up_bytes_per_s), ("down_mbit_per_s", self.down_bytes_per_s)):
            if rate <= 0:
                raise InvalidInputError(
                    f"board {self.name}: {key} is {rate / _MBIT_BYTES:g}, it has to be greater than 0"
                )
        if self.latency_s < 0:
            raise InvalidInputError(f"board {self.name}: latency_ms is {self.latency_s * 1e3:g}, it can't be below 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """All boards of one testbed.

    Attributes:
        boards: in order; the first one gets the first address.
        name: of the testbed: everything that it creates begins with it.
        cpu_period_s: how often a quota is filled up. Shorter is smoother, longer is more exact.
    """

    boards: tuple[Board, ...]
    name: str = "rtbed"
    cpu_period_s: float = 0.01

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
        if not _BED_NAME.fullmatch(self.name):
            raise InvalidInputError(
                f"testbed.name {self.name!r} has to be 1 to 15 small letters and digits, starting with a letter"
            )
        if not 1 <= len(self.boards) <= MAX_BOARDS:
            raise InvalidInputError(f"there are {len(self.boards)} boards; 1 to {MAX_BOARDS} are possible")
        names = [board.name for board in self.boards]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InvalidInputError(f"two boards are called {twice[0]!r}; each needs a name of its own")
        if not _MIN_PERIOD_S <= self.cpu_period_s <= _MAX_PERIOD_S:
            raise InvalidInputError(f"testbed.cpu_period_ms is {self.cpu_period_s * 1e3:g}, possible are 1 to 1000")
        for board in self.boards:
            if board.cpu_cores * self.cpu_period_s < _MIN_QUOTA_S * 0.999:
                raise InvalidInputError(
                    f"board {board.name}: {board.cpu_cores:g} cores of a period of {self.cpu_period_s * 1e3:g} ms are "
                    f"less than the kernel's 1 ms; set testbed.cpu_period_ms to {1 / board.cpu_cores:.0f} or more"
                )

    @property
    def cpu_cores(self) -> float:
        """Of all boards together."""
        return sum(board.cpu_cores for board in self.boards)

    @property
    def hub(self) -> str:
        """The namespace of the bridge; no board's can be called so."""
        return f"{self.name}.hub"

    def namespace(self, board: Board) -> str:
        """A board's namespace."""
        return f"{self.name}-{board.name}"

    def board(self, name: str) -> Board:
        """The board of that name; raises ``InvalidInputError``."""
        for board in self.boards:
            if board.name == name:
                return board
        raise InvalidInputError(f"no board is called {name!r}; there are {', '.join(b.name for b in self.boards)}")

    def check_fits(self, *, num_cores: int, free_bytes: int) -> list[str]:
        """Compare with the machine; return warnings; raises ``CapacityError``."""
        if self.cpu_cores > num_cores + 1e-9:
            raise CapacityError(
                f"the boards ask for {self.cpu_cores:g} cores together, but this machine has {num_cores}; "
                "lower cpu_cores"
            )
        notes = []
        if self.cpu_cores > 0.85 * num_cores:
            notes.append(
                f"the boards take {self.cpu_cores:g} of {num_cores} cores: little is left for the coordinator and the "
                "command, and shares may fall short"
            )
        memory_bytes = sum(board.memory_bytes for board in self.boards)
        if memory_bytes > free_bytes:
            notes.append(
                f"the boards may take {format_bytes(memory_bytes)} together, but {format_bytes(free_bytes)} are free "
                "here: the machine may run out before a board reaches its limit"
            )
        return notes


# ---- the file ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _TestbedTable:
    name: str = "rtbed"
    cpu_period_ms: float = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _BoardTable:
    name: str
    cpu_cores: float
    memory: str
    up_mbit_per_s: float
    down_mbit_per_s: float
    latency_ms: float = 0.0
    data: str = ""
    eval_data: str = ""

    def board(self, folder: Path) -> Board:
        """The value; relative paths are relative to ``folder``."""
        try:
            memory_bytes = parse_bytes(self.memory)
        except UsageError as error:
            raise InvalidInputError(f"board {self.name}: memory: {error}") from error
        return Board(
            name=self.name,
            cpu_cores=self.cpu_cores,
            memory_bytes=memory_bytes,
            up_bytes_per_s=self.up_mbit_per_s * _MBIT_BYTES,
            down_bytes_per_s=self.down_mbit_per_s * _MBIT_BYTES,
            latency_s=self.latency_ms / 1e3,
            data=_path(self.data, folder),
            eval_data=_path(self.eval_data, folder),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    board: tuple[_BoardTable, ...]
    testbed: _TestbedTable = field(default_factory=_TestbedTable)


def load_layout(path: Path) -> Layout:
    """Read a file of boards; its relative paths are relative to the file's folder; raises ``InvalidInputError``."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InvalidInputError(f"can't read the file of boards {path}: {reason}") from error
    return parse_layout(text, folder=path.parent, source=str(path))


def parse_layout(text: str, *, folder: Path, source: str) -> Layout:
    """Read the text of a file of boards; raises ``InvalidInputError``.

    Relative paths are relative to ``folder``; ``source`` names the text in messages.
    """
    try:
        file = read_dataclass(_File, tomllib.loads(text), where="", error=InvalidInputError)
        return Layout(
            boards=tuple(table.board(folder) for table in file.board),
            name=file.testbed.name,
            cpu_period_s=file.testbed.cpu_period_ms / 1e3,
        )
    except tomllib.TOMLDecodeError as error:
        raise InvalidInputError(f"{source}: not valid TOML: {error}") from error
    except InvalidInputError as error:
        raise InvalidInputError(f"{source}: {error}") from error


def _path(text: str, folder: Path) -> Path | None:
    return (folder / Path(text).expanduser()).resolve() if text else None
