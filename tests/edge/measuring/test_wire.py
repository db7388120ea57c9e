"""What is timed as encoding and decoding is what both ends of a link do."""

from __future__ import annotations

import pytest
import torch

from edge.measuring.wire import decode, encode

_ERRORS = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@pytest.mark.parametrize("dtype", sorted(_ERRORS))
def test_decoded_hidden_state_is_the_encoded_one(dtype: str) -> None:
    """Within the type's precision; float16 travels times a power of two, which decoding has to undo."""
    hidden = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(5))
    came = decode(encode(hidden, torch.ones(2, 6, dtype=torch.int64), dtype), torch.float32)
    assert bool(((came - hidden).abs() <= hidden.abs() * _ERRORS[dtype]).all())
