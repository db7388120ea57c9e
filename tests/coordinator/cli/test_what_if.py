"""``ringtune sim`` and ``what-if``: what they print and write, plans made anew, and that a bad input is one error."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from coordinator.api.prediction_text import write_prediction
from coordinator.planner import search
from coordinator.planner.judge import simulated_job_s
from coordinator.planner.make_plan import make_plan
from coordinator.planner.what_if import CellResult, WhatIf
from coordinator.screen.live_tables import shown_cells
from coordinator.screen.plan_text import plan_text
from coordinator.screen.progress import report_lines
from ringtune.costs.action_costs import move_s
from ringtune.costs.profile import WHOLE_WORKS, Work
from ringtune.errors import StorageError
from ringtune.job.job import load_job, parse_job
from ringtune.plan_keys import PLAN_KEYS
from ringtune.quantities import format_bytes, format_seconds
from ringtune.schedule.methods import RingAda
from ringtune.schedule.methods.base import Patience
from ringtune.schedule.operation_tables import BatchOperations, BlockCapacity, Choice, Operations, ScheduledTable
from ringtune.schedule.placement import Rack
from ringtune.schedule.turns import StartPoint
from ringtune.storage import durable
from ringtune.techniques.operations import expected_table
from sim.prediction import predict
from sim.ring import ExpectedTables
from tests.support import plans
from tests.support.cases import cases
from tests.support.choosing import make_choice
from tests.support.moves import moving, slices_of
from tests.support.plans import changed
from tests.support.predictions import (
    MOVE_S,
    PLAN,
    PROFILE,
    Change,
    asked,
    ringtune,
    tiny_job,
    write_json,
    write_pair,
    write_run,
)
from tests.support.processes import RUN_S, source_environment
from tests.support.profiles import all_pairs, profile_of

EXPECTED = predict(PLAN, PROFILE)


def predicted(*arguments: str | Path) -> dict[str, Any]:
    """The JSON line of a prediction."""
    result = ringtune("sim", *arguments, "--json")
    assert result.exit_code == 0, result.output
    value: dict[str, Any] = json.loads(result.stdout)
    assert value.pop("event") == "prediction"
    return value


def test_sim_prints_the_prediction(tmp_path: Path) -> None:
    """As JSON it is one line with everything, beside the plan's digest."""
    plan, profile = write_pair(tmp_path)
    value = predicted(plan, "--profile", profile)
    assert value == json.loads(
        json.dumps({"plan_digest": PLAN.digest, "method": PLAN.course.method.name, **EXPECTED.to_json()})
    )
    # Wall time, then a line for each node, link and depth
    result = ringtune("sim", plan, "--profile", profile)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("ringada, 4 blocks on 2 nodes, 8 steps of 4 rows in 2 micro-batches")
    assert lines[1].startswith("predicted training ")
    names = [line.split()[0] for line in lines[3:] if line]
    assert names == ["node", "alice", "bob", "link", "alice", "bob", "trained", "1", "2", "3", "4"]
    assert "954 MiB" in lines[4]
    # ``ringtune plan --json > plan.json`` is a plan too
    line = write_json(tmp_path / "line.json", {"event": "plan", "plan": PLAN.to_json(), "memory": {}})
    assert predicted(line, "--profile", profile)["wall_s"] == EXPECTED.wall_s


def test_sim_writes_a_prediction_and_a_trace(tmp_path: Path) -> None:
    """The trace has the form of a real run's: replayed, it gives the prediction."""
    plan, profile = write_pair(tmp_path)
    out = tmp_path / "out"
    value = predicted(plan, "--profile", profile, "--out", out)
    assert json.loads((out / "prediction.json").read_text()) == value
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    compute = [event for event in events if event["ph"] == "X" and event["tid"] == 1]
    assert len(compute) == EXPECTED.num_actions
    assert sorted(path.name for path in out.iterdir()) == ["prediction.json", "trace.json"]
    slow = write_json(tmp_path / "slow.json", profile_of(PLAN, times=dict.fromkeys(TIMES, 9.0)).to_json(), links)
    again = predicted(plan, "--profile", slow, "--trace", out / "trace.json", "--out", out)
    assert again["wall_s"] == pytest.approx(EXPECTED.wall_s, abs=1e-4)


AROUND = (Work.ENCODE, Work.DECODE, Work.HAND_OVER)
TIMES = [work for work in WHOLE_WORKS if work not in AROUND]


def links(value: dict[str, Any]) -> None:
    """Give a profile the links of ``PROFILE``, and no time for making messages."""
    value["links"] = PROFILE.to_json()["links"]
    for node in value["nodes"]:
        own = next(each for each in PROFILE.to_json()["nodes"] if each["node"] == node["node"])
        node["work_times"] += [t for t in own["work_times"] if t["work"] in AROUND]


def test_sim_of_a_run_says_how_far_off_it_is(tmp_path: Path) -> None:
    """A run 1.25 times as slow as its profile: the prediction is a fifth too short; bytes are the same."""
    real = write_run(tmp_path / "run", slower=1.25)
    value = predicted(tmp_path / "run")
    measured = value["measured"]
    assert value["wall_s"] == EXPECTED.wall_s
    assert measured["wall_s"] == pytest.approx(real.wall_s, abs=1e-4)
    assert measured["error_share"] == pytest.approx(EXPECTED.wall_s / real.wall_s - 1, abs=1e-4)
    assert measured["sent_bytes"] == {f"{each.source}>{each.target}": each.sent_bytes for each in EXPECTED.links}
    assert measured["busy_s"] == pytest.approx({node.node: node.busy_s for node in real.nodes}, abs=1e-3)
    assert measured["steps_error_share"] == pytest.approx(EXPECTED.train_s / real.train_s - 1, abs=1e-4)
    text = ringtune("sim", tmp_path / "run").stdout
    off, of_steps = (f"{100 * measured[name]:+.1f} %" for name in ("error_share", "steps_error_share"))
    assert f"measured training {format_seconds(real.wall_s)}: {format_seconds(real.train_s)} of steps; " in text
    assert f"the prediction is off by {off}, {of_steps} of the steps" in text
    # With the run's trace in place of medians the error goes away
    value = predicted(tmp_path / "run", "--trace", tmp_path / "run")
    assert value["wall_s"] == pytest.approx(real.wall_s, abs=1e-4)
    assert abs(value["measured"]["error_share"]) < 1e-5


def test_sim_of_a_run_that_moved_goes_by_its_own_moves(tmp_path: Path) -> None:
    """Replayed, it is the run; its moves take what they took, and a placement that it failed to reach is left out."""
    plan = moving(PLAN, (2, [("bob", 0, 3), ("alice", 3, 4)]))
    real = write_run(tmp_path / "run", slower=1.25, plan=plan)
    value = predicted(tmp_path / "run", "--trace", tmp_path / "run")
    assert (value["moves_s"], value["wall_s"]) == (MOVE_S, pytest.approx(real.wall_s, abs=1e-4))
    text = ringtune("sim", tmp_path / "run").stdout
    assert f"{format_seconds(MOVE_S)} of 1 move" in text and "[0, 2) then [3, 4)" in text
    assert "[0, 2) then [3, 4)" in ringtune("what-if", tmp_path / "run", "--change", "bob.compute=0.5").stdout
    report = json.loads((tmp_path / "run/report.json").read_text())
    report["moves"][0]["problem"] = "node bob has no room"
    write_json(tmp_path / "run/report.json", report)
    assert predicted(tmp_path / "run")["wall_s"] == EXPECTED.wall_s
    assert "left out: 1 placement to which the run failed to move" in ringtune("sim", tmp_path / "run").stdout


@pytest.mark.parametrize("missing", ["trace.json", "report.json"])
def test_sim_of_a_run_that_did_not_end_is_a_prediction_only(missing: str, tmp_path: Path) -> None:
    """What there is nothing of is not compared."""
    write_run(tmp_path / "run")
    (tmp_path / "run" / missing).unlink()
    assert "measured" not in predicted(tmp_path / "run")


@pytest.mark.parametrize("steps", [(), (4,), (2, 6)])
def test_sim_of_a_run_that_unfroze_by_itself_does_as_the_run_did(steps: tuple[int, ...], tmp_path: Path) -> None:
    """Under ``auto`` the report says when; without a run it is the soonest, and the text says so."""
    plan = changed(PLAN, method=RingAda(every_steps=0, auto=Patience(patience_steps=2)))
    real = write_run(tmp_path / "run", plan=changed(PLAN, method=RingAda(every_steps=0, at=steps)))
    write_json(tmp_path / "run/plan.json", plan.to_json())
    report = json.loads((tmp_path / "run/report.json").read_text())
    write_json(tmp_path / "run/report.json", {**report, "unfreeze_at": list(steps)})
    value = predicted(tmp_path / "run")
    assert value["wall_s"] == real.wall_s
    assert [depth["depth"] for depth in value["depths"]] == list(range(1, len(steps) + 2))
    alone = ringtune("sim", tmp_path / "run/plan.json", "--profile", tmp_path / "run/profile.json").stdout
    assert "predicted is a loss that never improves: the soonest" in alone


def test_sim_of_a_run_that_chooses_operations_says_what_it_assumes(tmp_path: Path) -> None:
    """Scores take time of their own, and nobody knows the table before there are any."""
    capacity = BlockCapacity(full=PLAN.course.batch_size, forward_only=0.0, forward=1.0, backward=1.0)
    said = []
    for policy in ("two-stage", "random"):
        choice = Choice(policy=policy, subnets=2, capacities=(capacity,))
        write_pair(tmp_path / policy, plan=changed(PLAN, choice=choice))
        files = (tmp_path / policy / "plan.json", "--profile", tmp_path / policy / "profile.json")
        said.append(re.sub(r"\s+", " ", ringtune("sim", *files).stdout))
    assumed = "the run chooses its operations by scores; predicted are as many of each kind, evenly spread"
    assert assumed in said[0] and "of evaluations, checkpoints and scores" in said[0]
    assert assumed not in said[1] and "of evaluations and checkpoints" in said[1]


def test_sim_draws_times_for_another_plan(tmp_path: Path) -> None:
    """A recording of one plan serves another one; the seed decides what is drawn."""
    write_run(tmp_path / "run", slower=2.0)
    other = changed(PLAN, method=RingAda(every_steps=8))
    plan, profile = write_pair(tmp_path / "other", plan=other)
    value = predicted(plan, "--profile", profile, "--trace", tmp_path / "run", "--seed", "1")
    assert value["wall_s"] > 1.5 * predict(other, PROFILE).wall_s
    assert value == predicted(plan, "--profile", profile, "--trace", tmp_path / "run", "--seed", "1")


# ---- bad inputs --------------------------------------------------------------------------------------


def put(path: str, new: object) -> Change:
    """Set a value deep inside, e.g. ``nodes.0.model.digest``."""

    def change(value: dict[str, Any]) -> None:
        *inner, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        found: Any = value
        for part in inner:
            found = found[part]
        found[last] = new

    return change


def drop_node(value: dict[str, Any]) -> None:
    """A profile without bob."""
    value["nodes"] = [node for node in value["nodes"] if node["node"] != "bob"]
    value["links"] = []


def slices(*pieces: tuple[str, int, int]) -> Change:
    """A plan with other slices, without digests."""

    def change(value: dict[str, Any]) -> None:
        (placement,) = value["placements"]
        del value["digest"], placement["digest"]
        placement["slices"] = [{"node": n, "start": start, "stop": stop} for n, start, stop in pieces]

    return change


def whole_model(key: str, new: object) -> Change:
    """Every node measured with another model."""

    def change(value: dict[str, Any]) -> None:
        for node in value["nodes"]:
            node["model"][key] = new

    return change


def check_refused(tmp_path: Path, plan: Path, profile: Path, *more: str | Path) -> tuple[str, int]:
    """Run it with ``--out``: one line of error, and nothing written."""
    before = sorted(tmp_path.rglob("*"))
    result = ringtune("sim", plan, "--profile", profile, "--out", tmp_path / "out", *more)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before
    return result.stderr, result.exit_code


@cases(
    ("file", "change", "message", "exit_code"),
    [
        ("profile", whole_model("num_blocks", 6), "a model with 6 blocks of width 8, the run has 4 of 8", 5),
        ("profile", put("nodes.1.shape.wire_dtype", "int8"), "bob was profiled with wire_dtype int8, the job has", 5),
        ("profile", drop_node, "the plan names node 'bob', which the profile lacks", 5),
        ("profile", put("nodes.1.memory_bytes", 100_000), "node bob needs ", 6),
        ("plan", slices(("alice", 0, 2), ("bobby", 2, 4)), "names node 'bobby', which .*; did you mean 'bob'", 5),
        ("plan", put("course.batch_size", 6), "the plan's digest does not match its content", 5),
        ("plan", put("color", "red"), "unknown key 'color'", 5),
    ],
)
def test_sim_refuses_a_bad_plan_or_profile(
    file: str, change: Change, message: str, exit_code: int, tmp_path: Path
) -> None:
    """Of another model or shape, without a node, with too little memory at one, or edited by hand."""
    of_plan, of_profile = (change, None) if file == "plan" else (None, change)
    error, code = check_refused(tmp_path, *write_pair(tmp_path, of_plan=of_plan, of_profile=of_profile))
    assert re.search(message, error) and code == exit_code


@cases("share", [0.1, 0.5, 0.9])
def test_sim_refuses_a_trace_that_is_cut_off(share: float, tmp_path: Path) -> None:
    """Line and byte; both as ``--trace`` and beside the run itself."""
    write_run(tmp_path / "run")
    trace = tmp_path / "run" / "trace.json"
    text = trace.read_text()
    trace.write_text(text[: int(share * len(text))])
    plan, profile = write_pair(tmp_path / "alone")
    error, code = check_refused(tmp_path, plan, profile, "--trace", trace)
    assert "trace.json is cut off at line " in error
    assert code == 7
    error, code = check_refused(tmp_path, tmp_path / "run", profile)
    assert "trace.json is cut off at line " in error
    assert code == 7


def test_sim_refuses_times_of_another_plan(tmp_path: Path) -> None:
    """A recording of batches half as large says nothing about these."""
    write_run(tmp_path / "run")
    plan, profile = write_pair(tmp_path / "other", plan=changed(PLAN, microbatches=4))
    error, code = check_refused(tmp_path, plan, profile, "--trace", tmp_path / "run")
    assert "micro-batches of 2 x 8 tokens, the plan has 4 and 1 x 8; its times say nothing about it" in error
    assert code == 5
    # Nothing of what was recorded would be used
    trace = tmp_path / "trace.json"
    trace.write_text((tmp_path / "run/trace.json").read_text().replace('"alice"', '"carol"').replace('"bob"', '"dan"'))
    plan, profile = write_pair(tmp_path / "other")
    error, code = check_refused(tmp_path, plan, profile, "--trace", trace)
    assert "is of nodes carol, dan, the plan has alice, bob" in error
    assert code == 5


def test_sim_refuses_paths_that_are_not_there(tmp_path: Path) -> None:
    """What is missing is named, with what to give."""
    plan, profile = write_pair(tmp_path)
    for arguments, message in (
        ((plan,), "plan.json alone has no times; give --profile FILE"),
        ((tmp_path / "no",), "no is not there; give plan.json or the --out"),
        ((tmp_path / "no.json", "--profile", profile), "no.json is not there; give plan.json or the --out"),
        ((plan, "--profile", tmp_path / "no.json"), "no.json is not there; give --profile FILE"),
        ((plan, "--profile", profile, "--trace", tmp_path / "no.json"), "no.json is not there; give a run's folder"),
    ):
        result = ringtune("sim", *arguments)
        assert message in result.stderr
        assert result.exit_code == 2


def test_sim_does_not_write_over_a_real_run(tmp_path: Path) -> None:
    """The trace of a run is not replaced by a predicted one; an earlier prediction is."""
    write_run(tmp_path / "run")
    before = (tmp_path / "run/trace.json").read_text()
    result = ringtune("sim", tmp_path / "run", "--out", tmp_path / "run")
    assert "holds the trace of a real run; choose another" in result.stderr
    assert result.exit_code == 2
    assert (tmp_path / "run/trace.json").read_text() == before
    for _ in range(2):
        assert ringtune("sim", tmp_path / "run", "--out", tmp_path / "out").exit_code == 0


def test_memory_has_one_meaning(tmp_path: Path) -> None:
    """What a node needs is the same number in the plan, the prediction, a what-if and the words after a run."""
    wanted = parse_job(tiny_job(), source="test")
    planned = make_plan(wanted, PROFILE.by_name, links=PROFILE.links)
    plan, profile = write_pair(tmp_path, plan=planned.plan)
    nodes = predicted(plan, "--profile", profile)["nodes"]
    assert {node["node"]: node["needed_bytes"] for node in nodes} == planned.memory_bytes
    assert all(node["peak_memory_bytes"] <= node["needed_bytes"] for node in nodes)
    kept = wanted.with_overrides({"audit.share": 0.5, "recovery.copies": "next"})
    audited = make_plan(kept, PROFILE.by_name, links=PROFILE.links)
    write_pair(tmp_path / "audited", plan=audited.plan)
    (tmp_path / "audited/job.toml").write_text(kept.to_toml())
    assert audited.memory_bytes["bob"] > planned.memory_bytes["bob"]
    nodes = predicted(tmp_path / "audited")["nodes"]
    assert {node["node"]: node["needed_bytes"] for node in nodes} == audited.memory_bytes
    needs = format_bytes(planned.memory_bytes["bob"])
    told = "\n".join(plan_text(planned.plan, planned.memory, num_steps=0, measured=True))
    shown = ringtune("sim", plan, "--profile", profile).stdout
    changed_too = ringtune("what-if", plan, "--profile", profile, "--change", "bob.compute=2").stdout
    report = {"busy_s": 1.0, "peak_rss_bytes": 2**30, "sent_bytes": 10, "predicted_bytes": planned.memory_bytes["bob"]}
    after = report_lines({"steps": 8, "wall_s": 2.0, "nodes": {"bob": report}, "eval": {"count": 0}})
    for text in (told, shown, changed_too):
        assert re.search(rf"^bob .*\b{re.escape(needs)}\b", text, re.MULTILINE) and "needs" in text
    assert f"needs {needs}, whole process 1,024 MiB" in after[1]
    card = {"device": "NVIDIA T4", "peak_device_bytes": 2**29, "device_bytes": 2**34}
    on_card = report_lines({"steps": 8, "wall_s": 2.0, "nodes": {"bob": {**report, **card}}, "eval": {"count": 0}})
    assert f"needs {needs}, NVIDIA T4 512 MiB of 16.0 GiB, whole process 1,024 MiB" in on_card[1]
    assert len(on_card) == len(after) + 1 and "CUDA's context" in "".join(on_card)


CHOOSING = changed(PLAN, choice=make_choice(subnets=1, refresh_steps=4))


def table(code: str) -> Operations:
    """A table in which all blocks of all micro-batches have one operation, but for the highest block."""
    rows = (code * 3 + "1",) * 2
    return Operations(
        batches=tuple(
            BatchOperations(owner=owner.node, batch_id=at, rows=rows) for owner in PLAN.course.owners for at in range(3)
        )
    )


TABLES = (ScheduledTable(step=0, operations=table("3")), ScheduledTable(step=4, operations=table("1")))


def test_prediction_takes_tables_that_are_known_or_expected() -> None:
    """Scores take time, which is no time of steps; steps take what the expected table leaves of them."""
    once = changed(PLAN, choice=make_choice(subnets=1))
    fixed = predict(changed(PLAN, operations=expected_table(once.course)), PROFILE)
    found, full = predict(once, PROFILE), predict(PLAN, PROFILE)
    assert found.train_s == pytest.approx(fixed.train_s)
    assert found.train_s < full.train_s
    assert found.evaluation_s > 2 * fixed.evaluation_s
    # In place of expected ones, at their steps; the expected one where none is known
    chooser = ExpectedTables(CHOOSING, TABLES)
    assert [chooser.table(step, ()) for step in (0, 4)] == [table("3"), table("1")]
    assert chooser.table(6, ()) == expected_table(CHOOSING.course)
    less = predict(CHOOSING, PROFILE, tables=TABLES[:1])
    more = predict(CHOOSING, PROFILE, tables=TABLES[1:])
    assert less.train_s < predict(CHOOSING, PROFILE).train_s < more.train_s
    # A run that repeats tables has them in its plan
    choice = Choice.given(TABLES)
    given = predict(changed(PLAN, choice=choice), PROFILE)
    chosen = predict(CHOOSING, PROFILE, tables=TABLES)
    assert given.train_s == pytest.approx(chosen.train_s, rel=0.01)  # frozen blocks work ahead where nothing is scored
    assert given.num_steps == chosen.num_steps
    assert given.evaluation_s < chosen.evaluation_s


def test_sim_of_a_run_that_chose_does_as_the_run_did(tmp_path: Path) -> None:
    """The tables of operations.json, step by step."""
    real = write_run(tmp_path, plan=CHOOSING, tables=TABLES)
    value = predicted(tmp_path)
    assert value["wall_s"] == real.wall_s != predict(CHOOSING, PROFILE).wall_s
    assert abs(value["measured"]["error_share"]) < 1e-5


@pytest.mark.parametrize("tables", [TABLES, ()])
def test_sim_of_a_resumed_run_that_chose_has_its_tables(tmp_path: Path, tables: tuple[ScheduledTable, ...]) -> None:
    """The last four steps, from a step where a table is due; without the file the expected tables stand for them."""
    start = StartPoint.of(CHOOSING.course, step=4, holder="bob", operations=table("3"))
    real = predict(CHOOSING, PROFILE, start=start, keep_spans=True, tables=tables)
    write_run(tmp_path, plan=CHOOSING, tables=tables)
    write_prediction(tmp_path, CHOOSING, real, {})
    value = predicted(tmp_path)
    assert value["measured"]["steps"] == 4
    assert value["wall_s"] == pytest.approx(real.wall_s)


def test_sim_of_a_run_with_a_damaged_file_of_tables_names_it(tmp_path: Path) -> None:
    """One sentence, no trace."""
    write_run(tmp_path, plan=CHOOSING, tables=TABLES)
    (tmp_path / "operations.json").write_text("{")
    result = ringtune("sim", tmp_path)
    assert result.exit_code != 0 and "operations.json can't be read" in result.output


def test_what_if_compares_before_and_after(pair: tuple[str, ...]) -> None:
    """The plan as it is, with the change, and how many times as long it takes."""
    value = asked(*pair, "--change", "bob.compute=0.5")
    assert value["event"] == "what-if"
    assert value["before"]["wall_s"] == EXPECTED.wall_s
    assert value["after"]["wall_s"] > EXPECTED.wall_s
    assert value["ratio"] == value["after"]["wall_s"] / EXPECTED.wall_s
    assert value["after"]["plan_digest"] == PLAN.digest
    assert value["before"]["rows_per_s"] == PLAN.course.batch_size * PLAN.course.num_steps / EXPECTED.wall_s
    # Wall time, step, idle share and bytes; then every node
    result = ringtune("what-if", *pair, "--change", "bob.compute=2", "--change", "link.*.*.rate=1e4")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["before", "after", "ratio"]
    assert [line.split("  ")[0] for line in lines[1:6]] == [
        "training",
        "a step",
        "rows per second",
        "hosts idle",
        "sent",
    ]
    assert [line.split()[0] for line in lines[7:]] == ["node", "alice", "bob"]
    # The host before it in the ring takes its blocks
    value = asked(*pair, "--drop", "bob")
    assert value["after"]["slices"] == {"alice": [0, 4]}
    assert value["after"]["links"] == []
    # Whatever may be changed is found without a wrong guess first
    words = " ".join(ringtune("what-if", "-h").stdout.replace("\u2502", " ").split())
    assert [key for key in PLAN_KEYS if key not in words.replace("- ", "-")] == []


def test_what_if_checks_plan_and_profile_as_sim_does(tmp_path: Path) -> None:
    """The same checks stand before both commands."""
    plan, profile = write_pair(tmp_path, profile=profile_of(PLAN, links={("alice", "bob"): (1e5, 0.0)}))
    result = ringtune("what-if", plan, "--profile", profile, "--change", "bob.compute=2")
    assert "the profile lacks link bob -> alice" in result.stderr
    assert result.exit_code == 5
    # A plan of longer rows was not measured
    plan, profile = write_pair(tmp_path, plan=changed(PLAN, max_length=64))
    result = ringtune("what-if", plan, "--profile", profile, "--change", "bob.compute=2")
    assert "was profiled with tokens 8, the job has 64" in result.stderr
    assert result.exit_code == 5


def test_what_if_plans_anew_for_a_job(pair: tuple[str | Path, ...], tmp_path: Path) -> None:
    """An added node gets blocks; keys of the plan change the job."""
    job = tmp_path / "job.toml"
    job.write_text(tiny_job())
    added: tuple[str | Path, ...] = (*pair, "--add", "carol", "--like", "bob", "--replan", job)
    after = asked(*added, "--change", "carol.compute=4", "--change", "num_steps=6")["after"]
    assert after["slices"]["carol"][1] > after["slices"]["carol"][0]
    assert after["num_steps"] == 6
    assert {node["node"] for node in after["nodes"]} >= {"alice", "bob", "carol"}
    slow: tuple[str | Path, ...] = (*added, "--change", "carol.compute=1e-6")
    assert asked(*slow)["after"]["left_out"] == ["carol"]
    assert ringtune("what-if", *slow).stdout.endswith("left out: carol\n")
    dropped = asked(*pair, "--drop", "bob", "--replan", job)["after"]
    assert dropped["slices"] == {"alice": [0, 4]}


def test_what_if_says_what_follows_when_nodes_are_lost_at_once(tmp_path: Path) -> None:
    """Two copies on other racks: any host and another go; both owners are awaited, and hosts move meanwhile."""
    slices = [(name, at, at + 1) for at, name in enumerate("abcd")]
    plan = plans.make_plan(slices, ["a", "c"], num_steps=24, method="all")
    plan = changed(plan, max_length=8, hidden_size=8)
    racks = tuple(Rack(name, rack) for name, rack in zip("abcd", "1122", strict=True))
    plan, profile = plan.with_copies(True, 2, racks), profile_of(plan, links=all_pairs(plan.nodes, 1e5, 0.01))
    files, job = write_pair(tmp_path, plan=plan, profile=profile), tmp_path / "job.toml"
    job.write_text(tiny_job())
    pair = (files[0], "--profile", files[1])
    losses = asked(*pair, "--replan", job, "--lose", "any two")["losses"]
    assert [row["lost"] for row in losses] == [[*lost] for lost in itertools.combinations("abcd", 2)]
    assert {row["outcome"] for row in losses if {"a", "c"} & {*row["lost"]}} == {"waits"}
    (hosts,) = [row for row in losses if row["lost"] == ["b", "d"]]
    assert hosts["outcome"] == "goes on" and hosts["why"] == "" and "b" not in hosts["layout"].split()
    after = dataclasses.replace(plan.placement, slices=slices_of([("a", 0, 3), ("c", 3, 4)]))
    assert hosts["seconds"] == move_s(plan.placement, after, profile.nodes[0])
    lines = ringtune(
        "what-if", *pair, "--replan", job, "--lose", "b+d", "--lose", "a+b+c", "--lose", "a"
    ).stdout.splitlines()
    assert lines[1].split()[:4] == ["b,", "d", "goes", "on"]
    assert lines[2].split()[3] == "ends" and "no living node has a copy of block 0" in lines[2]
    assert lines[3].split()[:7] == ["a", "waits", "for", "a,", "no", "blocks", "move,"]
    assert lines[4].startswith("in 2 of 3 cases")
    refused = {"any 4": "at most 3 of 4 nodes can be lost", "b+x": "no node 'x'", "a+b+c+d": "no node would be left"}
    for lost, why in refused.items():
        result = ringtune("what-if", *pair, "--replan", job, "--lose", lost)
        assert result.exit_code == 2 and why in result.stderr
    assert "--lose asks for [recovery] of a job" in ringtune("what-if", *pair, "--lose", "b").stderr
    assert "in another call" in ringtune("what-if", *pair, "--lose", "b", "--drop", "b").stderr


@pytest.mark.parametrize(
    ("arguments", "message", "exit_code"),
    [
        ([], "nothing changes; give --change, --sweep, --drop, --lose, --add or --replan", 2),
        (["--change", "bob"], "'bob' is not KEY=VALUE", 2),
        (["--change", "bobb.compute=2"], "no node 'bobb'; did you mean 'bob'?", 5),
        (["--change", "bob.memory=100KiB"], "node bob needs ", 6),
        (["--drop", "carol"], "--drop carol: the profile has no such node", 5),
        (["--drop", "alice", "--drop", "bob"], "--drop bob: it is the only owner of data", 5),
        (["--add", "carol", "--like", "bob"], "--add carol: the plan has no blocks for it; give --replan JOB", 5),
        (["--add", "carol"], "every --add NODE needs a --like NODE", 2),
        (["--like", "bob", "--change", "bob.compute=2"], "every --add NODE needs a --like NODE", 2),
        (["--change", "bob.compute=2", "--csv", "OUT.csv"], "--csv and --plot are for a --sweep", 2),
        (["--sweep", "bob.compute=1,2", "--csv", "OUT.csv", "--jobs", "0"], "--jobs 0 has to be at least 1", 2),
        (["--sweep", "bob.compute=1,-2", "--csv", "OUT.csv"], "--change bob.compute=-2: it has to be above 0", 5),
        (["--sweep", "bobb.compute=1,2", "--csv", "OUT.csv"], "no node 'bobb'; did you mean 'bob'?", 5),
        (["--sweep", "bob.compute=1,2", "--plot", "OUT.pdf"], "has to end in .png or .svg", 2),
    ],
)
def test_what_if_refuses_what_makes_no_sense(
    arguments: list[str], message: str, exit_code: int, pair: tuple[str, ...], tmp_path: Path
) -> None:
    """One line that says what, and nothing written."""
    before = sorted(tmp_path.rglob("*"))
    result = ringtune("what-if", *pair, *(text.replace("OUT", str(tmp_path / "out")) for text in arguments))
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.exit_code == exit_code
    assert sorted(tmp_path.rglob("*")) == before


def test_what_if_of_more_steps_has_no_ratio_of_wall_times(pair: tuple[str, ...]) -> None:
    """Twice the steps take longer whatever the nodes: the difference is said, and steps of one depth are compared."""
    value = asked(*pair, "--change", "num_steps=16")
    assert (value["same_work"], value["ratio"]) == (False, None)
    assert value["changed"] == {"num_steps": ["8", "16"]}
    assert value["rows_per_s_ratio"] == value["after"]["rows_per_s"] / value["before"]["rows_per_s"]
    lines = ringtune("what-if", *pair, "--change", "num_steps=16").stdout.splitlines()
    assert lines[1].split()[-1] == lines[2].split()[-1] == "-"
    assert "after the change: num_steps 8 -> 16" in lines
    assert any(line.startswith("the two do not do the same work: compare rows per second") for line in lines)
    titles = next(index for index, line in enumerate(lines) if line.startswith("trained blocks"))
    assert [line.split()[0] for line in lines[titles + 1 : titles + 5]] == ["1", "2", "3", "4"]
    same = ringtune("what-if", *pair, "--change", "bob.compute=2").stdout
    assert "same work" not in same and "after the change" not in same


def test_what_if_plans_anew_as_plan_does(
    pair: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge takes part: the plan is the very one of the planner for that job and profile."""
    job = tmp_path / "job.toml"
    job.write_text(tiny_job())
    judged: list[object] = []

    def noted(*args: Any, **options: Any) -> float | None:
        judged.append(args)
        return simulated_job_s(*args, **options)

    monkeypatch.setattr(search, "simulated_job_s", noted)
    after = asked(*pair, "--change", "num_steps=6", "--replan", job)["after"]
    assert judged
    wanted = load_job(job).with_overrides({"train.max_steps": 6})
    assert after["plan_digest"] == make_plan(wanted, PROFILE.by_name, links=PROFILE.links).plan.digest


def test_what_if_says_in_what_another_job_differs(tmp_path: Path) -> None:
    """A run's own job is no news; another one is named key by key."""
    write_run(tmp_path / "run")
    (tmp_path / "run/job.toml").write_text(tiny_job())
    (tmp_path / "job.toml").write_text(tiny_job().replace("rounds = 2", "rounds = 3"))
    arguments: tuple[str | Path, ...] = (tmp_path / "run", "--change", "bob.compute=2", "--replan")
    assert asked(*arguments, tmp_path / "run/job.toml")["job_changed"] == {}
    assert asked(*arguments, tmp_path / "job.toml")["job_changed"] == {"train.rounds": ["2", "3"]}
    shown = ringtune("what-if", *arguments, tmp_path / "job.toml").stdout
    assert f"{tmp_path / 'job.toml'} is not the job of the run: train.rounds 2 -> 3" in shown


def test_what_if_takes_recorded_times(tmp_path: Path) -> None:
    """A run that took three times what its profile says: both sides are predicted from what it recorded."""
    write_run(tmp_path / "run", slower=3.0)
    run = tmp_path / "run"
    by_profile = asked(run, "--change", "bob.compute=2")
    recorded = asked(run, "--change", "bob.compute=2", "--trace", run)
    assert recorded["before"]["wall_s"] > 1.5 * by_profile["before"]["wall_s"]
    assert recorded["after"]["wall_s"] < recorded["before"]["wall_s"]
    bob = [next(node for node in recorded[side]["nodes"] if node["node"] == "bob") for side in ("before", "after")]
    assert bob[1]["busy_s"] == pytest.approx(bob[0]["busy_s"] / 2)
    assert recorded["before"]["wall_s"] == json.loads(ringtune("sim", run, "--trace", run, "--json").stdout)["wall_s"]


def test_what_if_of_a_run_that_moved_changes_every_placement(tmp_path: Path) -> None:
    """Faster nodes, and a node that is lost: its blocks are others' in both placements, which are one then."""
    write_run(tmp_path / "run", plan=moving(PLAN, (2, [("bob", 0, 3), ("alice", 3, 4)])))
    faster = asked(tmp_path / "run", "--change", "*.compute=2")
    assert (faster["before"]["moves_s"], faster["after"]["moves_s"]) == (MOVE_S, MOVE_S)
    assert faster["after"]["wall_s"] < faster["before"]["wall_s"]
    assert faster["after"]["moves"] == [{"step": 4, "slices": {"bob": [0, 3], "alice": [3, 4]}}]
    alone = asked(tmp_path / "run", "--drop", "bob")["after"]
    assert (alone["slices"], alone["moves_s"], "moves" in alone) == ({"alice": [0, 4]}, 0.0, False)


def test_what_if_refuses_recorded_times_of_another_size(tmp_path: Path) -> None:
    """A micro-batch of other rows was not recorded; the profile's times can be scaled."""
    write_run(tmp_path / "run")
    result = ringtune("what-if", tmp_path / "run", "--change", "microbatches=1", "--trace", tmp_path / "run")
    assert (
        "the recorded times are of micro-batches of 2 x 8 tokens, the plan has 4 x 8; leave out --trace"
        in result.stderr
    )
    assert result.exit_code == 5


GRID = ("--sweep", "bob.compute=0.5:2:4", "--sweep", "microbatches=1,2", "--jobs", "1")


def test_sweep_has_a_cell_for_every_combination(pair: tuple[str, ...], tmp_path: Path) -> None:
    """Each is the answer to its own question, with the axes beside it; a file has the same, to the last digit."""
    value = asked(*pair, *GRID, "--csv", tmp_path / "sweep.csv")
    with (tmp_path / "sweep.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [{**row, "wall_s": float(row["wall_s"])} for row in rows] == [
        {key: text if key == "wall_s" else str(text) for key, text in cell.items()} for cell in value["cells"]
    ]
    assert value["event"] == "sweep"
    assert value["axes"] == {"bob.compute": ["0.5", "1", "1.5", "2"], "microbatches": ["1", "2"]}
    assert [(cell["bob.compute"], cell["microbatches"]) for cell in value["cells"]] == [
        (speed, parts) for speed in ("0.5", "1", "1.5", "2") for parts in ("1", "2")
    ]
    alone = asked(*pair, "--change", "bob.compute=1.5", "--change", "microbatches=1")["after"]
    cell = value["cells"][4]
    assert (cell["wall_s"], cell["rows_per_s"]) == (alone["wall_s"], alone["rows_per_s"])
    assert (cell["fullest_node"], cell["fullest_share"]) == (alone["fullest_node"], alone["fullest_share"])
    same = value["cells"][3]
    assert (same["wall_s"], same["ratio"]) == (EXPECTED.wall_s, 1.0)


def test_sweep_of_keys_of_a_job_names_the_soonest_and_how_to_set_it(pair: tuple[str, ...]) -> None:
    """What the plan has already, and a speed that nobody chooses, are no advice."""
    swept = (*pair, "--jobs", "1")
    said = ringtune("what-if", *swept, "--sweep", "microbatches=1,2,4").stdout.splitlines()
    cells = asked(*swept, "--sweep", "microbatches=1,2,4")["cells"]
    best = min(cells, key=lambda cell: cell["wall_s"])
    assert best["ratio"] < 0.98
    setting = f"microbatches = {best['microbatches']}"
    assert said[-1] == f"soonest: {setting}, {best['ratio']:.3f} of the time; set train.{setting}"
    for other in (["microbatches=2,4"], ["bob.compute=1,2"], ["bob.compute=1,2", "microbatches=2,4"]):
        options = [word for axis in other for word in ("--sweep", axis)]
        assert "soonest" not in ringtune("what-if", *swept, *options).stdout


def test_sweep_that_is_stopped_shows_and_writes_what_is_done(
    pair: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Ctrl-C in the third cell: two lines in table and file, what is missing is said, and the exit code is 130."""
    done = WhatIf.__call__
    asked_for: list[object] = []

    def third_is_stopped(self: WhatIf, more: Sequence[str]) -> CellResult:
        asked_for.append(more)
        if len(asked_for) == 3:
            raise KeyboardInterrupt
        return done(self, more)

    monkeypatch.setattr(WhatIf, "__call__", third_is_stopped)
    result = ringtune("what-if", *pair, *GRID, "--csv", tmp_path / "sweep.csv")
    assert result.exit_code == 130
    assert result.stderr == "error: stopped; 2 of 8 cells are done, and they are above\n"
    assert [line.split()[:2] for line in result.stdout.splitlines()[3:]] == [["0.5", "1"], ["0.5", "2"]]
    assert len((tmp_path / "sweep.csv").read_text().splitlines()) == 1 + 2


def test_sweep_finds_a_file_that_can_not_be_written_first(
    pair: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 9 before any cell is computed."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(WhatIf, "__call__", lambda *_: pytest.fail("a cell was computed"))
    (tmp_path / "taken.png").mkdir()
    for option in ("--csv", "--plot"):
        result = ringtune("what-if", *pair, *GRID, option, tmp_path / "taken.png")
        assert result.exit_code == 9
        assert "it is a folder" in result.stderr


def test_sweep_prints_its_table_before_it_writes(
    pair: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full in the end costs the file, not the table."""

    def full(path: Path, content: bytes) -> None:
        raise StorageError(f"can't write {path}: No space left on device")

    monkeypatch.setattr(durable, "write_durably", full)
    result = ringtune("what-if", *pair, *GRID, "--csv", tmp_path / "sweep.csv")
    assert result.exit_code == 9
    assert len(result.stdout.splitlines()) == 3 + 8


def test_sweep_progress_is_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of cells and the time left on a line that is cleared in the end; a file gets nothing."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("FORCE_COLOR", "1")  # makes no file a terminal
    shown = {}
    for term, stream in (("xterm", Terminal()), ("dumb", Terminal()), ("xterm", io.StringIO())):
        monkeypatch.setenv("TERM", term)
        with shown_cells("abc", 3, Console(file=stream, width=80)) as cells:
            assert list(cells) == ["a", "b", "c"]
        shown[term, stream.isatty()] = stream.getvalue()
    bar = shown.pop(("xterm", True))
    assert "3/3" in bar and bar.endswith("\x1b[2K")
    assert shown == {("dumb", True): "", ("xterm", False): ""}


def test_sweep_shows_what_differs_and_does_not_fit_as_a_result(pair: tuple[str, ...]) -> None:
    """A cell of half the rows has no ratio, that of the plan's has one."""
    cells = asked(*pair, "--sweep", "batch_size=2,4", "--jobs", "1")["cells"]
    assert [(cell["ratio"], cell["trained_rows"]) for cell in cells] == [(None, 16), (1.0, 32)]
    assert "no ratio where a cell" in ringtune("what-if", *pair, "--sweep", "batch_size=2,4", "--jobs", "1").stdout
    # A budget that is too small is an answer of a sweep, with its reason, and does not end it
    cells = asked(*pair, "--sweep", "bob.memory=100KiB,1GiB", "--jobs", "1")["cells"]
    assert (cells[0]["wall_s"], cells[0]["ratio"]) == (None, None)
    assert cells[0]["error"].startswith("node bob needs ")
    assert (cells[1]["wall_s"], cells[1]["error"]) == (EXPECTED.wall_s, "")


def test_sweep_is_the_same_for_any_number_of_workers(pair: tuple[str, ...], tmp_path: Path) -> None:
    """One process or two: the very same CSV."""
    sweep = ("what-if", *pair, "--sweep", "bob.compute=1,2", "--csv")
    command = [sys.executable, "-m", "ringtune.cli", *sweep, str(tmp_path / "2.csv"), "--jobs", "2"]
    subprocess.run(command, check=True, env=source_environment(), capture_output=True, timeout=RUN_S)  # noqa: S603 - our own
    assert ringtune(*sweep, tmp_path / "1.csv", "--jobs", "1").exit_code == 0
    assert (tmp_path / "1.csv").read_text() == (tmp_path / "2.csv").read_text()


def test_sweep_plans_every_cell_anew(pair: tuple[str, ...], tmp_path: Path) -> None:
    """With a job, a faster node may get other blocks in each cell."""
    job = tmp_path / "job.toml"
    job.write_text(tiny_job())
    cells = asked(*pair, "--sweep", "bob.compute=0.1,1,10", "--replan", job, "--jobs", "1")["cells"]
    assert all(cell["error"] == "" for cell in cells)
    kept = asked(*pair, "--sweep", "bob.compute=0.1,1,10", "--change", "num_steps=8", "--jobs", "1")["cells"]
    assert cells[0]["wall_s"] < kept[0]["wall_s"]


def test_sweep_draws_a_picture(pair: tuple[str, ...], tmp_path: Path) -> None:
    """The same bytes each time; categories are no numbers."""
    pytest.importorskip("matplotlib")
    pictures = []
    for name in ("a", "b"):
        file = tmp_path / f"{name}.svg"
        asked(*pair, "--sweep", "wire_dtype=float32,int8", "--sweep", "bob.compute=1,2", "--jobs", "1", "--plot", file)
        pictures.append(file.read_bytes())
    assert pictures[0].startswith(b"<?xml")
    assert pictures[0] == pictures[1]
    text = pictures[0].decode()
    for word in ("wire_dtype", "float32", "int8", "bob.compute = 2", "as it is"):
        assert word in text
    for title in ("ringada, 4 blocks, 2 nodes: predicted training", "predicted training (seconds)"):
        assert title in text


@pytest.mark.parametrize(("option", "ending"), [("--csv", "csv"), ("--plot", "png")])
def test_sweep_writes_over_an_earlier_one_only(
    option: str, ending: str, pair: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repeated it does; rows, a photo or a link stay as they are, and no cell is computed."""
    pytest.importorskip("matplotlib")
    own, link, mine = (tmp_path / f"{name}.{ending}" for name in ("own", "link", "mine"))
    sweep = (*pair, "--sweep", "bob.compute=1,2", "--jobs", "1", option)
    for _ in range(2):
        assert ringtune("what-if", *sweep, own).exit_code == 0
    link.symlink_to(own)
    monkeypatch.setattr(WhatIf, "__call__", lambda *_: pytest.fail("a cell was computed"))
    for content in (b"text,label\na,b\n", b"\x89PNG\r\n\x1a\n of a camera", b"<svg></svg>", b""):
        mine.write_bytes(content)
        refused = ringtune("what-if", *sweep, mine)
        assert refused.exit_code == 2 and f"{mine} is there already and is no " in refused.stderr
        assert mine.read_bytes() == content
    assert ringtune("what-if", *sweep, link).exit_code == 2 and link.is_symlink()
