"""Planning without nodes: sizes from files, and the plan as text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coordinator.commands.overrides import parse_changes
from coordinator.estimates.facts import estimated_facts
from coordinator.planner.make_plan import make_plan
from coordinator.screen.plan_text import plan_json, plan_text, table_text
from ringtune.errors import DataError, UsageError
from ringtune.jobs.job import Job
from tests.support.fake_agents import job
from tests.support.plans import make_plan as plan_by_hand

tiny = pytest.importorskip("tests.support.tiny")
GIB = 2**30


@pytest.fixture
def wanted(tmp_path: Path) -> Job:
    """A job on a tiny model with 21 rows to train on and 9 to evaluate on."""
    tiny.write_model(tmp_path / "model")
    train = tiny.write_rows(tmp_path / "train.csv", 21)
    evaluation = tiny.write_rows(tmp_path / "eval.csv", 9)
    return job(model__path=str(tmp_path / "model"), data__train=str(train), data__eval=str(evaluation))


def test_estimates_share_the_rows_like_training(wanted: Job) -> None:
    """Two owners get all rows between them, sizes differing by one at most."""
    facts = estimated_facts(wanted, 2, memory_bytes=GIB)
    assert sorted(node.train_rows for node in facts.values()) == [10, 11]
    assert sorted(node.eval_rows for node in facts.values()) == [4, 5]
    assert {node.memory_bytes for node in facts.values()} == {GIB}


def test_estimates_leave_helpers_without_data(wanted: Job) -> None:
    """With one owner of three nodes, two host only."""
    facts = estimated_facts(wanted.with_overrides({"data.owners": 1}), 3, memory_bytes=GIB)
    assert [node.train_rows for node in facts.values()] == [21, 0, 0]


def test_estimates_count_jsonl_rows(wanted: Job, tmp_path: Path) -> None:
    """Rows may be JSON lines; empty lines are no rows."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "x", "label": "bad"}\n\n{"text": "y", "label": "good"}\n')
    facts = estimated_facts(wanted.with_overrides({"data.train": str(path)}), 1, memory_bytes=GIB)
    assert facts["node-0"].train_rows == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.csv", None, "is not there; set data.train"),
        ("rows.txt", "text,label\n", "ends in '.txt'"),
        ("empty.csv", "text,label\n", "has no rows"),
        ("other.csv", "text,class\na,b\n", "line 2 has no column 'label'; it has 'text', 'class'; set data.label"),
        (
            "sentence.csv",
            "sentence,label\na,b\n",
            "line 2 has no column 'text'; it has 'sentence', 'label'; set data.text",
        ),
        ("short.csv", "text,label\na,b\na\n", "line 3 has no column 'label'"),
        ("broken.jsonl", "{", "line 1 is not JSON"),
    ],
)
def test_estimates_refuse_bad_files(wanted: Job, tmp_path: Path, name: str, content: str | None, message: str) -> None:
    """A bad file is named with what is wrong, before any node is started."""
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        estimated_facts(wanted.with_overrides({"data.train": str(tmp_path / name)}), 1, memory_bytes=GIB)


def test_plan_text_has_slices_memory_and_table(wanted: Job) -> None:
    """The text names every node with its blocks, its memory by part, what travels, and the actions of a step."""
    planned = make_plan(wanted, estimated_facts(wanted, 2, memory_bytes=GIB))
    lines = plan_text(planned.plan, planned.memory, num_steps=1, measured=False)
    text = "\n".join(lines)
    assert "node-0  blocks [0, 2)" in text
    assert "weights" in text
    assert "can tell the tokens from them" in text
    assert "f0.0[0,1)" in text
    assert "U0[head]" in text


def test_plan_text_says_how_stale_pipeadapter_is(wanted: Job) -> None:
    """Whoever plans a stale run is told by how many steps each host lags; other methods have no such line."""
    wanted = wanted.with_overrides({"train.method": "pipeadapter", "train.local_iterations": 8})
    planned = make_plan(wanted, estimated_facts(wanted, 2, memory_bytes=GIB))
    text = "\n".join(plan_text(planned.plan, planned.memory, num_steps=0, measured=False))
    assert "stale on purpose" in text
    assert "node-0 1, node-1 0" in text
    fresh = make_plan(wanted.with_overrides({"train.method": "all"}), estimated_facts(wanted, 2, memory_bytes=GIB))
    assert "stale" not in "\n".join(plan_text(fresh.plan, fresh.memory, num_steps=0, measured=False))


def test_plan_json_is_one_line_that_reads_back(wanted: Job) -> None:
    """Machines get the whole plan with its digest, and the memory in bytes."""
    planned = make_plan(wanted, estimated_facts(wanted, 2, memory_bytes=GIB))
    value = json.loads(plan_json(planned.plan, planned.memory))
    assert value["plan"]["digest"] == planned.plan.digest
    assert value["memory"]["node-0"]["total_bytes"] == planned.memory["node-0"].total_bytes


def test_plan_table_can_begin_at_any_step() -> None:
    """At a later step more blocks train."""
    plan = plan_by_hand([("a", 0, 2), ("b", 2, 4)], ["a"])
    assert "F0.0[3,4)" in table_text(plan, at_step=0, num_steps=1)
    assert "F6.0[2,4)" in table_text(plan, at_step=6, num_steps=1)
    with pytest.raises(UsageError, match=r"--at-step 8 is not in \[0, 8\)"):
        table_text(plan, at_step=8, num_steps=1)


def test_changes_are_read_like_the_job_file() -> None:
    """Numbers, lists and quoted strings as in TOML; other words are strings."""
    assert parse_changes(["train.seed=1", 'data.labels=["a", "b"]', "train.method=all", "model.path=a=b"]) == {
        "train.seed": 1,
        "data.labels": ["a", "b"],
        "train.method": "all",
        "model.path": "a=b",
    }
    for change in ("seed=1", "train.seed", "a.b.c=1"):
        with pytest.raises(UsageError, match=r"SECTION\.KEY=VALUE"):
            parse_changes([change])
