"""``make bench-d2ft``: what is left of a block's forward and backward where subnets are skipped, on one core.

Every subnet is full for ``full`` of ``microbatches`` micro-batches and skipped for the others, each for other ones; the
time of all micro-batches is compared with that of the whole block as the library runs it. The variants take turns, and
what counts is processor time, so that a machine that others use slows all of them down alike; the median of the ratios
of all rounds is given. Beside blocks of BERT there is one of Llama with grouped-query attention, three query heads for
each key/value head, whose rows have padding; it is reported. Writes ``build/bench/d2ft.json``, exits with 1 if the
BERT block that gains least misses a target at 8 rows of 128 tokens.
"""

from __future__ import annotations

import argparse
import itertools
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

from edge.model.skeleton import build_skeleton
from edge.model.slice import BlockRunner, materialise
from edge.model.tensor_files import SafetensorsFiles
from ringtune.job.job import parse_job
from ringtune.schedule.operation_tables import FORWARD_ONLY, FULL, SHORTCUT
from tests.bench.rings import conclude, missed
from tests.support import tiny
from tests.support.tiny_families import write_family

OUT: Final = Path("build/bench/d2ft.json")
TARGETS: Final = {
    "compute_ratio_60_seq_bn": ("<=", 0.66),
    "compute_ratio_60_lora": ("<=", 0.66),
    "compute_ratio_60_full": ("<=", 0.70),
    "compute_ratio_50_seq_bn": ("<=", 0.56),
    "compute_ratio_50_lora": ("<=", 0.56),
    "compute_ratio_50_full": ("<=", 0.60),
}
ADAPTERS: Final = {"seq_bn": "seq_bn", "lora": "lora", "full": "full"}
HEADS: Final = 12


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a block is like.

    Attributes:
        model_type: its family.
        width: of the hidden state.
        inner: width of the feed-forward part.
        kv_heads: key/value heads of its 12 heads; each is a subnet with its query heads.
        padded: share of the tokens that every other row lacks.
    """

    model_type: str = "bert"
    width: int
    inner: int
    kv_heads: int = HEADS
    padded: float = 0.0

    def write(self, folder: Path) -> None:
        """Write a model of one such block with random weights."""
        if self.model_type == "bert":
            sizes = {"hidden_size": self.width, "num_heads": HEADS, "intermediate_size": self.inner}
            tiny.write_bert(folder, vocab_size=64, num_blocks=1, **sizes)
            return
        write_family(
            folder,
            self.model_type,
            num_blocks=1,
            hidden_size=self.width,
            num_attention_heads=HEADS,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.inner,
            initializer_range=0.02,
        )

    def mask(self, rows: int, tokens: int) -> torch.Tensor:
        """The mask of a micro-batch: 1 = token."""
        found = torch.ones(rows, tokens, dtype=torch.int64)
        found[1::2, tokens - round(self.padded * tokens) :] = 0
        return found


SHAPES: Final = {
    "minilm": Shape(width=384, inner=1536),
    "base": Shape(width=768, inner=3072),
    "llama": Shape(model_type="llama", width=768, inner=2048, kv_heads=4, padded=0.25),
}


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

    def patterns(self, subnets: int) -> list[str]:
        """The pattern of the block for each micro-batch."""
        rng = random.Random(0)
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
    """A block with random weights, forward and backward.

    Args:
        folder: for its files.
        shape: what it is like.
        adapter: as in a job.
        rows: of a micro-batch.
        tokens: of a row.
    """

    def __init__(self, folder: Path, *, shape: Shape, adapter: str, rows: int, tokens: int) -> None:
        shape.write(folder)
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
        self._hidden = torch.randn(rows, tokens, shape.width, generator=generator)
        self._grad = torch.randn(rows, tokens, shape.width, generator=generator)
        self._mask = shape.mask(rows, tokens)
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
    """Compute ratios by block, adapter and (rows, tokens) of a micro-batch; one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {
            f"{name}_{adapter}_{rows}x{tokens}": _ratios(shape, ADAPTERS[adapter], rows, tokens, rounds)
            for name, shape in SHAPES.items()
            for adapter in ADAPTERS
            for rows, tokens in shapes
        }
    finally:
        torch.set_num_threads(threads)


def _ratios(shape: Shape, adapter: str, rows: int, tokens: int, rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        block = OneBlock(Path(folder), shape=shape, adapter=adapter, rows=rows, tokens=tokens)
        found = ratios_of(block, MIXES, subnets=shape.kv_heads, rounds=rounds)
    return {f"compute_ratio_{name}": round(value, 4) for name, value in found.items()}


def worst_ratios(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """For each adapter the ratio of the BERT block that gains least, at 8 rows of 128 tokens."""
    return {
        f"{ratio}_{adapter}": max(found[f"{shape}_{adapter}_8x128"][ratio] for shape in ("minilm", "base"))
        for adapter, ratio in itertools.product(ADAPTERS, ("compute_ratio_60", "compute_ratio_50"))
    }


def main() -> int:
    """Measure, write and print; 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="rounds in which every variant has a turn")
    rounds = parser.parse_args().rounds
    found = compute_ratios(shapes=((8, 128), (8, 64), (2, 64)), rounds=rounds)
    figures = worst_ratios(found)
    return conclude(OUT, {**figures, "compute_ratios": found}, missed(figures, TARGETS))


if __name__ == "__main__":
    sys.exit(main())
