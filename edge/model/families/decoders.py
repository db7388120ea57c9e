"""GPT-2, Llama, Mistral, Qwen2, Qwen3, SmolLM3 and Gemma 1 to 3 (text).

GPT-2 has learned positions, a causal mask, and a last normalisation before the head. The others have rotary positions
and blocks of full or of sliding-window attention; SmolLM3's blocks without positions ignore the rotary tables. Gemma
and Gemma 2 scale the word embeddings by the root of the model's width. Gemma 3 has separate rotary tables for blocks
with a window; its token table scales its output.

A packed sequence has several rows, told by its mask (``Batch.mask``): positions begin anew with each row, and a token
attends to tokens of its own row only. Padding is a row of its own, so that each token attends to itself at least.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from edge.data.tokens import Batch
from edge.model.key_values import KeyValueCache


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
        """Run one layer; only the hidden state of its tuple is used."""
        hidden: torch.Tensor = block(hidden_BTD, context.cache, context.row_positions, context.mask, None, None)[0]
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
    make = _causal_mask if config._attn_implementation == "sdpa" else _causal_mask_of_library
    if before:
        mask = _mask_behind(config, hidden_BTD, positions_T, window=window)
    else:
        mask = make(config, hidden_BTD, mask_BT, positions_BT, window=window)
    of_library = cache.of_library if cache is not None else None
    return CausalContext(mask, positions=positions_BT, row_positions=positions_T, rotary=None, cache=of_library)


def _mask_behind(
    config: Any, hidden_BTD: torch.Tensor, positions_T: torch.Tensor, *, window: bool
) -> torch.Tensor | None:
    """Build the mask of tokens that follow others in a cache, of which a window keeps one less than it has.

    Truth values, or for eager attention numbers that are added to the scores.
    """
    if len(positions_T) == 1:
        return None
    first, last = int(positions_T[0]), int(positions_T[-1])
    keys_K = torch.arange(
        max(0, first - config.sliding_window + 1) if window else 0, last + 1, device=positions_T.device
    )
    ahead_TK = positions_T[:, None] - keys_K
    seen_TK = (ahead_TK >= 0) & (ahead_TK < config.sliding_window) if window else ahead_TK >= 0
    if config._attn_implementation != "sdpa":
        zeros_TK = torch.zeros_like(seen_TK, dtype=hidden_BTD.dtype)
        seen_TK = zeros_TK.masked_fill_(~seen_TK, torch.finfo(hidden_BTD.dtype).min)
    return seen_TK.expand(hidden_BTD.shape[0], 1, *seen_TK.shape)


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
    """Build a block-diagonal mask: truth values, or for eager attention numbers that are added to the scores."""
    rows_BT, positions_BT = row_places(mask_BT.to(hidden_BTD.device))
    ahead_TT = positions_T[:, None] - positions_T
    seen_TT = (ahead_TT >= 0) & (ahead_TT < config.sliding_window) if window else ahead_TT >= 0
    mask_B1TT = (seen_TT & (rows_BT[:, :, None] == rows_BT[:, None, :]))[:, None]
    if config._attn_implementation != "sdpa":
        lowest = torch.finfo(hidden_BTD.dtype).min
        mask_B1TT = torch.zeros_like(mask_B1TT, dtype=hidden_BTD.dtype).masked_fill_(~mask_B1TT, lowest)
    return CausalContext(mask=mask_B1TT, positions=positions_BT, row_positions=positions_T, rotary=None)


def _causal_mask(
    config: Any, hidden_BTD: torch.Tensor, mask_BT: torch.Tensor, positions_BT: torch.Tensor, *, window: bool
) -> torch.Tensor | None:
    """Build the library's mask for sdpa attention in a hundredth of its time.

    Source: transformers 4.57, ``masking_utils.sdpa_mask_recent_torch``, which computes each cell with ``vmap``.
    """
    tokens = hidden_BTD.shape[1]
    keep_BT = mask_BT.to(dtype=torch.bool, device=hidden_BTD.device)
    if (not window or tokens < config.sliding_window) and bool(keep_BT.all()):
        return None
    ahead_TT = positions_BT[0][:, None] - positions_BT[0][None]
    seen_TT = (ahead_TT >= 0) & (ahead_TT < config.sliding_window) if window else ahead_TT >= 0
    return seen_TT & keep_BT[:, None, None, :]


def _causal_mask_of_library(
    config: Any, hidden_BTD: torch.Tensor, mask_BT: torch.Tensor, positions_BT: torch.Tensor, *, window: bool
) -> torch.Tensor | None:
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    make = create_sliding_window_causal_mask if window else create_causal_mask
    mask: torch.Tensor | None = make(
        config=config,
        input_embeds=hidden_BTD,
        attention_mask=mask_BT,
        cache_position=positions_BT[0],
        past_key_values=None,
        position_ids=positions_BT,
    )
    return mask


def last_token(hidden_BTD: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Pick the hidden state (B, D) of each row's rightmost token by the mask, whatever its id; token 0 of an empty row.

    AdapterHub and transformers find the token by the padding id, which is another token where a text contains this id.
    """
    rows_B = torch.arange(hidden_BTD.shape[0], device=hidden_BTD.device)
    places_T = torch.arange(hidden_BTD.shape[1], device=hidden_BTD.device)
    return hidden_BTD[rows_B, (places_T * mask_BT.to(hidden_BTD.device)).argmax(-1)]


_SLIDING = "sliding_attention"


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
        full = _context(config, hidden_BTD, mask_BT, cache, window=False)
        full = full._replace(rotary=base.rotary_emb(hidden_BTD, full.positions))
        if _SLIDING not in (getattr(config, "layer_types", None) or ()):
            return LayeredContext(full, full)
        sliding = _context(config, hidden_BTD, mask_BT, cache, window=True)
        return LayeredContext(full, sliding._replace(rotary=self.sliding_rotary(base, hidden_BTD, full)))

    def sliding_rotary(self, base: Any, hidden_BTD: torch.Tensor, full: CausalContext) -> Any:
        """Return the rotary tables of blocks with a window: those of all blocks."""
        return full.rotary

    def block(self, block: Any, hidden_BTD: torch.Tensor, context: Any) -> torch.Tensor:
        """Run one layer; in a tuple the hidden state is first."""
        own = context.of(block.self_attn)
        found = block(
            hidden_BTD,
            attention_mask=own.mask,
            position_ids=own.positions,
            cache_position=own.row_positions,
            past_key_values=own.cache,
            **self.positions(context),
        )
        hidden: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return hidden

    def positions(self, context: LayeredContext) -> dict[str, Any]:
        """Return the rotary tables as arguments of a block."""
        return {"position_embeddings": context.full.rotary}

    def finish(self, base: Any, hidden_BTD: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, Any]]:
        """Normalise the hidden state, and pick each row's last token for classification."""
        last = base.norm(hidden_BTD)
        return last, {"cls_output": last_token(last, batch.mask)}


def _context(
    config: Any, hidden_BTD: torch.Tensor, mask_BT: torch.Tensor, cache: KeyValueCache | None, *, window: bool
) -> CausalContext:
    """Build the mask of one type as the library does.

    Eager attention computes its softmax in float32, where the smallest float64 overflows and a row of padding would
    spoil all others. So numeric masks are clamped to float32.
    """
    context = causal_context(config, hidden_BTD, mask_BT, cache, window=window)
    if context.mask is None or not context.mask.is_floating_point():
        return context
    return context._replace(mask=context.mask.clamp(min=torch.finfo(torch.float32).min))


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
        """Look up the word embeddings and scale them in their own dtype, as the library does."""
        hidden = super().embed(base, batch)
        return hidden * torch.tensor(base.config.hidden_size**0.5, dtype=hidden.dtype)


class Gemma3Family(LayeredFamily):
    """The ``FamilyForward`` of Gemma 3."""

    def sliding_rotary(self, base: Any, hidden_BTD: torch.Tensor, full: CausalContext) -> Any:
        """Build the rotary tables of blocks with a window."""
        return base.rotary_emb_local(hidden_BTD, full.positions)

    def positions(self, context: LayeredContext) -> dict[str, Any]:
        """Return both rotary tables; each block uses its own."""
        return {"position_embeddings_global": context.full.rotary, "position_embeddings_local": context.sliding.rotary}
