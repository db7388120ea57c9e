"""Change a right input into a hostile one."""

from __future__ import annotations

import copy
import json
import random
from typing import Any, Final

from tests.support.fuzz.reader import Reader

MAX_BYTES: Final = 1 << 16

HOSTILE: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, -1, 1, 2, 3, 1 << 20, 1 << 31, 1 << 62, 1 << 63, 10**19, 10**400, -(10**400), 0.5, -0.5),
    *(1e308, -1e308, "", "x", "a", "b", "a/../b", "../../x", "/etc/x", "\x1b[2J", "\ud800", "x" * 5000, "0" * 64),
    *([], [[]], {}, {"a": 1}, [1, 2], ["a", "a"], [None], [{"node": "a"}], "nan", "Infinity", "\0", [0] * 2000),
)
_TEXTS: Final = ("NaN", "Infinity", "-Infinity", "1e999", "-0", "0.0", "1" * 5000, "[" * 30_000, '{"a":' * 30_000)
_NUMBERS: Final = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 63) - 1, (1 << 64) - 1)
_DEEP: Final = "HERE IT IS DEEP"


def mutated(reader: Reader, data: bytes, rng: random.Random) -> bytes:
    """Change an input; what is JSON stays JSON more often than not."""
    if reader.is_json and rng.random() < 0.8:
        try:
            return _changed_json(reader, json.loads(data), rng)[:MAX_BYTES]
        except (ValueError, RecursionError):
            return _changed_json(reader, json.loads(rng.choice(reader.seeds)), rng)[:MAX_BYTES]
    content = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        _change_bytes(content, reader, rng)
    return bytes(content[:MAX_BYTES])


def _changed_json(reader: Reader, value: Any, rng: random.Random) -> bytes:
    value = copy.deepcopy(value)
    known = _places(value)
    for _ in range(rng.randint(1, 3)):
        if known:
            _put(value, rng.choice(known), rng, known)
    if rng.random() < 0.5:
        value = without_digests(value)
    elif reader.repair is not None:
        value = reader.repair(value)
    text = json.dumps(value)
    if _DEEP in text:
        text = text.replace(f'"{_DEEP}"', rng.choice(_TEXTS))
    return text.encode("utf-8", "replace")


def without_digests(value: Any) -> Any:
    """A value without the digests that would refuse any change before it is looked at."""
    if isinstance(value, dict):
        return {key: without_digests(item) for key, item in value.items() if key != "digest"}
    return [without_digests(item) for item in value] if isinstance(value, list) else value


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at] if at else []
    if len(at) > 20:
        return found
    inside = value.items() if isinstance(value, dict) else enumerate(value[:50]) if isinstance(value, list) else ()
    for key, item in inside:
        found += _places(item, (*at, key))
    return found


def _put(value: Any, at: tuple[Any, ...], rng: random.Random, known: list[tuple[Any, ...]]) -> None:
    whole = value
    for key in at[:-1]:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return
    what = rng.random()
    if what < 0.1 and isinstance(value, dict):
        value.pop(at[-1], None)
    elif what < 0.15 and isinstance(value, list) and len(value) < 50:
        value.append(copy.deepcopy(value[-1]) if value else 0)
    elif (isinstance(value, dict) and at[-1] in value) or (
        isinstance(value, list) and isinstance(at[-1], int) and at[-1] < len(value)
    ):
        if what < 0.25:
            value[at[-1]] = _DEEP
        elif what < 0.4:
            value[at[-1]] = copy.deepcopy(_at(whole, rng.choice(known)))
        elif what < 0.6 and type(value[at[-1]]) is int:
            value[at[-1]] += rng.choice((-1, 1, 2, 7))
        else:
            value[at[-1]] = copy.deepcopy(rng.choice(HOSTILE))


def _at(value: Any, at: tuple[Any, ...]) -> Any:
    for key in at:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _change_bytes(content: bytearray, reader: Reader, rng: random.Random) -> None:
    at = rng.randrange(len(content) + 1)
    end = min(len(content), at + rng.choice((1, 2, 4, 8, 64, 4096)))
    match rng.randrange(7):
        case 0:
            content[at:end] = b""
        case 1:
            content[at:at] = rng.randbytes(rng.randint(1, 16))
        case 2 if at < len(content):
            content[at] ^= 1 << rng.randrange(8)
        case 3:
            content[at:end] = rng.choice(_NUMBERS).to_bytes(8, rng.choice(("little", "big")))[: end - at or 8]
        case 4:
            content[at:at] = content[at:end] * rng.choice((1, 2, 100))
        case 5:
            other = rng.choice(reader.seeds)
            begin = rng.randrange(len(other) + 1)
            content[at:end] = other[begin : begin + rng.choice((1, 8, 64, 4096))]
        case _:
            content[at:end] = rng.choice(_TEXTS).encode()
