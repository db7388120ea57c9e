"""Part ``hift-boards`` of ``make bench-memory``: all parameters of a 110-million model train on four boards of 1 GiB.

A random BERT (12 blocks of width 768, 30,522 words, float32) trains with HiFT, one unit a step, AdamW, in batches of 8
rows of 128 tokens: two sweeps of 14 steps. Each of the four boards owns rows, and so has copies of embedding and head;
its control group ends it at 1,024 MiB, libraries included. The run has to plan with state on the disk, train, leave
``DIR/model/``, and evaluate. That folder is evaluated on the same boards once more, by ``ringtune eval``.

Beside it, how planning ends for what has less room::

    memory   the same with optimizer state in memory
    full     plain full fine-tuning: one group of all units, state in memory
    alone    the same as the run, on one of these boards
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any, Final

from deploy.testbed.testbed import Testbed
from tests.bench.hift_state import BATCH, NUM_UNITS, TOKENS, VOCABULARY
from tests.bench.mbert import write_model, write_rows
from tests.bench.memory_boards import (
    MAX_ERROR,
    MIB,
    NUM_BOARDS,
    RUN_S,
    Case,
    boards,
    compared_boards,
    refusal,
    report_of,
    say,
    train,
)

BOARD_BYTES: Final = 1024 * MIB
REFUSED_EXIT_CODE: Final = 6
SWEEPS: Final = 2
_JOB: Final = """
[model]
path = "{model}"
[train]
method = "hift"
optimizer = "adamw"
learning_rate = 1e-5
batch_size = {batch}
microbatches = 2
max_length = {tokens}
max_steps = {steps}
local_iterations = 5
checkpoint_every = 14
eval_every = 14
[hift]
group_size = 1
state = "disk"
[runtime]
threads = 1
lease_s = 60
wait_s = 900
"""

Figures = dict[str, Any]


def bert(folder: Path) -> Case:
    """The job, and rows that all boards share."""
    model = write_model(folder / "model", vocabulary=VOCABULARY)
    job = folder / "job.toml"
    job.write_text(
        _JOB.format(model=model.resolve(), batch=BATCH, tokens=TOKENS, steps=SWEEPS * NUM_UNITS), encoding="utf-8"
    )
    rows, held_out = (write_rows(folder / f"{count}.csv", rows=count, tokens=TOKENS) for count in (128, 16))
    return Case(job, rows, held_out)


def measure(folder: Path) -> Figures:
    """Train on four boards, and ask for plans of what has less room.

    Raises:
        MissingCapability: no testbed can be built here.
    """
    case = bert(folder)
    sizes = {f"board-{index}": BOARD_BYTES for index in range(NUM_BOARDS)}
    found: Figures = {"board_bytes": BOARD_BYTES}
    with boards(case, folder / "bed", sizes) as (bed, watch):
        found["memory"] = refusal(bed, case.job, "--set", "hift.state=memory")
        found["full"] = refusal(bed, case.job, "--set", "hift.state=memory", "--set", f"hift.group_size={NUM_UNITS}")
        found["exit_code"] = train(bed, case, folder / "run")
        found["boards"] = compared_boards(folder / "run", watch.boards)
        found["eval_exit_code"] = _evaluate(bed, folder / "run")
        found["kills"] = sum(bed.times_out_of_memory(name) for name in sizes)
    with boards(case, folder / "alone", {"board-0": BOARD_BYTES}, count=1) as (bed, _):
        found["alone"] = refusal(bed, case.job)
    found["report"] = _report(folder / "run")
    say("hift", "boards", found)
    errors = [abs(board["error"]) for board in found["boards"].values()]
    return {**found, "figures": {"hift_boards_largest_error": max(errors, default=None)}}


def _evaluate(bed: Testbed, run: Path) -> int:
    """Evaluate the model of a run on the boards; the exit code."""
    words = [sys.executable, "-P", "-m", "ringtune.cli", "eval", str(run)]
    command = f"{shlex.join(words)} --coordinator {{coordinator}} --insecure"
    return bed.run(["sh", "-c", command], timeout_s=RUN_S)


def _report(run: Path) -> Figures:
    report, model = report_of(run), run / "model"
    if not report:
        return {}
    return {
        "steps": report["steps"],
        "wall_s": report["wall_s"],
        "eval": report["eval"],
        "model_bytes": sum(path.stat().st_size for path in model.glob("*.safetensors")),
    }


def missed(found: Figures) -> list[str]:
    """What does not hold; empty if all does."""
    report = found["report"]
    wanted = {
        "exit code of the run": (found["exit_code"], 0),
        "exit code of the evaluation": (found["eval_exit_code"], 0),
        "boards without memory": (found["kills"], 0),
        "steps": (report.get("steps"), SWEEPS * NUM_UNITS),
        "whether rows were evaluated": (bool((report.get("eval") or {}).get("count")), True),
        "whether the model was saved": (report.get("model_bytes", 0) > 400_000_000, True),
        "exit code of full fine-tuning": (found["full"]["exit_code"], REFUSED_EXIT_CODE),
        "both numbers for full fine-tuning": (_has_both_numbers(found["full"]), True),
        "exit code of one board": (found["alone"]["exit_code"], REFUSED_EXIT_CODE),
        "both numbers for one board": (_has_both_numbers(found["alone"]), True),
    }
    off = [
        f"{name} is {one['error']:+.1%} off" for name, one in found["boards"].items() if abs(one["error"]) > MAX_ERROR
    ]
    return off + [f"{name} {was}, it has to be {has}" for name, (was, has) in wanted.items() if was != has]


def _has_both_numbers(planned: Figures) -> bool:
    return "needs" in planned["says"] and "but has" in planned["says"]
