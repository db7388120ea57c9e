"""Sizes, rates and durations: parsing and formatting."""

from __future__ import annotations

import re
from typing import Final

from ringtune.errors import UsageError

_FACTORS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def parse_bytes(text: str, *, option: str = "") -> int:
    """Read a size as bytes, rounded down: ``512MiB``, ``2GB`` (decimal), ``1.5 GiB``, ``1000``; or ``UsageError``.

    ``option`` is that of the command line, for the error.
    """
    match = re.fullmatch(r"\s*([0-9]+)(?:\.([0-9]+))?\s*([A-Za-z]*)\s*", text)
    if match is None or match[3].lower() not in _FACTORS:
        raise UsageError(f"{option}{' ' * bool(option)}{text!r} is not a size; write it like 512MiB, 2GB or 1073741824")
    whole, fraction, factor = match[1], match[2] or "", _FACTORS[match[3].lower()]
    scale: int = 10 ** len(fraction)
    return int(whole + fraction) * factor // scale


_BITS_PER_S = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "kbps": 1e3, "mbps": 1e6, "gbps": 1e9}
RATE_FORMS: Final = "100Mbit, 100Mbit/s, 1Gbit, 5MB/s, 20MB or 12.5e6 (bytes per second)"


def parse_rate(text: str) -> float:
    """Read a rate as bytes per second: ``100Mbit``, ``1Gbit/s``, ``5MB/s``, ``20MB``, ``12.5e6``; or ``UsageError``.

    Networks are sold by Mbit/s: 100 Mbit/s are 12.5e6 bytes per second. ``Mb`` is refused: it may mean either.
    """
    number = r"[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
    match = re.fullmatch(rf"\s*({number})\s*(?:([A-Za-z]+)\s*(?:/\s*s)?)?\s*", text)
    unit = match[2] or "" if match else ""
    if match and unit.lower() in _BITS_PER_S:
        return float(match[1]) * _BITS_PER_S[unit.lower()] / 8
    if match is None or unit.lower() not in _FACTORS or (len(unit) == 2 and unit.endswith("b")):
        raise UsageError(f"{text!r} is not a rate; write it like {RATE_FORMS}")
    return float(match[1]) * _FACTORS[unit.lower()]


_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_seconds(text: str) -> float:
    """Read a duration above 0 as seconds: ``90s``, ``30m``, ``24h``, ``7d``; else raise ``UsageError``."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)\s*", text)
    if match is None or match[2] not in _SECONDS or not float(match[1]):
        raise UsageError(f"{text!r} is not a duration; write it like 90s, 30m, 24h or 7d")
    return float(match[1]) * _SECONDS[match[2]]


def format_bytes(size_bytes: float) -> str:
    """Print bytes in binary units: ``512 B``, ``1.5 KiB``, ``3,100 MiB``, ``12.0 GiB``.

    MiB are used up to 10 GiB, so that memory budgets have one unit.
    """
    size = abs(size_bytes)
    if size < 1024:
        return f"{size_bytes:.0f} B"
    if size < 2**20:
        return f"{size_bytes / 2**10:.1f} KiB"
    if size < 100 * 2**20:
        return f"{size_bytes / 2**20:.1f} MiB"
    if size < 10 * 2**30:
        return f"{size_bytes / 2**20:,.0f} MiB"
    return f"{size_bytes / 2**30:,.1f} GiB"


def format_seconds(duration_s: float) -> str:
    """Print a duration: ``0.35 ms``, ``18 ms``, ``2.5 s``, ``3 min 12 s``, ``2 h 05 min``."""
    if duration_s < 0:
        return f"-{format_seconds(-duration_s)}"
    if duration_s < 1:
        millis = duration_s * 1000
        return f"{millis:.2f} ms" if millis < 10 else f"{millis:.0f} ms"
    if duration_s < 59.95:
        return f"{duration_s:.1f} s"
    seconds = round(duration_s)
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    minutes = round(duration_s / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"
