"""Seconds of a last block that computes one token of each row, over those of one that computes all.

Run ``python -m tests.bench.top_tokens``; JSON beside the share of multiplications that the planner counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch

from edge.model.families import family_of
from ringtune.costs.times.top_share import share_left

SHAPES = ((384, 1536, 128), (768, 3072, 64), (768, 3072, 128))
ROWS, REPEATS, WARM = 4, 40, 5


def measure(hidden: int, inner: int, tokens: int) -> dict[str, float]:
    """Forward and backward of a block of one thread, in turns, median of the ratios and the middle half of them."""
    from adapters import BertAdapterModel
    from transformers import BertConfig

    config = BertConfig(
        hidden_size=hidden, intermediate_size=inner, num_attention_heads=12, num_hidden_layers=1, vocab_size=100
    )
    model: Any = BertAdapterModel(config)
    model.add_adapter("bench", config="seq_bn")
    model.train_adapter("bench")
    model.eval()
    family, block = family_of("bert"), model.bert.encoder.layer[0]
    mask = torch.ones(ROWS, tokens, dtype=torch.long)
    mask[1, tokens // 2 :] = 0
    state = torch.randn(ROWS, tokens, hidden)
    context = family.context(model.bert, state, mask)

    def seconds(*, is_one: bool) -> tuple[float, float]:
        entered = state.clone().requires_grad_(True)
        began_s = time.perf_counter()
        left: Any = family.first_tokens(block, entered, context, 1) if is_one else family.block(block, entered, context)
        forward_s = time.perf_counter()
        left.backward(torch.ones_like(left))
        return forward_s - began_s, time.perf_counter() - forward_s

    pairs = [(seconds(is_one=True), seconds(is_one=False)) for _ in range(WARM + REPEATS)][WARM:]
    found: dict[str, float] = {"counted": round(share_left(1, tokens, hidden=hidden, inner=inner), 3)}
    for index, name in enumerate(("forward", "backward")):
        low, middle, high = statistics.quantiles((one[index] / whole[index] for one, whole in pairs), n=4)
        found |= {name: round(middle, 3), f"{name}_low": round(low, 3), f"{name}_high": round(high, 3)}
    return found


def main() -> None:
    """Measure all shapes, print JSON."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.set_num_threads(1)
    figures = {f"{hidden} wide, {tokens} tokens": measure(hidden, inner, tokens) for hidden, inner, tokens in SHAPES}
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
