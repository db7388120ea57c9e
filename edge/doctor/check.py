"""A check is one line of the doctor: what was looked at, what was found, and what to do about it."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Level(enum.StrEnum):
    """How bad the finding of a check is."""

    PASS = "PASS"  # noqa: S105 - no password
    WARN = "WARN"  # it works, with a drawback
    FAIL = "FAIL"  # it will not work


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """The finding of one check.

    Attributes:
        name: what was looked at.
        level: how bad it is.
        found: what is there.
        remedy: what to do; empty with ``PASS``.
    """

    name: str
    level: Level
    found: str
    remedy: str = ""

    def as_json(self) -> dict[str, str]:
        """Return the check as a JSON object."""
        return {"name": self.name, "level": self.level.value, "found": self.found, "remedy": self.remedy}

    def line(self, width: int) -> str:
        """Write the check as a line; its name is padded to ``width``."""
        advice = f" -> {self.remedy}" if self.remedy else ""
        return f"{self.level}  {self.name:<{width}}  {self.found}{advice}"


def passed(name: str, found: str) -> Check:
    """Make a check that found all well."""
    return Check(name=name, level=Level.PASS, found=found)


def warned(name: str, found: str, remedy: str) -> Check:
    """Make a check that found a drawback, with which the machine works."""
    return Check(name=name, level=Level.WARN, found=found, remedy=remedy)


def failed(name: str, found: str, remedy: str) -> Check:
    """Make a check that found what keeps the machine from working."""
    return Check(name=name, level=Level.FAIL, found=found, remedy=remedy)


def all_lines(checks: Iterable[Check]) -> list[str]:
    """Write a line for each check, aligned."""
    checks = list(checks)
    width = max((len(check.name) for check in checks), default=0)
    return [check.line(width) for check in checks]
