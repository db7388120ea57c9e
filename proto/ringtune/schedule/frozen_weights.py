"""How the weights that do not train are held, if it is not as float32: smaller, and rounded once.

The result depends on it, so it is part of the course. With ``bfloat16`` a frozen matrix has 2 bytes a number, with
``int8`` one byte a number and a scale for each row. Norms, biases and whatever trains stay float32.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Final

from ringtune.errors import PlanError

BFLOAT16: Final = "bfloat16"
INT8: Final = "int8"
FROZEN_DTYPES: Final = (BFLOAT16, INT8)
AS_COMPUTED: Final = "float32"
"""The word for frozen weights that are held in the type of the computation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenWeights:
    """The small number type of frozen matrices, and how they are multiplied.

    Attributes:
        dtype: one of ``FROZEN_DTYPES``.
        native: whether products are computed in bfloat16, with sums in float32. Otherwise one matrix at a time is
            widened to float32, and the product is one of float32.
    """

    dtype: str
    native: bool = False

    def __post_init__(self) -> None:
        """Refuse a type that weights are not held in.

        Raises:
            PlanError: names it.
        """
        if self.dtype not in FROZEN_DTYPES:
            raise PlanError(f"frozen.dtype = {self.dtype!r} is not one of {', '.join(FROZEN_DTYPES)}")

    def to_json(self) -> dict[str, Any]:
        """Write both fields as a JSON-able table."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """Print type and products: ``bfloat16 native`` or ``int8 widened``."""
        return f"{self.dtype} {'native' if self.native else 'widened'}"


def dtype_of(frozen: FrozenWeights | None) -> str:
    """The word for the type of frozen weights, as ``runtime.frozen`` has it: ``float32`` where they are as computed."""
    return frozen.dtype if frozen is not None else AS_COMPUTED


def name_of(frozen: FrozenWeights | None) -> str:
    """The words for how frozen weights are held: ``float32`` where they are as computed."""
    return str(frozen) if frozen is not None else AS_COMPUTED
