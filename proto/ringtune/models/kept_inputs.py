"""Which inputs of linear layers a block keeps for its backward: those of the layers whose weights train.

A frozen linear layer does not need its input. These tensors are all that VeLoRA can make smaller; several layers may
read one tensor, which is kept as long as one of them keeps it.

Source: the saved tensors of blocks of every family (``tests/edge/compute/test_velora_saved.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ringtune.models.adapter_config import known_configurations, parse_adapter_config, trains_own_weights
from ringtune.models.family import Config, Family, Widths

ADAPTER_DOWN: Final = "adapter_down"
_ATTENTION_KEEPS: Final = ("gpt2",)
_NORM_FIRST: Final = ("gpt2", "llama", "mistral", "vit")
_PARALLEL: Final = ("par_bn", "scaled_par_bn")


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptInput:
    """One tensor of a block that is kept because linear layers which train read it.

    Attributes:
        layers: that read it; words of ``schedule.saving.LAYERS``.
        width: values of each token.
        kept_anyway: whether the fused attention kernel keeps it too, as that of GPT-2 does without dropout.
    """

    layers: tuple[str, ...]
    width: int
    kept_anyway: bool = False


def kept_inputs(family: Family, config: Config, adapter: str) -> tuple[KeptInput, ...]:
    """The inputs that one block keeps for linear layers that train, each tensor once.

    Example: with own weights a BERT block of width 768 keeps three inputs of 768 values and one of 3,072; with LoRA
    on queries and values one of 768.

    Args:
        family: of the model.
        config: from ``read_config``.
        adapter: ``adapter.config`` of the job.

    Raises:
        JobError: the adapter configuration is refused.
    """
    dimensions = family.dimensions(config)
    if trains_own_weights(adapter):
        has_gate = any("gate" in name for name in family.subnet_weights)
        return (
            KeptInput(layers=("query", "key", "value"), width=dimensions.hidden),
            KeptInput(
                layers=("attention_out",), width=dimensions.hidden, kept_anyway=family.model_type in _ATTENTION_KEEPS
            ),
            KeptInput(layers=("up", "gate") if has_gate else ("up",), width=dimensions.hidden),
            KeptInput(layers=("down",), width=dimensions.inner),
        )
    defaults, widths = known_configurations(), family.widths(config)
    found: list[int] = []
    for part in parse_adapter_config(adapter):
        kind, options = defaults[part.name]
        options = {**options, **part.options}
        if options.get("use_gating") or (part.name in _PARALLEL and family.model_type in _NORM_FIRST):
            return ()  # the gate, or the norm, keeps the input of the adapter
        if kind == "bottleneck":
            found += [dimensions.hidden] * (bool(options["mh_adapter"]) + bool(options["output_adapter"]))
        if kind == "lora" and options["composition_mode"] == "add":
            found += _lora_inputs(options, widths)
    return tuple(KeptInput(layers=(ADAPTER_DOWN,), width=width) for width in found)


def _lora_inputs(options: dict[str, Any], widths: Widths) -> Iterable[int]:
    """The widths of the inputs that LoRA's first matrices read; one for all matrices of the attention."""
    if options["selfattn_lora"] and options["attn_matrices"]:
        yield widths.query[0]
    if options["intermediate_lora"]:
        yield widths.intermediate[0]
    if options["output_lora"]:
        yield widths.output[0]


def trained_layers(inputs: Sequence[KeptInput]) -> tuple[str, ...]:
    """The linear layers of a block that train, in the order of their inputs."""
    return tuple(dict.fromkeys(layer for kept in inputs for layer in kept.layers))


def taken_together(layers: Iterable[str], inputs: Sequence[KeptInput]) -> tuple[str, ...]:
    """The layers that train of those named, each with all that read the same tensor.

    Example: ``value`` alone takes ``query`` and ``key`` with it.
    """
    wanted = set(layers)
    taken = (layer for kept in inputs if wanted & set(kept.layers) for layer in kept.layers)
    return tuple(dict.fromkeys(taken))
