"""Check that installed packages satisfy the distribution's requirements, without importing them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import metadata

from packaging.requirements import Requirement

from edge.doctor.check import Check, failed, passed, warned

DISTRIBUTION = "ringtune"

Find = Callable[[str], str | None]


def requirements() -> tuple[Requirement, ...]:
    """List the requirements of the installed distribution; empty in a checkout that is not installed."""
    try:
        return tuple(map(Requirement, metadata.requires(DISTRIBUTION) or ()))
    except metadata.PackageNotFoundError:
        return ()


def installed(name: str) -> str | None:
    """Find the version of an installed package; None if it is not there."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_packages(wanted: Sequence[Requirement], extras: Sequence[str], *, find: Find = installed) -> list[Check]:
    """Check each package that is needed with these extras, a line each.

    Args:
        wanted: the requirements.
        extras: besides the packages that are always needed.
        find: version of a package by name.
    """
    if not wanted:
        return [warned("packages", "ringtune is not installed here, only run", "pip install it to check versions")]
    return [_check(need, find(need.name)) for extra in ("", *extras) for need in wanted if _is_of(extra, need)]


def _is_of(extra: str, need: Requirement) -> bool:
    """Whether a package is needed because of this extra; the empty one stands for no extra."""
    if need.marker is None or need.marker.evaluate({"extra": ""}):
        return not extra
    return need.marker.evaluate({"extra": extra})


def _check(need: Requirement, version: str | None) -> Check:
    remedy = f"pip install '{need.name}{need.specifier}'"
    if version is None:
        return failed(need.name, "not installed", remedy)
    if not need.specifier.contains(version, prereleases=True):
        return failed(need.name, f"{version}, tested is {need.specifier}", remedy)
    return passed(need.name, version)


def check_protobuf() -> Check:
    """Check that protobuf reads messages with compiled code."""
    from google.protobuf.internal import api_implementation

    kind = str(api_implementation.Type())
    if kind == "python":
        return warned("protobuf code", "pure Python, many times slower", "install a wheel of protobuf for this system")
    return passed("protobuf code", kind)
