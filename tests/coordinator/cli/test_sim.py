"""``ringtune sim``: what it prints and writes, and that a bad input is one error and leaves nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from coordinator.api.prediction_text import write_prediction
from coordinator.planner.make_plan import make_plan
from coordinator.screen.plan_text import plan_text
from coordinator.screen.progress import report_lines
from ringtune.costs.profile import WHOLE_WORKS, Work
from ringtune.job.job import parse_job
from ringtune.quantities import format_bytes, format_seconds
from ringtune.schedule.methods import RingAda
from ringtune.schedule.methods.base import Patience
from ringtune.schedule.operation_tables import BatchOperations, BlockCapacity, Choice, Operations, ScheduledTable
from ringtune.schedule.turns import StartPoint
from ringtune.techniques.operations import expected_table
from sim.prediction import predict
from sim.ring import ExpectedTables
from tests.support.cases import cases
from tests.support.choosing import make_choice
from tests.support.moves import moving
from tests.support.plans import changed
from tests.support.predictions import (
    MOVE_S,
    PLAN,
    PROFILE,
    Change,
    ringtune,
    tiny_job,
    write_json,
    write_pair,
    write_run,
)
from tests.support.profiles import profile_of

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
    plan, profile = write_pair(tmp_path)
    result = ringtune("sim", plan, "--profile", profile)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("ringada, 4 blocks on 2 nodes, 8 steps of 4 rows in 2 micro-batches")
    assert lines[1].startswith("predicted training ")
    names = [line.split()[0] for line in lines[3:] if line]
    assert names == ["node", "alice", "bob", "link", "alice", "bob", "trained", "1", "2", "3", "4"]
    assert "954 MiB" in lines[4]
    # ``ringtune plan --json > plan.json`` is a plan too
    _, profile = write_pair(tmp_path)
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
    real = write_run(tmp_path / "run", slower=1.25)
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
    write_run(tmp_path / "run")
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


def prediction_of(folder: Path) -> dict[str, Any]:
    """The JSON line of a prediction."""
    result = ringtune("sim", folder, "--json")
    assert result.exit_code == 0, result.output
    value: dict[str, Any] = json.loads(result.stdout)
    return value


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
    value = prediction_of(tmp_path)
    assert value["wall_s"] == real.wall_s != predict(CHOOSING, PROFILE).wall_s
    assert abs(value["measured"]["error_share"]) < 1e-5


@pytest.mark.parametrize("tables", [TABLES, ()])
def test_sim_of_a_resumed_run_that_chose_has_its_tables(tmp_path: Path, tables: tuple[ScheduledTable, ...]) -> None:
    """The last four steps, from a step where a table is due; without the file the expected tables stand for them."""
    start = StartPoint.of(CHOOSING.course, step=4, holder="bob", operations=table("3"))
    real = predict(CHOOSING, PROFILE, start=start, keep_spans=True, tables=tables)
    write_run(tmp_path, plan=CHOOSING, tables=tables)
    write_prediction(tmp_path, CHOOSING, real, {})
    value = prediction_of(tmp_path)
    assert value["measured"]["steps"] == 4
    assert value["wall_s"] == pytest.approx(real.wall_s)


def test_sim_of_a_run_with_a_damaged_file_of_tables_names_it(tmp_path: Path) -> None:
    """One sentence, no trace."""
    write_run(tmp_path, plan=CHOOSING, tables=TABLES)
    (tmp_path / "operations.json").write_text("{")
    result = ringtune("sim", tmp_path)
    assert result.exit_code != 0 and "operations.json can't be read" in result.output
