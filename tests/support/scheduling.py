"""Which files run beside each other when several processes run the tests (``make test``).

The tests of a file stay together and share its fixtures. Some files are one unit: those that measure this machine, so
that no two of them disturb each other; those of integration that share the nodes of one ring, and all others of
integration, which share what nodes are forked from; and the laws, which share their runs. Units come first, as the
longest must not be the last; one that waits for processes and one that computes run beside each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePath
from typing import Final

from xdist.scheduler import LoadFileScheduling

MEASURING: Final = (
    "tests/integration/test_testbed.py",
    "tests/integration/test_measure.py",
    "tests/integration/test_agent_figures.py",
    "tests/contract/test_imports.py",
    "tests/edge/machine/test_resources.py",
    "tests/edge/transport/test_probe.py",
)
"""Files with tests of processor seconds, rates or memory of real processes."""
_FIRST: Final = ("files that measure", "rings", "laws", "integration", "suites")
"""Units and folders that are begun before other files."""


def _unit_of(file: str) -> str:
    """The unit that a file is part of, or the folder that it is in."""
    path = PurePath(file)
    if file in MEASURING:
        return "files that measure"
    if path.parent.name == "integration" and path.name.startswith(("test_ring_", "test_cli_")):
        return "rings"
    return path.parent.name


class ByFile(LoadFileScheduling):  # type: ignore[misc]
    """Gives whole files to processes, and all files of a unit to one of them."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        unit = _unit_of(file)
        return file if unit not in _FIRST or unit == "suites" else unit


def order(files: Iterable[str]) -> dict[str, int]:
    """File -> its place in the order in which they are begun."""
    names = list(dict.fromkeys(files))
    first = [name for unit in _FIRST for name in names if _unit_of(name) == unit]
    return {name: place for place, name in enumerate(dict.fromkeys([*first, *names]))}
