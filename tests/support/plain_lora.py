"""LoRA written out beside the matrices of a model of transformers that AdapterHub's library can't take; or no LoRA."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from edge.model.families.stored_names import use_stored_names
from ringtune.job.job import Job
from ringtune.models.adapter_config import parse_adapter_config
from ringtune.models.families import FAMILIES
from ringtune.models.family import Family


def lora_model(folder: Path, job: Job, config: Any, name: str) -> Any:
    """Load a language model and put LoRA of a job beside its matrices; each block draws in the order of its modules.

    With ``full`` the blocks themselves train.
    """
    from transformers import AutoModelForCausalLM

    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_pretrained(str(folder), config=config, dtype=torch.float32).requires_grad_(False)
    family = FAMILIES[config.model_type]
    blocks = model.base_model.get_submodule(family.blocks_path)
    model.iter_layers = lambda: enumerate(blocks)
    model.heads, model.active_head = {"default": model.lm_head}, "default"
    model.loss_function = lambda logits, labels, *_, **__: functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
    )
    if job.adapter.config == "full":
        _separate_experts(model, blocks, family)
        blocks.requires_grad_(True)
        return model.to(getattr(torch, job.model.dtype)).eval()
    (part,) = parse_adapter_config(job.adapter.config)
    options = part.whole
    layout, roles = family.layout, [_ROLES[letter] for letter in options["attn_matrices"]]
    paths = {path for role in roles for path in layout.matrices_of(role)}
    paths |= {layout.up} if options["intermediate_lora"] else set()
    paths |= {layout.down} if options["output_lora"] else set()
    torch.manual_seed(job.train.seed)
    for block in blocks:
        for path, module in list(block.named_modules()):
            if path in paths:
                _add(module, options, job.train.dropout, name)
    return model.to(getattr(torch, job.model.dtype)).eval()


def _separate_experts(model: Any, blocks: Any, family: Family) -> None:
    """Give experts that are stacked in memory the names and values that they have in files."""
    parts = [part for block in blocks for part in block.children() if hasattr(part, "experts")]
    stacked = [part.experts for part in parts]
    use_stored_names(model.base_model, family.model_type, family.blocks_path)
    for part, both in zip(parts, stacked, strict=True):
        for number, (gate_up, down) in enumerate(zip(both.gate_up_proj, both.down_proj, strict=True)):
            names = _GATE_UP_DOWN.get(family.model_type, ("gate_proj", "up_proj", "down_proj"))
            for name, value in zip(names, (*gate_up.chunk(2), down), strict=True):
                part.experts.get_submodule(f"{number}.{name}").weight.data = value.detach().clone()


_GATE_UP_DOWN = dict.fromkeys(("lfm2_moe", "minimax_m2"), ("w1", "w3", "w2"))
_ROLES = {"q": "query", "k": "key", "v": "value"}


def _add(matrix: Any, options: dict[str, Any], dropout: float, name: str) -> None:
    """Add alpha / r * B A x to the output of a matrix."""
    own: Any = nn.Module()
    own.lora_A = nn.Parameter(torch.empty(options["r"], matrix.in_features))
    own.lora_B = nn.Parameter(torch.zeros(matrix.out_features, options["r"]))
    if options.get("init_weights") == "bert":
        nn.init.normal_(own.lora_A, std=0.02)
        nn.init.normal_(own.lora_B, std=0.02)
    else:
        nn.init.kaiming_uniform_(own.lora_A, a=math.sqrt(5))
    own.lora_dropout, own.scaling = nn.Dropout(dropout), options["alpha"] / options["r"]
    own.forward = lambda x: own.scaling * (own.lora_dropout(x) @ own.lora_A.T @ own.lora_B.T)

    plain = matrix.forward
    matrix.loras = nn.ModuleDict({name: own})
    matrix.forward = lambda x: plain(x) + own(x)
