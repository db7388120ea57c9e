"""A pytest plugin: what tests compute they compute on a GPU: ``pytest -p tests.support.on_cuda PATHS``.

Executors and benches that tests make without a device are on CUDA then; agents that tests start take it by themselves.
Without a device pytest ends with 77, which stands for "skipped". What compares a GPU with a reference on the processor
where the two differ by their nature is skipped, with its reason.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import pytest
import torch

SKIPPED: Final = 77
"""Exit code where there is no device, as automake has it."""

_MASKS: Final = "a GPU draws other masks for dropout than the processor that the reference runs on"
_ANGLES: Final = "rotary angles are computed in float32, and a GPU's sine differs from the processor's in the last bit"
_SHAPES: Final = "a GPU's kernels for other shapes add in another order: equal, but not in every bit"
_PROCESSOR_ONLY: Final = {
    "test_executor_ends_an_action_when_the_device_has_done_it": "made for the processor: it names the device",
    "test_executor_equals_one_process_with_options[{'train__dropout': 0.2, 'train__microbatches': 3}]": _MASKS,
    "test_executor_hands_the_head_over[0.1]": _MASKS,
    "test_executor_in_float32_equals_with_the_same_micro_batches": _MASKS,
    "test_executor_under_engines_equals_one_process": _MASKS,
    "test_head_gets_the_tokens_that_it_reads": _SHAPES,
    "test_scores_of_nodes_equal_one_process[mistral": _ANGLES,
}
"""Beginnings of tests' names, and why a GPU cannot be compared there."""


def pytest_configure() -> None:
    """Put executors and benches on the device, before any test module is imported."""
    if not torch.cuda.is_available():
        pytest.exit("torch sees no CUDA device here", returncode=SKIPPED)
    use("cuda")
    _skip_other_masks()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what a GPU cannot be compared with."""
    for item in items:
        for name, reason in _PROCESSOR_ONLY.items():
            if item.name.startswith(name):
                item.add_marker(pytest.mark.skip(reason=reason))


def use(device: str) -> None:
    """Let executors, and benches of the profiler, be on a device where none is named."""
    from edge.profiler.benchmark import Bench
    from edge.runtime.executor import NodeExecutor

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
            pytest.skip(_MASKS)
        return before(case)

    torch_ring.reference_of = reference_of
