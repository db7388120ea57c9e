"""What frozen weights take where they are held small, and the room in which one matrix at a time is widened.

A frozen matrix of 2,048 x 5,632 numbers has 46.1 MB in float32, 23.1 MB in bfloat16, and in int8 11.5 MB with a scale
of 4 bytes for each row. Vectors (norms, biases) stay as they are.
"""

from __future__ import annotations

from typing import Final

from ringtune.schedule.frozen_weights import BFLOAT16, FrozenWeights

MOST_WIDENED_BYTES: Final = 64 << 20
"""What a widened matrix may take; one that would take more is widened and multiplied so many rows at a time."""

_NUMBER_BYTES: Final = {"bfloat16": 2, "int8": 1}
_SCALE_BYTES: Final = {"bfloat16": 0, "int8": 4}


def frozen_bytes(whole_bytes: int, *, params: int, rows: int, item_bytes: int, frozen: FrozenWeights | None) -> int:
    """Bytes of weights of which the frozen matrices are held small.

    Args:
        whole_bytes: of all these weights in the type of the computation.
        params: numbers in their frozen matrices.
        rows: of these matrices together.
        item_bytes: of a number in the type of the computation.
        frozen: how they are held; None = as computed.
    """
    if frozen is None:
        return whole_bytes
    small_bytes = params * _NUMBER_BYTES[frozen.dtype] + rows * _SCALE_BYTES[frozen.dtype]
    return whole_bytes - params * item_bytes + small_bytes


def widened_bytes(largest_params: int, *, item_bytes: int, frozen: FrozenWeights | None) -> int:
    """Bytes of the room in which a frozen matrix is widened; 0 where it is multiplied as it is held.

    Args:
        largest_params: numbers of the largest frozen matrix.
        item_bytes: of a number in the type of the computation.
        frozen: how frozen weights are held.
    """
    if frozen is None or (frozen.native and frozen.dtype == BFLOAT16):
        return 0
    return min(MOST_WIDENED_BYTES, largest_params * (_NUMBER_BYTES[BFLOAT16] if frozen.native else item_bytes))
