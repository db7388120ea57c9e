"""Inputs of trained linear layers, which a block keeps for its backward; a frozen linear layer does not need its input.

VeLoRA can compress these tensors only. Several layers may read one tensor, which is kept once.

Source: the saved tensors of blocks of every family (``tests/edge/techniques/test_velora.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from ringtune.models.adapter_config import AdapterPart, auxiliary_of, parse_adapter_config, trains_own_weights
from ringtune.models.auxiliary_models import AUXILIARY_KINDS, INTERMEDIATE, OUTPUT, places_beside
from ringtune.models.family import Config, Dimensions, Family, Widths
from ringtune.schedule.saved_activations import (
    ADAPTER_DOWN,
    LAYERS,
    ONE_INPUT,
    RANDOM,
    SITES,
    Velora,
    has_layer,
    is_adapter,
)

_WRITTEN_OUT: Final = ("electra",)
"""``model_type`` of families with attention that is not fused."""
_NORM_FIRST: Final = ("gpt2", "llama", "mistral", "vit")
_ATTENTION: Final = ONE_INPUT[0]
_PARALLEL: Final = ("par_bn", "scaled_par_bn")


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptInput:
    """One tensor of a block that is kept because trained linear layers read it.

    Attributes:
        layers: that read it; words of ``schedule.saved_activations.LAYERS``, LoRA's before those of auxiliary models.
        width: values per token.
        readers: number of trained matrices that read it; if each has its own VeLoRA vector, each keeps a projection.
        lora: how many of the readers are LoRA's, each with its own dropout; the first ones.
        merged: how many of the layers, the first ones, are one matrix; 0 = each is one.
        kept_anyway: whether the fused attention kernel keeps it too without dropout.
        always_kept: whether the activation function before it keeps it too, as ReLU does; VeLoRA then does not compress
            it.
    """

    layers: tuple[str, ...]
    width: int
    readers: int = 1
    lora: int = 0
    kept_anyway: bool = False
    always_kept: bool = False
    merged: int = 0

    @property
    def is_adapter(self) -> bool:
        """Whether adapters read it."""
        return is_adapter(self.layers[0])

    def chosen(self, layers: Collection[str]) -> list[bool]:
        """Say of each reader whether some words name it."""
        first = self.layers[: self.merged]
        named = [any(has_layer(layers, layer) for layer in first)] if first else []
        named += [has_layer(layers, layer) for layer in self.layers[self.merged :]]
        return named + named[-1:] * (self.readers - len(named))

    def groups(self, layers: Collection[str], *, has_dropout: bool) -> list[list[bool]]:
        """Say of each reader whether some words name it, by the tensor that it reads; empty if these are always kept.

        With dropout each LoRA reads a tensor of its own, which only it keeps.
        """
        if self.always_kept:
            return []
        chosen, alone = self.chosen(layers), self.lora if has_dropout else 0
        return [[is_named] for is_named in chosen[:alone]] + ([chosen[alone:]] if chosen[alone:] else [])

    def saved_values(self, velora: Velora, *, has_dropout: bool) -> int:
        """Values per token that VeLoRA saves; negative where something without it keeps the tensor nevertheless.

        A tensor has one projection, or with random vectors one for each reader. ``has_dropout`` is LoRA's.
        """
        groups = self.groups(velora.layers, has_dropout=has_dropout)
        projections = sum(sum(group) if velora.init == RANDOM else any(group) for group in groups)
        freed = 0 if self.kept_anyway else self.width * sum(map(all, groups))
        return freed - projections * velora.num_subtokens(self.width)


def kept_inputs(family: Family, config: Config, adapter: str, widths: Widths | None = None) -> tuple[KeptInput, ...]:
    """Return the inputs that one block keeps for trained linear layers, each tensor once.

    ``widths`` are those of the block, if blocks may be unlike.

    Example: with own weights a BERT block of width 768 keeps three inputs of 768 values and one of 3,072 per token;
    with LoRA on queries and values one of 768.
    """
    dimensions = family.dimensions(config)
    if trains_own_weights(adapter):
        if family.generic and widths is not None:
            return tuple(_inputs_of_block(family, dimensions, widths))
        return tuple(_inputs_by_name(family, dimensions))
    widths = widths or family.widths(config)
    inputs_of_bottlenecks: list[KeptInput] = []
    beside = [_of_places(part.places, widths, is_lora=False, joined=family.joined) for part in auxiliary_of(adapter)]
    for part in parse_adapter_config(adapter):
        kind, options = part.kind, part.whole
        if options.get("use_gating") or (
            part.name in _PARALLEL and (family.plugged or family.model_type in _NORM_FIRST)
        ):
            return ()  # the gate, or the norm, keeps the input of the adapter
        if kind == "bottleneck":
            inputs = bool(options["mh_adapter"]) + bool(options["output_adapter"])
            inputs_of_bottlenecks += [KeptInput(layers=(ADAPTER_DOWN,), width=dimensions.hidden)] * inputs
        if _added_lora(part):
            beside.append(_of_places(places_beside(options), widths, is_lora=True, joined=family.joined))
    kept = _beside_matrices(beside, widths, keeps_down_input=dimensions.keeps_down_input)
    twice = {f"{ADAPTER_DOWN}:{word}" for word in family.twice}
    return (
        *inputs_of_bottlenecks,
        *(
            replace(kept_input, kept_anyway=kept_input.kept_anyway or not twice.isdisjoint(kept_input.layers))
            for kept_input in kept
        ),
    )


def _inputs_by_name(family: Family, dimensions: Dimensions) -> Iterable[KeptInput]:
    """Yield the inputs of those own weights that have a name; experts have none.

    One matrix of queries, keys and values has three names.
    """
    layout, attention = family.layout, _ATTENTION
    first = tuple(role for role in ("up", "gate") if getattr(layout, role))
    merged = 0 if layout.query and not layout.is_merged else len(attention)
    joined = (*attention, *first) if family.joined else attention
    if not family.twice:
        readers = len(joined) - max(0, merged - 1)
        yield KeptInput(layers=joined, width=dimensions.hidden, readers=readers, merged=merged)
    out = dimensions.attention or dimensions.hidden
    is_fused = family.model_type not in _WRITTEN_OUT and not dimensions.kept_scores
    yield KeptInput(layers=("attention_out",), width=out, kept_anyway=is_fused)
    if first and not family.joined:
        yield KeptInput(layers=first, width=dimensions.hidden, readers=len(first))
    if layout.down:
        yield KeptInput(layers=("down",), width=dimensions.inner, always_kept=dimensions.keeps_down_input)


def _inputs_of_block(family: Family, dimensions: Dimensions, widths: Widths) -> Iterable[KeptInput]:
    """Yield the same where blocks have unlike matrices, of a block with these.

    Not the hidden state where a matrix without a role keeps it: in a block with a gated delta net instead of attention,
    where queries are made of latents, and beside Gemma 3n's residual of low rank.
    """
    hidden, layout = dimensions.hidden, family.layout
    for width, words in _by_input(_ATTENTION, widths).items():
        if not (widths.shares_hidden and width == hidden):
            yield KeptInput(layers=words, width=width, readers=len(words))
    if out := widths.attention_out[0]:
        yield KeptInput(layers=("attention_out",), width=out, kept_anyway=not dimensions.kept_scores)
    if first := tuple(role for role in ("up", "gate") if getattr(layout, role)):
        yield KeptInput(layers=first, width=hidden, readers=len(first))
    if layout.down:
        yield KeptInput(layers=("down",), width=widths.output[0], always_kept=dimensions.keeps_down_input)


def _by_input(words: Iterable[str], widths: Widths) -> dict[int, tuple[str, ...]]:
    """Group matrices by the width of their input; equal ones read one tensor."""
    words_of: dict[int, tuple[str, ...]] = {}
    for word in words:
        width = getattr(widths, word)[0]
        words_of |= {width: (*words_of.get(width, ()), word)} if width else {}
    return words_of


def lora_values(adapter: str) -> int | None:
    """Values per token between the two matrices of all LoRA of a block; None without LoRA.

    Example: 16 for rank 8 on queries and values. Methods that scale, such as IA3, do not count.
    """
    values = []
    for part in parse_adapter_config(adapter):
        if options := _added_lora(part):
            matrices = len(options["attn_matrices"]) if options["selfattn_lora"] else 0
            matrices += bool(options["intermediate_lora"]) + bool(options["output_lora"])
            values.append(int(options["r"]) * matrices)
    return sum(values) if values else None


def has_other_adapters(adapter: str) -> bool:
    """Whether a configuration has library adapters other than additive LoRA, such as bottlenecks."""
    return any(part.name not in AUXILIARY_KINDS and not _added_lora(part) for part in parse_adapter_config(adapter))


def _added_lora(part: AdapterPart) -> dict[str, Any]:
    """Return the options of an additive LoRA, defaults included; empty for another method."""
    return part.whole if part.kind == "lora" and part.whole["composition_mode"] == "add" else {}


class _Beside(NamedTuple):
    """A method that adds modules beside matrices.

    LoRA adds one beside a merged matrix of query, key and value; auxiliary models add one for each of the three.

    Attributes:
        attention: words of the layers among query, key and value.
        others: words among up and down.
        is_lora: whether it is LoRA, not an auxiliary model.
    """

    attention: tuple[str, ...]
    others: tuple[str, ...]
    is_lora: bool


def _of_places(places: Collection[str], widths: Widths, *, is_lora: bool, joined: bool) -> _Beside:
    """Return the words of places with a matrix; where all read one tensor, ``up`` is with those of the attention."""
    words = _feed_forward(widths)
    there = {words.get(place, place): None for place in places if any(getattr(widths, place))}
    apart = ("down",) if joined else ("up", "down")
    return _Beside(
        tuple(word for word in there if word not in apart), tuple(word for word in there if word in apart), is_lora
    )


def _feed_forward(widths: Widths) -> dict[str, str]:
    """Return place -> word of its matrix; the library exchanges the two of the Llama family."""
    return {INTERMEDIATE: "down", OUTPUT: "up"} if widths.swapped else {INTERMEDIATE: "up", OUTPUT: "down"}


def _beside_matrices(modules: Sequence[_Beside], widths: Widths, *, keeps_down_input: bool) -> Iterable[KeptInput]:
    """Yield the inputs that modules beside matrices read: one for attention, ``up`` and ``down`` each."""
    modules = sorted(modules, key=lambda module: not module.is_lora)
    by_input = {widths.value[0] or widths.query[0]: tuple(word for module in modules for word in module.attention)}
    for width, words in (_by_input(_ATTENTION, widths) if widths.apart else by_input).items():
        lora = [word for module in modules if module.is_lora for word in module.attention if word in words]
        others = [word for module in modules if not module.is_lora for word in module.attention if word in words]
        if not (lora or others):
            continue
        merged = len(lora) if widths.merged else 0
        of_lora = min(merged, 1) or len(lora)
        yield KeptInput(
            layers=tuple(f"{ADAPTER_DOWN}:{word}" for word in (*lora, *others)),
            width=width,
            readers=of_lora + len(others),
            lora=of_lora,
            merged=merged,
        )
    for place, word in _feed_forward(widths).items():
        if readers := [module for module in modules if word in module.others]:
            yield KeptInput(
                layers=(f"{ADAPTER_DOWN}:{word}",) * len(readers),
                width=getattr(widths, place)[0],
                readers=len(readers),
                lora=sum(module.is_lora for module in readers),
                always_kept=word == "down" and keeps_down_input,
            )


def trained_layers(inputs: Sequence[KeptInput]) -> tuple[str, ...]:
    """Return the trained linear layers of a block, in the order of ``LAYERS``; ``adapter_down`` with any adapter."""
    names = {layer for kept in inputs for layer in kept.layers}
    return tuple(layer for layer in LAYERS if layer in names or (layer == ADAPTER_DOWN and any(map(is_adapter, names))))


def with_shared_inputs(layers: Iterable[str], inputs: Sequence[KeptInput]) -> tuple[str, ...]:
    """Return those of ``layers`` with a compressible input; of own weights with all that read the same tensor.

    Example: ``value`` alone gives ``query``, ``key`` and ``value``; ``down`` behind ReLU is left out.
    """
    named = set(layers)
    compressible: set[str] = set()
    for kept in inputs:
        if kept.always_kept or not any(kept.chosen(named)):
            continue
        compressible |= {word for word in named if any(has_layer([word], layer) for layer in kept.layers)}
        if not kept.is_adapter:
            compressible |= set(kept.layers)
    if not compressible.isdisjoint(_ATTENTION):  # the three are named together, also where they read different tensors
        compressible |= set(_ATTENTION)
    return tuple(layer for layer in LAYERS if layer in compressible)


def paper_layers(inputs: Sequence[KeptInput], *, has_dropout: bool) -> tuple[str, ...]:
    """Return the layers that VeLoRA's authors project.

    These are value and down projections, and down matrices of bottlenecks. Of LoRA they are the A of ``down``, and of
    ``value`` where no other module reads the same tensor, which would keep it.
    """
    beside = [kept for kept in inputs if kept.layers[0] in SITES]
    if not beside or len(beside) < len(inputs):
        return with_shared_inputs(("value", "down", ADAPTER_DOWN), inputs)
    down, value = f"{ADAPTER_DOWN}:down", f"{ADAPTER_DOWN}:value"
    free = [kept for kept in beside if not kept.kept_anyway]
    alone = [kept for kept in free if any(map(all, kept.groups([value], has_dropout=has_dropout)))]
    values = (value,) if alone and not any(kept.merged > 1 for kept in alone) else ()
    return with_shared_inputs((*values, down), inputs)
