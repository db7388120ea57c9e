"""Tests of ``ringtune.storage.strict``: hostile values, strict.

Whatever stands in a JSON text of another machine or of a file: an error of ours, soon, or a value that holds.

Valid texts with a few values replaced by hostile ones: numbers without end or that are none, other types, deep lists,
long and odd texts, keys that are missing or too many.

The strict reader: dictionaries into dataclasses without guessing.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.server.run_record import RunRecord
from ringtune.costs.profile import NodeFacts, Profile
from ringtune.errors import IntegrityError, PlanError, RingTuneError
from ringtune.run_control.checkpoint import CheckpointManifest, Resume
from ringtune.schedule.operation_tables import Operations
from ringtune.schedule.plan import Plan
from ringtune.storage.strict import read_dataclass, read_object
from ringtune.transport.codecs import table_from_proto
from ringtune.v1 import control_pb2
from tests.contract.run_control.test_checkpoint import manifest
from tests.support.cases import cases
from tests.support.fake_agents import facts
from tests.support.plans import make_plan

HOSTILE: st.SearchStrategy[Any] = st.sampled_from(
    [
        None, True, False, 0, -1, 1, 1 << 31, 1 << 62, 1 << 63, 10**19, 10**400, -(10**400), 0.5, -0.5, 1e308, -1e308,
        "", "x", "a/../b", "../../x", "\x1b[2J", "\ud800", "x" * 5000, "0" * 64, [], [[]], {}, {"a": 1}, [1, 2],
        ["a", "a"], [None], [{"node": "a"}], "nan", "Infinity",
    ]
)  # fmt: skip
TEXTS = ("NaN", "Infinity", "-Infinity", "1e999", "1" * 5000, "[" * 5000)
PLAN = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"], checkpoint_every=2, eval_every=2)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything in a JSON value."""
    found = [at] if at else []
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        found += places(item, (*at, key))
    return found


def put(value: Any, at: tuple[Any, ...], new: Any) -> None:
    """Replace what is at a path; nothing where an earlier change took it away."""
    for key in at[:-1]:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return
    if isinstance(value, dict) or (isinstance(value, list) and isinstance(at[-1], int) and at[-1] < len(value)):
        value[at[-1]] = new


READERS: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "plan": (PLAN.to_json(), Plan.from_json),
    "facts": (facts("a").to_message(), NodeFacts.from_message),
    "profile": (Profile(nodes=(facts("a"), facts("b"))).to_json(), Profile.from_json),
    "manifest": (manifest(4).to_json(), CheckpointManifest.from_json),
}


@cases("name", READERS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_hostile_values_are_an_error_of_ours_or_harmless(name: str, data: st.DataObject) -> None:
    """What passes can be written again; what does not says so in a short and printable text."""
    given_value, read = READERS[name]
    value = copy.deepcopy(json.loads(json.dumps(given_value)))
    known = places(value)
    for _ in range(data.draw(st.integers(1, 3))):
        put(value, data.draw(st.sampled_from(known)), copy.deepcopy(data.draw(HOSTILE)))
    try:
        found = read(value)
    except RingTuneError as error:
        told = str(error)
    else:
        write = found.to_message if isinstance(found, NodeFacts) else found.to_json  # type: ignore[attr-defined]
        again, told = json.dumps(write(), allow_nan=False), ""
        assert read(json.loads(again)) == found
    assert len(told) < 5000


def test_plan_with_more_private_blocks_than_the_model_has_is_refused() -> None:
    """Found by fuzzing: with no host at all it ended in an error of Python's."""
    value = PLAN.to_json()
    placement = value["placements"][0]
    placement["private_blocks"] = 5
    placement["slices"] = [{"node": node, "start": 4, "stop": 4} for node in "ab"]
    with pytest.raises(RingTuneError, match="private_blocks is 5, the model has 4 blocks"):
        Plan.from_json(_without_digests(value))


def _without_digests(value: Any) -> Any:
    """A plan without the digests that would refuse any change before it is looked at."""
    if isinstance(value, dict):
        return {key: _without_digests(item) for key, item in value.items() if key != "digest"}
    return [_without_digests(item) for item in value] if isinstance(value, list) else value


@cases("most", [1 << 20, 1 << 62])
def test_plan_of_a_model_without_end_is_refused_at_once(most: int) -> None:
    """Before any block of it is looked at."""
    value: Any = json.loads(json.dumps(PLAN.to_json()))
    value["course"]["num_blocks"] = most
    value["placements"][0]["slices"][1]["stop"] = most
    with pytest.raises(RingTuneError):
        Plan.from_json(_without_digests(value))


@cases("name", READERS)
@cases("text", TEXTS)
def test_texts_that_are_no_numbers_are_no_json(name: str, text: str) -> None:
    """At every place of a valid text: refused where the text is read, before anybody counts on it."""
    given_value, read = READERS[name]
    for at in places(given_value)[:60]:
        value = copy.deepcopy(json.loads(json.dumps(given_value)))
        put(value, at, "HERE")
        with pytest.raises(RingTuneError):
            read(read_object(json.dumps(value).replace('"HERE"', text), "a text"))


@given(st.text(max_size=400))
def test_records_of_any_text_are_an_error_of_ours(text: str) -> None:
    """Of a kept run, of a checkpoint."""
    for parse in (RunRecord.parse, CheckpointManifest.parse):
        with pytest.raises(RingTuneError):
            parse(text)


@cases("text", ["[" * 100_000, '{"plan":' * 100_000, "1" * 5000, '{"a": ' + "[" * 100_000])
@cases(
    "read",
    [
        RunRecord.parse,
        CheckpointManifest.parse,
        Resume.parse,
        lambda text: table_from_proto(control_pb2.TableMessage(table_json=text.encode()), PLAN.course),
    ],
)
def test_texts_that_are_deep_or_long_are_an_error_of_ours(read: Callable[[str], object], text: str) -> None:
    """Of files, and of calls; found by fuzzing."""
    with pytest.raises(IntegrityError):
        read(text)


@cases("value", [{"subnets": 10**400, "batches": []}, {"subnets": 1, "batches": [{"batch_id": 1 << 70}]}, []])
def test_operations_of_hostile_values_are_refused(value: Any) -> None:
    """A table that a coordinator, or a file, names."""
    with pytest.raises(RingTuneError):
        Operations.from_json(value, where="table")


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


@cases(
    ("value", "message"),
    [
        ({}, "bike.wheels is missing; add it: wheels = ..."),
        ({"wheels": {}}, "bike.wheels has to be a list, but is a table"),
        ({"wheels": [3]}, "bike.wheels[0] has to be a table, but is the whole number 3"),
        ({"wheels": [{}]}, "bike.wheels[0].size is missing; add it: size = 0.1"),
        ({"wheels": [{"size": True}]}, "bike.wheels[0].size has to be a number, but is true"),
        ({"wheels": [{"size": 10**400}]}, "bike.wheels[0].size is too large for a number"),
        ({"wheels": [{"size": float("inf")}]}, "bike.wheels[0].size has to be a finite number, but is inf"),
        ({"wheels": [{"size": float("nan")}]}, "bike.wheels[0].size has to be a finite number, but is nan"),
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
        read_dataclass(Bike, value, where="bike", error=PlanError)
    assert str(caught.value) == message


@cases(("content", "why"), [("{", "is not JSON"), ("[" * 10**5, "is not JSON"), ("[]", "is not a J")])
def test_strict_object_of_a_message_is_one_or_an_error_of_ours(content: str, why: str) -> None:
    """What another machine sent is named, with the remedy; no depth of it is a bug here."""
    assert read_object('{"a": 1}', "the plan") == read_object(b'{"a": 1}', "the plan") == {"a": 1}
    with pytest.raises(IntegrityError, match=f"the plan {why}.*; use one version on all machines"):
        read_object(content, "the plan")
