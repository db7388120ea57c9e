"""Which cases of the tests are in ``make test``; ``--all`` has all of them.

A test that is carried out for many settings, and takes seconds for each, would take most of the time. Its mark
``sampled`` says how many of its cases are enough after a small change. They are drawn by their names, so that every
process draws the same ones, and not by their places, so that they do not all have one setting in common.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable

import pytest


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
