"""Modules of transformers 5 with other names of tensors than in files, made again with the names of the files.

Files, and with them plans, digests, adapters and checkpoints, are the same for transformers 4 and 5. In memory
version 5 has other modules in two places, and renames tensors when it reads or writes a file::

    vision transformer     encoder.layer.0.attention.attention.query    is layers.0.attention.q_proj there
    mixture of experts     mlp.experts.3.up_proj.weight                 is a part of mlp.experts.gate_up_proj

Here these modules are built as in transformers 4, so that a node reads, freezes, holds small and exports them by one
name. Nothing is done where a model has the names of its files, as in transformers 4.57.

N tokens, D model width, K experts of a token.

Source: transformers 5.24, ``conversion_mapping.py``; ``modeling_vit.py`` of 4.57.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from ringtune.models.folder import read_headers

_EXPERT: Final = ("gate_proj", "up_proj", "down_proj")
_EXPERTS: Final[Mapping[str, tuple[str, tuple[str, str, str]]]] = {
    **dict.fromkeys(("minimax_m2", "mixtral", "phimoe"), ("block_sparse_moe.experts", ("w1", "w3", "w2"))),
    "lfm2_moe": ("feed_forward.experts", ("w1", "w3", "w2")),
    **dict.fromkeys(
        (
            *("deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe"),
            *("glm4_moe_lite", "hunyuan_v1_moe", "hy_v3", "mellum", "mimo_v2_flash", "olmoe", "qwen2_moe"),
            *("qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "solar_open"),
        ),
        ("mlp.experts", _EXPERT),
    ),
}
"""``model_type`` -> path of the experts in a block, and names of an expert's matrices: gate, up, down; in files."""
_STACKED: Final = "gate_up_proj"
_EITHER: Final = ("qwen3_5_moe_text",)
"""``model_type`` whose files may have stacked experts, too."""
_GRANITE: Final = {
    "block_sparse_moe.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
    "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
    "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
}
_RENAMED: Final[Mapping[str, Mapping[str, str]]] = {
    "aria_text": {
        "mlp.experts.gate_up_proj": "mlp.experts.fc1.weight",
        "mlp.experts.down_proj": "mlp.experts.fc2.weight",
    },
    "ernie4_5_moe": {"mlp.gate.moe_statics.e_score_correction_bias": "mlp.moe_statics.e_score_correction_bias"},
    "granitemoe": _GRANITE,
    "granitemoeshared": _GRANITE,
    "exaone_moe": {"mlp.gate.e_score_correction_bias": "mlp.e_score_correction_bias"},
    "hy_v3": {
        "mlp.e_score_correction_bias": "mlp.expert_bias",
        "mlp.gate.weight": "mlp.router.gate.weight",
        **{f"mlp.shared_experts.{name}.weight": f"mlp.shared_mlp.{name}.weight" for name in _EXPERT},
    },
    "mimo_v2_flash": {"self_attn.sinks": "self_attn.attention_sink_bias"},
    "minimax_m2": {
        "mlp.e_score_correction_bias": "block_sparse_moe.e_score_correction_bias",
        "mlp.gate.weight": "block_sparse_moe.gate.weight",
    },
    "mixtral": {"mlp.gate.weight": "block_sparse_moe.gate.weight"},
    "phimoe": {"mlp.router.weight": "block_sparse_moe.gate.weight"},
}
"""``model_type`` -> name of a tensor in a block of transformers 5 -> its name in files."""


def use_stored_names(base: Any, model_type: str, blocks_path: str, folder: Path | None = None) -> None:
    """Give the modules of a base model the names of their tensors in files; before it has weights."""
    stored_names = read_headers(folder) if model_type in _EITHER and folder is not None else ()
    is_stacked = any(name.endswith(f".experts.{_STACKED}") for name in stored_names)
    if model_type == "vit" and not hasattr(base, "encoder"):
        base.encoder = nn.Module()
        base.encoder.layer = nn.ModuleList(VitBlock(base.config) for _ in base.layers)
        del base.layers
    for block in base.get_submodule(blocks_path):
        for name, stored in _RENAMED.get(model_type, {}).items():
            _rename(block, name, stored)
        mixture: Any = getattr(block, "feed_forward" if model_type == "lfm2_moe" else "mlp", None)
        experts = getattr(mixture, "experts", None)
        if model_type in _EXPERTS and not is_stacked and _STACKED in getattr(experts, "_parameters", {}):
            path, matrices = _EXPERTS[model_type]
            del mixture.experts
            separate = Experts(experts, matrices)
            _place(block, path, separate)
            if not hasattr(mixture, "experts"):
                mixture.__dict__["experts"] = separate  # called there, but its tensors have another path


def _place(block: nn.Module, path: str, module: nn.Module) -> None:
    """Make a module the one at a path, with plain modules before it where there are none."""
    *before, last = path.split(".")
    for name in before:
        if name not in block._modules:
            block.add_module(name, nn.Module())
        block = block.get_submodule(name)
    block.add_module(last, module)


def _rename(block: nn.Module, name: str, stored: str) -> None:
    """Keep a parameter or buffer under another name; its module finds it there whenever it computes."""
    path, _, attribute = name.rpartition(".")
    try:
        module = block.get_submodule(path)
    except AttributeError:  # of another version, or a block without experts
        return
    if attribute not in module._parameters and attribute not in module._buffers:
        return
    where, _, last = stored.rpartition(".")
    try:
        home = block.get_submodule(where)
    except AttributeError:
        home = nn.Module()
        _place(block, where, home)
    if attribute in module._parameters:
        home.register_parameter(last, module._parameters.pop(attribute))
    else:
        home.register_buffer(last, module._buffers.pop(attribute))
    module.__dict__[f"_home_of_{attribute}"] = home
    kind = type(module)
    names = {
        attribute: property(lambda self: getattr(self.__dict__[f"_home_of_{attribute}"], last)),
        "__module__": kind.__module__,
    }
    module.__class__ = type(kind.__name__, (kind,), names)


class Experts(nn.Module):
    """Experts of a mixture, each with matrices of its own; called as the stacked ones of transformers 5.

    Args:
        stacked: module with ``gate_up_proj`` (experts, 2 I, D) and an activation ``act_fn``.
        matrices: names of an expert's gate, up and down.
    """

    def __init__(self, stacked: Any, matrices: tuple[str, str, str]) -> None:
        super().__init__()
        count, double, hidden = stacked.gate_up_proj.shape
        self._count, self._matrices = count, matrices
        self.act_fn = stacked.act_fn
        for number in range(count):
            expert = nn.Module()
            for name, (inputs, outputs) in zip(
                matrices, ((hidden, double // 2), (hidden, double // 2), (double // 2, hidden)), strict=True
            ):
                expert.add_module(name, nn.Linear(inputs, outputs, bias=False))
            self.add_module(str(number), expert)

    def forward(self, hidden_ND: torch.Tensor, chosen_NK: torch.Tensor, factors_NK: torch.Tensor) -> torch.Tensor:
        """Add up what the chosen experts of each token compute, times their factors."""
        total_ND = torch.zeros_like(hidden_ND)
        for number in range(self._count):
            token, place = torch.where(chosen_NK == number)
            if not len(token):
                continue
            gate, up, down = (self.get_submodule(f"{number}.{name}") for name in self._matrices)
            given = hidden_ND[token]
            output = down(self.act_fn(gate(given)) * up(given)) * factors_NK[token, place, None]
            total_ND.index_add_(0, token, output.to(total_ND.dtype))
        return total_ND


class _VitAttention(nn.Module):
    """Queries, keys, values and their attention."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.num_attention_heads
        self.config, self.num_attention_heads = config, heads
        self.scaling, self.is_causal = (width // heads) ** -0.5, False
        self.dropout_prob = config.attention_probs_dropout_prob
        self.query, self.key, self.value = (nn.Linear(width, width, bias=config.qkv_bias) for _ in range(3))

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Attend to all tokens."""
        from transformers.models.vit.modeling_vit import ALL_ATTENTION_FUNCTIONS, eager_attention_forward

        matrices = (self.key, self.value, self.query)
        key, value, query = (
            matrix(hidden_BTD).unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2) for matrix in matrices
        )
        name = self.config._attn_implementation
        attend: Any = eager_attention_forward if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
        rate = self.dropout_prob if self.training else 0.0
        attended: torch.Tensor = attend(
            self, query, key, value, None, is_causal=False, scaling=self.scaling, dropout=rate
        )[0]
        return attended.flatten(2)


class _Dense(nn.Module):
    """A matrix with dropout, which gets the residual too. ``adds``: whether it adds the residual."""

    def __init__(self, inputs: int, outputs: int, dropout: float, *, adds: bool) -> None:
        super().__init__()
        self.dense, self.dropout, self._adds = nn.Linear(inputs, outputs), nn.Dropout(dropout), adds

    def forward(self, hidden_BTD: torch.Tensor, input_BTD: torch.Tensor) -> torch.Tensor:
        """Compute the output."""
        output: torch.Tensor = self.dropout(self.dense(hidden_BTD))
        return output + input_BTD if self._adds else output


class _Inner(nn.Module):
    """First matrix of the feed-forward part, and its activation."""

    def __init__(self, config: Any) -> None:
        from transformers.activations import ACT2FN

        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.intermediate_act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Compute the inner state."""
        output: torch.Tensor = self.intermediate_act_fn(self.dense(hidden_BTD))
        return output


class _AttentionPart(nn.Module):
    """Attention and its output matrix."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.attention = _VitAttention(config)
        self.output = _Dense(config.hidden_size, config.hidden_size, config.hidden_dropout_prob, adds=False)

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Compute the part's output, without the residual."""
        output: torch.Tensor = self.output(self.attention(hidden_BTD), hidden_BTD)
        return output


class VitBlock(nn.Module):
    """A block of a vision transformer, with the modules and names of transformers 4."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.attention = _AttentionPart(config)
        self.intermediate = _Inner(config)
        self.output = _Dense(config.intermediate_size, config.hidden_size, config.hidden_dropout_prob, adds=True)
        self.layernorm_before = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.layernorm_after = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Compute the hidden state after the block."""
        between_BTD = self.attention(self.layernorm_before(hidden_BTD)) + hidden_BTD
        output: torch.Tensor = self.output(self.intermediate(self.layernorm_after(between_BTD)), between_BTD)
        return output
