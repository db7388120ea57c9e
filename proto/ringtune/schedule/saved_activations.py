"""Activations saved for backward: VeLoRA, which changes the result, and ranges of blocks.

VeLoRA keeps, for the input of a trained linear layer, one number for each *sub-token*: M consecutive values of a token,
projected on a unit vector v of the layer. With 768 inputs and 32 parts M is 24, and a token keeps 32 numbers::

    x        768 values of a token, as 32 sub-tokens of 24
    z        32 numbers: each sub-token times v                  kept until the backward
    x~       32 times v scaled by z                              replaces x in the gradient of the weight only

All other gradients are exact.

Source: VeLoRA, sections 3.1 and 5, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from ringtune.errors import InvalidInputError, PlanError
from ringtune.schedule.units import Range
from ringtune.storage.strict import LATER, Bounds, OneOf, check_fields, nearest

VELORA: Final = "velora"
"""Its name in ``memory.activations`` and ``offload.pairs``."""

ADAPTER_DOWN: Final = "adapter_down"
SITES: Final = tuple(f"{ADAPTER_DOWN}:{layer}" for layer in ("query", "key", "value", "up", "down"))
"""First matrices of modules beside linear layers: ``adapter_down:down`` is A of the LoRA at ``down``."""

LAYERS: Final = ("query", "key", "value", "attention_out", "up", "gate", "down", ADAPTER_DOWN, *SITES)
"""Linear layers of a block by function; ``adapter_down`` is the first matrix of each bottleneck and each LoRA."""

ONE_INPUT: Final = (("query", "key", "value"), ("up", "gate"))
"""Layers that read one tensor, which is kept if any of them keeps it."""

RANDOM: Final = "random"
INITS: Final = ("average", "running", "svd", RANDOM)
"""Origin of v: mean sub-token of the first micro-batch, of all so far, its first singular vector, or a seed."""

DEFAULT_PARTS: Final = 32


def is_adapter(layer: str) -> bool:
    """Whether a layer is the first matrix of an adapter."""
    return layer.partition(":")[0] == ADAPTER_DOWN


def has_layer(layers: Collection[str], layer: str) -> bool:
    """Whether some words name a layer: ``adapter_down`` also names every ``adapter_down:...``."""
    return layer in layers or (ADAPTER_DOWN in layers and is_adapter(layer))


def check_named_once(layers: Sequence[str], error: type[InvalidInputError]) -> None:
    """Refuse layers that are named twice, also as one of ``adapter_down``, with ``error``."""
    if len(set(layers)) != len(layers):
        raise error(f"velora.layers names a layer twice: {', '.join(layers)}; keep one")
    sites = [layer for layer in layers if layer in SITES]
    if sites and ADAPTER_DOWN in layers:
        raise error(f"velora.layers has {ADAPTER_DOWN!r}, which includes {sites[0]!r}; keep one of them")


@dataclass(frozen=True, kw_only=True, slots=True)
class Velora:
    """Linear layers that keep projections of their input instead of their input.

    Attributes:
        layers: some of ``LAYERS``; of query, key and value all three or none.
        parts: of an input of D values; a sub-token has M = D / parts values, rounded up, the last one padded with
            zeros. 0 where ``values`` is set.
        values: M itself, for inputs of any width; 0 where ``parts`` is set.
    """

    blocks: tuple[Range, ...]
    layers: tuple[str, ...]
    parts: Annotated[int, Bounds(ge=0)] = DEFAULT_PARTS
    init: Annotated[str, OneOf(INITS)] = "average"
    values: Annotated[int, LATER, Bounds(ge=0)] = 0

    def __post_init__(self) -> None:
        """Refuse unknown words, a layer without the others of its input, and invalid ranges; raises ``PlanError``."""
        check_fields(self, where="velora", error=PlanError)
        if bool(self.parts) == bool(self.values):
            raise PlanError(
                f"velora.parts is {self.parts} and velora.values is {self.values}; set one of them, and the other to 0"
            )
        check_ranges(self.blocks, where="velora.blocks")
        if not self.blocks:
            raise PlanError("velora.blocks is empty; name blocks, or leave velora out")
        if not self.layers:
            raise PlanError(f"velora.layers is empty; name some of {', '.join(LAYERS)}")
        for layer in self.layers:
            if layer not in LAYERS:
                raise PlanError(f"velora.layers has {layer!r}; {nearest(layer, LAYERS)}")
        check_named_once(self.layers, PlanError)
        named = [layer for layer in ONE_INPUT[0] if layer in self.layers]
        missing = [layer for layer in ONE_INPUT[0] if layer not in self.layers]
        if named and missing:
            raise PlanError(
                f"velora.layers has {', '.join(named)} without {', '.join(missing)}: the three read one tensor, which "
                "is kept as long as one of them keeps it; name all three, or none"
            )
        if "gate" in self.layers and "up" not in self.layers:
            raise PlanError("velora.layers has gate without up: both read one tensor; name both, or none")

    def has_block(self, block: int) -> bool:
        """Whether the layers of a block keep projections."""
        return in_ranges(block, self.blocks)

    def check(self, *, num_blocks: int, hidden_size: int) -> None:
        """Refuse blocks beyond the model, and more parts than a token has values; raises ``PlanError``.

        Inputs of ``down`` are wider than a token, so ``values`` are checked where these are known.
        """
        check_ranges(self.blocks, where="velora.blocks", stop=num_blocks)
        if self.parts and (problem := self.misfit(hidden_size, "a token")):
            raise PlanError(problem)

    def misfit(self, inputs: int, what: str) -> str:
        """Say why an input of ``inputs`` values can't be cut into these sub-tokens; empty if it can."""
        name, number = ("values", self.values) if self.values else ("parts", self.parts)
        if number <= inputs:
            return ""
        return f"velora.{name} is {number}, but {what} has {inputs} values; set it to at most {inputs}"

    def subtoken_size(self, inputs: int) -> int:
        """Number M of values of a sub-token of an input with ``inputs`` values."""
        return self.values or subtoken_size(inputs, self.parts)

    def num_subtokens(self, inputs: int) -> int:
        """Number of sub-tokens of a token, which is the number of kept values."""
        return -(-inputs // self.subtoken_size(inputs))


def subtoken_size(inputs: int, parts: int) -> int:
    """Number M of values of a sub-token.

    Example: 768 inputs in 32 parts are sub-tokens of 24; 100 inputs in 32 parts are 25 sub-tokens of 4.
    """
    return -(-inputs // parts)


def num_subtokens(inputs: int, parts: int) -> int:
    """Number of sub-tokens of a token, which is the number of kept values.

    Example: 100 inputs in 32 parts are 25; 90 are 30 of 3; 95 are 32 of 3, the last one with one zero.
    """
    return -(-inputs // subtoken_size(inputs, parts))


def in_ranges(block: int, ranges: Iterable[Range]) -> bool:
    """Whether a block is in one of the ranges."""
    return any(start <= block < stop for start, stop in ranges)


def overlap(ranges: Sequence[Range], others: Iterable[tuple[int, int]]) -> int:
    """Number of blocks that ranges have in common with others, counted for each of those."""
    return sum(max(0, min(stop, last) - max(start, first)) for first, last in others for start, stop in ranges)


def merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Sort ranges and join adjacent ones: [2, 4), [0, 1) and [1, 2) are [0, 4)."""
    joined: list[Range] = []
    for each in sorted(ranges):
        if joined and joined[-1].stop == each.start:
            joined[-1] = Range(joined[-1].start, each.stop)
        else:
            joined.append(Range(*each))
    return tuple(joined)


def within(ranges: Iterable[Range], start: int, stop: int) -> tuple[Range, ...]:
    """Intersect ranges with [start, stop): [0, 4) and [6, 8) in [2, 7) are [2, 4) and [6, 7)."""
    cut = (Range(max(start, first), min(stop, last)) for first, last in ranges)
    return tuple(part for part in cut if part.start < part.stop)


def check_ranges(ranges: Sequence[Range], *, where: str, stop: int | None = None) -> None:
    """Refuse ranges of blocks that are empty, not ascending, or beyond ``stop``, with ``PlanError``."""
    at = 0
    for first, last in ranges:
        if not at <= first < last:
            raise PlanError(f"{where} has [{first}, {last}); ranges are not empty, ascending and apart, from {at} on")
        if stop is not None and last > stop:
            raise PlanError(f"{where} has [{first}, {last}), but there are {stop} blocks")
        at = last


def ranges_text(ranges: Iterable[Sequence[int]]) -> str:
    """Write ranges for people: ``[0, 2), [4, 6)``."""
    return ", ".join(f"[{start}, {stop})" for start, stop in ranges)


def ranges_to_json(ranges: Iterable[Range]) -> list[list[int]]:
    """Write ranges as pairs of numbers."""
    return [list(each) for each in ranges]
