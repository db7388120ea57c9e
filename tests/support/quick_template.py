"""A template whose agents measure themselves in a tenth of the time: ``python -m tests.support.quick_template``.

A run plans with what its nodes measured, and its result is the same whatever that was. So windows of a tenth of the
length do, and the fewest of them. Commands that tests start as processes have the template that users have.
"""

from __future__ import annotations

import sys
from typing import Final

from edge import template
from edge.measuring import laps

COMMAND: Final = (sys.executable, "-P", "-m", "tests.support.quick_template", "_" * 100)
_WINDOW_S: Final = 0.002


def main() -> int:
    """Serve the launcher at the standard input; return the exit code."""
    laps.MOST_TIMINGS = laps.LEAST_TIMINGS
    laps._LEAST_WINDOW_S = _WINDOW_S
    return template.main()


if __name__ == "__main__":
    sys.exit(main())
