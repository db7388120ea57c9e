"""GPT-2, Llama, Mistral, Qwen2, Qwen3, SmolLM3 and Gemma 1 to 3 (text).

GPT-2 has learned positions, a causal mask, and a last normalisation before the head. The others have rotary positions
and blocks of full or of sliding-window attention; SmolLM3's blocks without positions ignore the rotary tables. Gemma
and Gemma 2 scale the word embeddings by the root of the model's width. Gemma 3 has separate rotary tables for blocks
with a window; its token table scales its output.

A packed sequence has several rows, told by its mask (``Batch.mask``): positions begin anew with each row, and a token
attends to tokens of its own row only. Padding is a row of its own, so that each token attends to itself at least.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from edge.data.tokens import Batch
from edge.model.families import FamilyForward, first_of
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


def _embed_gpt2(base: Any, batch: Batch) -> torch.Tensor:
    """Add word and position embeddings; positions count padding, as in the library."""
    positions = torch.arange(batch.ids.shape[1], device=batch.ids.device)[None]
    if batch.positions is not None:
        positions = batch.positions
    elif is_packed(batch.mask):
        positions = row_places(batch.mask)[1]
    hidden: torch.Tensor = base.drop(base.wte(batch.ids) + base.wpe(positions))
    return hidden


def _context_of_gpt2(
    base: Any, hidden_BTD: torch.Tensor, mask_BT: torch.Tensor, cache: KeyValueCache | None = None
) -> CausalContext:
    return causal_context(base.config, hidden_BTD, mask_BT, cache, window=False)


def _block_of_gpt2(block: Any, hidden_BTD: torch.Tensor, context: Any) -> torch.Tensor:
    cache = {cache_argument(block.__class__): context.cache, "cache_position": context.row_positions}
    return first_of(block(hidden_BTD, attention_mask=context.mask, **cache))


def _finished(norm: str) -> Callable[[Any, torch.Tensor, Batch], tuple[torch.Tensor, dict[str, Any]]]:
    """Normalise the hidden state by the base model's last norm, and pick each row's last token for classification."""

    def finish(base: Any, hidden_BTD: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, Any]]:
        last = getattr(base, norm)(hidden_BTD)
        return last, {"cls_output": last_token(last, batch.mask)}

    return finish


GPT2 = FamilyForward(_embed_gpt2, _context_of_gpt2, _block_of_gpt2, _finished("ln_f"))


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


def _embed_words(base: Any, batch: Batch) -> torch.Tensor:
    hidden: torch.Tensor = base.embed_tokens(batch.ids)
    return hidden


def _embed_scaled(base: Any, batch: Batch) -> torch.Tensor:
    """Scale the word embeddings in their own dtype, as the library does; in transformers 5 the token table does it."""
    hidden = _embed_words(base, batch)
    if hasattr(base.embed_tokens, "embed_scale"):
        return hidden
    return hidden * torch.tensor(base.config.hidden_size**0.5, dtype=hidden.dtype)


def _contexts(
    base: Any, hidden_BTD: torch.Tensor, mask_BT: torch.Tensor, cache: KeyValueCache | None = None
) -> LayeredContext:
    """Build the masks of all types of blocks as the library does, and their rotary tables."""
    contexts = []
    for kind in _types(base.config):
        context = causal_context(base.config, hidden_BTD, mask_BT, cache, window=kind == _SLIDING)
        contexts.append(context._replace(rotary=_rotary(base, hidden_BTD, context.positions, kind)))
    return LayeredContext(contexts[0], contexts[-1])


def _types(config: Any) -> list[str]:
    """Return the types of a model's blocks, full attention first; a Mistral's have a window or not, all of them."""
    if config.model_type == "mistral":
        return [_FULL if config.sliding_window is None else _SLIDING]
    types = getattr(config, "layer_types", None) or (_FULL,)
    return [kind for kind in (_FULL, _SLIDING) if kind in types]


def _rotary(base: Any, hidden_BTD: torch.Tensor, positions_BT: torch.Tensor, kind: str) -> Any:
    """Build the rotary tables of blocks of a type: one for all, but for Gemma 3.

    There transformers 4 has a module for each type, and 5 one for both.
    """
    if base.config.model_type != "gemma3_text":
        return base.rotary_emb(hidden_BTD, positions_BT)
    if not hasattr(base, "rotary_emb_local"):
        return base.rotary_emb(hidden_BTD, positions_BT, kind)
    make = base.rotary_emb_local if kind == _SLIDING else base.rotary_emb
    return make(hidden_BTD, positions_BT)


def _block_of_type(block: Any, hidden_BTD: torch.Tensor, context: Any) -> torch.Tensor:
    """Run one layer with the mask and rotary tables of its type; Gemma 3's of transformers 4 chooses of both tables."""
    inputs = context.of(block.self_attn)
    if _chooses_tables(block.__class__):
        rotary = {
            "position_embeddings_global": context.full.rotary,
            "position_embeddings_local": context.sliding.rotary,
        }
    else:
        rotary = {"position_embeddings": inputs.rotary}
    output = block(
        hidden_BTD,
        attention_mask=inputs.mask,
        position_ids=inputs.positions,
        cache_position=inputs.row_positions,
        **{cache_argument(block.__class__): inputs.cache},
        **rotary,
    )
    return first_of(output)


@functools.cache
def _chooses_tables(kind: Any) -> bool:
    return "position_embeddings_global" in inspect.signature(kind.forward).parameters


ROTARY = FamilyForward(_embed_words, _contexts, _block_of_type, _finished("norm"))
GEMMA = ROTARY._replace(embed=_embed_scaled)
