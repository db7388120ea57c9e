"""GPT-2, Llama, Mistral, Qwen2, Qwen3, SmolLM3 and Gemma 1 to 3 (text).

GPT-2 has learned positions, a causal mask, and a last normalisation before the head. The others have rotary positions
and blocks of full or of sliding-window attention; SmolLM3's blocks without positions ignore the rotary tables. Gemma
and Gemma 2 scale the word embeddings by the root of the model's width. Gemma 3 has separate rotary tables for blocks
with a window; its token table scales its output.

A packed sequence has several rows, told by its mask (``Batch.mask``): positions begin anew with each row, and a token
attends to tokens of its own row only. Padding is a row of its own, so that each token attends to itself at least.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch

from edge.data.tokens import Batch
from edge.model.key_values import KeyValueCache, cache_argument


class CausalContext(NamedTuple):
    """Mask and positions of a decoder's block.

    Attributes:
        mask: (B, 1, T, K) causal, with K tokens of a cache and these T; None where all are seen or the kernel makes it.
        positions: (B, T) position of each token.
        row_positions: (T,) the same for one row.
        rotary: cosine and sine (B, T, width of a head); None with learned positions.
        cache: keys and values of tokens before, to which a block adds those of T; None without.
    """

    mask: torch.Tensor | None
    positions: torch.Tensor
    row_positions: torch.Tensor
    rotary: tuple[torch.Tensor, torch.Tensor] | None
    cache: Any = None


class Gpt2Family:
    """The ``FamilyForward`` of GPT-2."""

    def embed(self, base: Any, batch: Batch) -> torch.Tensor:
        """Add word and position embeddings; positions count padding, as in the library."""
        positions = torch.arange(batch.ids.shape[1], device=batch.ids.device)[None]
        if batch.positions is not None:
            positions = batch.positions
        elif is_packed(batch.mask):
            positions = row_places(batch.mask)[1]
        hidden: torch.Tensor = base.drop(base.wte(batch.ids) + base.wpe(positions))
        return hidden

    def context(
        self, base: Any, hidden_BTD: torch.Tensor, mask_BT: torch.Tensor, cache: KeyValueCache | None = None
    ) -> CausalContext:
        """Build the causal mask as the library does."""
        return causal_context(base.config, hidden_BTD, mask_BT, cache, window=False)

    def block(self, block: Any, hidden_BTD: torch.Tensor, context: Any) -> torch.Tensor:
        """Run one layer; in a tuple the hidden state is first."""
        cache = {cache_argument(block.__class__): context.cache, "cache_position": context.row_positions}
        output = block(hidden_BTD, attention_mask=context.mask, **cache)
        hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return hidden

    def finish(self, base: Any, hidden_BTD: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, Any]]:
        """Normalise the hidden state, and pick each row's last token for classification."""
        last = base.ln_f(hidden_BTD)
        return last, {"cls_output": last_token(last, batch.mask)}


def causal_context(
    config: Any, hidden_BTD: torch.Tensor, mask_BT: torch.Tensor, cache: KeyValueCache | None = None, *, window: bool
) -> CausalContext:
    """Build mask and positions as the library's ``forward`` does; ``window`` limits attention to the last tokens.

    With a cache no row is padded or packed.
    """
    rows, tokens, _ = hidden_BTD.shape
    before = cache.num_tokens if cache is not None else 0
    positions_T = torch.arange(before, before + tokens, device=hidden_BTD.device)
    if is_packed(mask_BT):
        return _packed_context(config, hidden_BTD, mask_BT, positions_T, window=window)
    positions_BT = positions_T.expand(rows, tokens)
    if before:
        mask = _mask_behind(config, hidden_BTD, positions_T, window=window)
    else:
        mask = _causal_mask(config, hidden_BTD, mask_BT, positions_T, window=window)
    of_library = cache.of_library if cache is not None else None
    return CausalContext(mask, positions=positions_BT, row_positions=positions_T, rotary=None, cache=of_library)


def _mask_behind(
    config: Any, hidden_BTD: torch.Tensor, positions_T: torch.Tensor, *, window: bool
) -> torch.Tensor | None:
    """Build the mask of tokens that follow others in a cache, of which a window keeps one less than it has."""
    if len(positions_T) == 1:
        return None
    first, last = int(positions_T[0]), int(positions_T[-1])
    keys_K = torch.arange(
        max(0, first - config.sliding_window + 1) if window else 0, last + 1, device=positions_T.device
    )
    ahead_TK = positions_T[:, None] - keys_K
    seen_TK = (ahead_TK >= 0) & (ahead_TK < config.sliding_window) if window else ahead_TK >= 0
    seen_TK = _mask_of(config, seen_TK, hidden_BTD.dtype)
    return seen_TK.expand(hidden_BTD.shape[0], 1, *seen_TK.shape)


def _mask_of(config: Any, seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return truth values as they are for fused attention, for another one as numbers that are added to the scores.

    Eager attention computes its softmax in float32, where the smallest float64 overflows and a row of padding would
    spoil all others. So no number is below that of float32.
    """
    if config._attn_implementation == "sdpa":
        return seen
    lowest = max(torch.finfo(dtype).min, torch.finfo(torch.float32).min)
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, lowest)


def is_packed(mask_BT: torch.Tensor) -> bool:
    """Whether a sequence of a micro-batch has several rows; see ``Batch.mask``."""
    return bool((mask_BT > 1).any())


def row_places(mask_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of each token's row in its sequence, and its position in that row; both (B, T).

    Example: the mask 1 1 1 2 2 0 has rows 0 0 0 1 1 2 and positions 0 1 2 0 1 0.
    """
    begins_BT = torch.zeros_like(mask_BT, dtype=torch.bool)
    begins_BT[:, 1:] = mask_BT[:, 1:] != mask_BT[:, :-1]
    places_BT = torch.arange(mask_BT.shape[1], device=mask_BT.device).expand(mask_BT.shape)
    return begins_BT.cumsum(dim=1), places_BT - (places_BT * begins_BT).cummax(dim=1).values


def _packed_context(
    config: Any, hidden_BTD: torch.Tensor, mask_BT: torch.Tensor, positions_T: torch.Tensor, *, window: bool
) -> CausalContext:
    """Build a block-diagonal mask."""
    rows_BT, positions_BT = row_places(mask_BT.to(hidden_BTD.device))
    ahead_TT = positions_T[:, None] - positions_T
    seen_TT = (ahead_TT >= 0) & (ahead_TT < config.sliding_window) if window else ahead_TT >= 0
    mask_B1TT = (seen_TT & (rows_BT[:, :, None] == rows_BT[:, None, :]))[:, None]
    mask_B1TT = _mask_of(config, mask_B1TT, hidden_BTD.dtype)
    return CausalContext(mask=mask_B1TT, positions=positions_BT, row_positions=positions_T, rotary=None)


def _causal_mask(
    config: Any, hidden_BTD: torch.Tensor, mask_BT: torch.Tensor, positions_T: torch.Tensor, *, window: bool
) -> torch.Tensor | None:
    """Build the mask of the library's ``masking_utils`` in a hundredth of its time; None: fused attention makes it."""
    tokens = hidden_BTD.shape[1]
    keep_BT = mask_BT.to(dtype=torch.bool, device=hidden_BTD.device)
    is_plain = (not window or tokens < config.sliding_window) and bool(keep_BT.all())
    if is_plain and config._attn_implementation == "sdpa":
        return None
    ahead_TT = positions_T[:, None] - positions_T[None]
    seen_TT = (ahead_TT >= 0) & (ahead_TT < config.sliding_window) if window else ahead_TT >= 0
    return _mask_of(config, seen_TT & keep_BT[:, None, None, :], hidden_BTD.dtype)


def last_token(hidden_BTD: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Pick the hidden state (B, D) of each row's rightmost token by the mask, whatever its id; token 0 of an empty row.

    AdapterHub and transformers find the token by the padding id, which is another token where a text contains this id.
    """
    rows_B = torch.arange(hidden_BTD.shape[0], device=hidden_BTD.device)
    places_T = torch.arange(hidden_BTD.shape[1], device=hidden_BTD.device)
    return hidden_BTD[rows_B, (places_T * mask_BT.to(hidden_BTD.device)).argmax(-1)]


_FULL, _SLIDING = "full_attention", "sliding_attention"


class LayeredContext(NamedTuple):
    """Masks and positions for blocks of each type.

    Attributes:
        full: for blocks in which a token attends to all before it.
        sliding: for blocks with a window; the same object where a model has none.
    """

    full: CausalContext
    sliding: CausalContext

    def of(self, attention: Any) -> CausalContext:
        """Return the context of the block with this attention module."""
        types = getattr(attention.config, "layer_types", None)
        return self.sliding if types and types[attention.layer_idx] == _SLIDING else self.full


class LayeredFamily:
    """The ``FamilyForward`` of Qwen2, Qwen3 and SmolLM3."""

    def embed(self, base: Any, batch: Batch) -> torch.Tensor:
        """Look the word embeddings up."""
        hidden: torch.Tensor = base.embed_tokens(batch.ids)
        return hidden

    def context(
        self, base: Any, hidden_BTD: torch.Tensor, mask_BT: torch.Tensor, cache: KeyValueCache | None = None
    ) -> LayeredContext:
        """Build the masks of both types as the library does, and the rotary tables."""
        config = base.config
        types = getattr(config, "layer_types", None) or (_FULL,)
        contexts = []
        for kind in (_FULL, _SLIDING):
            if kind in types:
                context = causal_context(config, hidden_BTD, mask_BT, cache, window=kind == _SLIDING)
                contexts.append(context._replace(rotary=self.rotary(base, hidden_BTD, context.positions, kind)))
        return LayeredContext(contexts[0], contexts[-1])

    def rotary(self, base: Any, hidden_BTD: torch.Tensor, positions_BT: torch.Tensor, layer_type: str) -> Any:
        """Return the rotary tables of blocks of a type: the same for all."""
        return base.rotary_emb(hidden_BTD, positions_BT)

    def block(self, block: Any, hidden_BTD: torch.Tensor, context: Any) -> torch.Tensor:
        """Run one layer; in a tuple the hidden state is first."""
        inputs = context.of(block.self_attn)
        output = block(
            hidden_BTD,
            attention_mask=inputs.mask,
            position_ids=inputs.positions,
            cache_position=inputs.row_positions,
            **{cache_argument(block.__class__): inputs.cache},
            **self.positions(block, context),
        )
        hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return hidden

    def positions(self, block: Any, context: LayeredContext) -> dict[str, Any]:
        """Return the rotary tables as arguments of a block."""
        return {"position_embeddings": context.of(block.self_attn).rotary}

    def finish(self, base: Any, hidden_BTD: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, Any]]:
        """Normalise the hidden state, and pick each row's last token for classification."""
        last = base.norm(hidden_BTD)
        return last, {"cls_output": last_token(last, batch.mask)}


class LlamaFamily(LayeredFamily):
    """The ``FamilyForward`` of Llama and Mistral; each node makes its own rotary embedding, which has no weights."""

    def context(
        self, base: Any, hidden_BTD: torch.Tensor, mask_BT: torch.Tensor, cache: KeyValueCache | None = None
    ) -> LayeredContext:
        """Build the causal mask as the library does, and the rotary tables."""
        config = base.config
        window = config.model_type == "mistral" and config.sliding_window is not None
        context = causal_context(config, hidden_BTD, mask_BT, cache, window=window)
        context = context._replace(rotary=base.rotary_emb(hidden_BTD, context.positions))
        return LayeredContext(context, context)


class GemmaFamily(LayeredFamily):
    """The ``FamilyForward`` of Gemma and Gemma 2."""

    def embed(self, base: Any, batch: Batch) -> torch.Tensor:
        """Look up the word embeddings and scale them in their own dtype, as the library does.

        In transformers 5 the token table scales its output.
        """
        hidden = super().embed(base, batch)
        if hasattr(base.embed_tokens, "embed_scale"):
            return hidden
        return hidden * torch.tensor(base.config.hidden_size**0.5, dtype=hidden.dtype)


class Gemma3Family(LayeredFamily):
    """The ``FamilyForward`` of Gemma 3.

    In transformers 5 one module makes the rotary tables of both types of blocks, and a block gets its own.
    """

    def rotary(self, base: Any, hidden_BTD: torch.Tensor, positions_BT: torch.Tensor, layer_type: str) -> Any:
        """Build the rotary tables of blocks of a type."""
        if not hasattr(base, "rotary_emb_local"):
            return base.rotary_emb(hidden_BTD, positions_BT, layer_type)
        make = base.rotary_emb_local if layer_type == _SLIDING else base.rotary_emb
        return make(hidden_BTD, positions_BT)

    def positions(self, block: Any, context: LayeredContext) -> dict[str, Any]:
        """Return the block's rotary tables, or both where it chooses."""
        if "position_embeddings" in inspect.signature(type(block).forward).parameters:
            return super().positions(block, context)
        return {"position_embeddings_global": context.full.rotary, "position_embeddings_local": context.sliding.rotary}
