"""For whom a run waits when it can't go on without a node: an owner of rows, or any node with room for what is left.

::

    halting -- an owner is lost, or nothing fits --> waiting -- it joins --> placing, moving, training
                                                        |
                                                        '-- time is up --> the run ends, resumable

The others have stopped meanwhile and keep what they had at the end of the last committed turn.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ringtune.errors import CapacityError, PeerLostError, StorageError
from ringtune.rounds.events.recovery_events import AwaitNodes

RESUME: Final = "start it again and --resume the run"
_OF_ROOM: Final = (CapacityError.__name__, StorageError.__name__)


class Waiting:
    """Who is awaited in one recovery, and until when; true while somebody is.

    Args:
        wait_s: longest time to wait for a node, in seconds; 0 = for none.
    """

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s
        self._owners: dict[str, float] = {}
        self._lost: tuple[str, ...] = ()
        self._problem = self._error = ""
        self._room_until_s: float | None = None

    def __bool__(self) -> bool:
        """Whether anybody is awaited."""
        return bool(self._owners or self._problem)

    @property
    def owners(self) -> tuple[str, ...]:
        """The owners that are awaited, sorted."""
        return tuple(sorted(self._owners))

    @property
    def needs_room(self) -> bool:
        """Whether any node is awaited that has room for what does not fit."""
        return bool(self._problem)

    @property
    def until_s(self) -> float:
        """When the first of them is late; on the clock of the state machine."""
        room = [self._room_until_s] if self._problem and self._room_until_s is not None else []
        return min([*self._owners.values(), *room])

    # ---- what happens -----------------------------------------------------------------------------

    def for_owner(self, node: str, now_s: float) -> None:
        """Wait for an owner that is lost just now."""
        self._owners[node] = now_s + self.wait_s

    def for_room(self, error: str, problem: str, lost: Iterable[str], now_s: float) -> bool:
        """Wait for any node because nothing fits; False if that was waited for long enough, or no node would help.

        Args:
            error: class of the error with which the run would end.
            problem: why nothing fits.
            lost: who is lost.
            now_s: the time.
        """
        if error not in _OF_ROOM:
            return False
        if self._room_until_s is None:
            self._room_until_s = now_s + self.wait_s
        if now_s >= self._room_until_s:
            return False
        self._error, self._problem, self._lost = error, problem, tuple(lost)
        return True

    def came(self, node: str) -> None:
        """A node is there: one owner less is awaited, and there may be room."""
        self._owners.pop(node, None)
        self._problem = ""

    def end(self) -> None:
        """Wait for nobody any more: the run goes on."""
        self._owners, self._problem, self._room_until_s = {}, "", None

    # ---- what is said -----------------------------------------------------------------------------

    @property
    def awaited(self) -> tuple[str, ...]:
        """The names of all that are awaited: owners, and hosts for whose blocks there is no room."""
        return tuple(dict.fromkeys((*self.owners, *(self._lost if self._problem else ()))))

    @property
    def why(self) -> str:
        """Why the run can't go on without them."""
        owns = "own" if len(self._owners) > 1 else "owns"
        parts = [f"{', '.join(self.owners)} {owns} rows, which no other node has"] if self._owners else []
        return "; ".join([*parts, self._problem] if self._problem else parts)

    def told(self) -> AwaitNodes:
        """What people are told."""
        others = "; another node with room does as well" if self._problem else ""
        return AwaitNodes(self.awaited, self.why + others, self.until_s)

    def late(self) -> tuple[str, str]:
        """The class and the message of the error with which the run ends when time is up."""
        waited = f"waited {self.wait_s:g} s (recovery.wait_s) for node {', '.join(self.awaited)}"
        error = PeerLostError.__name__ if self._owners else self._error
        return error, f"{waited}: {self.why}; {RESUME}"
