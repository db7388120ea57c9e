"""What a decoder's head takes at its peak, which the planner's estimate counts on."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from edge.data.tokens import Batch
from edge.machine.memory_budget import give_memory_back, peak_rss_bytes, reset_peak, rss_bytes
from edge.model.heads import CausalLanguageModel
from edge.model.owner import OwnerParts
from ringtune.costs.memory import MOST_LOGIT_BYTES, logits_peak_bytes
from ringtune.jobs.job import Train

ROWS, TOKENS, WIDTH, VOCAB = 4, 128, 16, 32_000


class Decoder(torch.nn.Module):
    """Logits of every token from a frozen table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Linear(WIDTH, VOCAB, bias=False).requires_grad_(False)

    def get_output_embeddings(self) -> torch.nn.Linear:
        """The table, as AdapterHub's heads give it."""
        return self.table

    def forward(self, outputs: Any, **_: Any) -> types.SimpleNamespace:
        """As AdapterHub's heads answer."""
        return types.SimpleNamespace(logits=self.table(outputs.last_hidden_state))


def _family() -> types.SimpleNamespace:
    return types.SimpleNamespace(finish=lambda base, hidden, batch: (hidden, {}))


@pytest.fixture
def parts() -> Iterator[OwnerParts]:
    """An owner with nothing but a decoder."""
    skeleton: Any = types.SimpleNamespace(base=None, family=_family())
    yield OwnerParts(skeleton, Decoder(), CausalLanguageModel(), Train())
    give_memory_back()


def _batch() -> Batch:
    ids = torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS) % VOCAB
    labels = ids.clone()
    labels[:, 0] = -100
    return Batch(ids=ids, mask=torch.ones_like(ids), token_type_ids=torch.zeros_like(ids), labels=labels)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak can be reset on Linux only")
def test_decoder_head_holds_as_many_logits_as_the_estimate_says(parts: OwnerParts) -> None:
    """Forward and backward of a micro-batch hold one chunk of logits, not the 65 MB of all, and no copy of it."""
    estimate = logits_peak_bytes(ROWS * TOKENS, VOCAB, 4)
    assert estimate == MOST_LOGIT_BYTES
    batch, hidden = _batch(), torch.randn(ROWS, TOKENS, WIDTH)
    parts.train_step(hidden[:, :8], batch._replace(labels=batch.labels[:, :8]), num_targets=1, at=(0, 0))
    give_memory_back()
    reset_peak()
    before = rss_bytes()
    parts.train_step(hidden, batch, num_targets=ROWS * (TOKENS - 1), at=(0, 0))
    # a second copy would be 2; other tests' threads of this process come and go with some MiB
    assert 0.5 < (peak_rss_bytes() - before) / estimate < 1.5


def test_decoder_head_counts_targets_within_rows_only(parts: OwnerParts) -> None:
    """The last token of a row predicts nothing, not even the first token of the next row."""
    batch, hidden = _batch(), torch.randn(ROWS, TOKENS, WIDTH)
    values = dict(parts.evaluate(hidden, batch).values)
    with torch.no_grad():
        (weight,) = parts.head.parameters()
        logits = torch.nn.functional.linear(hidden, weight)[:, :-1].flatten(0, 1)
        expected = torch.nn.functional.cross_entropy(logits, batch.labels[:, 1:].flatten(), reduction="sum")
    assert values["count"] == ROWS * (TOKENS - 1)
    assert values["loss_sum"] == pytest.approx(float(expected), rel=1e-6)
