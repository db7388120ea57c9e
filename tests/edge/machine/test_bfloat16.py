"""Whether a machine multiplies bfloat16 fast is what torch says of its processor."""

from __future__ import annotations

import pytest
import torch

from edge.machine.bfloat16 import INSTRUCTIONS, multiplies_bfloat16_fast


@pytest.mark.parametrize(
    ("says", "is_fast"),
    [
        *(({name: True}, True) for name in INSTRUCTIONS),
        ({"avx512_f": True, "amx_int8": True}, False),
        ({"avx512_bf16": False, "amx_bf16": False}, False),
        ({}, False),
    ],
)
def test_processor_with_instructions_for_bfloat16_is_fast(
    monkeypatch: pytest.MonkeyPatch, says: dict[str, bool], is_fast: bool
) -> None:
    """AVX512 alone computes them by other means, and slowly."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: says)
    assert multiplies_bfloat16_fast("cpu") is is_fast


def test_torch_without_its_kernels_is_not_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The instructions are used by oneDNN."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not multiplies_bfloat16_fast("cpu")
