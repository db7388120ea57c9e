"""The strict reader: dictionaries into dataclasses without guessing."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from ringtune.errors import IntegrityError, InvalidInputError, PlanError
from ringtune.files.strict import describe_value, nearest, read_dataclass, read_object


@dataclass(frozen=True, kw_only=True, slots=True)
class Wheel:
    """A part."""

    size: float
    name: str = "front"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bike:
    """A whole with nested parts."""

    wheels: tuple[Wheel, ...]
    gears: int | None = None
    spare: Wheel | None = None


def _read(value: object) -> Bike:
    return read_dataclass(Bike, value, where="bike", error=PlanError)


def test_read_dataclass_builds_nested_values() -> None:
    """Lists become tuples, nested tables become dataclasses, defaults fill in."""
    assert _read({"wheels": [{"size": 28}, {"size": 26.5, "name": "rear"}], "spare": {"size": 1.0}}) == Bike(
        wheels=(Wheel(size=28.0), Wheel(size=26.5, name="rear")), spare=Wheel(size=1.0)
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "bike.wheels is missing; add it: wheels = ..."),
        ({"wheels": {}}, "bike.wheels has to be a list, but is a table"),
        ({"wheels": [3]}, "bike.wheels[0] has to be a table, but is the whole number 3"),
        ({"wheels": [{}]}, "bike.wheels[0].size is missing; add it: size = 0.1"),
        ({"wheels": [{"size": True}]}, "bike.wheels[0].size has to be a number, but is true"),
        ({"wheels": [{"size": 10**400}]}, "bike.wheels[0].size is too large for a number"),
        ({"wheels": [], "gears": 1.5}, "bike.gears has to be a whole number, but is the number 1.5"),
        ({"wheels": [], "gears": False}, "bike.gears has to be a whole number, but is false"),
        ({"wheels": [], "wheel": 1}, "unknown key 'bike.wheel'; did you mean 'wheels'?"),
        ({"wheels": [], 3: 1}, "unknown key 'bike.3'; known here: gears, spare, wheels"),
        (None, "bike has to be a table, but is nothing"),
    ],
)
def test_read_dataclass_says_where_and_what(value: object, message: str) -> None:
    """The dotted place, what was expected and what was found, in the caller's error class."""
    with pytest.raises(PlanError) as caught:
        _read(value)
    assert str(caught.value) == message


def test_read_dataclass_refuses_infinite_numbers() -> None:
    """A measured time can be neither infinite nor undefined."""
    for value in (float("inf"), float("nan")):
        with pytest.raises(InvalidInputError, match="has to be a finite number"):
            read_dataclass(Wheel, {"size": value}, where="", error=InvalidInputError)


def test_describe_shortens_long_values() -> None:
    """A message never repeats a whole file."""
    assert describe_value("x" * 100) == f"the text '{'x' * 36}..."
    assert describe_value([1, 2]) == "a list"


def test_nearest_names_one_or_all() -> None:
    """A near miss gets one suggestion, anything else the whole list."""
    assert nearest("sead", ["seed", "text"]) == "did you mean 'seed'?"
    assert nearest("q", ["seed", "text"]) == "known here: seed, text"


@pytest.mark.parametrize(("content", "why"), [("{", "is not JSON"), ("[" * 10**5, "is not JSON"), ("[]", "is not a J")])
def test_strict_object_of_a_message_is_one_or_an_error_of_ours(content: str, why: str) -> None:
    """What another machine sent is named, with the remedy; no depth of it is a bug here."""
    assert read_object('{"a": 1}', "the plan") == read_object(b'{"a": 1}', "the plan") == {"a": 1}
    with pytest.raises(IntegrityError, match=f"the plan {why}.*; use one version on all machines"):
        read_object(content, "the plan")
