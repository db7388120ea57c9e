"""Inputs of trained linear layers, which a block keeps for its backward; a frozen linear layer does not need its input.

VeLoRA can compress these tensors only. Several layers may read one tensor, which is kept once.

Source: the saved tensors of blocks of every family (``tests/edge/techniques/test_velora.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ringtune.models.adapter_config import (
    AdapterPart,
    auxiliary_of,
    known_configurations,
    parse_adapter_config,
    trains_own_weights,
)
from ringtune.models.auxiliary_models import AUXILIARY_KINDS, INTERMEDIATE, OUTPUT, AuxiliaryConfig
from ringtune.models.family import Config, Family, Widths

ADAPTER_DOWN: Final = "adapter_down"
_ATTENTION_KEEPS: Final = ("gpt2",)
_NORM_FIRST: Final = ("gpt2", "llama", "mistral", "vit")
_PARALLEL: Final = ("par_bn", "scaled_par_bn")


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptInput:
    """One tensor of a block that is kept because trained linear layers read it.

    Attributes:
        layers: that read it; words of ``schedule.saved_activations.LAYERS``.
        width: values per token.
        readers: number of trained matrices that read it; if each has its own VeLoRA vector, each keeps a projection.
        lora: how many of the readers are LoRA's, each with its own dropout.
        kept_anyway: whether the fused attention kernel keeps it too without dropout, as in GPT-2 and plugged families.
        always_kept: whether the activation function before it keeps it too, as ReLU does; VeLoRA then does not compress
            it.
    """

    layers: tuple[str, ...]
    width: int
    readers: int = 1
    lora: int = 0
    kept_anyway: bool = False
    always_kept: bool = False


def kept_inputs(family: Family, config: Config, adapter: str) -> tuple[KeptInput, ...]:
    """Return the inputs that one block keeps for trained linear layers, each tensor once.

    Example: with own weights a BERT block of width 768 keeps three inputs of 768 values and one of 3,072 per token;
    with LoRA on queries and values one of 768.
    """
    dimensions = family.dimensions(config)
    if trains_own_weights(adapter):
        has_gate = any("gate" in name for name in family.subnet_weights)
        attention = 1 if family.widths(config).merged else 3
        return (
            KeptInput(layers=("query", "key", "value"), width=dimensions.hidden, readers=attention),
            KeptInput(
                layers=("attention_out",),
                width=dimensions.attention or dimensions.hidden,
                kept_anyway=family.model_type in _ATTENTION_KEEPS or (family.plugged and not dimensions.kept_scores),
            ),
            KeptInput(
                layers=("up", "gate") if has_gate else ("up",), width=dimensions.hidden, readers=2 if has_gate else 1
            ),
            KeptInput(layers=("down",), width=dimensions.inner, always_kept=dimensions.keeps_down_input),
        )
    defaults, widths = known_configurations(), family.widths(config)
    found: list[KeptInput] = []
    beside = [_of_auxiliary(one) for one in auxiliary_of(adapter)]
    for part in parse_adapter_config(adapter):
        kind, options = defaults[part.name]
        options = {**options, **part.options}
        if options.get("use_gating") or (
            part.name in _PARALLEL and (family.plugged or family.model_type in _NORM_FIRST)
        ):
            return ()  # the gate, or the norm, keeps the input of the adapter
        if kind == "bottleneck":
            inputs = bool(options["mh_adapter"]) + bool(options["output_adapter"])
            found += [KeptInput(layers=(ADAPTER_DOWN,), width=dimensions.hidden)] * inputs
        if _added_lora(part):
            beside.append(_of_lora(options, is_merged=widths.merged))
    return (*found, *_beside_matrices(beside, widths, keeps_down_input=dimensions.keeps_down_input))


def lora_values(adapter: str) -> int | None:
    """Values per token between the two matrices of all LoRA of a block; None without LoRA.

    Example: 16 for rank 8 on queries and values. Methods that scale, such as IA3, do not count.
    """
    found = []
    for part in parse_adapter_config(adapter):
        if options := _added_lora(part):
            matrices = len(options["attn_matrices"]) if options["selfattn_lora"] else 0
            matrices += bool(options["intermediate_lora"]) + bool(options["output_lora"])
            found.append(int(options["r"]) * matrices)
    return sum(found) if found else None


def has_other_adapters(adapter: str) -> bool:
    """Whether a configuration has library adapters other than additive LoRA, such as bottlenecks."""
    return any(part.name not in AUXILIARY_KINDS and not _added_lora(part) for part in parse_adapter_config(adapter))


def _added_lora(part: AdapterPart) -> dict[str, Any]:
    """Return the options of an additive LoRA, defaults included; empty for another method."""
    kind, defaults = known_configurations()[part.name]
    options = {**defaults, **part.options}
    return options if kind == "lora" and options["composition_mode"] == "add" else {}


_OUTPUT: Final = 2
"""Index of ``output`` in ``_Beside``."""


class _Beside(NamedTuple):
    """Number of modules that a method adds beside matrices, by the input that they read.

    LoRA adds one beside a merged matrix of query, key and value; auxiliary models add one for each of the three.
    """

    attention: int
    intermediate: int
    output: int
    is_lora: bool = False


def _of_lora(options: Mapping[str, Any], *, is_merged: bool) -> _Beside:
    readers = len(options["attn_matrices"]) if options["selfattn_lora"] else 0
    readers = min(readers, 1) if is_merged else readers
    return _Beside(readers, bool(options["intermediate_lora"]), bool(options["output_lora"]), is_lora=True)


def _of_auxiliary(auxiliary: AuxiliaryConfig) -> _Beside:
    readers = sum(place not in (INTERMEDIATE, OUTPUT) for place in auxiliary.places)
    return _Beside(readers, INTERMEDIATE in auxiliary.places, OUTPUT in auxiliary.places)


def _beside_matrices(found: Sequence[_Beside], widths: Widths, *, keeps_down_input: bool) -> Iterable[KeptInput]:
    """Yield the inputs that modules beside matrices read: one for attention, intermediate and output each."""
    for at, width in enumerate((widths.query[0], widths.intermediate[0], widths.output[0])):
        readers = sum(one[at] for one in found)
        if readers:
            lora = sum(one[at] for one in found if one.is_lora)
            always = at == _OUTPUT and keeps_down_input
            yield KeptInput(layers=(ADAPTER_DOWN,), width=width, readers=readers, lora=lora, always_kept=always)


def trained_layers(inputs: Sequence[KeptInput]) -> tuple[str, ...]:
    """Return the trained linear layers of a block, in the order of their inputs."""
    return tuple(dict.fromkeys(layer for kept in inputs for layer in kept.layers))


def with_shared_inputs(layers: Iterable[str], inputs: Sequence[KeptInput]) -> tuple[str, ...]:
    """Return those of ``layers`` with a compressible input, each with all layers that read the same tensor.

    Example: ``value`` alone gives ``query``, ``key`` and ``value``; ``down`` behind ReLU is left out.
    """
    wanted = set(layers)
    free = (kept for kept in inputs if not kept.always_kept)
    taken = (layer for kept in free if wanted & set(kept.layers) for layer in kept.layers)
    return tuple(dict.fromkeys(taken))
