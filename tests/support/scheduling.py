"""Which files run beside each other when several processes run the tests (``make test``).

The tests of a file stay together and share its fixtures; the files of laws are one unit, which shares its runs. Files
that measure this machine are one unit, so that no two of them disturb each other, and come first: the longest unit must
not be the last. Then files whose tests wait for processes take turns with files that compute, so that neither all wait
nor all compute at one time.
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


class ByFile(LoadFileScheduling):  # type: ignore[misc]
    """Gives whole files to processes, all files that measure to one of them, and all laws to one."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        if file.startswith("tests/laws/"):
            return "laws"
        return "files that measure" if file in MEASURING else file


def order(files: Iterable[str]) -> dict[str, int]:
    """File -> its place in the order in which they are begun."""
    names = list(dict.fromkeys(files))
    measuring = [name for name in names if name in MEASURING]
    waiting = [name for name in names if PurePath(name).parent.name == "integration" and name not in MEASURING]
    computing = [name for name in names if PurePath(name).parent.name in ("laws", "suites", "compute")]
    places = {name: place for place, name in enumerate(measuring, start=-len(measuring))}
    places |= {name: 2 * place for place, name in enumerate(waiting)}
    places |= {name: 2 * place + 1 for place, name in enumerate(computing)}
    return places | {name: len(names) * 2 + place for place, name in enumerate(names) if name not in places}
