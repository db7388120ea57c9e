"""Which cases of the tests are in ``make test``, and which files run beside each other; ``--all`` has all cases.

A test that is carried out for many settings, and takes seconds for each, would take most of the time. Its mark
``sampled`` says how many of its cases are enough after a small change. They are drawn by their names, so that every
process draws the same ones, and not by their places, so that they do not all have one setting in common.

The tests of a file stay together and share its fixtures. Some files are one unit: those that measure this machine, so
that no two of them disturb each other; those of integration that share the nodes of one ring, and all others of
integration, which share what nodes are forked from; and the laws, which share their runs. Units come first, as the
longest must not be the last; one that waits for processes and one that computes run beside each other.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import PurePath
from typing import Final

import pytest
from xdist.scheduler import LoadFileScheduling


def leave_thorough_out(cases: object = ()) -> None:
    """Take thorough cases out of a list of parameters; a list of nothing else stays."""
    if isinstance(cases, list):
        kept = [case for case in cases if all(mark.name != "thorough" for mark in getattr(case, "marks", ()))]
        cases[:] = kept or cases


def in_sample(items: Iterable[pytest.Item]) -> set[str]:
    """Ids of the tests to carry out: a test that is asked for by its name is always among them."""
    cases: dict[tuple[str, int], list[str]] = defaultdict(list)
    kept: set[str] = set()
    left_out: set[str] = set()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled is not None:
            cases[item.nodeid.partition("[")[0], sampled.args[0]].append(item.nodeid)
        elif item.get_closest_marker("thorough") is None:
            kept.add(item.nodeid)
        else:
            left_out.add(item.nodeid)
    for (_, count), ids in cases.items():
        kept.update(sorted(ids, key=lambda nodeid: zlib.crc32(nodeid.encode()))[:count])
    return kept or left_out


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
