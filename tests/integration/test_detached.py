"""Runs without a terminal, as processes: detached, stopped, gone on with; a coordinator that is killed finds them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from coordinator.client.checkpoints import RunCheckpoints
from coordinator.client.saved_run import read_place
from tests.support import measured
from tests.support.fake_agents import FakeAgent
from tests.support.killing import NODES, write_inputs
from tests.support.processes import RUN_S, agents_below, run_ringtune, start_ringtune

POLL_S = 0.05
LEASE_S = RUN_S  # these agents send no heartbeats, and commands take their time on a busy machine


def wait_for_steps(out: Path, count: int) -> None:
    """Wait until so many steps are in the metrics of a run that nobody follows."""
    deadline_s = time.monotonic() + RUN_S
    while not (out / "metrics.jsonl").is_file() or (out / "metrics.jsonl").read_text().count("\n") < count:
        assert time.monotonic() < deadline_s, (out / "run.log").read_text()
        time.sleep(POLL_S)


def wait_ended(pid: int) -> None:
    """Wait for the end of a process that is no child of this one any more."""
    try:
        psutil.Process(pid).wait(RUN_S)
    except psutil.NoSuchProcess:
        return


@pytest.mark.thorough
def test_local_run_is_detached_stopped_and_gone_on_with(tmp_path: Path) -> None:
    """It outlives its command, ``stop`` saves it, and it goes on where it was, detached again."""
    job, out = write_inputs(tmp_path), tmp_path / "out"
    measured.recall_in(out, NODES)
    saved = 0
    for more in ([], ["--resume"]):
        arguments = ["train", job, "--local", 3, "--out", out, "--set", "train.max_steps=20000", "--detach", *more]
        begun = run_ringtune(*arguments)
        assert begun.returncode == 0, begun.stderr
        place = read_place(out)
        assert place is not None
        try:
            assert begun.stdout.splitlines()[0] == f"run {place.run_id} continues without this command"
            assert f"ringtune stop {out}" in begun.stdout
            assert os.getsid(place.pid) == place.pid, "a closed terminal does not reach it"
            wait_for_steps(out, saved + 10)
            stopped = run_ringtune("stop", out)
            assert stopped.returncode == 0, stopped.stderr
            wait_ended(place.pid)
        finally:
            _kill(place.pid)
        before, saved = saved, RunCheckpoints(out).steps()[0]
        assert saved > before
        shown = run_ringtune("logs", out, "--follow").stdout
        assert f"saved up to step {saved}; resume with: " in shown
        assert f"with a checkpoint of step {saved}" in shown
        assert (f"resuming after step {before}" in shown) == bool(before)
    over = run_ringtune("stop", out)
    assert over.returncode == 2 and "is not under way" in over.stderr


def _kill(pid: int) -> None:
    """End a launcher and its agents, if the test failed before they ended."""
    if psutil.pid_exists(pid):
        for process in [*agents_below(pid).values(), psutil.Process(pid)]:
            process.kill()


@pytest.mark.thorough
def test_detached_run_that_is_refused_is_an_error_of_its_command(tmp_path: Path) -> None:
    """The error and its exit code are those of the run."""
    job = write_inputs(tmp_path)
    (tmp_path / "train.csv").unlink()
    begun = run_ringtune("train", job, "--local", 2, "--out", tmp_path / "out", "--detach")
    assert begun.returncode == 5, begun.stdout
    assert "train.csv" in begun.stderr


def start_coordinator(state: Path, *more: object) -> tuple[subprocess.Popen[str], str]:
    """A coordinator that keeps its runs there, and its address."""
    where = ("--bind", "127.0.0.1:0", "--state", state)
    process = start_ringtune("coordinator", *where, "--lease", LEASE_S, "--json", *more)
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())["address"]


@pytest.mark.promise("6 every wait ends")
@pytest.mark.thorough
def test_coordinator_that_is_killed_finds_its_runs_again(tmp_path: Path) -> None:
    """A finished run can be fetched, one that was under way is interrupted, with its checkpoint in its books."""
    job = tmp_path / "job.toml"
    job.write_text(
        '[model]\npath = "model"\n[train]\nbatch_size = 4\nmicrobatches = 2\nmax_length = 8\n'
        f"local_iterations = 2\nrounds = 2\ncheckpoint_every = 2\n[runtime]\nlease_s = {LEASE_S}\n"
    )
    state = tmp_path / "state"
    process, address = start_coordinator(state)
    agents = [FakeAgent(name, address) for name in ("a", "b")]
    where = ("--coordinator", address)
    try:
        for agent in agents:
            agent.join()
        done = run_ringtune("train", job, *where, "--nodes", 2, "--detach")
        assert done.returncode == 0, done.stderr
        first = re.findall(r"r\d{8}-\d{6}-[0-9a-f]{8}", done.stdout)[0]
        assert run_ringtune("logs", first, "--follow", *where).returncode == 0
        long = run_ringtune("train", job, *where, "--detach", "--set", "train.rounds=100000", "--json")
        second = json.loads(long.stdout)["run_id"]
        followed = start_ringtune("logs", second, "--follow", "--json", *where)
        with followed:
            assert followed.stdout is not None
            assert next(line for line in followed.stdout if '"step": 60' in line)
            process.send_signal(signal.SIGKILL)
            followed.communicate(timeout=RUN_S)
            assert followed.returncode == 3, "the connection is lost"
    finally:
        process.kill()
        process.communicate(timeout=RUN_S)
        for agent in agents:
            agent.close()
    process, address = start_coordinator(state, "--take-up", 0)
    try:
        listed = run_ringtune("runs", "--coordinator", address, "--json")
        found = {line["run_id"]: line for line in map(json.loads, listed.stdout.splitlines())}
        assert (found[first]["state"], found[second]["state"]) == ("done", "interrupted")
        assert found[second]["saved_step"] >= 8 and found[second]["can_go_on"]
        for run_id in (first, second):
            fetched = run_ringtune("fetch", run_id, "--out", tmp_path / run_id, "--coordinator", address)
            assert fetched.returncode == 0, fetched.stderr
        assert (tmp_path / first / "adapter/adapter.safetensors").is_file()
        assert RunCheckpoints(tmp_path / second).steps()[0] == found[second]["saved_step"]
        process.send_signal(signal.SIGINT)
        assert process.wait(RUN_S) == 130
    finally:
        process.kill()
        process.communicate(timeout=RUN_S)
