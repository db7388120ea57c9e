"""``make bench-llm``: language models with LoRA: what frozen weights of fewer bits cost, and what a ring costs.

Writes ``build/bench/llm.json``; exit code 1 if a target is missed. Parts, of which ``--only`` picks some:

======  ==================================================================================================
bits    stories15M on Shakespeare, one node, frozen weights of each kind: bytes of the plan, seconds of a
        step and loss of the held-out play over those of float32; medians of interleaved runs
plain   the same job in a ring of one node over plain transformers and adapters in one process: largest
        difference of a step's loss, seconds of a step (median of interleaved pairs)
boards  a random Llama of 1.1 billion parameters with ``frozen = "nf4"``: on two boards of 768 MiB, and on
        one of 1,280 MiB; no board is killed (as root, where a testbed can be made)
eight   a random Llama of 8 billion parameters, every block of which trains: two steps on four boards of
        4 GiB; what the plan says and what boards need, seconds of quantising and of a step (as root; some
        six minutes, and 16 GB of the disk meanwhile)
======  ==================================================================================================

Source of model and texts: ``docs/examples/shakespeare``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from deploy.testbed.capabilities import MissingCapability
from docs.examples.shakespeare.prepare import prepare
from ringtune.job.job import load_job
from ringtune.storage.durable import write_durably
from tests.bench.memory import EIGHT_BILLION, MAX_ERROR, Case, boards, compared_boards, llama, report_of, train
from tests.bench.rings import Figures, conclude, machine, missed, run_plain, run_ring, say, write_job

OUT: Final = Path("build/bench")
FROZEN: Final = ("float32", "bfloat16", "int8", "nf4")
"""Values of ``runtime.frozen``; float32 is the base of comparison."""

STEPS, FIRST_STEP, EIGHT_STEPS = 60, 10, 2
REPEATS: Final = 3
BOARDS: Final = {"two": (2, 768 << 20), "one": (1, 1280 << 20)}
TARGETS: Final[dict[str, tuple[str, float]]] = {
    "nf4_loss_ratio": ("<=", 1.01),
    "plain_loss_difference": ("<=", 1e-4),
    "plain_wall_ratio": ("<=", 1.05),
    "two_exit_code": ("<=", 0),
    "two_kills": ("<=", 0),
    "one_exit_code": ("<=", 0),
    "one_kills": ("<=", 0),
    "eight_exit_code": ("<=", 0),
    "eight_kills": ("<=", 0),
    "eight_error": ("<=", MAX_ERROR),
}


def shakespeare_job(frozen: str = "float32") -> Path:
    """Write the job of ``bits`` and ``plain``: LoRA on query, key and value, 8 x 128 tokens; all blocks train."""
    made = prepare(OUT / "shakespeare")
    held_out = made["data.eval"].with_name("held_out_short.txt")
    held_out.write_text(made["data.eval"].read_text(encoding="utf-8")[:40_000], encoding="utf-8")
    return write_job(
        OUT / f"llm-{frozen}.toml",
        model=made["model.path"],
        train=made["data.train"],
        steps=STEPS,
        method="all",
        microbatches=2,
        tokens=128,
        more={
            "model.task": "causal-lm",
            "data.eval": str(held_out.resolve()),
            "adapter.config": "lora[r=8,attn_matrices=['q','k','v']]",
            "train.learning_rate": 2e-3,
            "train.batch_size": 8,
            "runtime.frozen": frozen,
        },
    )


def measure_bits() -> Figures:
    """Each kind of frozen weights, one after the other, several times."""
    seconds: dict[str, list[float]] = {frozen: [] for frozen in FROZEN}
    figures: Figures = {"samples": {"step_s": seconds}}
    for _ in range(REPEATS):
        for frozen in FROZEN:
            ran = run_ring(shakespeare_job(frozen), OUT / "llm-run", nodes=1)
            seconds[frozen].append(ran.wall_s(FIRST_STEP, STEPS) / (STEPS - FIRST_STEP))
            (node,) = ran.report["nodes"].values()
            figures |= {f"{frozen}_loss": ran.report["eval"]["loss"], f"{frozen}_bytes": node["predicted_bytes"]}
            say(f"{frozen}: {seconds[frozen][-1]:.3f} s a step, loss {figures[f'{frozen}_loss']:.4f}")
    for frozen in FROZEN[1:]:
        times = [one / base for one, base in zip(seconds[frozen], seconds[FROZEN[0]], strict=True)]
        figures |= {
            f"{frozen}_wall_ratio": statistics.median(times),
            f"{frozen}_loss_ratio": figures[f"{frozen}_loss"] / figures[f"{FROZEN[0]}_loss"],
            f"{frozen}_bytes_ratio": figures[f"{frozen}_bytes"] / figures[f"{FROZEN[0]}_bytes"],
        }
    return figures


def measure_plain() -> Figures:
    """The ring of one node beside one process."""
    job, times, difference = shakespeare_job(), [], 0.0
    for pair in range(REPEATS):
        ring = run_ring(job, OUT / "llm-run", nodes=1)
        plain = run_plain(ring.folder, first_step=FIRST_STEP)
        steps = [json.loads(line) for line in (ring.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        losses = [step["loss"] for step in steps if step["kind"] == "train"]
        difference = max(abs(one - other) for one, other in zip(losses, plain["losses"], strict=True))
        times.append(ring.wall_s(FIRST_STEP, STEPS - 1) / plain["wall_s"])
        say(f"pair {pair}: {times[-1]:.3f}, largest difference of a loss {difference:.2e}")
    return {
        "plain_wall_ratio": statistics.median(times),
        "plain_loss_difference": difference,
        "samples": {"plain_wall_ratio": times},
    }


def measure_boards() -> Figures:
    """The big model on small boards."""
    figures: Figures = {}
    with tempfile.TemporaryDirectory(prefix="llm-", dir=OUT) as made:
        folder = Path(made).resolve()
        case = llama(folder)
        job = load_job(case.job).with_overrides({"runtime.frozen": "nf4"})
        write_durably(case.job, job.to_toml().encode())
        for name, (count, size) in BOARDS.items():
            figures |= _on_boards(case, folder / name, name, count, size)
    return figures


def measure_eight() -> Figures:
    """The shape of Llama 3 8B on four boards; ``preparing`` is reading and quantising, all boards at once."""
    with tempfile.TemporaryDirectory(prefix="eight-", dir=OUT) as made:
        folder = Path(made).resolve()
        case = llama(folder, EIGHT_BILLION)
        method = {"train.method": "all", "train.max_steps": EIGHT_STEPS}
        job = load_job(case.job).with_overrides(
            {**method, "runtime.frozen": "nf4", "placement.replicas": "never"}  # with them a board may be left out
        )
        write_durably(case.job, job.to_toml().encode())
        figures = _on_boards(case, folder / "eight", "eight", 4, 4 << 30)
        if report := report_of(folder / "eight" / "run"):
            figures["eight_error"] = max(abs(one["error"]) for one in figures["eight_boards"].values())
            figures["eight_quantising_s"] = report["phases_s"]["preparing"]
            figures["eight_step_s"] = report["steps_s"] / EIGHT_STEPS
            say(f"eight: {figures['eight_quantising_s']:.1f} s of quantising, {figures['eight_step_s']:.1f} s a step")
    return figures


def _on_boards(case: Case, folder: Path, name: str, count: int, size: int) -> Figures:
    sizes = {f"board-{index}": size for index in range(count)}
    with boards(case, folder / "bed", sizes, count=count) as (bed, watch):
        code = train(bed, case, folder / "run")
        kills = sum(bed.times_out_of_memory(board) for board in sizes)
    found = compared_boards(folder / "run", watch.boards)
    for board, one in found.items():
        say(f"{board} of {name}: needs {one['needed_bytes'] >> 20} MiB, the plan says {one['predicted_bytes'] >> 20}")
    return {f"{name}_exit_code": code, f"{name}_kills": kills, f"{name}_boards": found}


PARTS: Final[dict[str, Callable[[], Figures]]] = {
    "bits": measure_bits,
    "plain": measure_plain,
    "boards": measure_boards,
    "eight": measure_eight,
}


def main() -> int:
    """Measure the parts that are asked for; 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS), help="parts")
    OUT.mkdir(parents=True, exist_ok=True)
    figures: Figures = {}
    for name in parser.parse_args().only:
        try:
            found = PARTS[name]()
        except MissingCapability as missing:
            say(f"{name} not measured: {missing}")
            continue
        figures |= found | {"samples": figures.get("samples", {}) | found.get("samples", {})}
    figures |= {"targets": TARGETS, "machine": machine()}
    return conclude(OUT / "llm.json", figures, missed(figures, TARGETS))


if __name__ == "__main__":
    sys.exit(main())
