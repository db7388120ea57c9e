"""Sizes, times and rates as people write and read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtune.errors import UsageError
from ringtune.quantities import format_bytes, format_seconds, parse_bytes, parse_rate
from tests.support.cases import cases


@cases(
    ("text", "size"),
    [
        ("0", 0),
        ("1073741824", 2**30),
        ("512MiB", 512 * 2**20),
        ("7mib", 7 * 2**20),
        ("2GB", 2 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        ("  100 kb ", 100_000),
        ("1KiB", 1024),
        ("3b", 3),
        ("0.1TB", 10**11),
        ("0.0001KiB", 0),
        ("1.005GB", 1_005_000_000),
    ],
)
def test_parse_bytes_reads_binary_and_decimal_units(text: str, size: int) -> None:
    """Exact, without rounding through floats."""
    assert parse_bytes(text) == size


@cases("text", ["", "MiB", "-1", "1.5.2GB", "1 parsec", "1e3", "0x10", "1,000", "1.GB", "inf", "٣GB"])
def test_parse_bytes_refuses_what_is_no_size(text: str) -> None:
    """The message shows how to write one, and names the option that has it."""
    with pytest.raises(UsageError, match=r"^--memory '.*' is not a size; write it like 512MiB"):
        parse_bytes(text, option="--memory")


@given(
    number=st.floats(0.001, 1e6).map(lambda value: float(f"{value:.6g}")),
    unit=st.sampled_from(["kbit", "Mbit", "Gbit", "Mbps", "", "B", "kB", "MB", "MiB", "GB"]),
    per_second=st.sampled_from(["", "/s", " / s"]),
    space=st.sampled_from(["", " "]),
)
def test_parse_rate_reads_bits_and_bytes(number: float, unit: str, per_second: str, space: str) -> None:
    """Every unit, with or without ``/s``: bits are an eighth of a byte, and bytes are as in sizes."""
    text = f"{number!r}{space}{unit}{per_second if unit else ''}"
    prefix = {"k": 1e3, "M": 1e6, "G": 1e9}.get(unit[:1], 1.0)
    wanted = number * prefix / 8 if unit.endswith(("bit", "bps")) else number * parse_bytes(f"1{unit}")
    assert parse_rate(text) == pytest.approx(wanted)


@cases("text", ["", "fast", "-1MB", "100Mb", "5mb/s", "1 Mbit/h", "nan", "Mbit", "1,5MB/s", "/s"])
def test_parse_rate_refuses_what_is_no_rate(text: str) -> None:
    """``Mb`` may be bits or bytes; the message lists the forms."""
    with pytest.raises(UsageError, match="is not a rate; write it like 100Mbit, 100Mbit/s, 1Gbit, 5MB/s"):
        parse_rate(text)


@cases(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (75360, "73.6 KiB"),
        (7_097_856, "6.8 MiB"),
        (2**20 * 2048, "2,048 MiB"),
        (2**20 * 3100, "3,100 MiB"),
        (2**30 * 12, "12.0 GiB"),
        (-(2**21), "-2.0 MiB"),
    ],
)
def test_format_bytes_keeps_budgets_comparable(size: int, text: str) -> None:
    """Node budgets of 1 to 10 GiB all appear in MiB."""
    assert format_bytes(size) == text


@cases(
    ("duration", "text"),
    [
        (0, "0.00 ms"),
        (0.00035, "0.35 ms"),
        (0.018, "18 ms"),
        (2.5, "2.5 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (192, "3 min 12 s"),
        (3599.7, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (-2.5, "-2.5 s"),
    ],
)
def test_format_seconds_fits_the_size(duration: float, text: str) -> None:
    """From a hundredth of a millisecond to hours, no 60 seconds or 60 minutes."""
    assert format_seconds(duration) == text
