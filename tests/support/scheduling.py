"""Which files run beside each other when several processes run the tests (``make test``).

The tests of a file stay together and share its fixtures; the files of laws are one unit, which shares its runs, and
those of integration another one, which shares its nodes. Files that measure this machine are one unit, so that no two
of them disturb each other, and come first: the longest unit must not be the last. Integration, which waits for
processes, and laws, which compute, follow.
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
_FIRST: Final = ("integration", "laws", "suites")
"""Folders whose files are begun before those of others."""


class ByFile(LoadFileScheduling):  # type: ignore[misc]
    """Gives whole files to processes, all files that measure to one of them, and so all laws and all of integration."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        if file in MEASURING:
            return "files that measure"
        folder = PurePath(file).parent.name
        return folder if folder in ("laws", "integration") else file


def order(files: Iterable[str]) -> dict[str, int]:
    """File -> its place in the order in which they are begun."""
    names = list(dict.fromkeys(files))
    measuring = [name for name in names if name in MEASURING]
    later = [name for folder in _FIRST for name in names if PurePath(name).parent.name == folder]
    return {name: place for place, name in enumerate(dict.fromkeys([*measuring, *later, *names]))}
