"""Modules of a block by family: the matrices that subnets share, and the places of adapters.

Source: the modules of transformers 4.57 and adapters 1.3.0. In the Llama family the library's ``intermediate_lora``
wraps the matrix ``down``, and its ``output_lora`` the matrix ``up``; here a module has the name of its function. For
plugged-in adapters both names are right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockLayout:
    """Dotted names of the modules in a block of one family.

    Attributes:
        attention: module of the attention itself.
        query: matrix of the queries; the same as ``key`` and ``value`` for a fused matrix.
        key: matrix of the keys.
        value: matrix of the values.
        attention_out: output matrix of the attention.
        up: first matrix of the feed-forward part.
        gate: matrix of the gate beside ``up``; empty without one.
        activation: function between ``up`` (or ``gate``) and ``down``.
        down: output matrix of the feed-forward part.
        attention_norm: before the attention, or after it and the residual.
        feed_forward_norm: the same of the feed-forward part.
        attention_adapter: bottleneck after the attention; adds the residual.
        feed_forward_adapter: bottleneck after the feed-forward part; adds the residual.
        norm_first: whether norms are before attention and feed-forward part, not after them.
        inputs_first: whether matrices are stored with a row for each input, not for each output.
        swaps_lora: whether the library calls ``down`` the intermediate matrix and ``up`` the output.
        adds_residual: whether the block adds the residual after its plugged-in bottleneck.
        query_norm: norm of each head's queries, before the rotation; empty without one.
        key_norm: the same of keys.
        attention_last_norm: norm of the attention's output, after its bottleneck; empty without one.
        feed_forward_last_norm: the same of the feed-forward part.
        attention_dropout: dropout of the attention's output; empty without one.
        feed_forward_dropout: the same of the feed-forward part.
        order: in which the block computes queries, keys and values, and draws the dropout of their LoRA.
    """

    attention: str
    query: str
    key: str
    value: str
    attention_out: str
    up: str
    gate: str = ""
    activation: str
    down: str
    attention_norm: str
    feed_forward_norm: str
    attention_adapter: str
    feed_forward_adapter: str
    norm_first: bool
    inputs_first: bool = False
    swaps_lora: bool = False
    adds_residual: bool = False
    query_norm: str = ""
    key_norm: str = ""
    attention_last_norm: str = ""
    feed_forward_last_norm: str = ""
    attention_dropout: str = ""
    feed_forward_dropout: str = ""
    order: tuple[str, ...] = ("query", "key", "value")

    @property
    def is_merged(self) -> bool:
        """Whether queries, keys and values have one fused matrix."""
        return self.query == self.key

    @property
    def lora_intermediate(self) -> str:
        """Matrix of the library's ``intermediate_lora``; in the Llama family ``down``."""
        return self.down if self.swaps_lora else self.up

    @property
    def lora_output(self) -> str:
        """Matrix of the library's ``output_lora``; in the Llama family ``up``."""
        return self.up if self.swaps_lora else self.down


_BERT: Final = BlockLayout(
    attention="attention.self",
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    attention_out="attention.output.dense",
    up="intermediate.dense",
    activation="intermediate.intermediate_act_fn",
    down="output.dense",
    attention_norm="attention.output.LayerNorm",
    feed_forward_norm="output.LayerNorm",
    attention_adapter="attention.output",
    feed_forward_adapter="output",
    norm_first=False,
    attention_dropout="attention.output.dropout",
    feed_forward_dropout="output.dropout",
)
_DISTILBERT: Final = BlockLayout(
    attention="attention",
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    attention_out="attention.out_lin",
    up="ffn.lin1",
    activation="ffn.activation",
    down="ffn.lin2",
    attention_norm="sa_layer_norm",
    feed_forward_norm="output_layer_norm",
    attention_adapter="attention_adapters",
    feed_forward_adapter="output_adapters",
    norm_first=False,
    feed_forward_dropout="ffn.dropout",
)
_GPT2: Final = BlockLayout(
    attention="attn",
    query="attn.c_attn",
    key="attn.c_attn",
    value="attn.c_attn",
    attention_out="attn.c_proj",
    up="mlp.c_fc",
    activation="mlp.act",
    down="mlp.c_proj",
    attention_norm="ln_1",
    feed_forward_norm="ln_2",
    attention_adapter="attention_adapters",
    feed_forward_adapter="output_adapters",
    norm_first=True,
    inputs_first=True,
    attention_dropout="attn.resid_dropout",
    feed_forward_dropout="mlp.dropout",
)
_LLAMA: Final = BlockLayout(
    attention="self_attn",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    attention_out="self_attn.o_proj",
    up="mlp.up_proj",
    gate="mlp.gate_proj",
    activation="mlp.act_fn",
    down="mlp.down_proj",
    attention_norm="input_layernorm",
    feed_forward_norm="post_attention_layernorm",
    attention_adapter="attention_adapters",
    feed_forward_adapter="output_adapters",
    norm_first=True,
    swaps_lora=True,
)
_PLUGGED: Final = dataclasses.replace(_LLAMA, swaps_lora=False, adds_residual=True)
_QWEN3: Final = dataclasses.replace(_PLUGGED, query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")
_GEMMA2: Final = dataclasses.replace(
    _PLUGGED,
    attention_last_norm="post_attention_layernorm",
    feed_forward_norm="pre_feedforward_layernorm",
    feed_forward_last_norm="post_feedforward_layernorm",
)
_GEMMA3: Final = dataclasses.replace(_GEMMA2, query_norm=_QWEN3.query_norm, key_norm=_QWEN3.key_norm)
_VIT: Final = BlockLayout(
    attention="attention.attention",
    query="attention.attention.query",
    key="attention.attention.key",
    value="attention.attention.value",
    attention_out="attention.output.dense",
    up="intermediate.dense",
    activation="intermediate.intermediate_act_fn",
    down="output.dense",
    attention_norm="layernorm_before",
    feed_forward_norm="layernorm_after",
    attention_adapter="attention_adapters",
    feed_forward_adapter="output.output_adapters",
    norm_first=True,
    attention_dropout="attention.output.dropout",
    feed_forward_dropout="output.dropout",
    order=("key", "value", "query"),
)
LAYOUTS: Final[Mapping[str, BlockLayout]] = {
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "electra": _BERT,
    "distilbert": _DISTILBERT,
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "vit": _VIT,
    "qwen2": _PLUGGED,
    "qwen3": _QWEN3,
    "gemma": _PLUGGED,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    "smollm3": _PLUGGED,
}
"""``model_type`` -> layout of its blocks."""
