"""Tell whether this machine multiplies bfloat16 faster than float32.

What torch says of the processor decides, and no measurement, because a run's result depends on the answer: it has to be
the same tomorrow. It is worth 4 times on AVX512-BF16. Without such instructions torch computes the same products by
other means, more slowly than in float32. A torch that can't be asked (2.9 has no such function) counts as one without
them.

Source: torch 2.13, ``torch.cpu.get_capabilities`` and ``torch.cuda.is_bf16_supported``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

INSTRUCTIONS: Final = ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16")
"""Names of what multiplies bfloat16: of x86-64 processors, and of ARM processors."""


def multiplies_bfloat16_fast(device: str) -> bool:
    """Whether this device has instructions for products in bfloat16 that torch uses.

    Args:
        device: ``cpu`` or ``cuda``.
    """
    if device == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    say = getattr(torch.cpu, "get_capabilities", dict)
    found: Mapping[str, Any] = say()
    has_kernels = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(has_kernels) and any(bool(found.get(name)) for name in INSTRUCTIONS)
