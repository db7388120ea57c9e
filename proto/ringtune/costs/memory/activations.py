"""What one block keeps for its backward, where nobody measured it."""

from __future__ import annotations

from collections.abc import Collection

from ringtune.costs.memory.sizes import DTYPE_BYTES
from ringtune.costs.profile import ModelFacts
from ringtune.models.adapters.auxiliary_config import AuxiliaryConfig


def estimate_activation_token_bytes(
    model: ModelFacts,
    *,
    tokens: int,
    dropout: float,
    dtype: str = "float32",
    trains_own_weights: bool = False,
    auxiliary: Collection[AuxiliaryConfig] = (),
    lora_values: int | None = None,
    has_more: bool = False,
) -> float:
    """Estimate the bytes that one block keeps for backward per padded token, where nothing was measured.

    The estimate is 5 to 8 % above the MiniLM block that it was fitted to (``Source``). For a block of any family it is
    at most 7 % too low or 33 % too high with a bottleneck, LoRA or own weights (``tests/edge/model/test_sizes.py``).
    With IA3, DoRA, MTL-LoRA or a gate beside LoRA it was up to 24 % too low.

    In units of the hidden state (a token's width): queries, keys, values and attention output 4 (each of the width of
    all heads together, as keys and values are repeated for the heads that share them), inputs of the layer norms 3,
    adapter 2, and of the feed-forward part ``inner_kept * intermediate / hidden``; besides, what further norms keep,
    and scores that are capped. With dropout the attention probabilities are kept three times, and the masks 2. A linear
    layer that trains keeps its input: where the block's own weights train, there is no adapter and one input of a norm
    less, but the inputs of queries, keys and values, of the way out of the attention and of the feed-forward part are
    kept 3, and that of the way out of it ``intermediate / hidden``. Auxiliary models keep their inputs, each tensor
    once, and what is inside each MLP; as they stand in the way of no norm there are 2 inputs of norms. LoRA is like
    them; with dropout each of its matrices keeps the dropped input and a mask instead of the input. With other adapters
    beside these, such as bottlenecks, the 5 units of an adapter of the library are counted too.

    Args:
        model: sizes of the model.
        tokens: of the longest row.
        dropout: probability; above 0 it disables the attention kernel that keeps no probabilities.
        dtype: of the computation.
        trains_own_weights: whether the block's own weights train instead of an adapter.
        auxiliary: models that train, alone or beside adapters of the library.
        lora_values: of each token inside all LoRAs of the block; None without LoRA.
        has_more: whether other adapters train beside LoRA and auxiliary models.

    Source: saved tensors of one MiniLM block at 16 x 128 tokens: 37.3 MiB without, 75.2 MiB with dropout
    (``tests/contract/costs/memory/test_estimate.py``).
    """
    inner_units = (model.inner_kept + trains_own_weights) * model.intermediate_size / model.hidden_size
    trained_units = 2.0 + 3.0 if trains_own_weights else 3.0 + 2.0
    if auxiliary or lora_values is not None:
        inputs = sum(kept.width for kept in model.kept_inputs if not kept.always_kept)
        values = inputs + (lora_values or 0) + sum(one.hidden_values for one in auxiliary)
        beside = (trained_units if has_more else 2) + values / model.hidden_size
        trained_units = beside if lora_values is None else max(trained_units, beside)
    dropped = dropout_token_bytes(model, tokens=tokens, dtype=dtype) if dropout > 0 else 0
    if lora_values is not None and dropout > 0:
        dropped += _lora_dropout_values(model) * DTYPE_BYTES[dtype]
    attention = 4 * (model.attention_width or model.hidden_size) + model.more_kept_values
    attention += model.kept_scores * model.num_heads * tokens
    return ((trained_units + inner_units) * model.hidden_size + attention) * DTYPE_BYTES[dtype] + dropped


def _lora_dropout_values(model: ModelFacts) -> int:
    """Values of a token that LoRA's dropout adds: for each matrix a dropped input and a mask, but no input.

    The input stays where an auxiliary model reads it too.
    """
    found = (kept for kept in model.kept_inputs if kept.lora)
    return sum(kept.width * (2 * kept.lora - (kept.lora == kept.readers and not kept.always_kept)) for kept in found)


def dropout_token_bytes(model: ModelFacts, *, tokens: int, dtype: str = "float32") -> int:
    """Bytes of a block's graph per padded token that are there only with dropout.

    Without it the attention kernel is fused and keeps no probabilities. With it these are kept three times, as
    probabilities, mask and product, and the masks of hidden states twice.

    Example: 12 heads, rows of 128 tokens and width 384 are 5,376 numbers, 21,504 bytes.
    """
    return (2 * model.hidden_size + 3 * model.num_heads * tokens) * DTYPE_BYTES[dtype]
