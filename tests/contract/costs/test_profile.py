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
    Work,
    WorkTable,
    WorkTime,
)
from ringtune.errors import InvalidInputError
from tests.support.cases import cases
from tests.support.profiles import MINILM

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


def test_profile_refuses_a_link_of_a_node_that_it_lacks() -> None:
    """A link without its node could not be used by any plan."""
    link = LinkFacts(source="jetson-2", target="pi-9", rate_bytes_per_s=1e6, latency_s=0.0)
    with pytest.raises(InvalidInputError, match="names node pi-9, which the profile lacks"):
        Profile(nodes=(FACTS,), links=(link,))


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


def test_names_of_a_saved_profile_change_with_its_schema_alone() -> None:
    """Profiles lie on users' disks, and nodes of another build send theirs."""
    names = """
        activation_token_bytes block_backward_s block_forward_s block_graph_s cpu_cores cut_rows data_bytes device
        eval_labels eval_rows eval_tokens fast_bfloat16 handling_s hardware has_messages labels left_out load
        lowest_token_bytes memory_bytes message_s_per_byte model node numerics rested_s schema shape skipped_rows
        state_disk state_free_bytes threads train_rows train_tokens users work_times
    """
    assert (SCHEMA, sorted(FACTS.to_message())) == (3, names.split())
