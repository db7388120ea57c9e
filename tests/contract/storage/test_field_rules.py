"""The ranges and words of plans and profiles, and that each of their records refuses all others when it is built."""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Annotated, Any

import pytest

from ringtune.costs.profile import LinkFacts, ModelFacts, Work, WorkTime
from ringtune.errors import InvalidInputError, PlanError
from ringtune.schedule.course import FrozenWeights, HelperSettings
from ringtune.schedule.methods.base import Patience
from ringtune.schedule.methods.hift import Hift
from ringtune.schedule.operation_tables import BlockCapacity, Choice
from ringtune.schedule.placement import ActivationCacheSettings
from ringtune.schedule.saved_activations import Velora
from ringtune.schedule.units import Range
from ringtune.storage.strict import (
    LATER,
    Bounds,
    Longest,
    OneOf,
    Rule,
    check_fields,
    field_rules,
    read_dataclass,
    to_table,
)
from tests.support.cases import cases
from tests.support.fake_agents import facts
from tests.support.plans import make_plan

PLAN = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"])
CAPACITY = BlockCapacity(full=1, forward_only=0, forward=0.4, backward=0.6)
OF_PLANS: tuple[Any, ...] = (
    PLAN.course,
    PLAN.placement,
    FrozenWeights(dtype="int8"),
    HelperSettings(),
    ActivationCacheSettings(),
    Velora(blocks=(Range(0, 1),), layers=("down",)),
    Hift(),
    Patience(),
    Choice(policy="joint", subnets=1, capacities=(CAPACITY,)),
)
OF_PROFILES: tuple[Any, ...] = (
    facts("a"),
    facts("a").model,
    LinkFacts(source="a", target="b", rate_bytes_per_s=1e6, latency_s=0.0),
    WorkTime(work=Work.FORWARD, rows=1, tokens=8, median_s=0.1, low_s=0.1, high_s=0.1, samples=3),
)
RULES = {
    "1 to 65,536": "Course.microbatches",
    "1 to 4,096": "Course.num_blocks",
    "0 to 2,147,483,648": "Course.num_steps Course.frozen_blocks Course.eval_every Course.checkpoint_every "
    "Course.head_tokens",
    "1 to 2,147,483,648": "Course.local_iterations Course.batch_size Course.max_length Course.hidden_size",
    "float32, bfloat16, float16, int8, float64": "Course.wire_dtype",
    "equal, rows": "Course.turns",
    "float32, bfloat16": "Course.compute",
    "at least 0": "Placement.private_blocks Placement.placement_number Placement.first_turn Placement.num_copies "
    "ActivationCacheSettings.max_bytes Velora.parts Velora.values",
    "at least 1": "Placement.credits HelperSettings.interval Hift.group_size Patience.patience_steps",
    "bfloat16, int8, nf4, gguf": "FrozenWeights.dtype",
    "float32, bfloat16, velora": "HelperSettings.pairs",
    "joint, alone, collaboration": "HelperSettings.users",
    "all, wide": "HelperSettings.projected",
    "float64, float32, bfloat16": "ActivationCacheSettings.dtype",
    "average, running, svd, random": "Velora.init",
    "bottom2up, top2down, random": "Hift.order",
    "embedding, head": "Hift.always_active",
    "at least 0, below 1": "Patience.min_improvement",
    "standard, two-stage, joint, random, magnitude, magnitude-gradient": "Choice.policy",
    "fisher, weight-magnitude, gradient-magnitude, taylor": "Choice.backward_score Choice.forward_score",
    "above 0, finite": "Choice.score_scale",
    "spread, together": "Choice.ties",
    "base, adapter": "Choice.scored_weights",
}


def _rules(record: Any) -> dict[str, tuple[Rule, ...]]:
    cls: Any = type(record)
    return field_rules(cls)


def test_rules_of_plans_are_these() -> None:
    """The whole table: plans come from other machines too."""
    found: dict[str, list[str]] = {}
    for record in OF_PLANS:
        for name, rules in _rules(record).items():
            for rule in rules:
                found.setdefault(rule.text, []).append(f"{type(record).__name__}.{name}")
    assert {text: " ".join(names) for text, names in found.items()} == RULES


def test_no_number_of_a_profile_may_be_negative_or_endless() -> None:
    """Sizes of a model and threads are at least 1; the share of a block is checked with its work."""
    least_1 = {
        "num_blocks",
        "hidden_size",
        "intermediate_size",
        "num_heads",
        "inner_kept",
        "repeats",
        "threads",
        "samples",
    }
    for record in OF_PROFILES:
        rules = _rules(record)
        for name, hint in typing.get_type_hints(type(record)).items():
            if not {int, float} & {hint, *typing.get_args(hint)} or name == "share" or "tuple" in str(hint):
                continue
            (bounds,) = rules[name]
            assert isinstance(bounds, Bounds)
            assert (bounds.ge, bounds.gt) == ((1 if name in least_1 else 0), None) or name == "rate_bytes_per_s"
            assert bounds.lt == (math.inf if name == "rate_bytes_per_s" else 1e18 if hint is float else None)


@cases("record", [*OF_PLANS, *OF_PROFILES])
def test_record_refuses_what_breaks_a_rule(record: Any) -> None:
    """Each of its rules, at each end, also where code builds it."""
    refused = 0
    for name, rules in _rules(record).items():
        for rule in rules:
            for value, said in _wrong(rule):
                wrap = tuple if isinstance(rule, Longest) else lambda one: (one,)
                item = wrap(value) if isinstance(getattr(record, name), tuple) else value
                with pytest.raises(InvalidInputError) as caught:
                    dataclasses.replace(record, **{name: item})
                assert f"{name} {said}" in str(caught.value)
                refused += 1
    assert refused >= len(_rules(record)) > 0


def _wrong(rule: object) -> list[tuple[Any, str]]:
    if isinstance(rule, OneOf):
        return [("no word", "= 'no word' is not one of " + ", ".join(rule.words))]
    if isinstance(rule, Longest):
        return [("x" * (rule.length + 1), f"has {rule.length + 1:,} ")]
    assert isinstance(rule, Bounds)
    found: list[tuple[Any, str]] = [(True, "is true, it has to be a number")]
    for end, words, side in ((rule.ge, "at least", -1), (rule.le, "at most", 1)):
        found += [] if end is None else [(end + side, f"is {end + side}, it has to be {words} {end:,}")]
    for end, words in ((rule.gt, "above"), (rule.lt, "below")):
        if end == math.inf:
            found += [(value, f"is {value}, it has to be ") for value in (math.inf, math.nan)]
        elif end is not None:
            found.append((end, f"is {end}, it has to be {words} {end:,}"))
    return found


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Wheels:
    """A record with a rule, and with fields of a later version."""

    spokes: Annotated[int, Bounds(ge=1, advice="buy a wheel")]
    blocks: Annotated[tuple[Range, ...], LATER] = ()
    names: Annotated[dict[str, int] | None, LATER] = None
    cached: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        check_fields(self, where="wheels", error=PlanError)


def test_table_of_a_record_is_read_as_that_record() -> None:
    """Later fields are left out where they have their defaults; named tuples are lists."""
    assert to_table(Wheels(spokes=3)) == {"spokes": 3}
    full = Wheels(spokes=3, blocks=(Range(0, 2),), names={"a": 1})
    assert to_table(full) == {"spokes": 3, "blocks": [[0, 2]], "names": {"a": 1}}
    again = read_dataclass(Wheels, to_table(full), where="", error=PlanError)
    assert again == full and isinstance(again.blocks[0], Range)


@cases(
    ("value", "message"),
    [
        ({"spokes": 0}, "wheels.spokes is 0, it has to be at least 1; buy a wheel"),
        ({"spokes": 3, "cached": 1}, "unknown key 'w.cached'; known here: blocks, names, spokes"),
        ({"spokes": 3, "blocks": [[1]]}, "w.blocks[0] has to be [start, stop], but is [1]"),
        ({"spokes": 3, "blocks": [[1, "2"]]}, "w.blocks[0][1] has to be a whole number, but is the text '2'"),
        ({"spokes": 3, "names": {"a": None}}, "w.names.a has to be a whole number, but is nothing"),
    ],
)
def test_record_names_the_place_of_what_is_wrong(value: object, message: str) -> None:
    """Down to the place in a list, and the key of a table."""
    with pytest.raises(PlanError) as caught:
        read_dataclass(Wheels, value, where="w", error=PlanError)
    assert str(caught.value) == message


def test_model_has_bytes_in_its_blocks() -> None:
    """Frozen or trained ones."""
    sizes: ModelFacts = facts("a").model
    assert dataclasses.replace(sizes, block_bytes=0, adapter_block_bytes=8).block_bytes == 0
    with pytest.raises(InvalidInputError, match=r"model\.block_bytes is 0, it has to be at least 1"):
        dataclasses.replace(sizes, block_bytes=0, adapter_block_bytes=0)
