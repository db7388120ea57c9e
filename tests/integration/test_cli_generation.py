"""Texts of a language model as a user gets them: ROUGE-L in a run's report, and ``ringtune predict`` on a ring."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from ringtune.run_control.evaluation import rouge_l
from tests.support.cluster import TEMPLATE, Cluster
from tests.support.tiny_families import write_family
from tests.support.typed import run_here

JOB = """
[model]
path = "model"
task = "causal-lm"
[adapter]
config = "lora"
[data]
train = "rows.jsonl"
eval = "rows.jsonl"
owners = 1
[runtime]
lease_s = 30.0
[train]
batch_size = 4
microbatches = 2
max_length = 16
local_iterations = 2
max_steps = 2
learning_rate = 1e-2
[generation]
rows = 100
max_new_tokens = 5
at_once = 3
temperature = 1.5
seed = 4
"""


def typed(*arguments: object) -> list[dict[str, object]]:
    """The JSON lines of a command that has to succeed."""
    done = run_here(TEMPLATE.get, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_report_and_ring_write_what_one_process_writes(ring: Cluster, tmp_path: Path) -> None:
    """ROUGE-L of an evaluation is that of local predictions, and so is each text that nodes write for this machine.

    They draw from the same tokens: the model limits them.
    """
    write_family(tmp_path / "model", "llama", with_decoder=True)
    answer = " ".join(f"w{at}" for at in range(60))  # of words of which any model writes some
    rows = [{"text": f"w{at} w{at + 3} w{at % 4}", "answer": answer} for at in range(7)]
    longer = [*rows, {"text": " ".join(f"w{at}" for at in range(40)), "answer": answer}]  # than train.max_length
    (tmp_path / "longer.jsonl").write_text("".join(json.dumps(row) + "\n" for row in longer))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "model" / "generation_config.json").write_text('{"top_k": 4, "top_p": 0.9}')
    run, plan = tmp_path / "run", tmp_path / "plan.json"
    typed("plan", tmp_path / "job.toml", "--assume", "2", "--memory", "1GiB", "--save", plan)  # of equal nodes
    typed("train", tmp_path / "job.toml", "--local", "2", "--plan", plan, "--out", run)
    found = json.loads((run / "report.json").read_text())["eval"]
    (placement,) = json.loads((run / "plan.json").read_text())["placements"]
    assert len({piece["node"] for piece in placement["slices"]}) == 2
    words = (
        "predict",
        run,
        "--data",
        tmp_path / "longer.jsonl",
        "--max-new-tokens",
        "5",
        "--temperature",
        "1.5",
        "--seed",
        "4",
    )
    *alone, summary = typed(*words)
    assert found["generated"] == found["judged_texts"] == len(rows) and summary["judged"] == len(longer)
    told = statistics.fmean(rouge_l(str(line["predicted"]), [answer]) for line in alone[:-1])
    assert found["rouge_l"] == pytest.approx(told, abs=1e-6) and found["rouge_l"] > 0
    *there, same = typed(*words, "--coordinator", ring.address)
    assert (there, same) == (alone, summary)
    ring.wait_idle(*ring.names)
