"""``ringtune what-if``: before and after, plans made anew, recorded times, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.planner import search
from coordinator.planner.judge import simulated_job_s
from coordinator.planner.make_plan import make_plan
from ringtune.job.job import load_job
from ringtune.plan_keys import PLAN_KEYS
from sim.prediction import predict
from tests.support.moves import moving
from tests.support.plans import changed
from tests.support.predictions import MOVE_S, PLAN, PROFILE, asked, ringtune, tiny_job, write_pair, write_run
from tests.support.profiles import profile_of

EXPECTED = predict(PLAN, PROFILE)


def test_what_if_compares_before_and_after(pair: tuple[str, ...]) -> None:
    """The plan as it is, with the change, and how many times as long it takes."""
    value = asked(*pair, "--change", "bob.compute=0.5")
    assert value["event"] == "what-if"
    assert value["before"]["wall_s"] == EXPECTED.wall_s
    assert value["after"]["wall_s"] > EXPECTED.wall_s
    assert value["ratio"] == value["after"]["wall_s"] / EXPECTED.wall_s
    assert value["after"]["plan_digest"] == PLAN.digest
    assert value["before"]["rows_per_s"] == PLAN.course.batch_size * PLAN.course.num_steps / EXPECTED.wall_s


def test_help_lists_every_key_of_the_plan() -> None:
    """Whatever may be changed is found without a wrong guess first."""
    words = " ".join(ringtune("what-if", "-h").stdout.replace("\u2502", " ").split())
    assert [key for key in PLAN_KEYS if key not in words.replace("- ", "-")] == []


def test_what_if_prints_tables_for_people(pair: tuple[str, ...]) -> None:
    """Wall time, step, idle share and bytes; then every node."""
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


def test_what_if_takes_a_run_with_its_own_profile(tmp_path: Path) -> None:
    """A folder has both."""
    write_run(tmp_path / "run")
    assert asked(tmp_path / "run", "--change", "microbatches=1")["before"]["wall_s"] == EXPECTED.wall_s


def test_what_if_drops_a_node_without_planning_anew(pair: tuple[str, ...]) -> None:
    """The host before it in the ring takes its blocks."""
    value = asked(*pair, "--drop", "bob")
    assert value["after"]["slices"] == {"alice": [0, 4]}
    assert value["after"]["links"] == []


def test_what_if_plans_anew_for_a_job(pair: tuple[str, ...], tmp_path: Path) -> None:
    """An added node gets blocks; keys of the plan change the job."""
    job = tmp_path / "job.toml"
    job.write_text(tiny_job())
    value = asked(
        *pair,
        "--add",
        "carol",
        "--like",
        "bob",
        "--change",
        "carol.compute=4",
        "--change",
        "num_steps=6",
        "--replan",
        job,
    )
    after = value["after"]
    assert after["slices"]["carol"][1] > after["slices"]["carol"][0]
    assert after["num_steps"] == 6
    assert {node["node"] for node in after["nodes"]} >= {"alice", "bob", "carol"}
    slow: tuple[str | Path, ...] = (
        *pair,
        "--add",
        "carol",
        "--like",
        "bob",
        "--change",
        "carol.compute=1e-6",
        "--replan",
        job,
    )
    assert asked(*slow)["after"]["left_out"] == ["carol"]
    assert ringtune("what-if", *slow).stdout.endswith("left out: carol\n")
    dropped = asked(*pair, "--drop", "bob", "--replan", job)["after"]
    assert dropped["slices"] == {"alice": [0, 4]}


@pytest.mark.parametrize(
    ("arguments", "message", "exit_code"),
    [
        ([], "nothing changes; give --change, --sweep, --drop, --add or --replan", 2),
        (["--change", "bob"], "'bob' is not KEY=VALUE", 2),
        (["--change", "bobb.compute=2"], "no node 'bobb'; did you mean 'bob'?", 5),
        (["--change", "bob.cmpute=2"], "unknown key 'cmpute'; did you mean 'compute'?", 5),
        (["--change", "link.alice.bobb.rate=1"], "no link 'alice.bobb'; did you mean 'alice.bob'?", 5),
        (["--change", "link.alice.bob.rate=0"], "it has to be above 0", 5),
        (["--change", "link.alice.bob.rate=fast"], "is not a rate; write it like 100Mbit", 5),
        (["--change", "bob.memory=100KiB"], "node bob needs ", 6),
        (["--change", "microbatches=3.5"], "is no whole number", 5),
        (["--change", "microbatches=9"], "9 micro-batches do not fit a batch of 4 rows", 5),
        (["--drop", "carol"], "--drop carol: the profile has no such node", 5),
        (["--drop", "alice", "--drop", "bob"], "--drop bob: it is the only owner of data", 5),
        (["--add", "carol", "--like", "bob"], "--add carol: the plan has no blocks for it; give --replan JOB", 5),
        (["--add", "carol"], "every --add NODE needs a --like NODE", 2),
        (["--like", "bob", "--change", "bob.compute=2"], "every --add NODE needs a --like NODE", 2),
        (["--change", "bob.compute=2", "--csv", "OUT.csv"], "--csv and --plot are for a --sweep", 2),
        (["--sweep", "bob.compute=1,2", "--csv", "OUT.csv", "--backend", "spark"], "--backend 'spark' is not one", 2),
        (["--sweep", "bob.compute=1,2", "--csv", "OUT.csv", "--jobs", "0"], "--jobs 0 has to be at least 1", 2),
        (["--sweep", "bob.compute=1,-2", "--csv", "OUT.csv"], "--change bob.compute=-2: it has to be above 0", 5),
        (["--sweep", "bobb.compute=1,2", "--csv", "OUT.csv"], "no node 'bobb'; did you mean 'bob'?", 5),
        (["--sweep", "bob.compute=1:2", "--csv", "OUT.csv"], "'1:2' is not FROM:TO:COUNT", 2),
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


def test_what_if_refuses_a_bad_profile_as_sim_does(tmp_path: Path) -> None:
    """The same checks stand before both commands."""
    plan, profile = write_pair(tmp_path, profile=profile_of(PLAN, links={("alice", "bob"): (1e5, 0.0)}))
    result = ringtune("what-if", plan, "--profile", profile, "--change", "bob.compute=2")
    assert "the profile lacks link bob -> alice" in result.stderr
    assert result.exit_code == 5


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


def test_what_if_refuses_a_job_that_was_not_measured(pair: tuple[str, ...], tmp_path: Path) -> None:
    """Another adapter or length: the profile says nothing about it."""
    job = tmp_path / "job.toml"
    job.write_text(tiny_job().replace('config = "seq_bn"', 'config = "lora"'))
    result = ringtune("what-if", *pair, "--change", "bob.compute=2", "--replan", job)
    assert "was profiled with adapter seq_bn, the job has lora; measure anew" in result.stderr
    assert result.exit_code == 5


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


def test_what_if_sees_a_plan_that_is_not_the_profiles(tmp_path: Path) -> None:
    """A plan of longer rows was not measured."""
    plan, profile = write_pair(tmp_path, plan=changed(PLAN, max_length=64))
    result = ringtune("what-if", plan, "--profile", profile, "--change", "bob.compute=2")
    assert "was profiled with tokens 8, the job has 64" in result.stderr
    assert result.exit_code == 5
