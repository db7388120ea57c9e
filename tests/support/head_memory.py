"""What a decoder's head takes at its peak; to be measured in a process of its own."""

from __future__ import annotations

import types
from typing import Any

import torch

from edge.data.tokens import Batch
from edge.machine.resources import peak_rss_bytes, release_memory, reset_peak, rss_bytes
from edge.model.heads import task_of
from edge.model.owner import OwnerParts
from edge.model.prediction_heads import Head
from ringtune.job.job import Train
from ringtune.models.family import CAUSAL_LM
from ringtune.schedule.units import Units

ROWS, TOKENS, WIDTH, VOCAB = 4, 128, 16, 32_000


def make_parts() -> OwnerParts:
    """An owner with nothing but a decoder."""
    family = types.SimpleNamespace(finish=lambda base, hidden, batch: (hidden, {}))
    layout = types.SimpleNamespace(blocks_path="blocks")
    skeleton: Any = types.SimpleNamespace(
        base=torch.nn.Module(), family=family, layout=layout, blocks=[], full_parameters=False, invertible=None
    )
    table = torch.nn.Linear(WIDTH, VOCAB, bias=False).requires_grad_(False)
    head = Head([table], {"head_type": "causal_lm"})
    return OwnerParts(skeleton, head, task_of(CAUSAL_LM), Train())


def make_batch() -> Batch:
    """Tokens that predict each other."""
    ids = torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS) % VOCAB
    labels = ids.clone()
    labels[:, 0] = -100
    return Batch(ids=ids, mask=torch.ones_like(ids), token_type_ids=torch.zeros_like(ids), labels=labels)


def rise_bytes() -> int:
    """By how much the resident memory rises in forward and backward of a micro-batch, and in no first one."""
    parts, batch, hidden = make_parts(), make_batch(), torch.randn(ROWS, TOKENS, WIDTH)
    for _ in range(2):  # the first time loads kernels and their work space, which stay
        release_memory()
        reset_peak()
        before = rss_bytes()
        targets = ROWS * (TOKENS - 1)
        parts.train_step(hidden, batch, num_targets=targets, at=(0, 0), weights=Units(0), goes_down=True)
    return peak_rss_bytes() - before
