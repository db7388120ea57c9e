"""Auxiliary models: two kinds of adapters of our own, which sit where LoRA does.

Beside a matrix with the input x stands a small model g, and the matrix gives ``h + alpha * g(x)``:

========== ========================================= =====================================
kind       g(x)                                      zero at the start
========== ========================================= =====================================
``linear`` ``x W^T``, W as large as the matrix       W
``mlp``    ``relu(x V^T + b) U^T + c``               U and c, so that g is zero too
========== ========================================= =====================================

The options that choose matrices are those of LoRA. Where query, key and value are one matrix each has a g of its own.

Source: ColA, section 4 and appendix B (low rank, linear and MLP as auxiliary models).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ringtune.models.family import Shapes, Widths

LINEAR: Final = "linear"
MLP: Final = "mlp"
AUXILIARY_KINDS: Final = (LINEAR, MLP)

QUERY: Final = "query"
KEY: Final = "key"
VALUE: Final = "value"
INTERMEDIATE: Final = "intermediate"
OUTPUT: Final = "output"
PLACES: Final = (QUERY, KEY, VALUE, INTERMEDIATE, OUTPUT)
"""The matrices of a block that may have an auxiliary model, by their names in ``Widths``."""

_LETTERS: Final = {"q": QUERY, "k": KEY, "v": VALUE}
_SHARED_OPTIONS: Final[dict[str, Any]] = {
    "selfattn_lora": True,
    "intermediate_lora": False,
    "output_lora": False,
    "attn_matrices": ["q", "v"],
    "alpha": 1.0,
    "leave_out": [],
}
DEFAULTS: Final[dict[str, dict[str, Any]]] = {LINEAR: _SHARED_OPTIONS, MLP: {**_SHARED_OPTIONS, "hidden": 128}}
"""Kind -> its options with their defaults."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AuxiliaryConfig:
    """What a configuration of one of these kinds says.

    Attributes:
        kind: ``linear`` or ``mlp``.
        alpha: factor of g.
        hidden: width between the two matrices of an MLP; 0 = linear.
        places: matrices that have a g, of ``PLACES`` and in their order.
        leave_out: blocks without any.
    """

    kind: str
    alpha: float
    hidden: int
    places: tuple[str, ...]
    leave_out: tuple[int, ...] = ()

    @staticmethod
    def of(kind: str, options: Mapping[str, Any]) -> AuxiliaryConfig:
        """Read the options of a kind, which have been checked; one that is not given has its default."""
        known = {**DEFAULTS[kind], **options}
        letters = {_LETTERS[letter] for letter in known["attn_matrices"]} if known["selfattn_lora"] else set()
        others = {INTERMEDIATE: known["intermediate_lora"], OUTPUT: known["output_lora"]}
        return AuxiliaryConfig(
            kind=kind,
            alpha=float(known["alpha"]),
            hidden=int(known.get("hidden", 0)),
            places=tuple(place for place in PLACES if place in letters or others.get(place)),
            leave_out=tuple(known["leave_out"]),
        )

    def shapes(self, widths: Widths) -> Shapes:
        """The shapes of all tensors of a block that has auxiliary models, by place and name.

        Example: ``mlp[hidden=16]`` at width 64 has ``query.down.weight`` (16, 64), ``query.down.bias`` (16,),
        ``query.up.weight`` (64, 16), ``query.up.bias`` (64,), and the same of ``value``.
        """
        return {
            f"{place}.{name}": shape
            for place in self.places
            for name, shape in self._shapes_of(*getattr(widths, place)).items()
        }

    def _shapes_of(self, inputs: int, outputs: int) -> Shapes:
        if self.kind == LINEAR:
            return {"weight": (outputs, inputs)}
        return {
            "down.weight": (self.hidden, inputs),
            "down.bias": (self.hidden,),
            "up.weight": (outputs, self.hidden),
            "up.bias": (outputs,),
        }

    @property
    def hidden_values(self) -> int:
        """Values of each token that the MLPs of a block keep for their backward, besides their inputs."""
        return self.hidden * len(self.places)
