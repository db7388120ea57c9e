"""What a board of the testbed needs while a run goes on, sampled from its agent's process and its control group.

*Needed* is what would have to be there if the board were a machine of its own: the highest resident memory of the
agent's process (its own pages, those of libraries, and rows of a mapped table) and the highest that the kernel kept
for it (page tables, stacks, sockets). Page cache that no process has mapped is not needed: the kernel drops it.
The process's peak is the kernel's own (``VmHWM``), so that nothing between two samples is missed; an agent that
begins a run resets it, and the highest of all samples counts.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

from deploy.testbed.testbed import Testbed

_POLL_S = 0.05


@dataclass(slots=True)
class BoardMemory:
    """The highest figures of one board, in bytes.

    Attributes:
        idle: resident before anything was asked of the agent.
        uncharged: resident then, but charged to whoever read the files first.
        resident: highest.
        kernel: highest.
    """

    idle: int = 0
    uncharged: int = 0
    resident: int = 0
    kernel: int = 0

    @property
    def needed(self) -> int:
        """What the board needs in all."""
        return self.resident + self.kernel


class MemoryWatch:
    """Samples all boards from its making, when all agents are idle, until it is closed.

    Args:
        bed: with agents that have joined and loaded their libraries.
    """

    def __init__(self, bed: Testbed) -> None:
        self._bed = bed
        self.boards = {board.name: _first(bed, board.name) for board in bed.layout.boards}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="watch-memory", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the sampling."""
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(_POLL_S):
            for name, found in self.boards.items():
                try:
                    found.resident = max(found.resident, resident(self._bed.process_id(name))["VmHWM"])
                    found.kernel = max(found.kernel, self._bed.memory_use(name).kernel_bytes)
                except (OSError, KeyError):  # the board's agent has ended
                    continue


def resident(process_id: int) -> dict[str, int]:
    """Bytes of ``VmRSS``, ``VmHWM``, ``RssAnon`` and ``RssFile`` of a process.

    Raises:
        OSError: it has ended.
    """
    lines = (line.split() for line in Path(f"/proc/{process_id}/status").read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) << 10 for line in lines if len(line) == 3 and line[2] == "kB"}


def _first(bed: Testbed, name: str) -> BoardMemory:
    found, use = resident(bed.process_id(name)), bed.memory_use(name)
    return BoardMemory(
        idle=found["VmRSS"] + use.kernel_bytes,
        uncharged=max(0, found["RssFile"] - use.mapped_bytes),
        resident=found["VmHWM"],
        kernel=use.kernel_bytes,
    )
