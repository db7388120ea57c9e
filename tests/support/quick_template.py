"""A template whose agents measure themselves in little time: ``python -m tests.support.quick_template``.

A run plans with what its nodes measured, and its result is the same whatever that was. So windows of a fortieth of the
length do, and the fewest of them. Agents have failpoints where their environment says so. They send ten times as many
heartbeats: with the long leases of the tests an agent that stood still would learn late that it is to join again.

Commands that tests start as processes have the template that users have.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from edge import template
from edge.agent import process
from edge.profiler import timing
from tests.support import failpoints

COMMAND: Final = (sys.executable, "-P", "-m", "tests.support.quick_template", "_" * 100)
_WINDOW_S: Final = 0.0005


_be_agent: Final = template._be_agent


def _may_fail(arguments: Sequence[str], environment: Mapping[str, str], parent: int) -> int:
    """Be an agent, with failpoints where the environment says so."""
    if failpoints.VARIABLE in environment:
        name = arguments[arguments.index("--name") + 1]
        failpoints.arm(name, Path(environment[failpoints.VARIABLE]))
    return _be_agent(arguments, environment, parent)


def main() -> int:
    """Serve the launcher at the standard input; return the exit code."""
    timing.MAX_TIMINGS = timing.MIN_TIMINGS
    timing._MIN_WINDOW_S = _WINDOW_S
    process.BEATS_PER_LEASE = 30
    template._be_agent = _may_fail
    template.LOADED.append("transformers.models.bert.modeling_bert")  # of most rings of the tests
    return template.main()


if __name__ == "__main__":
    sys.exit(main())
