"""Whether what is installed satisfies what the distribution asks for; nothing is imported to find out.

The requirements are those of the installed metadata. Only the operators that they use are read:
``==``, ``==X.*``, ``~=``, ``>=`` and ``<``.

Source: the dependency specifiers of the Python packaging user guide.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from typing import NamedTuple

from edge.doctor.check import Check, failed, passed, warned

DISTRIBUTION = "ringtune"
_REQUIREMENT = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+)\s*(?P<bounds>[^;]*?)\s*(;.*extra == ['\"](?P<extra>[\w-]+)['\"].*)?"
)
_BOUND = re.compile(r"(==|~=|>=|<)\s*(\d[\w.]*?)(\.\*)?$")

Find = Callable[[str], str | None]


class Requirement(NamedTuple):
    """A package that is needed: its name, ``>=1,<2``, and the extra that needs it (empty: always)."""

    name: str
    bounds: str
    extra: str


def requirements() -> tuple[Requirement, ...]:
    """What the installed distribution asks for; empty in a checkout that is not installed."""
    try:
        return tuple(read_requirements(metadata.requires(DISTRIBUTION) or ()))
    except metadata.PackageNotFoundError:
        return ()


def read_requirements(lines: Iterable[str]) -> Iterable[Requirement]:
    """Requirements as metadata has them, e.g. ``torch<2.14,>=2.13; extra == 'node'``."""
    for line in lines:
        found = _REQUIREMENT.fullmatch(line.strip())
        if found is not None:
            yield Requirement(found["name"], found["bounds"].replace(" ", ""), found["extra"] or "")


def installed(name: str) -> str | None:
    """The version of a package; None if it is not there."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_packages(wanted: Sequence[Requirement], extras: Sequence[str], *, find: Find = installed) -> list[Check]:
    """A line for each package that is needed with these extras.

    Args:
        wanted: the requirements.
        extras: besides the packages that are always needed.
        find: version of a package by name.
    """
    if not wanted:
        return [warned("packages", "ringtune is not installed here, only run", "pip install it to check versions")]
    return [_check(need, find(need.name)) for need in wanted if need.extra in ("", *extras)]


def _check(need: Requirement, version: str | None) -> Check:
    package = f"ringtune[{need.extra}]" if need.extra else "ringtune"
    if version is None:
        return failed(need.name, "not installed", f"pip install '{package}'")
    if not satisfies(version, need.bounds):
        return failed(need.name, f"{version}, tested is {need.bounds}", f"pip install '{need.name}{need.bounds}'")
    return passed(need.name, version)


def satisfies(version: str, bounds: str) -> bool:
    """Whether a version is within bounds such as ``>=2.13,<2.14``; a bound that is not readable counts as kept."""
    return all(_within(_numbers(version), bound) for bound in bounds.split(",") if bound)


def _within(version: tuple[int, ...], bound: str) -> bool:
    found = _BOUND.match(bound.strip())
    if found is None:
        return True
    operator, limit, wildcard = found[1], _numbers(found[2]), bool(found[3])
    match operator:
        case "==":
            return version[: len(limit)] == limit if wildcard else _pad(version, limit) == _pad(limit, version)
        case "~=":
            return version >= limit and version[: len(limit) - 1] == limit[:-1]
        case ">=":
            return _pad(version, limit) >= _pad(limit, version)
        case _:
            return _pad(version, limit) < _pad(limit, version)


def _pad(numbers: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return numbers + (0,) * (len(other) - len(numbers))


def _numbers(version: str) -> tuple[int, ...]:
    """Release numbers; a local part (``+cpu``) and what follows a letter do not count."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def check_protobuf() -> Check:
    """Whether messages are read by compiled code."""
    from google.protobuf.internal import api_implementation

    kind = str(api_implementation.Type())
    if kind == "python":
        return warned("protobuf code", "pure Python, many times slower", "install a wheel of protobuf for this system")
    return passed("protobuf code", kind)
