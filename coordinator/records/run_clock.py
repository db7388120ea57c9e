"""The clock of a coordinator's runs: it begins at the wall clock's time and then never jumps.

Nodes put their times on this one clock (``edge.run.shared_clock``), so whatever their own wall clocks say, the seconds
of a step are a difference on one clock.
"""

from __future__ import annotations

import time

_OFFSET_S = time.time() - time.monotonic()


def now_unix_s() -> float:
    """Seconds since 1970 by the wall clock as it was when this process began, and its monotonic clock since."""
    return _OFFSET_S + time.monotonic()
