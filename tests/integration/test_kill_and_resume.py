"""``ringtune train --local``, whole, killed and interrupted: ``--resume`` ends with what the whole run trained.

``python -m tests.bench.kill`` does the same at twenty random moments.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
import torch

from coordinator.client.checkpoints import RunCheckpoints
from ringtune.errors import DataError, InterruptedRunError
from tests.support.killing import LAUNCHER, NODES, STEPS, LocalRun, run_whole, steps_of_metrics, write_inputs
from tests.support.processes import RUN_S
from tests.support.results import largest_difference, trained_in
from tests.support.tiny_data import shuffle_rows

Whole = tuple[Path, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The job, and what it trains if nobody disturbs it."""
    folder = tmp_path_factory.mktemp("kill")
    job = write_inputs(folder)
    run = run_whole(job, folder / "whole")
    assert run.code == 0, run.errors
    return job, trained_in(folder / "whole")


def test_run_leaves_a_complete_folder(whole: Whole) -> None:
    """Plan, report, metrics, trace and adapter are there and agree."""
    out = whole[0].parent / "whole"
    plan = json.loads((out / "plan.json").read_text())
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    sends = [event for event in events if event.get("cat") == "send"]
    (above,) = [piece["node"] for piece in plan["placements"][0]["slices"] if piece["start"] < 4 <= piece["stop"]]
    assert {"send head to node-0", "send head to node-1", f"send gradient to {above}"} <= {
        event["name"] for event in sends
    }
    # in microseconds from the start; a node knows the coordinator's clock as well as an answer comes at once
    assert all(event["dur"] >= 0 and event["ts"] > -5e6 for event in sends)
    assert steps_of_metrics(out) == list(range(1, STEPS + 1))
    report = json.loads((out / "report.json").read_text())
    assert report["eval"]["count"] == 20
    assert all(node["busy_s"] > 0 and node["peak_rss_bytes"] > 2**20 for node in report["nodes"].values())
    assert sorted(path.name for path in (out / "adapter").iterdir()) == [
        "adapter.safetensors",
        "adapter_config.json",
        "head_config.json",
        "model_head.safetensors",
    ]
    assert not list(out.rglob("*.part"))


@pytest.mark.thorough
def test_run_that_is_killed_again_and_again_ends_with_the_same_result(whole: Whole, tmp_path: Path) -> None:
    """Kill -9 of a host, of the launcher with the coordinator, of an owner: equal tensors, one line for every step."""
    job, wanted = whole
    out = tmp_path / "out"
    going_on = 0
    for steps, victim, code in ((10, "", 4), (10, LAUNCHER, -signal.SIGKILL), (10, "node-0", 4)):
        run = LocalRun(job, out, "--resume")
        run.until_steps(steps)
        run.until_saved(going_on)
        victim = victim or top_host(out)
        assert run.kill(victim) == victim
        assert run.wait() == code, run.errors()
        if victim != LAUNCHER:
            assert victim in run.errors()
            assert (run.events[-1]["event"], run.events[-1]["error"]) == ("error", "PeerLostError")
        reached, going_on = going_on, RunCheckpoints(out).steps()[0]
        assert going_on > reached
    last = run_whole(job, out, "--resume")  # at once: agents of the killed run may still be about to end
    assert last.code == 0, last.errors
    assert f"resuming after step {going_on}" in last.notes
    assert largest_difference(trained_in(out), wanted) <= 1e-9
    assert steps_of_metrics(out) == list(range(1, STEPS + 1))


@pytest.mark.thorough
def test_run_goes_on_after_ctrl_z(whole: Whole, tmp_path: Path) -> None:
    """The launcher, with the coordinator, stands still for two leases; its nodes wait for it."""
    job, wanted = whole
    out = tmp_path / "out"
    run = LocalRun(job, out, "--set", "runtime.lease_s=6")
    run.until_steps(13)
    run.process.send_signal(signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        run.process.wait(13.0)
    run.process.send_signal(signal.SIGCONT)
    assert run.wait() == 0, run.errors()
    assert largest_difference(trained_in(out), wanted) <= 1e-9
    assert steps_of_metrics(out) == list(range(1, STEPS + 1))
    assert not [note for note in run.notes() if "lost" in note]


def test_interrupted_run_saves_and_says_how_to_go_on(whole: Whole, tmp_path: Path) -> None:
    """Ctrl-C once: exit code 130, a checkpoint, the command, no process; a damaged shard then costs only some steps.

    The part that is interrupted is a process of its own, as users start it.
    """
    job, wanted = whole
    out, orders = tmp_path / "out", tmp_path / "orders"
    orders.mkdir()
    (orders / "coordinator").write_text("call Grant 24 stop")
    run = LocalRun(job, out, orders=orders)
    run.until_stopped()
    (orders / "coordinator").write_text("answered Drain 1 stop")
    processes = psutil.Process(run.process.pid).children(recursive=True)
    assert len(processes) == len(NODES) + 1, "they and their template"
    top = top_host(out)
    host = run.agents()[top]
    host.suspend()  # so that no step ends before the launcher has asked for the end
    run.process.send_signal(signal.SIGINT)
    run.process.send_signal(signal.SIGCONT)
    run.until_stopped()
    host.resume()
    run.process.send_signal(signal.SIGCONT)
    assert run.wait() == InterruptedRunError.exit_code
    assert "Traceback" not in run.errors()
    _, left = psutil.wait_procs(processes, timeout=RUN_S)  # the kernel ends them with their template, if nobody has
    assert not left
    newest, before = RunCheckpoints(out).steps()
    assert 0 < before < newest < STEPS
    (line,) = [note for note in run.notes() if note.startswith("saved up to step")]
    assert line.startswith(f"saved up to step {newest}; resume with: ") and line.endswith("--resume")
    assert steps_of_metrics(out) == list(range(1, newest + 1))

    (shard,) = (RunCheckpoints(out).node_states() / top).rglob(f"step-{newest}.safetensors")
    content = bytearray(shard.read_bytes())
    content[-100] ^= 1
    shard.write_bytes(content)
    again = run_whole(job, out, "--resume")
    assert again.code == 0, again.errors
    passed, going_on = [note for note in again.notes if "step" in note and "the run's files" not in note]
    assert f"step-{newest}.safetensors is damaged" in passed and top in passed
    assert going_on == f"resuming after step {before}"
    assert largest_difference(trained_in(out), wanted) <= 1e-9
    assert steps_of_metrics(out) == list(range(1, STEPS + 1))
    report = json.loads((out / "report.json").read_text())
    assert [part["steps"] for part in report["parts"]] == [before]
    assert (report["steps"], report["whole"]["steps"]) == (STEPS - before, STEPS)
    assert json.loads((out / "parts/1/trace.json").read_text())["traceEvents"], "what was done before the stop"


def test_resume_that_would_be_another_run_is_refused(whole: Whole, tmp_path: Path) -> None:
    """As many rows in another order are refused."""
    job, _ = whole
    stopped = tmp_path / "stopped"
    shutil.copytree(job.parent / "whole", stopped)
    (stopped / "report.json").unlink()  # as if it had been killed while it collected
    rows = (job.parent / "train.csv").read_bytes()
    try:
        shuffle_rows(job.parent / "train.csv")
        run = run_whole(job, stopped, "--resume")
    finally:
        (job.parent / "train.csv").write_bytes(rows)
    assert run.code == DataError.exit_code
    assert "its rows, or their order, are not those that the run began with" in run.errors


def top_host(run: Path) -> str:
    """Return the host of the topmost blocks, which train in each step; two fast nodes may host all blocks."""
    return str(json.loads((run / "plan.json").read_text())["placements"][0]["slices"][-1]["node"])
