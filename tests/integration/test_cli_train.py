"""``ringtune train --local`` as a user types it, with real agents; ``test_kill_and_resume`` interrupts one."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support import measured, tiny
from tests.support.cluster import TEMPLATE
from tests.support.processes import run_ringtune
from tests.support.typed import run_here

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
rounds = 1
[unfreeze]
every_steps = 4
"""


def test_train_local_writes_a_complete_folder(tmp_path: Path) -> None:
    """Two processes train eight steps by a given plan; plan, report, metrics, trace and adapter are there and agree."""
    tiny.write_model(tmp_path / "model")
    tiny.write_rows(tmp_path / "train.csv", 48, seed=1)
    tiny.write_rows(tmp_path / "eval.csv", 20, seed=2)
    job, given, out = tmp_path / "job.toml", tmp_path / "plan.json", tmp_path / "out"
    job.write_text(JOB)
    options = ("--assume", "2", "--memory", "1GiB", "--microbatches", "4", "--wire", "bfloat16")
    planned = run_here(TEMPLATE.get, "plan", job, *options, "--save", given)
    assert planned.returncode == 0, planned.stderr
    states = measured.recall_in(out, ("node-0", "node-1"))
    done = run_ringtune("train", job, "--local", "2", "--out", out, "--json", "--plan", given)
    assert done.returncode == 0, done.stderr
    measured.keep(states)
    plan = json.loads((out / "plan.json").read_text())
    assert plan == json.loads((given).read_text())["plan"]
    assert (plan["course"]["microbatches"], plan["course"]["wire_dtype"]) == (4, "bfloat16")
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    sends = {event["name"] for event in events if event.get("cat") == "send"}
    assert sends == {
        *(f"send {what} to node-{index}" for what in ("hidden state", "head") for index in range(2)),
        "send gradient to node-1",  # the blocks of node-0 do not train yet
    }
    # in microseconds from the start; a node knows the coordinator's clock as well as an answer comes at once
    assert all(event["dur"] >= 0 and event["ts"] > -5e6 for event in events if event.get("cat") == "send")
    report = json.loads((out / "report.json").read_text())
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics if line["kind"] == "train"] == list(range(1, 9))
    assert report["eval"]["count"] == 20
    assert all(node["busy_s"] > 0 and node["peak_rss_bytes"] > 2**20 for node in report["nodes"].values())
    assert sorted(path.name for path in (out / "adapter").iterdir()) == [
        "adapter.safetensors",
        "adapter_config.json",
        "head_config.json",
        "model_head.safetensors",
    ]
    assert not list(out.rglob("*.part"))
