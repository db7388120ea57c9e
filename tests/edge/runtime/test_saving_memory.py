"""Saving, loading, handing over and collecting make no second copy of what they move."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_WORKS = ("save", "load", "send_head", "take_head", "collect", "merge")
_MODEL_WORKS = ("collect_model", "merge_model", "load_model")


@pytest.fixture(scope="module")
def figures() -> dict[str, int]:
    """What a process that does all of it once printed; its own memory, so that other work does not matter."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.saving_memory"], capture_output=True, text=True, timeout=240, check=True
    )
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak can be reset on Linux only")
@pytest.mark.parametrize("work", _WORKS)
@pytest.mark.sampled(1)
def test_memory_rises_by_pieces_only(figures: dict[str, int], work: str) -> None:
    """A head with moments of 50 MB passes in pieces of some MiB; the moments that come take the place of the pieces."""
    assert figures["shard_bytes"] > 48 << 20
    assert figures[f"{work}_rise_bytes"] < 16 << 20


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak can be reset on Linux only")
@pytest.mark.parametrize("work", _MODEL_WORKS)
def test_memory_of_a_whole_model_rises_by_pieces_only(figures: dict[str, int], work: str) -> None:
    """A model with a token table of 57 MB is handed in, merged and loaded again in pieces of some MiB."""
    assert figures["model_bytes"] > 128 << 20
    assert figures[f"{work}_rise_bytes"] < 16 << 20
