"""The stock libraries' model of a family that is plugged in, by the documented lines; nothing of ours computes in it.

It is given ``heads`` and ``active_head`` as AdapterHub's own classes have them, so that one reference trains both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from ringtune.models import decoders
from ringtune.models.families import FAMILIES
from tests.support.tiny_families import ENCODERS, GENERIC, PLUGGED

IN_EAGER = ("doge", "gemma2", "vaultgemma")
"""``model_type`` of models that have to be loaded with the written-out attention."""


def is_plugged(model_type: str) -> bool:
    """Whether AdapterHub has no class for a family."""
    return model_type in (*PLUGGED, *GENERIC, *ENCODERS)


def interface_of(model_type: str) -> Any:
    """The interface of a family, written down once more; that of a generic one is its description."""
    from adapters import AdapterModelInterface

    if model_type in GENERIC or model_type in ENCODERS:
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
    """Load the architecture's own class with a head for the task, ready to take adapters."""
    import adapters
    import transformers
    from transformers import AutoModelForCausalLM

    name = attention or ("eager" if config.model_type in IN_EAGER else None)
    choice = {} if name is None else {"attn_implementation": name}
    if task == "causal-lm":
        model = AutoModelForCausalLM.from_pretrained(str(folder), config=config, **choice)
        model.get_output_embeddings().requires_grad_(False)
    else:
        config.id2label = dict(enumerate(labels or _OUTPUTS.get(task, ["number"])))
        config.num_labels = len(config.id2label)
        kind = getattr(transformers, STOCK_CLASSES.get(task, "AutoModelForSequenceClassification"))
        model = kind.from_pretrained(str(folder), config=config, **choice)
    with _first_block_may_lack(FAMILIES[config.model_type].layout.instead):
        adapters.init(model, interface=interface_of(config.model_type))
    _add_places(model)
    for module in model.modules():
        if type(module).__name__ == "PhimoeSparseMoeBlock":  # in training it would draw experts at random
            module.train = lambda mode=True, of=module: of
    model.loss_function = _loss
    return with_room(model)


@contextlib.contextmanager
def _first_block_may_lack(instead: tuple[tuple[str, str], ...]) -> Iterator[None]:
    """Let the library take an interface of which the first block has not all names, as later blocks have."""
    from adapters.wrappers import model

    checks = model._validate_interface_values
    if instead:
        model._validate_interface_values = lambda *_: None
    try:
        yield
    finally:
        model._validate_interface_values = checks


def _add_places(model: Any) -> None:
    """Let LoRA be beside matrices that the plug-in interface has no names for, as the library puts it elsewhere."""
    from adapters.methods.lora import LoRALinear
    from adapters.utils import multigetattr, multisetattr

    layout = FAMILIES[model.config.model_type].layout
    for _, block in model.iter_layers():
        for role, path in layout.instead:
            if (matrix := multigetattr(block, path, None)) is not None:
                place = LoRALinear.wrap(matrix, "selfattn", model.config, model.adapters_config, attn_key=role[0])
                multisetattr(block, path, place)


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
    if model.config.model_type in ENCODERS:
        model.heads, model.active_head = {name: _encoder_head(model, task)}, name
        return
    fresh = torch.nn.Linear(model.config.hidden_size, model.config.num_labels, bias=False)
    model._init_weights(fresh)
    model.score.weight = fresh.weight
    model.heads, model.active_head, model.head_prefix = {name: model.score}, name, "score."


STOCK_CLASSES = {
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
}
_OUTPUTS = {"question-answering": ["start", "end"]}
_POOLED = {"deberta": "pooler.dense", "deberta-v2": "pooler.dense", "ernie": "ernie.pooler.dense"}
_POOLED |= {"megatron-bert": "bert.pooler.dense", "albert": "albert.pooler"}


def _encoder_head(model: Any, task: str) -> torch.nn.ModuleDict:
    """Draw the values of an encoder's own head, matrix after matrix, as each class of transformers names them."""
    model_type = model.config.model_type
    paths = ["qa_outputs" if task == "question-answering" else "classifier"]
    if model_type == "modernbert":
        paths = ["head.dense", "head.norm", "classifier"]
    elif task in ("sequence-classification", "regression"):
        pooled = _POOLED.get(model_type)
        paths = [pooled, "classifier"] if pooled else ["classifier.dense", "classifier.out_proj"]
    modules = [model.get_submodule(path) for path in paths]
    linear = torch.nn.Linear
    fresh = [
        linear(each.in_features, each.out_features, each.bias is not None) if isinstance(each, linear) else None
        for each in modules
    ]
    for module, new in zip(modules, fresh, strict=True):
        if new is None:
            module.reset_parameters()
            continue
        model._init_weights(new)
        module.load_state_dict(new.state_dict())
    found = torch.nn.ModuleDict({path.replace(".", "/"): module for path, module in zip(paths, modules, strict=True)})
    inside = {id(module) for module in model.base_model.modules()}
    found["drawing"] = torch.nn.ModuleList(
        module for module in model.modules() if isinstance(module, torch.nn.Dropout) and id(module) not in inside
    )
    return found


def encoder_loss(output: Any, mask: torch.Tensor, **targets: torch.Tensor) -> torch.Tensor:
    """The mean loss of a task; padding has no share in the loss of an answer."""
    if "start_positions" in targets:
        pairs = ((output.start_logits, "start_positions"), (output.end_logits, "end_positions"))
        spans = [functional.cross_entropy(x.masked_fill(mask == 0, -1e4), targets[name]) for x, name in pairs]
        return (spans[0] + spans[1]) / 2
    labels = targets["labels"]
    if labels.is_floating_point():
        return functional.mse_loss(output.logits.squeeze(-1), labels.to(output.logits.dtype))
    return functional.cross_entropy(output.logits.flatten(0, -2), labels.flatten(), ignore_index=-100)


def _loss(
    logits: torch.Tensor, labels: torch.Tensor, _: int = 0, *, pooled_logits: torch.Tensor | None = None, **__: Any
) -> torch.Tensor:
    """The mean cross entropy, or of numbers the mean squared error, in their type; the library's own is in float32."""
    if pooled_logits is not None and labels.is_floating_point():
        return functional.mse_loss(pooled_logits.squeeze(-1), labels.to(pooled_logits.dtype))
    if pooled_logits is not None:
        return functional.cross_entropy(pooled_logits, labels)
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
