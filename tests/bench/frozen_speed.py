"""What a step of some blocks takes with frozen weights in 32, 16 and 8 bits, natively and widened.

Blocks of two models, forward with a graph and backward, as an executor carries them out, on one thread. The ways take
turns in one process, round after round, and the processor's seconds count: a ratio is that of two times of the same
round. ``python -m tests.bench.frozen_speed`` prints the figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from edge.compute.executor import NodeExecutor
from ringtune.jobs.job import Job, parse_job
from ringtune.schedule.actions import Action, Op, Payload, TensorKey
from ringtune.schedule.course import Course
from ringtune.schedule.extent import Owner
from ringtune.schedule.frozen_weights import FROZEN_DTYPES, FrozenWeights
from ringtune.schedule.methods import Everything
from ringtune.schedule.placement import Placement, Slice
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.turns import StepKind, Turn
from tests.bench.collecting import write_llama
from tests.support.tiny import write_bert

WAYS: Final = {
    "float32": None,
    **{
        f"{dtype} {'native' if native else 'widened'}": FrozenWeights(dtype=dtype, native=native)
        for dtype in FROZEN_DTYPES
        for native in (True, False)
    },
}
SIZES: Final = {64: (1, 64), 1024: (16, 64)}
"""Tokens of a micro-batch -> rows, and tokens of a row."""

ROUNDS: Final = 5
_LONG_S = 0.4


def write_models(folder: Path) -> dict[str, tuple[Path, str, int]]:
    """Write two blocks of MiniLM's shape and two of a Llama of 1.1 billion parameters: folder, adapter, width."""
    minilm = write_bert(
        folder / "minilm", vocab_size=64, hidden_size=384, num_blocks=2, num_heads=12, intermediate_size=1536
    )
    return {
        "minilm, seq_bn": (minilm, "seq_bn", 384),
        "llama 1.1b, lora": (write_llama(folder / "llama", blocks=2, words=64), "lora", 2048),
    }


def one_node(model: Path, adapter: str, width: int, frozen: FrozenWeights | None, tokens: int) -> NodeExecutor:
    """A node that hosts both blocks, of which the lower one has trainable ones below it no more."""
    rows, length = SIZES[tokens]
    job: Job = parse_job(f'[model]\npath = "{model}"\n[adapter]\nconfig = "{adapter}"\n', source="bench")
    course = Course(
        method=Everything(),
        num_blocks=2,
        owners=(Owner(node="elsewhere", train_rows=rows, eval_rows=0),),
        num_steps=1,
        local_iterations=1,
        batch_size=rows,
        microbatches=1,
        max_length=length,
        hidden_size=width,
        labels=("a", "b"),
        frozen=frozen,
    )
    plan = Plan.of(course, Placement(slices=(Slice(node="here", start=0, stop=2),)))
    executor = NodeExecutor(plan, "here", job, model, None)
    turn = Turn(
        index=0,
        kind=StepKind.TRAIN,
        owner="elsewhere",
        round=0,
        first_seq=0,
        num_items=1,
        first_step=0,
        first_batch=0,
    )
    executor.grant(turn)
    return executor


def step_of(executor: NodeExecutor, width: int, tokens: int) -> Callable[[], None]:
    """A forward with graph and a backward of both blocks."""
    rows, length = SIZES[tokens]
    hidden, mask = torch.randn(rows, length, width), torch.ones(rows, length, dtype=torch.int64)

    def step() -> None:
        executor.put_tensor(TensorKey(Payload.HIDDEN, 0, 0, 0), hidden, mask)
        executor.run(Action(Op.FORWARD, 0, 0, 0, 2))
        executor.take_tensor(TensorKey(Payload.HIDDEN, 0, 0, 2))
        executor.put_tensor(TensorKey(Payload.GRAD, 0, 0, 2), hidden, None)
        executor.run(Action(Op.BACKWARD, 0, 0, 0, 2))

    return step


def timed(step: Callable[[], None], times: int) -> float:
    """Processor seconds of one step, the mean of so many."""
    start_s = time.process_time()
    for _ in range(times):
        step()
    return (time.process_time() - start_s) / times


def compare(model: Path, adapter: str, width: int, tokens: int, rounds: int = ROUNDS) -> dict[str, Any]:
    """Seconds of each way, and its ratio to float32: median, least and most of all rounds."""
    steps = {name: step_of(one_node(model, adapter, width, way, tokens), width, tokens) for name, way in WAYS.items()}
    first_s = [timed(step, 1) for step in steps.values()]
    times = max(1, round(_LONG_S / max(first_s)))
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            found[name].append(timed(step, times))
    return {name: _summed(seconds, found["float32"]) for name, seconds in found.items()}


def _summed(seconds: list[float], reference: list[float]) -> dict[str, float]:
    ratios = [own / other for own, other in zip(seconds, reference, strict=True)]
    return {
        "step_s": statistics.median(seconds),
        "ratio": statistics.median(ratios),
        "least_ratio": min(ratios),
        "most_ratio": max(ratios),
    }


def measure(folder: Path, rounds: int = ROUNDS) -> dict[str, Any]:
    """All models at all sizes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {
            name: {f"{tokens} tokens": compare(*model, tokens, rounds) for tokens in SIZES}
            for name, model in write_models(folder).items()
        }
    finally:
        torch.set_num_threads(before)


def main() -> None:
    """Measure in a folder, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    print(json.dumps(measure(options.folder, options.rounds), indent=1))  # noqa: T201


if __name__ == "__main__":
    main()
