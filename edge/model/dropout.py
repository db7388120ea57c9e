"""Seed dropout so that its masks do not depend on where a block runs.

torch's generator is one per process. Seeding it before each unit (embedding, block, head) from (seed, step,
micro-batch, unit) makes every mask a function of these four, whatever the split, the order or the process.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

EMBEDDING_UNIT = "embedding"
HEAD_UNIT = "head"


def block_unit(block: int) -> str:
    """Name of a block as a unit: block 3 is ``block.3``."""
    return f"block.{block}"


def unit_seed(seed: int, step: int, micro: int, unit: str) -> int:
    """Seed of the generator before ``unit`` runs: 63 bits of a SHA-256."""
    digest = hashlib.sha256(f"{seed}/{step}/{micro}/{unit}".encode()).digest()
    return int.from_bytes(digest[:8], "little") & (2**63 - 1)


def seed_unit(seed: int, step: int, micro: int, unit: str) -> None:
    """Seed torch's generators for ``unit``.

    As ``torch.manual_seed``, but an accelerator that is not in use is left alone: for each of them that function
    would keep the call and its stack for later, at every call.
    """
    number = unit_seed(seed, step, micro, unit)
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(number)


def set_dropout(config: Any, probability: float) -> None:
    """Set every dropout probability of a Hugging Face configuration (hidden, attention, head)."""
    for key, value in config.to_dict().items():
        if ("dropout" in key or key.endswith("pdrop")) and isinstance(value, float | int):
            setattr(config, key, probability)
