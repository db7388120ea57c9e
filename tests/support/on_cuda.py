"""A pytest plugin: what tests compute they compute on a GPU: ``pytest -p tests.support.on_cuda PATHS``.

Executors and benches that tests make without a device are on CUDA then; agents that tests start take it by themselves.
Without a device pytest ends with 77, which stands for "skipped". Tests with dropout against a reference on the
processor are skipped: its generator draws other masks.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import pytest
import torch

SKIPPED: Final = 77
"""Exit code where there is no device, as automake has it."""


def pytest_configure() -> None:
    """Put executors and benches on the device, before any test module is imported."""
    if not torch.cuda.is_available():
        pytest.exit("torch sees no CUDA device here", returncode=SKIPPED)
    use("cuda")
    _skip_other_masks()


def use(device: str) -> None:
    """Let executors, and benches of the profiler, be on a device where none is named."""
    from edge.compute.executor import NodeExecutor
    from edge.measuring.works import Bench

    for made in (NodeExecutor, Bench):
        init: Any = made.__init__
        init.__kwdefaults__ = {**init.__kwdefaults__, "device": device}


def _skip_other_masks() -> None:
    """Skip what would compare masks of two generators."""
    from tests.support import torch_ring

    before = torch_ring.reference_of

    @functools.wraps(before)
    def reference_of(case: torch_ring.Case) -> Any:
        if case.dropout:
            pytest.skip("a GPU draws other masks for dropout than the processor that the reference runs on")
        return before(case)

    torch_ring.reference_of = reference_of
