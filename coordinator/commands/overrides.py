"""``--set KEY=VALUE``: values as in the job file, strings also without quotes."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable

from ringtune.errors import UsageError


def parse_changes(changes: Iterable[str]) -> dict[str, object]:
    """Split each ``KEY=VALUE`` into a dotted key and its value.

    Raises:
        UsageError: not ``KEY=VALUE``, or a key without a section.
    """
    values: dict[str, object] = {}
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or key.count(".") != 1:
            raise UsageError(f"--set {change!r} is not SECTION.KEY=VALUE, e.g. train.seed=1")
        values[key.strip()] = _value(text.strip())
    return values


def _value(text: str) -> object:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
