"""Saving, loading, handing over and collecting make no second copy of what they move; nor does a decoder's head."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ringtune.costs.memory_sizes import MAX_LOGIT_BYTES, logits_peak_bytes
from tests.support.head_memory import ROWS, TOKENS, VOCAB, WIDTH, make_batch, make_parts

_WORKS = (
    *("save", "load", "send_head", "take_head", "collect", "merge"),
    *("collect_model", "merge_model", "load_model"),
)


@pytest.fixture(scope="module")
def figures() -> dict[str, int]:
    """What a process that does all of it once printed; its own memory, so that other work does not matter."""
    # libraries as a node loads them: without the compiler, in a third of the time
    work = "from edge.machine.libraries import load_libraries as load; load()"
    work += "; from tests.support.saving_memory import main; main()"
    done = subprocess.run([sys.executable, "-c", work], capture_output=True, text=True, timeout=240, check=True)  # noqa: S603
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


on_linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak can be reset on Linux only")


@on_linux
def test_memory_rises_by_pieces_only(figures: dict[str, int]) -> None:
    """At most two messages of 4 MiB are held of what is large: a head with moments of 50 MB, a token table of 25 MB."""
    assert figures["shard_bytes"] > 48 << 20
    assert figures["model_bytes"] > 104 << 20
    rises = {work: figures[f"{work}_rise_bytes"] for work in _WORKS}
    assert max(rises.values()) < 10 << 20, rises


@on_linux
def test_decoder_head_holds_as_many_logits_as_the_estimate_says(figures: dict[str, int]) -> None:
    """Forward and backward of a micro-batch hold one chunk of logits, not the 65 MB of all, and no copy of it."""
    estimate = logits_peak_bytes(ROWS * TOKENS, VOCAB, 4)
    assert estimate == MAX_LOGIT_BYTES
    # a second copy would be 2; nothing else works in that process
    assert 0.5 < figures["decoder_rise_bytes"] / estimate < 1.25


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
