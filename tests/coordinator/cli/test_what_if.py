"""``ringtune what-if``: before and after, plans made anew, recorded times, and what is refused."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from coordinator.planner import search
from coordinator.planner.judge import simulated_job_s
from coordinator.planner.make_plan import make_plan
from coordinator.planner.what_if import CellResult, WhatIf
from coordinator.screen.live_tables import shown_cells
from ringtune.costs.action_costs import move_s
from ringtune.errors import StorageError
from ringtune.job.job import load_job
from ringtune.plan_keys import PLAN_KEYS
from ringtune.schedule.placement import Rack
from ringtune.storage import durable
from sim.prediction import predict
from tests.support import plans
from tests.support.moves import moving, slices_of
from tests.support.plans import changed
from tests.support.predictions import MOVE_S, PLAN, PROFILE, asked, ringtune, tiny_job, write_pair, write_run
from tests.support.processes import RUN_S, source_environment
from tests.support.profiles import all_pairs, profile_of

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
    # A folder has both
    write_run(tmp_path / "run")
    assert asked(tmp_path / "run", "--change", "microbatches=1")["before"]["wall_s"] == EXPECTED.wall_s


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
