"""Tests of ``ringtune.costs.profile``: profile, work times."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtune.costs.profile import (
    MAX_ROWS,
    SCHEMA,
    LinkFacts,
    NodeFacts,
    Profile,
    TimedShape,
    Work,
    WorkTable,
    WorkTime,
)
from ringtune.errors import InvalidInputError, PlanError
from ringtune.storage.strict import to_table
from tests.support.cases import cases
from tests.support.model_facts import MINILM

MODEL = dataclasses.replace(MINILM, head_class_bytes=1540)
FACTS = NodeFacts(
    node="jetson-2",
    train_rows=100,
    eval_rows=20,
    labels=("neg", "pos"),
    eval_labels=("neg",),
    memory_bytes=2**31,
    threads=2,
    device="cpu",
    block_forward_s=0.018,
    block_graph_s=0.019,
    block_backward_s=0.02,
    activation_token_bytes=4882.5,
    model=MODEL,
)


def test_node_facts_json_has_schema_and_units() -> None:
    """The whole form of one node."""
    assert FACTS.to_message() == {
        "schema": 3,
        "node": "jetson-2",
        "train_rows": 100,
        "eval_rows": 20,
        "labels": ["neg", "pos"],
        "eval_labels": ["neg"],
        "memory_bytes": 2147483648,
        "threads": 2,
        "device": "cpu",
        "block_forward_s": 0.018,
        "block_graph_s": 0.019,
        "block_backward_s": 0.02,
        "activation_token_bytes": 4882.5,
        "model": to_table(MODEL),
        "data_bytes": 0,
        "skipped_rows": 0,
        "left_out": [],
        "cut_rows": 0,
        "hardware": "",
        "cpu_cores": 0.0,
        "train_tokens": 0.0,
        "eval_tokens": 0.0,
        "shape": to_table(TimedShape()),
        "work_times": [],
        "has_messages": False,
        "rested_s": 0.0,
        "handling_s": 0.0,
        "message_s_per_byte": 0.0,
        "lowest_token_bytes": 0.0,
        "fast_bfloat16": False,
        "state_free_bytes": None,
        "state_disk": "",
        "numerics": "",
        "users": [],
        "load": 0.0,
    }


COUNT = st.integers(0, 2**50)
SECONDS = st.floats(0, 1e6)


@settings(max_examples=20)
@given(
    facts=st.builds(
        NodeFacts,
        node=st.text(min_size=1),
        train_rows=st.integers(0, MAX_ROWS),
        eval_rows=st.integers(0, MAX_ROWS),
        labels=st.lists(st.text()).map(tuple),
        eval_labels=st.lists(st.text()).map(tuple),
        memory_bytes=COUNT,
        threads=st.integers(1, 64),
        device=st.sampled_from(["cpu", "cuda"]),
        block_forward_s=SECONDS,
        block_graph_s=SECONDS,
        block_backward_s=SECONDS,
        activation_token_bytes=SECONDS,
        model=st.just(MODEL),
    )
)
def test_node_facts_survive_json_text(facts: NodeFacts) -> None:
    """What an agent sends is what the planner gets, also inside a profile."""
    assert NodeFacts.from_message(json.loads(json.dumps(facts.to_message()))) == facts
    other = dataclasses.replace(FACTS, node=facts.node + "-2")
    link = LinkFacts(source=facts.node, target=other.node, rate_bytes_per_s=12.1e6, latency_s=4e-4)
    profile = Profile(nodes=(facts, other), links=(link,))
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile


@cases(
    ("change", "message"),
    [
        ({"schema": 2}, f"profile schema 2 is not {SCHEMA}; measure anew"),
        ({"schema": None}, f"profile schema None is not {SCHEMA}"),
        ({"rows": 3}, "unknown key 'rows'"),
        ({"train_rows": 1.5}, "train_rows has to be a whole number, but is the number 1.5"),
        ({"labels": "neg"}, "labels has to be a list"),
        ({"model": None}, "model has to be a table, but is nothing"),
        ({"block_forward_s": float("nan")}, "block_forward_s has to be a finite number"),
        ({"activation_token_bytes": 1e308}, "activation_token_bytes is 1e+308, it has to be below 1e+18"),
        ({"model": {**dataclasses.asdict(MODEL), "num_heads": "12"}}, "model.num_heads has to be a whole number"),
    ],
)
def test_node_facts_refuse_what_another_version_wrote(change: dict[str, Any], message: str) -> None:
    """A peer's JSON is not trusted."""
    with pytest.raises(InvalidInputError) as caught:
        NodeFacts.from_message({**FACTS.to_message(), **change})
    assert message in str(caught.value)


def test_link_of_a_node_to_itself_is_refused() -> None:
    """Nothing travels over it."""
    with pytest.raises(InvalidInputError, match=r"link\.a\.a joins a node with itself"):
        LinkFacts(source="a", target="a", rate_bytes_per_s=1e6, latency_s=0.0)


def test_profile_refuses_a_link_of_a_node_that_it_lacks() -> None:
    """A link without its node could not be used by any plan."""
    link = LinkFacts(source="jetson-2", target="pi-9", rate_bytes_per_s=1e6, latency_s=0.0)
    with pytest.raises(InvalidInputError, match="names node pi-9, which the profile lacks"):
        Profile(nodes=(FACTS,), links=(link,))


@cases("twice", [{"nodes": (FACTS, FACTS)}])
def test_profile_refuses_a_node_twice(twice: dict[str, Any]) -> None:
    """Which of the two would count?"""
    with pytest.raises(InvalidInputError, match="has a node twice"):
        Profile(**twice)


@cases("value", [[], None, "x", {}, {"schema": SCHEMA}, {"schema": SCHEMA, "nodes": {}}])
def test_profile_refuses_what_is_no_profile(value: Any) -> None:
    """Whatever arrives instead is an error of the tree."""
    with pytest.raises(PlanError):
        Profile.from_json(value)


def point(work: Work, rows: int, tokens: int, seconds: float) -> WorkTime:
    """A timing without spread."""
    return WorkTime(work=work, rows=rows, tokens=tokens, median_s=seconds, low_s=seconds, high_s=seconds, samples=3)


TABLE = WorkTable(
    [
        point(Work.FORWARD, 4, 64, 0.010),
        point(Work.FORWARD, 4, 32, 0.006),
        point(Work.FORWARD, 8, 64, 0.022),
        point(Work.HEAD, 4, 64, 0.004),
        point(Work.UPDATE, 0, 0, 0.003),
    ],
    where="node pi-3",
)


@cases(
    ("size", "seconds"),
    [(128, 0.006), (256, 0.010), (512, 0.022), (192, 0.008), (384, 0.016), (1024, 0.046), (64, 0.004), (0, 0.002)],
)
def test_work_table_is_linear_between_points_and_goes_on_outside(size: float, seconds: float) -> None:
    """Points are met exactly; beyond them the nearest line goes on."""
    assert TABLE.seconds(Work.FORWARD, size) == pytest.approx(seconds, rel=1e-12)


def test_work_table_never_falls_below_proportion() -> None:
    """Two noisy points may cross zero, a time may not."""
    steep = WorkTable([point(Work.HEAD, 1, 10, 0.001), point(Work.HEAD, 1, 20, 0.010)], where="node a")
    assert steep.seconds(Work.HEAD, 1) == pytest.approx(0.0001)


def test_work_table_scales_a_single_point() -> None:
    """With one size measured, time is in proportion; without a size it is constant."""
    assert TABLE.seconds(Work.HEAD, 512) == pytest.approx(0.008)
    assert TABLE.seconds(Work.UPDATE, 512) == 0.003


def test_work_table_names_what_is_missing() -> None:
    """A profile without that work can't be guessed from."""
    assert Work.EMBED not in TABLE
    with pytest.raises(PlanError, match="node pi-3 has no measured time for 'embed'; measure anew"):
        TABLE.seconds(Work.EMBED, 3)


@cases(
    ("change", "message"),
    [
        ({"work": "nap"}, "work 'nap' is not one of embed"),
        ({"median_s": -1.0}, "forward.median_s is -1.0"),
        ({"median_s": float("nan")}, "forward.median_s is nan"),
        ({"median_s": 9.0}, "quartiles 0.1 and 0.3 do not enclose the median 9.0"),
        ({"samples": 0}, "forward.samples is 0"),
    ],
)
def test_work_time_refuses_impossible_values(change: dict[str, object], message: str) -> None:
    """What a peer sent is not trusted."""
    good = {"work": "forward", "rows": 1, "tokens": 8, "median_s": 0.2, "low_s": 0.1, "high_s": 0.3, "samples": 3}
    with pytest.raises(InvalidInputError) as caught:
        WorkTime(**{**good, **change})  # type: ignore[arg-type]
    assert message in str(caught.value)
