"""Failpoints: named places where a test lets a process fail: end at once, stand still, be late, or lose a message.

``arm`` puts failpoints around files, calls and the work of runs of this process, and ``disarm`` takes them away; the
product knows nothing of them but ``ringtune.storage.durable.failpoint``. Processes of tests (``quick_template``,
``failing_command``) arm themselves where ``RINGTUNE_FAILPOINTS`` in their environment names a folder. There the file
with the name of the process, as ``node-1``, orders one failure::

    backward 3 kill               the process ends at once, as after SIGKILL, before its third backward
    send h* 1 delay 0.5           it waits half a second before it sends its first hidden state
    call Report 2 drop-reply      the second report reaches the coordinator, but its answer does not come back
    after backward 3 spoil        a gradient is infinite after the third backward
    after backward 3 scale        the gradients are multiplied by 1.001 after the third backward
    send h 9 withhold             from the ninth hidden state on it sends nothing to its neighbours (``HOSTILE``)

A failure happens once: its file gets the suffix ``.done`` in the moment before. A hostile one lasts until the process
ends. The file may come, go and change while the process runs. Places are counted from when the file is there.
Precedent: the failpoints of etcd (gofail).
"""

from __future__ import annotations

import fnmatch
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from ringtune.errors import UsageError

VARIABLE: Final = "RINGTUNE_FAILPOINTS"
"""Variable of the environment of a test's process: the folder of the orders."""
DONE_SUFFIX: Final = ".done"


class Failure(StrEnum):
    """What happens at a failpoint."""

    KILL = "kill"
    STOP = "stop"
    DELAY = "delay"
    ERROR = "error"
    DROP_REQUEST = "drop-request"
    DROP_REPLY = "drop-reply"
    SPOIL = "spoil"
    SCALE = "scale"
    WITHHOLD = "withhold"
    CUT = "cut"
    GARBAGE = "garbage"
    FLOOD = "flood"
    REFUSE = "refuse"


HOSTILE: Final = frozenset({Failure.WITHHOLD, Failure.CUT, Failure.GARBAGE, Failure.FLOOD, Failure.REFUSE})
"""What a node of the plan does from then on whose code was changed: it sends nothing; each message cut in half; random
messages before each one, or without end; it takes no links. It is deaf to refusals."""


@dataclass(frozen=True, slots=True)
class Order:
    """One failure: at the ``count``-th time of a place whose name matches ``place``, from 1."""

    place: str
    count: int
    failure: Failure
    delay_s: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Order:
        """Read ``PLACE COUNT FAILURE [SECONDS]``; the place may have spaces and the wildcards of file names."""
        words = text.split()
        delay_s = float(words.pop()) if len(words) > 3 and words[-2] == Failure.DELAY else 0.0
        try:
            *place, count, failure = words
            order = cls(" ".join(place), int(count), Failure(failure), delay_s)
        except ValueError:
            raise UsageError(f"{text!r} is no failpoint; write PLACE COUNT FAILURE [SECONDS]") from None
        if not order.place or order.count < 1 or (order.failure is Failure.DELAY) != (delay_s > 0):
            raise UsageError(f"{text!r} is no failpoint: a place, a count from 1, and seconds of a delay are asked")
        return order

    def __str__(self) -> str:
        """As it stands in a file."""
        tail = f" {self.delay_s:g}" if self.delay_s else ""
        return f"{self.place} {self.count} {self.failure}{tail}"


def order_failure(folder: Path, name: str, text: str) -> Path:
    """Order one failure of a process; return the file that is there once it has happened, or begun."""
    done = folder / f"{name}{DONE_SUFFIX}"
    done.unlink(missing_ok=True)
    partial = folder / f".{name}"
    partial.write_text(str(Order.parse(text)))
    partial.replace(folder / name)
    return done


class Failpoints:
    """The failures of one process, as a folder orders them. Safe for threads.

    ``hostile`` is the hostile order that has begun; None = none has.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / name
        self.hostile: Order | None = None
        self._lock = threading.Lock()
        self._order: Order | None = None
        self._stamp = (0, 0)
        self._left = 0

    def due(self, place: str) -> Order | None:
        """Count a place; return the order if its failure is due, which then is done."""
        with self._lock:
            order = self._read()
            if order is None or not fnmatch.fnmatchcase(place, order.place):
                return None
            self._left -= 1
            if self._left:
                return None
            try:
                self._path.rename(self._path.with_name(self._path.name + DONE_SUFFIX))
            except FileNotFoundError:  # it was taken back just now
                return None
            self._stamp = (0, 0)  # the next file may have the same number on the disk, and come in the same moment
            if order.failure in HOSTILE:
                self.hostile = order
                return None
            return order

    def _read(self) -> Order | None:
        try:
            found = self._path.stat()
            stamp = (found.st_ino, found.st_mtime_ns)
            if stamp != self._stamp:
                self._order, self._stamp = Order.parse(self._path.read_text()), stamp
                self._left = self._order.count
        except FileNotFoundError:  # there is none, or it was taken back just now
            self._order, self._stamp = None, (0, 0)
        return self._order


_own: Failpoints | None = None
_REPLACED: Final[list[tuple[Any, str, Any]]] = []


def arm(name: str, folder: Path) -> None:
    """Let this process follow the orders of a folder."""
    global _own
    import grpc

    from ringtune.storage import durable
    from ringtune.transport import tls
    from tests.support.failing_calls import FailingAnswers, FailingCalls
    from tests.support.failing_work import altering, deaf, failing_run, refusing

    disarm()
    _own = Failpoints(folder, name)

    def channel(make: Any) -> Any:
        return lambda *given, **more: grpc.intercept_channel(make(*given, **more), FailingCalls())

    def server(make: Any) -> Any:
        return lambda *given, interceptors=(), **more: make(
            *given, interceptors=[*interceptors, FailingAnswers()], **more
        )

    _replace(durable, "failpoint", lambda _: reached)
    _replace(grpc, "insecure_channel", channel)
    _replace(tls, "secure_channel", channel)
    _replace(grpc, "server", server)
    if (preparing := sys.modules.get("edge.agent.agent")) is not None:
        from edge.agent.active_run import ActiveRun
        from edge.transport.link import OutLink
        from edge.transport.server import InLink

        _replace(preparing, "AgentRun", failing_run)
        _replace(OutLink, "_put", altering)
        _replace(ActiveRun, "on_ack", deaf)
        _replace(InLink, "_accept_link", refusing)


def disarm() -> None:
    """Let nothing fail any more."""
    global _own
    _own = None
    while _REPLACED:
        setattr(*_REPLACED.pop())


def _replace(module: Any, name: str, make: Callable[[Any], Any]) -> None:
    found = getattr(module, name)
    _REPLACED.append((module, name, found))
    setattr(module, name, make(found))


def hostile() -> Order | None:
    """Return the hostile order that has begun in this process; None = none has."""
    return _own.hostile if _own is not None else None


def reached(place: str) -> Order | None:
    """Fail here if that is ordered; return the order if the caller has to carry it out: to drop a message, or to spoil.

    Raises:
        OSError: the order is an error, as of a disk.
    """
    order = _own.due(place) if _own is not None else None
    if order is None:
        return None
    match order.failure:
        case Failure.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60.0)  # the signal may reach another thread first
        case Failure.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        case Failure.DELAY:
            time.sleep(order.delay_s)
        case Failure.ERROR:
            raise OSError(5, f"the failpoint {order}")
        case _:
            return order
    return None
