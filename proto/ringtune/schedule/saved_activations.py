"""Activations that a forward saves for its backward: VeLoRA, which changes the result, and block ranges of policies.

VeLoRA keeps, of the input of a linear layer that trains, one number for each *sub-token*: M neighbouring values of a
token, projected on a unit vector v of the layer. With 768 inputs and 32 parts M is 24, and a token keeps 32 numbers::

    x        768 values of a token, as 32 sub-tokens of 24
    z        32 numbers: each sub-token times v                  kept until the backward
    x~       32 times v scaled by z                              stands for x in the gradient of the weight only

The gradient of the weight is that of x~. All other gradients are exact.

Source: VeLoRA, sections 3.1 and 5, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from ringtune.errors import PlanError
from ringtune.schedule.units import Range
from ringtune.storage.strict import Bounds, OneOf, check_fields, nearest

LAYERS: Final = ("query", "key", "value", "attention_out", "up", "gate", "down", "adapter_down")
"""Linear layers of a block by what they compute; ``adapter_down`` is the first matrix of each bottleneck and LoRA."""

ONE_INPUT: Final = (("query", "key", "value"), ("up", "gate"))
"""Layers that read one tensor: it is kept as long as one of them keeps it."""

RANDOM: Final = "random"
INITS: Final = ("average", "running", "svd", RANDOM)
"""The origin of v: mean sub-token of the first micro-batch, of all so far, its first singular vector, or a seed."""

DEFAULT_PARTS: Final = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Velora:
    """The linear layers that keep projections of their input instead of their input.

    Attributes:
        blocks: ranges of blocks, ascending.
        layers: some of ``LAYERS``. Of query, key and value all three are named, or none.
        parts: of an input of D values; a sub-token has M = D / parts, rounded up, with zeros behind the last value.
        init: one of ``INITS``.
    """

    blocks: tuple[Range, ...]
    layers: tuple[str, ...]
    parts: Annotated[int, Bounds(ge=1)] = DEFAULT_PARTS
    init: Annotated[str, OneOf(INITS)] = "average"

    def __post_init__(self) -> None:
        """Refuse unknown words, layers that read a tensor which another layer keeps, and ranges that are none.

        Raises:
            PlanError: names the value.
        """
        check_fields(self, where="velora", error=PlanError)
        check_ranges(self.blocks, where="velora.blocks")
        if not self.blocks:
            raise PlanError("velora.blocks is empty; name blocks, or leave velora out")
        _check_layers(self.layers)

    def has_block(self, block: int) -> bool:
        """Whether the layers of a block keep projections."""
        return in_ranges(block, self.blocks)

    def check(self, *, num_blocks: int, hidden_size: int) -> None:
        """Refuse blocks that the model does not have, and more parts than a token has values.

        Raises:
            PlanError: names the range, or both numbers.
        """
        check_ranges(self.blocks, where="velora.blocks", stop=num_blocks)
        if self.parts > hidden_size:
            raise PlanError(
                f"velora.parts is {self.parts}, but a token has {hidden_size} values; set it to at most {hidden_size}"
            )


def subtoken_size(inputs: int, parts: int) -> int:
    """How many values M a sub-token has of a layer with so many inputs.

    Example: 768 inputs in 32 parts are sub-tokens of 24; 100 inputs in 32 parts are 25 sub-tokens of 4.
    """
    return -(-inputs // parts)


def num_subtokens(inputs: int, parts: int) -> int:
    """How many sub-tokens a token of so many inputs has: one number of each is kept.

    Example: 100 inputs in 32 parts are 25; 90 are 30 of 3; 95 are 32 of 3, the last one with one zero.
    """
    return -(-inputs // subtoken_size(inputs, parts))


def in_ranges(block: int, ranges: Iterable[Range]) -> bool:
    """Whether a block is in one of the ranges."""
    return any(start <= block < stop for start, stop in ranges)


def merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Ranges in ascending order, with neighbours as one: [2, 4), [0, 1) and [1, 2) are [0, 4)."""
    found: list[Range] = []
    for one in sorted(ranges):
        if found and found[-1].stop == one.start:
            found[-1] = Range(found[-1].start, one.stop)
        else:
            found.append(Range(*one))
    return tuple(found)


def within(ranges: Iterable[Range], start: int, stop: int) -> tuple[Range, ...]:
    """The parts of ranges in [start, stop): of [0, 4) and [6, 8) in [2, 7) these are [2, 4) and [6, 7)."""
    cut = (Range(max(start, first), min(stop, last)) for first, last in ranges)
    return tuple(one for one in cut if one.start < one.stop)


def check_ranges(ranges: Sequence[Range], *, where: str, stop: int | None = None) -> None:
    """Refuse ranges of blocks that are empty, not ascending, or outside of the model.

    Args:
        ranges: of blocks.
        where: names them in errors.
        stop: one past the highest block that there is; None = not known.

    Raises:
        PlanError: names the range.
    """
    at = 0
    for first, last in ranges:
        if not at <= first < last:
            raise PlanError(f"{where} has [{first}, {last}); ranges are not empty, ascending and apart, from {at} on")
        if stop is not None and last > stop:
            raise PlanError(f"{where} has [{first}, {last}), but there are {stop} blocks")
        at = last


def ranges_to_json(ranges: Iterable[Range]) -> list[list[int]]:
    """Write ranges as pairs of numbers."""
    return [list(one) for one in ranges]


def _check_layers(layers: tuple[str, ...]) -> None:
    if not layers:
        raise PlanError(f"velora.layers is empty; name some of {', '.join(LAYERS)}")
    for layer in layers:
        if layer not in LAYERS:
            raise PlanError(f"velora.layers has {layer!r}; {nearest(layer, LAYERS)}")
    if len(set(layers)) != len(layers):
        raise PlanError(f"velora.layers names a layer twice: {', '.join(layers)}")
    named = [layer for layer in ONE_INPUT[0] if layer in layers]
    missing = [layer for layer in ONE_INPUT[0] if layer not in layers]
    if named and missing:
        raise PlanError(
            f"velora.layers has {', '.join(named)} without {', '.join(missing)}: the three read one tensor, which is "
            "kept as long as one of them keeps it; name all three, or none"
        )
    if "gate" in layers and "up" not in layers:
        raise PlanError("velora.layers has gate without up: both read one tensor; name both, or none")
