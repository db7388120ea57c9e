"""Every key of a job refuses every wrong value by its name; keys, types and ranges are those of the code."""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from typing import Any

import pytest

from ringtune.errors import JobError
from ringtune.job.job import Job, section_class
from ringtune.storage.strict import Bounds, OneOf
from tests.support.cases import cases
from tests.support.job_keys import KEYS, Key, refusal

OF_TYPES: Mapping[type, tuple[object, ...]] = {
    bool: (True, False),
    int: (3, -1, 0),
    float: (1.5,),
    str: ("", "word"),
    tuple: ([], ["word"], [3]),
    dict: ({}, {"a": "b"}),
    object: (b"bytes",),
}
"""Values by the type that a TOML reader gives them; ``tuple`` is a list."""

RANGES = [(key, rule) for key in KEYS.values() for rule in key.rules if isinstance(rule, Bounds)]
CHOICES = [(key, rule) for key in KEYS.values() for rule in key.rules if isinstance(rule, OneOf)]


_WRONG: Mapping[type, tuple[tuple[object, str], ...]] = {
    Bounds: ((-1, "is -1, it has to be "), (True, "is true, it has to be a number")),
    OneOf: (("no word", "= 'no word' is not one of "),),
}


@cases("key", KEYS.values())
def test_key_refuses_values_of_other_types(key: Key) -> None:
    """It names the key, the type that it has, and what was found; a whole number does for a number."""
    taken = {*key.kinds, *([int] if float in key.kinds else [])}
    wrong = [value for kind, values in OF_TYPES.items() if kind not in taken for value in values]
    assert len(wrong) > 5
    for value in wrong:
        said = refusal(key.name, value)
        assert said.startswith(f"{key.name} has to be "), (value, said)
        assert ", but is " in said


@cases("key", KEYS.values())
def test_key_that_is_misspelt_is_unknown(key: Key) -> None:
    """A letter too many, or too few, is answered with the key; so it is in another section."""
    section, _, name = key.name.partition(".")
    for typed in (f"{name}x", name[:-1]):
        if all(typed != known.partition(".")[2] for known in KEYS):
            assert refusal(f"{section}.{typed}", 1).startswith(
                f"unknown key '{section}.{typed}'; did you mean '{name}'"
            )
    elsewhere = "runtime" if f"runtime.{name}" not in KEYS else "model"
    homes = [home.partition(".")[0] for home in KEYS if home.partition(".")[2] == name]
    said = refusal(f"{elsewhere}.{name}", 1)
    assert said == (
        f"unknown key '{elsewhere}.{name}'; {name} is a key of {' or '.join(f'[{home}]' for home in homes)}, write it "
        "there"
    )


def _written(end: float) -> str:
    return f"{end:,.10g}" if isinstance(end, float) else f"{end:,}"


@cases(("key", "bounds"), RANGES)
def test_range_of_a_key_is_closed_or_open_where_it_says(key: Key, bounds: Bounds) -> None:
    """Ends are taken or refused as the range says, and what lies beyond is refused with key, value and end."""
    number = float if float in key.kinds else int
    ends = (
        (bounds.ge, True, -1, "at least"),
        (bounds.gt, False, -1, "above"),
        (bounds.le, True, 1, "at most"),
        (bounds.lt, False, 1, "below"),
    )
    for end, is_in, side, words in ends:
        if end is None or end == math.inf:
            continue
        next_to_it = math.nextafter(end, side * math.inf) if number is float else end + side
        refused = [number(end)] * (not is_in) + [next_to_it, number(end + side * 1024)]
        assert not is_in or refusal(key.name, number(end)) == ""
        for value in refused:
            said = refusal(key.name, value)
            if abs(value) >= 1 << 63:
                assert said == f"{key.name} is too large for a number"
            else:
                assert said.startswith(f"{key.name} is {value}, it has to be {words} {_written(end)}"), said


@cases(("key", "bounds"), RANGES)
def test_number_that_is_none_or_has_no_end_is_refused(key: Key, bounds: Bounds) -> None:
    """Not a number, infinite, or beyond 64 bits."""
    assert bounds.text
    for value in (math.nan, math.inf, -math.inf) if float in key.kinds else ():
        assert refusal(key.name, value) == f"{key.name} has to be a finite number, but is {value}"
    for value in (1 << 63, -(1 << 70), 10**400):
        assert refusal(key.name, value) == f"{key.name} is too large for a number"


@cases(("key", "choice"), CHOICES)
def test_word_of_a_key_is_one_of_those_that_it_names(key: Key, choice: OneOf) -> None:
    """Others are refused with all words, and with the nearest one if it is near."""
    for word in choice.words:
        known = [word] if tuple in key.kinds else word
        assert "is not one of" not in refusal(key.name, known)
        for typed, advice in ((f"{word}x", f"; did you mean {word!r}?"), ("\N{REPLACEMENT CHARACTER}", "")):
            said = refusal(key.name, [typed] if tuple in key.kinds else typed)
            assert said.startswith(f"{key.name} = {typed!r} is not one of {', '.join(choice.words)}{advice}"), said


@cases("name", [name for name, key in KEYS.items() if any(type(rule) in _WRONG for rule in key.rules)])
def test_section_checks_itself_when_code_builds_it(name: str) -> None:
    """Also without a file."""
    section, _, field = name.partition(".")
    cls: Any = section_class(typing.get_type_hints(Job)[section])
    key, beside = KEYS[name], {"path": "m"} if section == "model" else {}
    wrong = [_WRONG[type(rule)] for rule in key.rules if type(rule) in _WRONG]
    for value, said in wrong[0]:
        with pytest.raises(JobError) as caught:
            cls(**beside | {field: (value,) if tuple in key.kinds else value})
        assert str(caught.value).startswith(f"{name} {said}")
