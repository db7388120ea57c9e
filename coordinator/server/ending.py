"""The end of a coordinator: at a signal the run that is driven is saved first, at a second one it ends at once."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType

from coordinator.server.coordinator import Coordinator
from ringtune.errors import FrameError
from ringtune.machine.grace import end_within
from ringtune.machine.signals import handled

SAVE_S = 60.0
GRACE_S = 30.0
"""The longest that a coordinator takes to end after its run was saved, whatever a thread of it waits for."""
# Short: the kernel may hand a signal to any thread, and then nothing wakes this one, which runs the handlers.
_WAIT_S = 0.5
_POLL_S = 0.1


class Ending:
    """Hears SIGINT, SIGTERM and SIGHUP while in its context, as ``handled`` does; to be used in the main thread.

    Attributes:
        by_ctrl_c: whether Ctrl-C was among the signals; the others are how a service is ended.
    """

    def __init__(self) -> None:
        self.by_ctrl_c = False
        self._count = 0
        self._asked = threading.Event()
        self._hearing = handled(self._on_signal)

    def __enter__(self) -> Ending:
        """Install the handlers."""
        self._hearing.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Install the handlers that were there before."""
        self._hearing.__exit__(kind, error, traceback)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._count += 1
        self.by_ctrl_c |= number == signal.SIGINT
        self._asked.set()
        end_within(GRACE_S + (SAVE_S if self._count == 1 else 0.0), 128 + number)

    def wait(self) -> bool:
        """Wait for a moment; return whether the end was asked for."""
        return self._asked.wait(_WAIT_S)

    def save(self, coordinator: Coordinator) -> None:
        """Let the run that is driven end with a checkpoint; give up after ``SAVE_S`` or at a second signal."""
        run_id = coordinator.driven()
        if not run_id:
            return
        try:
            coordinator.drain(run_id, "the coordinator was stopped")
        except FrameError:  # it has ended by itself
            return
        coordinator.tell(f"stopping {run_id} with a checkpoint; the same again stops at once")
        deadline_s = time.monotonic() + SAVE_S
        while coordinator.driven() and self._count < 2 and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
