"""Time one block on this device, and count what its forward keeps for backward.

The planner gives out blocks in proportion to these times; the simulator predicts with them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from edge.model.activations import graph_bytes
from edge.model.safetensors_files import Checkpoint
from edge.model.skeleton import build_skeleton
from edge.model.slice import DTYPES, BlockRunner, materialise
from ringtune.errors import ModelError
from ringtune.job import Job

_WARM_UPS = 2
_LEAST = 3
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCost:
    """One block, one micro-batch at full length.

    Attributes:
        forward_s: without graph, seconds.
        graph_s: with graph.
        backward_s: its backward, down to the input's gradient.
        activation_bytes: what the forward with graph keeps until backward, its output included.
    """

    forward_s: float
    graph_s: float
    backward_s: float
    activation_bytes: int


def measure_block(folder: Path, job: Job, *, device: str = "cpu", repeats: int = 7, budget_s: float = 3.0) -> BlockCost:
    """Measure the last block with the job's adapter, dtype, dropout and largest micro-batch.

    Rows are padded unevenly, because the mask costs time and memory and most batches have one.

    Args:
        folder: of the base model.
        job: sizes and adapter.
        device: torch device.
        repeats: timings of each kind after warm-up; the median counts.
        budget_s: stop earlier (after three) when so many seconds have passed.

    Raises:
        ModelError: see ``build_skeleton`` and ``materialise``; or a folder without blocks.
    """
    place, dtype = torch.device(device), DTYPES[job.model.dtype]
    with torch.random.fork_rng(devices=[]):
        skeleton = build_skeleton(folder, job)
        if not len(skeleton.blocks):
            raise ModelError(f"{folder} has no blocks")
        last = len(skeleton.blocks) - 1
        with Checkpoint(folder) as checkpoint:
            materialise(skeleton, checkpoint, blocks=[last], with_embedding=False, dtype=dtype, device=place)
        blocks = BlockRunner(skeleton, dropout=job.train.dropout, seed=job.train.seed)
        rows, tokens = -(-job.train.batch_size // job.train.microbatches), job.train.max_length
        hidden = torch.randn(rows, tokens, int(skeleton.model.config.hidden_size), dtype=dtype, device=place)
        mask = torch.ones(rows, tokens, dtype=torch.int64, device=place)
        mask[0, tokens - tokens // 4 :] = 0
        context = blocks.context(hidden, mask)
        leaf = hidden.clone().requires_grad_(True)
        grad = torch.randn_like(hidden)

        def free() -> torch.Tensor:
            with torch.no_grad():
                return blocks.run(hidden, mask, context, last, last + 1)

        def graph() -> torch.Tensor:
            with torch.enable_grad():
                return blocks.run(leaf, mask, context, last, last + 1, train_at=(0, 0))

        weights = [*skeleton.model.parameters(), *skeleton.model.buffers(), hidden, leaf]
        kept = graph_bytes(graph(), weights)
        forward_s = _median_s(free, place, repeats, budget_s / 3)
        graph_s, backward_s = _graph_times(graph, grad, place, repeats, budget_s * 2 / 3)
    return BlockCost(forward_s=forward_s, graph_s=graph_s, backward_s=backward_s, activation_bytes=kept)


def _median_s(work: Callable[[], object], device: torch.device, repeats: int, budget_s: float) -> float:
    for _ in range(_WARM_UPS):
        work()
    started = time.perf_counter()
    times: list[float] = []
    while len(times) < repeats and (len(times) < _LEAST or time.perf_counter() - started < budget_s):
        times.append(_timed(work, device)[0])
    return statistics.median(times)


def _graph_times(
    forward: Callable[[], torch.Tensor], grad: torch.Tensor, device: torch.device, repeats: int, budget_s: float
) -> tuple[float, float]:
    forwards: list[float] = []
    backwards: list[float] = []
    started = time.perf_counter()
    while len(forwards) < repeats + _WARM_UPS:
        if len(forwards) >= _LEAST + _WARM_UPS and time.perf_counter() - started > budget_s:
            break
        forward_s, output = _timed(forward, device)
        backward_s, _ = _timed(lambda output=output: torch.autograd.backward([output], [grad]), device)  # type: ignore[misc]
        forwards.append(forward_s)
        backwards.append(backward_s)
    return statistics.median(forwards[_WARM_UPS:]), statistics.median(backwards[_WARM_UPS:])


def _timed(work: Callable[[], T], device: torch.device) -> tuple[float, T]:
    _wait(device)
    started = time.perf_counter()
    result = work()
    _wait(device)
    return time.perf_counter() - started, result


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
