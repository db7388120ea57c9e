"""``ringtune train --local`` as a user types it, with real agents: its folder, and its end by signals."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from coordinator.client.checkpoints import RunCheckpoints
from ringtune.errors import InterruptedRunError
from tests.support import measured, tiny
from tests.support.processes import RUN_S, agents_below, run_ringtune, start_ringtune

NODES = ("node-0", "node-1")
JOB = """
[model]
path = "model"
[data]
train = "train.csv"
eval = "eval.csv"
[train]
batch_size = 8
microbatches = 2
max_length = 16
local_iterations = 4
rounds = {rounds}
[unfreeze]
every_steps = 4
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with rows."""
    path = tmp_path_factory.mktemp("job")
    tiny.write_model(path / "model")
    tiny.write_rows(path / "train.csv", 48, seed=1)
    tiny.write_rows(path / "eval.csv", 20, seed=2)
    return path


def write_job(folder: Path, rounds: int) -> Path:
    """The job with so many rounds."""
    job = folder / f"job-{rounds}.toml"
    job.write_text(JOB.format(rounds=rounds))
    return job


def start(folder: Path, out: Path, *options: str | Path, rounds: int) -> subprocess.Popen[str]:
    """Begin to train on two local nodes, with JSON lines."""
    measured.recall_in(out, NODES)
    return start_ringtune("train", write_job(folder, rounds), "--local", "2", "--out", out, "--json", *options)


def states(out: Path) -> list[Path]:
    """Where the nodes of a run keep what is theirs."""
    return [RunCheckpoints(out).node_states() / name for name in NODES]


def events_until(process: subprocess.Popen[str], kind: str) -> list[dict[str, Any]]:
    """The events up to the first of a kind."""
    assert process.stdout is not None
    found = []
    for line in process.stdout:
        found.append(json.loads(line))
        if found[-1]["event"] == kind:
            return found
    raise AssertionError(f"no {kind} came: {process.communicate(timeout=RUN_S)[1]}")


def test_train_local_writes_a_complete_folder(folder: Path, tmp_path: Path) -> None:
    """Two processes train eight steps by a given plan; plan, report, metrics, trace and adapter are there and agree."""
    planned = run_ringtune(
        *("plan", write_job(folder, 1), "--assume", "2", "--memory", "1GiB"),
        *("--microbatches", "4", "--wire", "bfloat16", "--save", tmp_path / "plan.json"),
    )
    assert planned.returncode == 0, planned.stderr
    process = start(folder, tmp_path / "out", "--plan", tmp_path / "plan.json", rounds=1)
    _, errors = process.communicate(timeout=RUN_S)
    assert process.returncode == 0, errors
    plan = json.loads((tmp_path / "out/plan.json").read_text())
    assert plan == json.loads((tmp_path / "plan.json").read_text())["plan"]
    assert (plan["course"]["microbatches"], plan["course"]["wire_dtype"]) == (4, "bfloat16")
    events = json.loads((tmp_path / "out/trace.json").read_text())["traceEvents"]
    sends = {event["name"] for event in events if event.get("cat") == "send"}
    assert sends == {
        *(f"send {what} to node-{index}" for what in ("hidden state", "head") for index in range(2)),
        "send gradient to node-1",  # the blocks of node-0 do not train yet
    }
    # in microseconds from the start; a node knows the coordinator's clock as well as an answer comes at once
    assert all(event["dur"] >= 0 and event["ts"] > -5e6 for event in events if event.get("cat") == "send")
    measured.keep(states(tmp_path / "out"))
    report = json.loads((tmp_path / "out/report.json").read_text())
    metrics = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics if line["kind"] == "train"] == list(range(1, 9))
    assert report["eval"]["count"] == 20
    assert all(node["busy_s"] > 0 and node["peak_rss_bytes"] > 2**20 for node in report["nodes"].values())
    assert sorted(path.name for path in (tmp_path / "out/adapter").iterdir()) == [
        "adapter.safetensors",
        "adapter_config.json",
        "head_config.json",
        "model_head.safetensors",
    ]
    assert not list((tmp_path / "out").rglob("*.part"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.sampled(1)
def test_train_local_stops_in_order(folder: Path, tmp_path: Path, number: signal.Signals) -> None:
    """An end from outside or a closed terminal: exit code 130 and a checkpoint, as at Ctrl-C; no agent is left."""
    process = start(folder, tmp_path / "out", rounds=500)
    events_until(process, "step")
    agents = agents_below(process.pid)
    processes = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    _, errors = process.communicate(timeout=RUN_S)
    assert process.returncode == InterruptedRunError.exit_code
    assert "Traceback" not in errors
    newest = RunCheckpoints(tmp_path / "out").steps()[0]
    assert newest >= 1
    assert f"stopped by the user, with a checkpoint of step {newest}" in errors
    assert sorted(agents) == ["node-0", "node-1"]
    assert len(processes) == 3, "they and their template"
    assert not [child for child in processes if child.is_running()]
