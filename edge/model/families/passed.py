"""Packing and unpacking of what blocks pass on besides one hidden state (``ringtune.models.passed_values``).

A block takes its hidden states, keys and values of earlier blocks, and its own input out of one tensor, and returns one
for the next block. Parts are contiguous copies, so that a graph does not keep the whole tensor for a few of its values,
and kernels get what they get in one process.

B batch rows, T tokens, D model width, S hidden states side by side, P width of a block's input, V values of a token.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from ringtune.models.passed_values import PassedValues

_SHARED: Final = "shared_kv_states"


def pack_embedding(hidden: torch.Tensor, *inputs_BTP: torch.Tensor) -> torch.Tensor:
    """Join hidden states (B, T, D) or (S, B, T, D), and the inputs of all blocks, to what enters block 0."""
    return torch.cat([_beside(hidden), *inputs_BTP], dim=-1)


def hidden_states(passed: PassedValues, packed_BTV: torch.Tensor, width: int) -> torch.Tensor:
    """Return the hidden states of a packed tensor: (B, T, D), or where there are several (S, B, T, D)."""
    hidden = packed_BTV[..., : passed.hidden]
    if passed.hidden == width:
        return hidden.contiguous()
    return torch.stack(torch.split(hidden, width, dim=-1))


def without_inputs(base: Any, passed: PassedValues, hidden_BTD: torch.Tensor) -> None:
    """Let a copy of the base model, whose blocks are replaced, make no inputs of blocks; they are in the packed tensor.

    The tables for them are at the owner, and need token ids.
    """
    nothing = hidden_BTD.new_zeros(()).expand(*hidden_BTD.shape[:2], passed.num_blocks, passed.inputs)
    base.get_per_layer_inputs = lambda *_, **__: None
    base.project_per_layer_inputs = lambda *_, **__: nothing


def run_block(passed: PassedValues, block: Any, packed_BTV: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run one block on a packed tensor; return that of the next block.

    Of its other arguments the last one of ``args`` is replaced by the block's input, which gets no gradient, and
    ``shared_kv_states`` by the keys and values that it may read.
    """
    at: int = block.layer_idx
    sizes = [passed.hidden, *(keys.values for keys in passed.keys_at(at))]
    with_gradient, inputs = packed_BTV[..., : sum(sizes)], packed_BTV[..., sum(sizes) :].detach()
    hidden, *received = torch.split(with_gradient, sizes, dim=-1)
    kept = {keys.kind: values for keys, values in zip(passed.keys_at(at), received, strict=True)}
    attention = block.self_attn
    shared = {kind: _by_heads(kept[kind], attention.head_dim) for kind in kept if kind == attention.layer_type}
    if passed.inputs:
        args = (*args[:-1], inputs[..., : passed.inputs].contiguous())
    found = block(hidden_states(passed, hidden, block.config.hidden_size), *args, **{**kwargs, _SHARED: shared})
    found = found[0] if isinstance(found, tuple) else found
    for keys in passed.keys_at(at + 1):
        if keys.made_at == at:
            kept[keys.kind] = torch.cat([part.transpose(1, 2).flatten(2) for part in shared[keys.kind]], dim=-1)
    later = [kept[keys.kind] for keys in passed.keys_at(at + 1)]
    return torch.cat([_beside(found), *later, inputs[..., passed.inputs :]], dim=-1)


def _beside(hidden: torch.Tensor) -> torch.Tensor:
    """Put several hidden states (S, B, T, D) beside each other: (B, T, S * D)."""
    return torch.cat(hidden.unbind(), dim=-1) if hidden.dim() == 4 else hidden


def _by_heads(values_BTV: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values (B, heads, T, width)."""
    B, T, _ = values_BTV.shape
    keys, values = (part.reshape(B, T, -1, width).transpose(1, 2) for part in values_BTV.chunk(2, dim=-1))
    return keys, values
