"""The stock libraries' model of a family that is plugged in, by the documented lines; nothing of ours computes in it.

It is given ``heads`` and ``active_head`` as AdapterHub's own classes have them, so that one reference trains both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from ringtune.models import decoders
from ringtune.models.families import FAMILIES
from tests.support.tiny_families import GENERIC, PLUGGED

SCORES_CAPPED = ("gemma2", "vaultgemma")
"""``model_type`` of models that have to be loaded with the written-out attention."""


def is_plugged(model_type: str) -> bool:
    """Whether AdapterHub has no class for a family."""
    return model_type in PLUGGED or model_type in GENERIC


def interface_of(model_type: str) -> Any:
    """The interface of a family, written down once more; that of a generic one is its description."""
    from adapters import AdapterModelInterface

    if model_type in GENERIC:
        return AdapterModelInterface(**decoders.interface_of(FAMILIES[model_type]))
    has_own_norm = model_type in ("gemma2", "gemma3_text")
    return AdapterModelInterface(
        adapter_methods=["bottleneck", "lora", "reft"],
        model_embeddings="embed_tokens",
        model_layers="layers",
        layer_self_attn="self_attn",
        layer_cross_attn=None,
        attn_q_proj="q_proj",
        attn_k_proj="k_proj",
        attn_v_proj="v_proj",
        attn_o_proj="o_proj",
        layer_intermediate_proj="mlp.up_proj",
        layer_output_proj="mlp.down_proj",
        layer_pre_self_attn="input_layernorm",
        layer_pre_ffn="pre_feedforward_layernorm" if has_own_norm else "post_attention_layernorm",
        base_model="model",
    )


def stock_model(folder: Path, task: str, labels: tuple[str, ...], *, config: Any, attention: str | None) -> Any:
    """Load the architecture's own class with a head for the task, ready to take adapters.

    Args:
        folder: of the pretrained model.
        task: its head is the pretrained one, or is new.
        labels: names of the classes; empty without.
        config: of the model.
        attention: implementation; the one that computes the architecture exactly if not given.
    """
    import adapters
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    name = attention or ("eager" if config.model_type in SCORES_CAPPED else None)
    choice = {} if name is None else {"attn_implementation": name}
    if task == "causal-lm":
        model = AutoModelForCausalLM.from_pretrained(str(folder), config=config, **choice)
        model.get_output_embeddings().requires_grad_(False)
    else:
        config.num_labels = len(labels) or 1
        config.id2label = dict(enumerate(labels or ["number"]))
        model = AutoModelForSequenceClassification.from_pretrained(str(folder), config=config, **choice)
    adapters.init(model, interface=interface_of(config.model_type))
    model.loss_function = _loss
    return with_room(model)


def with_room(model: Any) -> Any:
    """Let written-out attention be computed in float64: its softmax in float32 takes the smallest float64 for infinity.

    A row of padding alone is NaN then, in the library itself. In float32 nothing changes.
    """

    def clamped(block: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.is_floating_point():
            kwargs = {**kwargs, "attention_mask": mask.clamp(min=torch.finfo(torch.float32).min)}
        return args, kwargs

    for block in model.base_model.get_submodule(FAMILIES[model.config.model_type].blocks_path):
        block.register_forward_pre_hook(clamped, with_kwargs=True)
    return model


def add_heads(model: Any, task: str, name: str) -> None:
    """Draw the initial values of a new head as AdapterHub does, and name it."""
    if task == "causal-lm":
        head = model.get_output_embeddings()
        model.heads, model.active_head, model.head_prefix = {"default": head}, "default", "lm_head."
        return
    fresh = torch.nn.Linear(model.config.hidden_size, model.config.num_labels, bias=False)
    model._init_weights(fresh)
    model.score.weight = fresh.weight
    model.heads, model.active_head, model.head_prefix = {name: model.score}, name, "score."


def _loss(
    logits: torch.Tensor, labels: torch.Tensor, _: int = 0, *, pooled_logits: torch.Tensor | None = None, **__: Any
) -> torch.Tensor:
    """The mean cross entropy, or of numbers the mean squared error, in their type; the library's own is in float32."""
    if pooled_logits is not None and labels.is_floating_point():
        return functional.mse_loss(pooled_logits.squeeze(-1), labels.to(pooled_logits.dtype))
    if pooled_logits is not None:
        return functional.cross_entropy(pooled_logits, labels)
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
