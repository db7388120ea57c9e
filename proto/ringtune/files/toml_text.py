"""Writing tables as TOML; the standard library only reads it."""

from __future__ import annotations

from collections.abc import Mapping

_ESCAPES = {"\\": "\\\\", '"': '\\"', "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


def write_toml(tables: Mapping[str, Mapping[str, object]]) -> str:
    """One ``[table]`` after another, keys in the given order; ``None`` values are left out.

    Args:
        tables: values are bool, int, float, str, or lists and tuples of these.

    Raises:
        TypeError: for any other value.
    """
    parts = []
    for name, table in tables.items():
        lines = [f"{key} = {toml_value(value)}" for key, value in table.items() if value is not None]
        parts.append("\n".join([f"[{name}]", *lines]))
    return "\n\n".join(parts) + "\n"


def toml_value(value: object) -> str:
    """One value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        return f'"{"".join(_escape(char) for char in value)}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    raise TypeError(f"TOML has no form for {type(value).__name__}")


def _escape(char: str) -> str:
    if char in _ESCAPES:
        return _ESCAPES[char]
    return f"\\u{ord(char):04X}" if ord(char) < 0x20 or ord(char) == 0x7F else char
