"""A model of 1.1 billion parameters on four small boards: what frozen weights in bfloat16 are for.

A random Llama (22 blocks of width 2,048, 32,000 words, a decoder of its own) in a bfloat16 checkpoint is trained with
LoRA on four boards of 1,280 MiB each, libraries included, as control groups limit them. It has to plan, train 8 steps,
save, and evaluate; in float32 it does not fit, and one board alone is refused with both numbers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ringtune.jobs.job import load_job
from tests.bench.memory_boards import (
    MIB,
    NUM_BOARDS,
    boards,
    compared_boards,
    llama,
    refusal,
    report_of,
    train,
)

BOARD_BYTES = 1280 * MIB
REFUSED_EXIT_CODE = 6


def measure(folder: Path) -> dict[str, Any]:
    """Train on four boards, and try one board, and float32."""
    case = llama(folder)
    job = load_job(case.job).with_overrides({"runtime.frozen": "bfloat16"})
    case.job.write_text(job.to_toml(), encoding="utf-8")
    sizes = {f"board-{index}": BOARD_BYTES for index in range(NUM_BOARDS)}
    found: dict[str, Any] = {"board_bytes": BOARD_BYTES}
    with boards(case, folder / "bed", sizes) as (bed, watch):
        found["exit_code"] = train(bed, case, folder / "run")
        found["kills"] = sum(bed.times_out_of_memory(name) for name in sizes)
        found["boards"] = compared_boards(folder / "run", watch.boards)
        found["report"] = _report(folder / "run")
        found["float32"] = refusal(bed, case.job, "--set", "runtime.frozen=float32")
    with boards(case, folder / "alone", {"board-0": BOARD_BYTES}, count=1) as (bed, _):
        found["alone"] = refusal(bed, case.job)
    return found


def _report(run: Path) -> dict[str, Any]:
    report = report_of(run)
    if not report:
        return {}
    course = json.loads((run / "plan.json").read_text(encoding="utf-8"))["course"]
    saved = sorted(path.name for path in (run / "adapter").iterdir())
    return {
        "steps": report["steps"],
        "wall_s": report["wall_s"],
        "eval": report["eval"],
        "frozen": course.get("frozen"),
        "saved": saved,
    }


def missed(found: dict[str, Any]) -> list[str]:
    """What does not hold."""
    report = found["report"]
    wanted = {
        "exit code of the run": (found["exit_code"], 0),
        "boards without memory": (found["kills"], 0),
        "steps": (report.get("steps"), 8),
        "whether rows were evaluated": (bool(report.get("eval", {}).get("count")), True),
        "adapter saved": ("adapter.safetensors" in report.get("saved", ()), True),
        "exit code in float32": (found["float32"]["exit_code"], REFUSED_EXIT_CODE),
        "exit code of one board": (found["alone"]["exit_code"], REFUSED_EXIT_CODE),
        "both numbers for one board": ("needs" in found["alone"]["says"] and "but has" in found["alone"]["says"], True),
    }
    return [f"boards: {name} {was}, it has to be {has}" for name, (was, has) in wanted.items() if was != has]
