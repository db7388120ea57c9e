"""The terms of a call that is carried out once however often it is made: they travel beside its request.

============== =======================================================================================
ringtune-call   caller; random, the same in every attempt of one call
ringtune-hold   caller; seconds after which it wants to hear that the work goes on
ringtune-for    caller; seconds that the work may take
ringtune-again  caller; "1": the other one has the request, this one is empty
============== =======================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import grpc

from ringtune.rpc.statuses import error_of_status

AT_WORK: Final = "still at work"
"""Details of an answer that is none yet."""
AT_WORK_STATUS: Final = grpc.StatusCode.ABORTED
_CALL, _HOLD, _FOR, _AGAIN = "ringtune-call", "ringtune-hold", "ringtune-for", "ringtune-again"
_MOST_KEY: Final = 64
_LONGEST_HOLD_S: Final = 600.0
_SILENT: Final = ("ConnectionFailedError", "DeadlineError")


class Held(NamedTuple):
    """The terms of one attempt.

    Attributes:
        key: of the call.
        hold_s: see above.
        work_s: that the work may take.
        is_again: whether the request is empty.
    """

    key: str
    hold_s: float
    work_s: float
    is_again: bool = False

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the terms as they travel."""
        again = ((_AGAIN, "1"),) if self.is_again else ()
        return ((_CALL, self.key), (_HOLD, f"{self.hold_s:.3f}"), (_FOR, f"{self.work_s:.3f}"), *again)

    @classmethod
    def read(cls, metadata: Iterable[tuple[str, Any]] | None) -> Held | None:
        """Read the terms that came; None where a call has none, or none that are readable."""
        came = {name: value for name, value in metadata or () if isinstance(value, str)}
        key = came.get(_CALL, "")
        try:
            hold_s, work_s = float(came.get(_HOLD, "nan")), float(came.get(_FOR, "nan"))
        except ValueError:
            return None
        if not 0 < len(key) <= _MOST_KEY or not math.isfinite(hold_s) or not math.isfinite(work_s):
            return None
        return cls(key, min(max(0.0, hold_s), _LONGEST_HOLD_S), max(0.0, work_s), came.get(_AGAIN) == "1")


def is_at_work(error: grpc.RpcError) -> bool:
    """Whether a failed attempt says that the work goes on."""
    return isinstance(error, grpc.Call) and error.code() is AT_WORK_STATUS and error.details() == AT_WORK


def is_silence(error: grpc.RpcError) -> bool:
    """Whether an attempt failed because no answer came; what the other one itself says is its answer."""
    if not isinstance(error, grpc.Call) or error.code() in (None, grpc.StatusCode.UNIMPLEMENTED):
        return False
    details = error.details() or ""
    meant = error_of_status(error.code().name, details, peer="the other one")
    return type(meant).__name__ in _SILENT and not details.startswith("ringtune.")
