"""Keep a processor busy as computing does: outside the interpreter's lock, for as long as a context lasts."""

from __future__ import annotations

import hashlib
import threading
from types import TracebackType

_PIECE = bytes(1 << 19)  # about a millisecond a piece: hashing more than 2 kB gives the lock back
_JOIN_S = 5.0


class Burner:
    """A thread that hashes zeros while a ``with`` block runs.

    Attributes:
        pieces: how many pieces of zeros it has hashed.
    """

    def __init__(self) -> None:
        self.pieces = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._burn, name="probe-burner", daemon=True)

    def __enter__(self) -> Burner:
        """Start hashing."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop hashing after the piece under way, about a millisecond."""
        self._stop.set()
        self._thread.join(_JOIN_S)

    def _burn(self) -> None:
        while not self._stop.is_set():
            hashlib.sha256(_PIECE).digest()
            self.pieces += 1
