"""Part ``saved`` of ``make bench-memory``: what a stack of blocks keeps under each policy, and what that costs in time.

A stack of BERT blocks with random weights goes forward and back with a micro-batch of 16 x 128 tokens, on one core, as
at a node, under each policy::

    none        the whole graph is kept
    velora      layers keep projections as by default: query, key, value and down; bottlenecks' down; LoRA's A at
                down, and with dropout at value
    every       the same for all layers that train
    recompute   every block keeps its input, and is run again
    both        it is run again with projections

for a frozen base with a bottleneck, with LoRA on all matrices, and for training of the blocks' own weights; without
dropout, where the attention is a fused kernel, and with it. Time is processor time, so that a machine that others use
slows all policies down alike; policies take turns, and what counts is the median of the ratios to ``none``. The peak is
that of the resident memory of a process of its own, above what it had before, without dropout.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch

from edge.machine.resources import keep_freed_memory, peak_rss_bytes, release_memory, reset_peak, rss_bytes
from edge.model.skeleton import Skeleton, build_skeleton
from edge.model.slice import materialise
from edge.model.tensor_files import SafetensorsFiles
from ringtune.job.job import parse_job
from ringtune.schedule.saved_activations import Velora
from ringtune.schedule.units import Range
from tests.support import tiny
from tests.support.block_stack import Stack

ROWS, TOKENS, WIDTH, HEADS, NUM_BLOCKS = 16, 128, 384, 12, 4
ROUNDS: Final = 7
MEASURED_IN_PROCESS: Final = ("none", "velora", "recompute", "both")
ALL: Final = (Range(0, NUM_BLOCKS),)
LORA: Final = "lora[attn_matrices=['q','k','v'],intermediate_lora=True,output_lora=True]"
ADAPTERS: Final = {"seq_bn": "seq_bn", "lora": LORA, "full": "full"}
DROPOUTS: Final = (0.0, 0.1)
POLICIES: Final = ("none", "velora", "every", "recompute", "both")
BOUNDS: Final = {
    "velora_saved_over_none_full": 0.80,
    "recompute_saved_over_none": 0.15,
    "recompute_time_ratio": 1.5,
    "velora_time_ratio": 1.05,
}
MIB: Final = 1 << 20

Figures = dict[str, Any]


def measure(folder: Path) -> Figures:
    """All adapters, dropouts and policies."""
    model = write_model(folder / "model")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        cases = {
            f"{name}_dropout_{dropout}": case_figures(model, name, dropout) for name in ADAPTERS for dropout in DROPOUTS
        }
    finally:
        torch.set_num_threads(threads)
    return {"cases": cases, "figures": figures_of(cases)}


def missed(figures: Figures) -> list[str]:
    """The figures above their bounds."""
    found = figures["figures"]
    return [f"{name} is {found[name]}, at most {bound}" for name, bound in BOUNDS.items() if found[name] > bound]


def figures_of(cases: dict[str, Figures]) -> dict[str, float]:
    """The worst of all cases for each figure that has a bound; for ``velora_saved_over_none_full`` without dropout.

    Dropout in the attention adds what no linear layer reads, so that VeLoRA's share is smaller: a figure of its own.
    """

    def worst(policy: str, key: str, *names: str) -> float:
        found = [float(case[policy][key]) for name, case in cases.items() if name.startswith(names)]
        return max(found, default=0.0)

    return {
        "velora_saved_over_none_full": worst("velora", "saved_over_none", "full_dropout_0.0"),
        "velora_every_saved_over_none_full": worst("every", "saved_over_none", "full_dropout_0.0"),
        "velora_saved_over_none_full_with_dropout": worst("velora", "saved_over_none", "full_dropout_0.1"),
        "velora_every_saved_over_none_full_with_dropout": worst("every", "saved_over_none", "full_dropout_0.1"),
        "velora_saved_over_none_frozen": worst("velora", "saved_over_none", "seq_bn", "lora"),
        "recompute_saved_over_none": worst("recompute", "saved_over_none", ""),
        "recompute_time_ratio": worst("recompute", "time_ratio", ""),
        "velora_time_ratio": max(worst("velora", "time_ratio", ""), worst("every", "time_ratio", "")),
    }


def case_figures(model: Path, name: str, dropout: float) -> Figures:
    """Saved bytes, time and peak of every policy."""
    skeleton = make_skeleton(model, name, dropout)
    stacks = {policy: make_stack(skeleton, name, policy, dropout) for policy in POLICIES}
    saved = {policy: stack.saved_bytes(*inputs()) for policy, stack in stacks.items()}
    ratios = time_ratios(stacks)
    found: Figures = {}
    for policy in POLICIES:
        found[policy] = {
            "saved_bytes_per_block_and_token": round(saved[policy]),
            "saved_mib_per_block": round(saved[policy] * ROWS * TOKENS / MIB, 2),
            "saved_over_none": round(saved[policy] / saved["none"], 4),
            "time_ratio": round(statistics.median(ratios[policy]), 4),
            "time_ratios": [round(ratio, 3) for ratio in sorted(ratios[policy])],
        }
        if policy in MEASURED_IN_PROCESS and not dropout:
            found[policy]["peak_mib"] = round(json.loads(in_process(model, name, policy)) / MIB, 1)
        print(name, dropout, policy, found[policy], flush=True)  # noqa: T201
    return found


def time_ratios(stacks: dict[str, Stack]) -> dict[str, list[float]]:
    """Processor time of forward and backward over that of ``none``, round by round."""
    found: dict[str, list[float]] = {policy: [] for policy in stacks}
    for round_ in range(ROUNDS + 1):
        seconds = {policy: step_s(stack) for policy, stack in stacks.items()}
        if round_:  # the first round warms up
            for policy in stacks:
                found[policy].append(seconds[policy] / seconds["none"])
    return found


def step_s(stack: Stack) -> float:
    """Processor seconds of one micro-batch, forward and back."""
    hidden, mask = inputs()
    begin = time.process_time()
    saved, y = stack.forward(hidden, mask)
    saved.backward(torch.ones_like(y))
    return time.process_time() - begin


def make_skeleton(model: Path, name: str, dropout: float) -> Skeleton:
    """Real blocks with an adapter."""
    text = (
        f'[model]\npath = "{model}"\ntask = "sequence-classification"\n'
        f'[adapter]\nconfig = "{ADAPTERS[name]}"\n[train]\ndropout = {dropout}\n'
    )
    skeleton = build_skeleton(model, parse_job(text, source="bench"))
    with SafetensorsFiles(model) as weights:
        blocks, device = range(NUM_BLOCKS), torch.device("cpu")
        materialise(skeleton, weights, blocks=blocks, with_embedding=False, dtype=torch.float32, device=device)
    return skeleton


def make_stack(skeleton: Skeleton, name: str, policy: str, dropout: float) -> Stack:
    """The blocks under a policy."""
    every = {"full": ("query", "key", "value", "attention_out", "up", "down")}.get(name, ("adapter_down",))
    lora = ("adapter_down:value", "adapter_down:down") if dropout else ("adapter_down:down",)
    layers = {"full": ("query", "key", "value", "down"), "lora": lora}.get(name, every)
    chosen = every if policy == "every" else layers
    velora = Velora(blocks=ALL, layers=chosen) if policy in ("velora", "every", "both") else None
    recompute = ALL if policy in ("recompute", "both") else ()
    return Stack(skeleton, dropout=dropout, velora=velora, recompute=recompute)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """A micro-batch without padding."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, TOKENS, WIDTH, generator=generator), torch.ones(ROWS, TOKENS, dtype=torch.int64)


def write_model(folder: Path) -> Path:
    """A BERT as wide as MiniLM."""
    return tiny.write_bert(
        folder, vocab_size=64, hidden_size=WIDTH, num_blocks=NUM_BLOCKS, num_heads=HEADS, intermediate_size=4 * WIDTH
    )


def in_process(*arguments: object) -> str:
    """What a process of its own prints for one case and policy."""
    command = [sys.executable, "-m", "tests.bench.saved_activations", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout  # noqa: S603


def print_peak(model: str, name: str, policy: str) -> None:
    """Print the bytes by which the resident memory rises at most in a second micro-batch, forward and back."""
    keep_freed_memory()  # as an agent does
    torch.set_num_threads(1)
    stack = make_stack(make_skeleton(Path(model), name, 0.0), name, policy, 0.0)
    step_s(stack)
    release_memory()
    reset_peak()
    before = rss_bytes()
    step_s(stack)
    sys.stdout.write(json.dumps(max(0, peak_rss_bytes() - before)))


def main() -> None:
    """Print the peak of one case and policy."""
    parser = argparse.ArgumentParser(description="Print the bytes by which one case's resident memory rises at most.")
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("adapter", choices=sorted(ADAPTERS))
    parser.add_argument("policy", choices=POLICIES)
    asked = parser.parse_args()
    print_peak(asked.model, asked.adapter, asked.policy)


if __name__ == "__main__":
    main()
