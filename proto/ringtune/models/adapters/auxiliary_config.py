"""Auxiliary models: two kinds of adapters of our own, which sit where LoRA does.

Beside a matrix with the input x stands a small model g, and the matrix gives ``h + alpha * g(x)``:

========== ========================================= =====================================
kind       g(x)                                      zero at the start
========== ========================================= =====================================
``linear`` ``x W^T``, W as large as the matrix       W
``mlp``    ``relu(x V^T + b) U^T + c``               U and c, so that g is zero too
========== ========================================= =====================================

The options that choose matrices are those of LoRA. Where query, key and value are one matrix each has a g of its own.
A configuration may name several, of one kind or of both, and methods of the library with them: each matrix of a block
has one at most (``check_places``).

Source: ColA, section 4 and appendix B (low rank, linear and MLP as auxiliary models).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ringtune.errors import JobError
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

LETTERS: Final = {"q": QUERY, "k": KEY, "v": VALUE}
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
        return AuxiliaryConfig(
            kind=kind,
            alpha=float(known["alpha"]),
            hidden=int(known.get("hidden", 0)),
            places=places_beside(known),
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


def in_block(auxiliary: Iterable[AuxiliaryConfig], block: int) -> tuple[AuxiliaryConfig, ...]:
    """Those of some auxiliary models that a block has."""
    return tuple(one for one in auxiliary if block not in one.leave_out)


def check_places(parts: Sequence[tuple[str, Mapping[str, Any]]], blocks: Iterable[int], *, is_merged: bool) -> None:
    """Refuse methods of which two want one matrix, if one of them is an auxiliary model.

    Example: ``lora|linear``, both beside query and value; ``lora[attn_matrices=['q']]|linear[attn_matrices=['v']]`` is
    fine.

    Args:
        parts: name and options of each method, defaults included.
        blocks: in which they may meet.
        is_merged: whether query, key and value are one matrix: their auxiliary models then have one alpha.

    Raises:
        JobError: names the matrix.
    """
    beside = [(name, options, places_beside(options)) for name, options in parts if "attn_matrices" in options]
    for block in blocks:
        found: dict[str, str] = {}
        fused: list[AuxiliaryConfig] = []
        here = [one for one in beside if block not in one[1]["leave_out"]]
        for name, options, places in sorted(here, key=lambda one: one[0] in AUXILIARY_KINDS):
            if name not in AUXILIARY_KINDS:
                found |= dict.fromkeys(places, name)
                continue
            for place in places:
                if place in found:
                    raise JobError(
                        f"adapter.config gives the matrix {place} of block {block} both {found[place]!r} and {name!r}, "
                        "of which it can have one; choose other attn_matrices for one of them, leave the block out of "
                        "one, or remove one"
                    )
                found[place] = name
            if is_merged and set(places) - {INTERMEDIATE, OUTPUT}:
                fused.append(AuxiliaryConfig.of(name, options))
        check_alphas(fused)


def check_alphas(fused: Iterable[AuxiliaryConfig]) -> None:
    """Refuse auxiliary models beside one matrix for query, key and value whose factors differ.

    Raises:
        JobError: names two of them.
    """
    by_alpha = {one.alpha: one for one in fused}
    if len(by_alpha) > 1:
        first, second = list(by_alpha.values())[:2]
        raise JobError(
            f"adapter.config gives {first.kind!r} alpha {first.alpha:g} and {second.kind!r} alpha {second.alpha:g}, "
            "but query, key and value of this model are one matrix with one alpha; set the same for both"
        )


def places_beside(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The matrices that LoRA's options choose."""
    letters = {LETTERS[letter] for letter in options["attn_matrices"]} if options["selfattn_lora"] else set()
    others = {INTERMEDIATE: options["intermediate_lora"], OUTPUT: options["output_lora"]}
    return tuple(place for place in PLACES if place in letters or others.get(place))
