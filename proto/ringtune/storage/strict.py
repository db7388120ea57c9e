"""Strict parsing of JSON, TOML and user files into frozen dataclasses; and digests of values.

A misspelt key, a missing key and a wrong type are errors with the place, the expected and the found type. Nothing is
converted, except a whole number for a float. Only regular files are read, whole, and up to a bound. A Git LFS pointer,
which a clone without Git LFS has instead of a file, is recognised. Equal values have equal digests.

The allowed values of a field are metadata of its type; ``check_fields`` and the reference of a job read them there::

    rounds: Annotated[int | None, Bounds(ge=1, le=1000)] = None
    turns: Annotated[str, OneOf(("equal", "rows"))] = "equal"

Source: the specification of Git LFS, version 1.
"""

from __future__ import annotations

import dataclasses
import difflib
import errno
import functools
import hashlib
import json
import math
import operator
import os
import stat
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from ringtune.errors import IntegrityError, InvalidInputError

_BEGIN: Final = b"version https://git-lfs.github.com/spec/"
_MAX_POINTER_BYTES: Final = 1024


def is_lfs_pointer(path: Path) -> bool:
    """Whether a file is a pointer of Git LFS; False if it is a pipe, which is not opened, or can't be read."""
    try:
        if not path.is_file() or path.stat().st_size > _MAX_POINTER_BYTES:
            return False
        with open(path, "rb", opener=regular) as file:
            return file.read(len(_BEGIN)) == _BEGIN
    except OSError:
        return False


def pointer_advice(path: Path) -> str:
    """Write that a file is a pointer, and the remedy."""
    return f"{path} is a pointer of Git LFS in place of the file; run 'git lfs pull' where the folder was cloned"


def json_digest(value: object) -> str:
    """SHA-256, hex, of a value's JSON form with sorted keys and without spaces."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


T = TypeVar("T")
_LARGEST: Final = (1 << 63) - 1

_TYPE_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    tuple: "a list",
    dict: "a table",
    type(None): "nothing",
}


def parse_json(content: str | bytes) -> Any:
    """Parse JSON; raises ``ValueError`` if it is not JSON, or nested too deeply."""
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_object(content: str | bytes, what: str) -> dict[str, Any]:
    """Parse a JSON object with finite numbers; else raise ``IntegrityError``, in which ``what`` names it."""
    try:
        value = json.loads(content, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{what} is not JSON: {error}; use one version on all machines") from error
    if not isinstance(value, dict):
        raise IntegrityError(f"{what} is not a JSON object; use one version on all machines")
    return value


def _finite(text: str) -> float:
    """Parse a number; Python's reader accepts NaN, Infinity and 1e999."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is no finite number")
    return number


def read_dataclass(cls: type[T], value: object, *, where: str, error: type[InvalidInputError]) -> T:
    """Build ``cls`` from a dictionary with exactly its fields as keys; fields with a default may be absent.

    Args:
        cls: a dataclass with fields of bool, int, float, str, ``X | None``, ``tuple[X, ...]`` and ``dict[str, X]`` with
            or without ``| str``, named tuples, such dataclasses, and classes with ``from_json(value, where=)``.
        value: parsed value; anything but a dictionary is refused.
        where: dotted name of the dictionary for messages, such as ``train``; empty at the top.
        error: class of the error.

    Raises:
        InvalidInputError: as ``error``, for an unknown or missing key or a wrong type.
    """
    if not isinstance(value, Mapping):
        raise error(f"{where or 'the file'} has to be a table, but is {describe_value(value)}")
    entries = {key_of(name): (name, entry) for name, entry in _entries(typing.cast(Any, cls)).items()}
    check_keys(value, entries, where=where, error=error)
    values: dict[str, Any] = {}
    for key, (name, entry) in entries.items():
        if key in value:
            values[name] = read_value(entry.hint, value[key], where=join(where, key), error=error)
        elif entry.is_required:
            raise error(f"{join(where, key)} is missing; add {_example(key, entry.hint)}")
    return cls(**values)


def key_of(field: str) -> str:
    """Return the key of a field; one that is a word of Python has an underscore behind it: ``from_`` is ``from``."""
    return field.removesuffix("_")


def read_value(hint: Any, value: object, *, where: str, error: type[InvalidInputError]) -> Any:
    """Check one value against a type, and return it in that type; raises ``InvalidInputError``."""
    if hint in _SCALARS:
        return _read_scalar(hint, value, where=where, error=error)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return read_value(_choice(args, value, where=where, error=error), value, where=where, error=error)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            hint = f"; write [{json.dumps(value)}]" if args[0] is str and isinstance(value, str) else ""
            raise error(f"{where} has to be a list, but is {describe_value(value)}{hint}")
        items = enumerate(value)
        return tuple(read_value(args[0], item, where=f"{where}[{index}]", error=error) for index, item in items)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise error(f"{where} has to be a table, but is {describe_value(value)}")
        table = {str(key): item for key, item in value.items()}
        return {key: read_value(args[1], item, where=join(where, key), error=error) for key, item in table.items()}
    if hasattr(hint, "from_json"):
        return hint.from_json(value, where=where)
    if hasattr(hint, "_fields"):
        return _read_named_tuple(hint, value, where=where, error=error)
    return read_dataclass(hint, value, where=where, error=error)


def _read_scalar(hint: type[Any], value: object, *, where: str, error: type[InvalidInputError]) -> Any:
    if type(value) is int and hint in (int, float) and abs(value) > _LARGEST:
        raise error(f"{where} is too large for a number")
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise error(f"{where} has to be {_TYPE_NAMES[hint]}, but is {describe_value(value)}")
    if hint is float and not math.isfinite(typing.cast(float, value)):
        raise error(f"{where} has to be a finite number, but is {value}")
    return value


def _read_named_tuple(hint: Any, value: object, *, where: str, error: type[InvalidInputError]) -> Any:
    if not isinstance(value, list | tuple) or len(value) != len(hint._fields):
        raise error(f"{where} has to be [{', '.join(hint._fields)}], but is {json.dumps(value, default=repr)}")
    kinds = _hints(hint).values()
    items = enumerate(zip(kinds, value, strict=True))
    return hint(*(read_value(kind, item, where=f"{where}[{at}]", error=error) for at, (kind, item) in items))


_SCALARS: Final = (int, float, str, bool)
LATER: Final = "later"
"""Metadata of a field of a later version: ``to_table`` omits its default, so that digests stay equal."""


def to_table(value: Any) -> dict[str, Any]:
    """Convert a dataclass to a JSON-compatible table of its constructor's fields; the inverse of ``read_dataclass``."""
    cls: Any = type(value)
    items = ((name, getattr(value, name), entry) for name, entry in _entries(cls).items())
    return {key_of(name): _to_json(item) for name, item, entry in items if item != entry.left_out}


def _to_json(value: Any) -> Any:
    if hasattr(value, "to_json"):
        return value.to_json()
    if dataclasses.is_dataclass(value):
        return to_table(value)
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    return {key: _to_json(item) for key, item in value.items()} if isinstance(value, Mapping) else value


class _Entry(NamedTuple):
    """Type of a constructor's field, whether it is required, and the value that is omitted in a table."""

    hint: Any
    is_required: bool
    left_out: object


_NOTHING: Final = object()


@functools.cache
def _entries(cls: type[Any]) -> dict[str, _Entry]:
    hints, whole = typing.get_type_hints(cls), typing.get_type_hints(cls, include_extras=True)
    return {
        field.name: _Entry(
            hint=hints[field.name],
            is_required=field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
            left_out=field.default if LATER in getattr(whole[field.name], "__metadata__", ()) else _NOTHING,
        )
        for field in dataclasses.fields(cls)
        if field.init
    }


def check_keys(value: Iterable[object], known: Collection[str], *, where: str, error: type[InvalidInputError]) -> None:
    """Refuse unknown keys with ``error``, which has the nearest known one."""
    for key in value:
        if key not in known:
            raise error(f"unknown key {join(where, str(key))!r}; {nearest(str(key), known)}")


def with_renamed_key(value: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """Copy a table with key ``old`` renamed to ``new``, unless it has ``new`` already."""
    return {new if key == old and new not in value else key: item for key, item in value.items()}


def nearest(word: str, known: Collection[str]) -> str:
    """Write advice for a misspelt word: the nearest known one, or all of them."""
    close = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(sorted(known))}"


def join(where: str, key: str) -> str:
    """Return the dotted name of ``key`` inside ``where``."""
    return f"{where}.{key}" if where else key


def describe_value(value: object) -> str:
    """Describe a value with its type for a message, at most 40 characters of it: ``the text 'abc'``."""
    kind = _TYPE_NAMES.get(type(value), type(value).__name__)
    if isinstance(value, Mapping | list | tuple) or value is None:
        return kind
    if type(value) is int and abs(value) > _LARGEST:
        return "a number beyond 64 bits"
    text = repr(value)
    text = text if len(text) <= 40 else f"{text[:37]}..."
    return f"{kind.replace('a ', 'the ', 1)} {text}" if not isinstance(value, bool) else str(value).lower()


def _choice(args: tuple[Any, ...], value: object, *, where: str, error: type[InvalidInputError]) -> Any:
    """Select the type of a union for a value: a list type for a list, else the value's own type."""
    given = [arg for arg in args if arg is not type(None)]
    if len(given) == 1:
        return given[0]
    kind = tuple if isinstance(value, list | tuple) else type(value)
    for arg in given:
        if kind in (arg, typing.get_origin(arg)):
            return arg
    names = " or ".join(_TYPE_NAMES[typing.get_origin(arg) or arg] for arg in given)
    raise error(f"{where} has to be {names}, but is {describe_value(value)}")


def _example(name: str, hint: Any) -> str:
    if dataclasses.is_dataclass(hint):
        return f"a table [{name}]"
    examples: dict[Any, str] = {str: '"..."', int: "1", float: "0.1", bool: "true"}
    return f"it: {name} = {examples.get(hint, '...')}"


@functools.cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(cls)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Range of a number; an end that is None is open.

    Attributes:
        lt: the value is below it; infinity = it must be finite.
        advice: remedy in the message; empty = none.
    """

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    advice: str = ""
    _ends: tuple[tuple[str, float, Callable[[Any, Any], bool]], ...] = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        given = ((getattr(self, name), words, holds) for name, (words, holds) in _ENDS.items())
        ends = tuple((_end_text(words, end), end, holds) for end, words, holds in given if end is not None)
        object.__setattr__(self, "_ends", ends)

    @property
    def text(self) -> str:
        """The range in words: ``1 to 1,000`` for whole numbers, ``at least 0, below 1`` for others."""
        if isinstance(self.ge, int) and isinstance(self.le, int):
            return f"{self.ge:,} to {self.le:,}"
        return ", ".join(words for words, _, _ in self._ends)

    def check(self, name: str, value: Any, error: type[InvalidInputError]) -> None:
        """Refuse a value out of range; raises ``InvalidInputError``."""
        if isinstance(value, bool):
            raise error(f"{name} is {str(value).lower()}, it has to be a number")
        for words, end, holds in self._ends:
            if not holds(value, end):
                advice = f"; {self.advice}" if self.advice else ""
                raise error(f"{name} is {value}, it has to be {words}{advice}")


_ENDS: Final = {
    "ge": ("at least", operator.ge),
    "gt": ("above", operator.gt),
    "le": ("at most", operator.le),
    "lt": ("below", operator.lt),
}


def _end_text(words: str, end: float) -> str:
    if end == math.inf:
        return "finite"
    return f"{words} {end:,.10g}" if isinstance(end, float) else f"{words} {end:,}"


@dataclass(frozen=True, slots=True)
class Longest:
    """Most characters of a text, or entries of a list. ``advice``: remedy in the message."""

    length: int
    advice: str = "shorten it"

    @property
    def text(self) -> str:
        """The rule in words."""
        return f"length up to {self.length:,}"

    def check(self, name: str, value: Any, error: type[InvalidInputError]) -> None:
        """Refuse a longer one; raises ``InvalidInputError``."""
        if len(value) > self.length:
            what = "characters" if isinstance(value, str) else "entries"
            raise error(f"{name} has {len(value):,} {what}, it may have {self.length:,}; {self.advice}")


@dataclass(frozen=True, slots=True)
class OneOf:
    """Allowed words of a text, or of each text of a list. ``reasons``: refused word of other systems -> reason."""

    words: Collection[str]
    reasons: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def text(self) -> str:
        """The words, with commas."""
        return ", ".join(self.words)

    def check(self, name: str, value: str | tuple[str, ...], error: type[InvalidInputError]) -> None:
        """Refuse another word; raises ``InvalidInputError``."""
        for word in (value,) if isinstance(value, str) else value:
            if word not in self.words:
                advice = self.reasons.get(word) or nearest(word, self.words)
                close = f"; {advice}" if not advice.startswith("known here") else ""
                raise error(f"{name} = {word!r} is not one of {self.text}{close}")


@dataclass(frozen=True, slots=True)
class InWords:
    """Description of a field's values; the class of the field checks them itself."""

    text: str

    def check(self, name: str, value: object, error: type[InvalidInputError]) -> None:
        """Accept every value."""


Rule = Bounds | Longest | OneOf | InWords


@functools.cache
def field_rules(cls: type[Any]) -> dict[str, tuple[Rule, ...]]:
    """Return the rules in the types of a dataclass's fields, for fields with rules."""
    hints = typing.get_type_hints(cls, include_extras=True)
    rules = {
        name: tuple(rule for rule in getattr(hint, "__metadata__", ()) if isinstance(rule, Rule))
        for name, hint in hints.items()
    }
    return {name: given for name, given in rules.items() if given}


def check_fields(settings: object, *, where: str, error: type[InvalidInputError]) -> None:
    """Refuse values of a dataclass that break the rules of its fields; None breaks none."""
    cls: Any = type(settings)
    for name, rules in field_rules(cls).items():
        if (value := getattr(settings, name)) is not None:
            for rule in rules:
                rule.check(join(where, name), value, error)


MAX_GIVEN_BYTES: Final = 1 << 30
"""Most bytes of a text file that is read whole."""

MAX_JSON_BYTES: Final = 1 << 27
"""Most bytes of a file of JSON, which takes up to 30 times as much memory; tokenizers of the field have 34 MB."""


def regular(path: str, flags: int) -> int:
    """Open a regular file, as ``opener`` of ``open``; raises ``OSError`` for a pipe, which would wait for a writer."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        is_folder = stat.S_ISDIR(mode)
        what = (errno.EISDIR, "it is a folder") if is_folder else (errno.EINVAL, "it is a pipe or device, no file")
        raise OSError(*what, path)
    return descriptor


def read_given(path: Path, *, encoding: str = "utf-8", most_bytes: int = MAX_GIVEN_BYTES) -> str:
    """Read a text file; raises ``OSError`` or ``UnicodeDecodeError``."""
    with open(path, encoding=encoding, opener=regular) as file:
        if os.fstat(file.fileno()).st_size > most_bytes:
            raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes", str(path))
        return file.read()


def read_json(path: Path) -> Any:
    """Parse a JSON file; raises ``OSError`` or ``ValueError``."""
    return parse_json(read_given(path, most_bytes=MAX_JSON_BYTES))
