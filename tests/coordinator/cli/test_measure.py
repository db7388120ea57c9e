"""``ringtune measure`` on fake agents: its tables, its file, its refusals."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.cli.measure import app
from coordinator.planner.given_plan import read_profile
from coordinator.screen.tables import profile_text
from ringtune.costs.measurement import job_shape
from ringtune.costs.profile import LinkFacts, Profile, WorkTime
from ringtune.errors import PeerLostError, StorageError, UsageError
from tests.support.fake_agents import JOB_TEXT, FakeCluster, facts, job

HEAD = WorkTime(work="head", rows=2, tokens=8, median_s=0.0025, low_s=0.0025, high_s=0.0025, samples=3)


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """The command listens to SIGTERM; here it must not go on to."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def job_file(tmp_path: Path) -> str:
    """The small job as a file."""
    path = tmp_path / "job.toml"
    path.write_text(JOB_TEXT)
    return str(path)


def test_profile_text_shows_nodes_and_links() -> None:
    """The whole output."""
    made: dict[str, Any] = {"shape": job_shape(job()), "hardware": "Made-up 3000, 1 thread"}
    nodes = (facts("a", **made, work_times=(HEAD,)), facts("long-name", **made, threads=4, memory_bytes=1 << 20))
    link = LinkFacts(
        source="a",
        target="long-name",
        rate_bytes_per_s=12.5e6,
        latency_s=0.0012,
        rate_low_bytes_per_s=12e6,
        rate_high_bytes_per_s=13e6,
    )
    assert profile_text(Profile(nodes=nodes, links=(link,))) == [
        "one block, 2 rows of up to 8 tokens, seq_bn, float32:",
        "  node       forward  with graph  backward  head     budget     threads  hardware",
        "  a          1.00 ms  1.10 ms     1.20 ms   2.50 ms  1,024 MiB  1        Made-up 3000, 1 thread",
        "  long-name  1.00 ms  1.10 ms     1.20 ms   -        1.0 MiB    4        Made-up 3000, 1 thread",
        "",
        "  link            rate        quartiles                 latency",
        "  a -> long-name  11.9 MiB/s  11.4 MiB/s to 12.4 MiB/s  1.20 ms",
    ]


def test_measure_command_prints_tables_and_writes_the_profile(job_file: str, tmp_path: Path) -> None:
    """As text by default, one JSON line with ``--json``; the file is the same."""
    out = tmp_path / "profiles" / "profile.json"
    with FakeCluster("a", "b") as cluster:
        typed = [job_file, "--coordinator", cluster.server.address, "--save", str(out), "--no-rehearsal"]
        shown = CliRunner().invoke(app, typed)
        lines = CliRunner().invoke(app, [job_file, "--coordinator", cluster.server.address, "--json", "--no-links"])
    assert shown.exit_code == 0, shown.output
    assert "a -> b" in shown.output and f"the profile is in {out}" in shown.output
    found = read_profile(out)
    assert [node.node for node in found.nodes] == ["a", "b"] and len(found.links) == 2
    (event,) = [json.loads(line) for line in lines.stdout.splitlines()]
    assert event["event"] == "profile"
    assert Profile.from_json(event["profile"]) == dataclasses.replace(found, links=())


def test_measure_command_saves_over_a_profile_only(job_file: str, tmp_path: Path) -> None:
    """Measured again it replaces the earlier one; anything else stays as it is, and nothing is measured."""
    out, job = tmp_path / "profile.json", Path(job_file).read_text()
    with FakeCluster("a") as cluster:
        typed = [job_file, "--coordinator", cluster.server.address, "--no-rehearsal", "--save"]
        for _ in range(2):
            assert CliRunner().invoke(app, [*typed, str(out)]).exit_code == 0
        asked = cluster.agents["a"].inspected
        refused = CliRunner().invoke(app, [*typed, job_file])
        assert cluster.agents["a"].inspected is asked
    assert isinstance(refused.exception, UsageError)
    assert str(refused.exception) == (
        f"{job_file} is there already and is no profile that 'ringtune measure' saved; give another name, or remove it"
    )
    assert Path(job_file).read_text() == job


def test_measure_command_passes_its_options_on(job_file: str) -> None:
    """One by one, anew, with a changed job."""
    options = ["--one-by-one", "--fresh", "--set", "train.max_length=4", "--nodes", "2", "--no-rehearsal"]
    with FakeCluster("a", "b") as cluster:
        done = CliRunner().invoke(app, [job_file, "--coordinator", cluster.server.address, *options])
        asked = [agent.inspected for agent in cluster.agents.values()]
    assert done.exit_code == 0, done.output
    assert [(one.neighbours, one.fresh) for one in asked] == [(0, True)] * 2
    assert all("max_length = 4" in one.job_toml for one in asked)


def test_measure_command_saves_what_it_measured_if_the_rehearsal_fails(job_file: str, tmp_path: Path) -> None:
    """Also with --json somebody is told: on the standard error, beside the profile."""
    out = tmp_path / "profile.json"
    with FakeCluster("a", "b", agents={"b": {"fails_at": {"prepare": PeerLostError("gone")}}}) as cluster:
        done = CliRunner().invoke(
            app, [job_file, "--coordinator", cluster.server.address, "--save", str(out), "--json"]
        )
    assert done.exit_code == 0, done.output
    assert Profile.from_json(json.loads(done.stdout)["profile"]) == read_profile(out)
    (line,) = [line for line in done.stderr.splitlines() if "rehearsal failed" in line]
    assert "gone" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of --local N and --coordinator"),
        (["--local", "2", "--coordinator", "127.0.0.1:1"], "give one of"),
        (["--local", "2", "--nodes", "2"], "--nodes is for --coordinator"),
    ],
)
def test_measure_command_refuses_what_makes_no_sense(job_file: str, arguments: list[str], message: str) -> None:
    """Before anything is started."""
    done = CliRunner().invoke(app, [job_file, *arguments])
    assert isinstance(done.exception, UsageError) and message in str(done.exception)


def test_measure_command_keeps_an_old_profile_that_it_can_not_replace(job_file: str, tmp_path: Path) -> None:
    """The folder is a file: the error says so, nothing is half written."""
    (tmp_path / "file").write_text("in the way")
    with FakeCluster("a") as cluster:
        arguments = [job_file, "--coordinator", cluster.server.address, "--save", str(tmp_path / "file" / "p.json")]
        done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, StorageError)
    assert (tmp_path / "file").read_text() == "in the way"
