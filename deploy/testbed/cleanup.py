"""The ledger of what a testbed creates, written before it is created, and the removal of all of it.

A testbed that is killed leaves its ledger, and ``clean`` reads it. Processes are not in it: whatever runs
in a group of the testbed is its own, also what the killed one did not live to write down, and no number of a
process can have got another meaning meanwhile.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from deploy.testbed import groups
from deploy.testbed.network import NAMESPACES
from deploy.testbed.processes import call
from ringtune.errors import BusyError, IntegrityError, RingTuneError, StorageError

# Gone after a restart of the machine, as all that it lists.
LEDGERS = Path("/run/ringtune-testbed")
KILL_S = 10.0
_CLEAN = "python -m deploy.testbed clean"


@dataclass(frozen=True, kw_only=True, slots=True)
class MakerProcess:
    """The process that made a testbed; the time of its start tells it from a later one of the same number."""

    pid: int
    started_unix_s: float

    @staticmethod
    def this() -> MakerProcess:
        """This process."""
        return MakerProcess(pid=os.getpid(), started_unix_s=psutil.Process().create_time())

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        try:
            process = psutil.Process(self.pid)
            is_same = abs(process.create_time() - self.started_unix_s) < 1.0
            return is_same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What a ledger lists."""

    maker: MakerProcess
    namespaces: tuple[str, ...]
    folders: tuple[Path, ...]


class Ledger:
    """The ledger of one testbed."""

    def __init__(self, name: str, *, folder: Path = LEDGERS) -> None:
        self.name = name
        self.path = folder / f"{name}.jsonl"

    def open(self) -> None:
        """Begin; raises ``BusyError`` or ``StorageError``."""
        maker = MakerProcess.this()
        line = json.dumps({"pid": maker.pid, "started_unix_s": maker.started_unix_s})
        draft = self.path.with_suffix(f".{maker.pid}")
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft.write_text(line + "\n")
            try:
                self.path.hardlink_to(draft)  # whole or not at all, and only if there is none
            finally:
                draft.unlink()
        except FileExistsError:
            raise BusyError(self._taken()) from None
        except OSError as error:
            raise StorageError(f"can't write the ledger {self.path}: {error.strerror}") from error

    def _taken(self) -> str:
        maker = self.read().maker
        if maker.is_alive:
            return f"testbed {self.name!r} is in use by process {maker.pid}; wait for it or set another testbed.name"
        return f"testbed {self.name!r} of process {maker.pid}, which has ended, is still there; remove it: {_CLEAN}"

    def add_namespace(self, name: str) -> None:
        """Before it is created; raises ``BusyError``."""
        if (NAMESPACES / name).exists():
            raise BusyError(
                f"there is a network namespace {name!r} that no testbed has listed; set another testbed.name, or "
                f"remove it: ip netns del {name}"
            )
        self._append({"namespace": name})

    def add_folder(self, path: Path) -> None:
        """A control group, before it is created; raises ``BusyError``."""
        if path.exists():
            raise BusyError(
                f"there is a control group {path} that no testbed has listed; set another testbed.name, or remove it: "
                f"rmdir {path}"
            )
        self._append({"folder": str(path)})

    def _append(self, entry: dict[str, str]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def read(self) -> Leftovers:
        """What it lists; a last line that was cut short listed nothing that exists; raises ``IntegrityError``."""
        try:
            first, *lines = self.path.read_text().splitlines(keepends=True)
            entries = [json.loads(line) for line in lines if line.endswith("\n")]
            maker = json.loads(first)
            return Leftovers(
                MakerProcess(pid=int(maker["pid"]), started_unix_s=float(maker["started_unix_s"])),
                tuple(str(entry["namespace"]) for entry in entries if "namespace" in entry),
                tuple(Path(entry["folder"]) for entry in entries if "folder" in entry),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise IntegrityError(
                f"{self.path} is no ledger of a testbed ({error}); remove by hand what 'ip netns list' shows, then the "
                "file"
            ) from error

    def remove_all(self) -> Leftovers:
        """End what runs in the testbed, remove what it created, then the ledger; what is gone already is no error.

        Raises:
            RingTuneError: something can't be removed; the ledger stays.
        """
        left = self.read()
        groups.kill_and_remove(left.folders, timeout_s=KILL_S)
        for name in left.namespaces:
            if (NAMESPACES / name).exists():
                call(("ip", "netns", "del", name))
        self.path.unlink()
        return left


def clean(*, folder: Path = LEDGERS, force: bool = False) -> list[str]:
    """Remove what testbeds have left whose process has ended; return a line for each testbed; raises ``RingTuneError``.

    ``force``: also those whose process runs.
    """
    return [_clean_one(Ledger(path.stem, folder=folder), force=force) for path in _ledgers(folder)]


def _ledgers(folder: Path) -> Iterable[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == ".jsonl")
    except FileNotFoundError:
        return []
    except PermissionError as error:  # not "nothing is left"
        raise RingTuneError(f"can't read the ledgers in {folder}: {error.strerror}; use sudo") from error


def _clean_one(ledger: Ledger, *, force: bool) -> str:
    try:
        maker = ledger.read().maker
        if maker.is_alive and not force:
            return f"{ledger.name}: in use by process {maker.pid}, left alone; --force removes it"
        left = ledger.remove_all()
    except PermissionError as error:
        raise RingTuneError(f"can't clean testbed {ledger.name}: {error.strerror}; use sudo") from error
    return f"{ledger.name}: removed {len(left.namespaces)} namespaces and {len(left.folders)} groups"
