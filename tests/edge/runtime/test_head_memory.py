"""What a decoder's head takes at its peak, which the planner's estimate counts on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ringtune.costs.memory_sizes import MAX_LOGIT_BYTES, logits_peak_bytes
from tests.support.head_memory import ROWS, TOKENS, VOCAB, WIDTH, make_batch, make_parts


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak can be reset on Linux only")
def test_decoder_head_holds_as_many_logits_as_the_estimate_says() -> None:
    """Forward and backward of a micro-batch hold one chunk of logits, not the 65 MB of all, and no copy of it."""
    estimate = logits_peak_bytes(ROWS * TOKENS, VOCAB, 4)
    assert estimate == MAX_LOGIT_BYTES
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.head_memory"], capture_output=True, text=True, timeout=240, check=True
    )
    rise_bytes = json.loads(done.stdout.splitlines()[-1])["rise_bytes"]
    # a second copy would be 2; nothing else works in that process
    assert 0.5 < rise_bytes / estimate < 1.25


def test_decoder_head_counts_targets_within_rows_only() -> None:
    """The last token of a row predicts nothing, not even the first token of the next row."""
    parts, batch, hidden = make_parts(), make_batch(), torch.randn(ROWS, TOKENS, WIDTH)
    values = dict(parts.evaluate(hidden, batch).values)
    with torch.no_grad():
        (weight,) = parts.head.parameters()
        logits = torch.nn.functional.linear(hidden, weight)[:, :-1].flatten(0, 1)
        expected = torch.nn.functional.cross_entropy(logits, batch.labels[:, 1:].flatten(), reduction="sum")
    assert values["count"] == ROWS * (TOKENS - 1)
    assert values["loss_sum"] == pytest.approx(float(expected), rel=1e-6)
