"""How some heads of a block attend: the kernel, mask and scale that the block's own module uses, for fewer heads.

B batch rows, T tokens, H heads, W width of a head.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

Attend = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, Any], torch.Tensor]


def _encoder(
    module: Any, q_BHTW: torch.Tensor, k_BHTW: torch.Tensor, v_BHTW: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attend as BERT: with an additive mask, or with the 2-D mask of tokens, or without any."""
    if mask is not None and mask.dim() == 2:
        mask = (mask != 0)[:, None, None, :]
    found = torch.nn.functional.scaled_dot_product_attention(q_BHTW, k_BHTW, v_BHTW, attn_mask=mask)
    return found.transpose(1, 2)


def _gpt2(module: Any, q_BHTW: torch.Tensor, k_BHTW: torch.Tensor, v_BHTW: torch.Tensor, context: Any) -> torch.Tensor:
    is_causal = context.mask is None and q_BHTW.shape[2] > 1
    return _library(module, q_BHTW, k_BHTW, v_BHTW, context.mask, is_causal=is_causal)


def _llama(module: Any, q_BHTW: torch.Tensor, k_BHTW: torch.Tensor, v_BHTW: torch.Tensor, context: Any) -> torch.Tensor:
    q_BHTW, k_BHTW = _turned(q_BHTW, k_BHTW, context.rotary)
    return _library(module, q_BHTW, k_BHTW, v_BHTW, context.mask, scaling=module.scaling)


def _layered(
    module: Any, q_BHTW: torch.Tensor, k_BHTW: torch.Tensor, v_BHTW: torch.Tensor, context: Any
) -> torch.Tensor:
    """Attend as a block of its type, turned unless it has no positions; scores are capped where the module does it."""
    own = context.of(module)
    if getattr(module, "use_rope", True):
        q_BHTW, k_BHTW = _turned(q_BHTW, k_BHTW, own.rotary)
    cap = getattr(module, "attn_logit_softcapping", None)
    choices = {} if cap is None else {"softcap": cap}
    return _library(module, q_BHTW, k_BHTW, v_BHTW, own.mask, scaling=module.scaling, **choices)


def _turned(q_BHTW: torch.Tensor, k_BHTW: torch.Tensor, rotary: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    turn: Any = apply_rotary_pos_emb
    q_BHTW, k_BHTW = turn(q_BHTW, k_BHTW, *rotary)
    return q_BHTW, k_BHTW


def _vit(module: Any, q_BHTW: torch.Tensor, k_BHTW: torch.Tensor, v_BHTW: torch.Tensor, context: Any) -> torch.Tensor:
    return _library(module, q_BHTW, k_BHTW, v_BHTW, None, is_causal=False, scaling=module.scaling)


def _library(module: Any, *tensors: torch.Tensor | None, **choices: Any) -> torch.Tensor:
    """Call the attention function that the module itself picks; it gives (B, T, H, W)."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = module.config._attn_implementation
    if name == "eager":
        function = importlib.import_module(type(module).__module__).eager_attention_forward
    else:
        function = ALL_ATTENTION_FUNCTIONS[name]
    found: torch.Tensor = function(module, *tensors, dropout=0.0, **choices)[0]
    return found


ATTEND: Final[Mapping[str, Attend]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "electra", "distilbert"), _encoder),
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _llama,
    "vit": _vit,
    **dict.fromkeys(("qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "smollm3"), _layered),
}
"""``model_type`` -> (attention module, queries, keys, values (B, H, T, W), context) -> (B, T, H, W)."""
