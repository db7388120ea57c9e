"""How much of a block's time is left when subnets are skipped: forward and backward of one block, on one core.

Every subnet is full for ``full`` of ``microbatches`` micro-batches and skipped for the others, each for other ones; the
time of all micro-batches is compared with that of the whole block as the library runs it. The variants take turns, and
what counts is processor time, so that a machine that others use slows all of them down alike; the median of the ratios
of all rounds is given.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from edge.model.safetensors_files import SafetensorsFiles
from edge.model.skeleton import build_skeleton
from edge.model.slice import BlockRunner, materialise
from ringtune.jobs.job import parse_job
from ringtune.schedule.operations.codes import FORWARD_ONLY, FULL, SHORTCUT
from tests.support import tiny

ADAPTERS: Final = {"seq_bn": "seq_bn", "lora": "lora", "full": "full"}
WIDTHS: Final = {"minilm": 384, "base": 768}
HEADS: Final = 12


@dataclass(frozen=True, kw_only=True)
class Mix:
    """What each subnet does in one batch.

    Attributes:
        microbatches: of the batch.
        full: of them, so many are full.
        forward_only: of them, so many are forward-only; the rest is skipped.
        is_random: whether a subnet's micro-batches are drawn; otherwise they follow one another, from another one on
            for each subnet.
    """

    microbatches: int
    full: int
    forward_only: int = 0
    is_random: bool = False

    def patterns(self, subnets: int, *, seed: int = 0) -> list[str]:
        """The pattern of the block for each micro-batch."""
        rng = random.Random(seed)
        skipped = self.microbatches - self.full - self.forward_only
        codes = FULL * self.full + FORWARD_ONLY * self.forward_only + SHORTCUT * skipped
        columns = []
        for subnet in range(subnets):
            at = subnet % self.microbatches
            columns.append(rng.sample(codes, len(codes)) if self.is_random else [*codes[-at:], *codes[:-at]])
        return ["".join(column[micro] for column in columns) for micro in range(self.microbatches)]


MIXES: Final = {
    "60": Mix(microbatches=5, full=3),
    "60_random": Mix(microbatches=5, full=3, is_random=True),
    "50": Mix(microbatches=4, full=2),
    "60_with_forward_only": Mix(microbatches=5, full=3, forward_only=2),
}


class OneBlock:
    """A block of a BERT with random weights, forward and backward.

    Args:
        folder: for its files.
        width: of the hidden state.
        adapter: as in a job.
        rows: of a micro-batch.
        tokens: of a row.
    """

    def __init__(self, folder: Path, *, width: int, adapter: str, rows: int, tokens: int) -> None:
        tiny.write_bert(
            folder, vocab_size=64, hidden_size=width, num_blocks=1, num_heads=HEADS, intermediate_size=4 * width
        )
        job = parse_job(
            f'[model]\npath = "{folder}"\ntask = "sequence-classification"\n[adapter]\nconfig = "{adapter}"\n',
            source="bench",
        )
        skeleton = build_skeleton(folder, job)
        with SafetensorsFiles(folder) as weights:
            device = torch.device("cpu")
            materialise(skeleton, weights, blocks=[0], with_embedding=False, dtype=torch.float32, device=device)
        self._runner = BlockRunner(skeleton, dropout=0.0, seed=0)
        generator = torch.Generator().manual_seed(0)
        self._hidden = torch.randn(rows, tokens, width, generator=generator)
        self._grad = torch.randn(rows, tokens, width, generator=generator)
        self._mask = torch.ones(rows, tokens, dtype=torch.int64)
        self._context = self._runner.context(self._hidden, self._mask)

    def batch_s(self, patterns: Sequence[str]) -> float:
        """Processor seconds of forward and backward of a batch, a pattern for each micro-batch; empty = whole block."""
        for parameter in self._runner.parameters(0, 1).values():
            parameter.grad = None
        begin = time.process_time()
        for pattern in patterns:
            x = self._hidden.detach().requires_grad_(True)
            y = self._runner.run(
                x, self._mask, self._context, 0, 1, train_at=(0, 0), patterns={0: pattern} if pattern else None
            )
            if y.grad_fn is not None:
                y.backward(self._grad)  # type: ignore[no-untyped-call]
        return time.process_time() - begin


def ratios_of(block: OneBlock, mixes: Mapping[str, Mix], *, subnets: int, rounds: int) -> dict[str, float]:
    """The share of the whole block's time that each mix takes; variants take turns in every round."""
    variants = {name: (mix.patterns(subnets), mix.microbatches) for name, mix in mixes.items()}
    found: dict[str, list[float]] = {name: [] for name in variants}
    for round_ in range(rounds + 1):
        whole_s = block.batch_s([""] * 4) / 4
        for name, (patterns, count) in variants.items():
            ratio = block.batch_s(patterns) / count / whole_s
            if round_:  # the first round warms up
                found[name].append(ratio)
    return {name: statistics.median(ratios) for name, ratios in found.items()}


def compute_ratios(*, rounds: int = 9, shapes: Sequence[tuple[int, int]] = ((8, 128),)) -> dict[str, Any]:
    """Compute ratios by width, adapter and (rows, tokens) of a micro-batch; one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {
            f"{name}_{adapter}_{rows}x{tokens}": _ratios(width, ADAPTERS[adapter], rows, tokens, rounds)
            for name, width in WIDTHS.items()
            for adapter in ADAPTERS
            for rows, tokens in shapes
        }
    finally:
        torch.set_num_threads(threads)


def _ratios(width: int, adapter: str, rows: int, tokens: int, rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        block = OneBlock(Path(folder), width=width, adapter=adapter, rows=rows, tokens=tokens)
        found = ratios_of(block, MIXES, subnets=HEADS, rounds=rounds)
    return {f"compute_ratio_{name}": round(value, 4) for name, value in found.items()}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="rounds in which every variant has a turn")
    sys.stdout.write(json.dumps(compute_ratios(rounds=parser.parse_args().rounds), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
